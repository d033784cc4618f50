"""Overlapped reductions and gathers give the numbers of those that wait, whatever comes between two updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.models.layout import Layout
from tests.feature_cases import Feature, train_with, update_in_a_row
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout

GRADIENTS = {"overlap_gradients": True}
BOTH = {"overlap_gradients": True, "overlap_parameters": True}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(Layout(data=2), marks=pytest.mark.nightly), Layout(pipeline=2, data=2, virtual_pipeline=2)],
    ids=["data", "virtual pipeline"],
)
def test_overlap_changes_no_number(tmp_path: Path, layout: Layout) -> None:
    """Forward phases, weight reads and a checkpoint come between the updates."""
    directory, folder = str(save_tiny_model(tmp_path / "model", "qwen3", tied=True)), str(tmp_path / "checkpoints")
    features = [
        Feature(), Feature(optimizer=GRADIENTS), Feature(optimizer=BOTH), Feature(optimizer=BOTH, memory={"offload": "all"}),
        Feature(optimizer=BOTH, checkpoint=folder),
    ]  # fmt: skip
    by_rank = run_ranks(train_with, layout.ranks, directory, layout, features)
    for plain, gradients, *same in by_rank:
        for line, expected in zip(gradients, plain, strict=True):
            # Other buckets: the norm and the cut of the optimizer's states add up in another order.
            assert line.loss == pytest.approx(expected.loss, rel=1e-6)
            assert line.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        assert all(other == gradients for other in same)
    for number in range(len(features)):
        # Data-parallel ranks of one stage end with the same weights: none read them before they were gathered.
        for stage in range(layout.pipeline):
            first, second = (by_rank[layout.rank(0, stage, data_rank)][number] for data_rank in (0, 1))
            assert [line.weights for line in first] == [line.weights for line in second]


@pytest.mark.parametrize(
    ("layout", "tied", "role"),
    [
        (Layout(), False, "actor"), (Layout(data=2), False, "actor"), (Layout(pipeline=2, data=2), True, "actor"),
        (Layout(data=2), False, "critic"),
    ],
    ids=["one rank", "data", "tied pipeline", "critic"],
)  # fmt: skip
def test_updates_in_a_row_wait_for_every_weight(tmp_path: Path, layout: Layout, tied: bool, role: str) -> None:
    """The vocabulary's head has a bucket of its own, and its module, which would wait for it, is not called; a value head
    is called. Behind the first stage of a pipeline megatron-core makes one bucket, beside that of a tied head."""
    directory = str(save_tiny_model(tmp_path / "model", "qwen3", tied))
    features = [Feature(optimizer=GRADIENTS), Feature(optimizer=BOTH)]
    for waiting, overlapped in run_ranks(update_in_a_row, layout.ranks, directory, layout, features, 3, role):
        assert overlapped == waiting


def test_a_read_does_not_take_a_gather_that_began_before_the_update(tmp_path: Path) -> None:
    directory, layout = str(save_tiny_model(tmp_path / "model", "qwen3", tied=False)), Layout(data=2)
    features = [Feature(optimizer=GRADIENTS), Feature(optimizer=BOTH, leaves_gathers=True)]
    for (_, waiting), (_, overlapped) in run_ranks(update_in_a_row, 2, directory, layout, features, 1):
        assert overlapped == waiting
