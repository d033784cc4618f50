"""Layouts whose shards cut a block of FP8 weights are refused; other layouts are legal."""

from __future__ import annotations

import pytest

from megarl.models.layout import Box
from megarl.models.quantised_blocks import BLOCK, check_blocks


def box(row0: int, row1: int, col0: int, col1: int, local_row: int = 0, rank: int = 0) -> Box:
    return Box("w", row0, row1, col0, col1, rank, "fused", local_row, 0)


SIZES = {"w": (300, 2 * BLOCK)}
WHOLE = box(0, 300, 0, 256)


def test_cuts_at_blocks_and_at_the_end_are_legal() -> None:
    rows = [box(0, 128, 0, 256), box(128, 300, 0, 256, rank=1)]
    columns = [box(0, 300, 0, 128), box(0, 300, 128, 256, rank=1)]
    below = [box(0, 300, 0, 256, local_row=256)]
    for sources, destinations in ([rows, columns], [columns, rows], [[WHOLE], below]):
        check_blocks(sources, destinations, SIZES)
    check_blocks([box(0, 5, 0, 5)], [box(0, 5, 0, 5)], {})  # a tensor that stays bf16


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([box(0, 150, 0, 256), box(150, 300, 0, 256, rank=1)], [WHOLE], r"rank 0's part \[0:150, 0:256\] of w .* 1 more"),
        ([WHOLE], [box(0, 300, 64, 256, rank=3)], r"worker 3's part \[0:300, 64:256\] of w cuts a block"),
        ([WHOLE], [box(0, 300, 0, 256, local_row=96)], r"worker 0's part .* starts inside a block of fused"),
    ],
)
def test_a_cut_through_a_block_is_named(sources: list[Box], destinations: list[Box], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_blocks(sources, destinations, SIZES)
