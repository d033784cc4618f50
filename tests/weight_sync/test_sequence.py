"""In which order a rank writes buckets, and which weights it holds meanwhile: replayed over the streams of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from megarl.models import ModelShape
from megarl.models import megatron_weights as megatron
from megarl.models.layout import Layout, RolloutLayout
from megarl.weight_sync.plan import ReshardPlan, sync_plan
from megarl.weight_sync.publish import Matrices
from megarl.weight_sync.stream import Stream, bucket_sequence, last_pieces, sync_stream
from tests.models.test_table import shape_of
from tests.weight_sync.test_memory import SHAPE

pytestmark = pytest.mark.sync


class Merged(Mapping[str, torch.Tensor]):
    """A rank's weights, each made anew whenever it is read, without memory."""

    def __init__(self, shape: ModelShape, layout: Layout, rank: int) -> None:
        self.sizes = megatron.parameter_sizes(shape, layout, rank)
        self.reads: Counter[str] = Counter()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        return torch.empty(self.sizes[name], device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def most_layers(held: Sequence[set[str]]) -> int:
    """At any time. What stands in no layer is never merged: a tied embedding, which goes to the first stage of an engine and
    to the last one, is held for nothing."""
    found = [[re.match(r".*\.layers\.\d+\.", name) for name in names] for names in held]
    return max(len({match.group() for match in matches if match}) for matches in found)


def replay(plan: ReshardPlan, streams: Sequence[Stream], by_layer: bool, parameters: Merged, rank: int) -> list[set[str]]:
    """The names that a rank holds behind each of its pieces; at the end it holds none."""
    sequence = bucket_sequence(plan, streams, by_layer)
    matrices, held = Matrices(parameters, last_pieces(plan, streams, sequence, rank)), []
    for bucket, number in sequence:
        part = streams[number].part(bucket, rank)
        for piece in () if part is None else streams[number].at_source(plan, part):
            box = matrices.box(piece)
            assert tuple(box.shape) == (piece.rows, piece.cols)
            held.append(set(matrices._held))
            matrices.packed(number, piece)
    assert not matrices._held
    return held


def by_layer_streams(shape: ModelShape, plan: ReshardPlan, rollout: RolloutLayout, bucket_bytes: int) -> list[Stream]:
    form = torch.bfloat16, bucket_bytes, None
    return [sync_stream(shape, plan, worker, None, *form) for worker in range(rollout.workers)]


@pytest.mark.parametrize("bucket_bytes", [1 << 17, 1 << 22], ids=["parts of a layer", "more than a layer"])
@pytest.mark.parametrize(
    ("shape", "layout", "rollout"),
    [
        *[(SHAPE, Layout(), RolloutLayout(workers)) for workers in (1, 2, 4, 8)],
        # The two workers of a stage and those of the other take unlike layers.
        (SHAPE, Layout(), RolloutLayout(2, 2)),
        (SHAPE, Layout(2, 2), RolloutLayout(4)),
        (SHAPE, Layout(1, 2, virtual_pipeline=2), RolloutLayout(1, 2)),
        # Workers hold unlike numbers of experts.
        (shape_of("qwen3_moe"), Layout(2, 1, 2, expert=2), RolloutLayout(1, 1, 3, True)),
    ],
)
def test_by_layer_a_rank_is_in_one_layer_at_a_time_and_merges_each_weight_once(
    shape: ModelShape, layout: Layout, rollout: RolloutLayout, bucket_bytes: int
) -> None:
    plan = sync_plan(shape, layout, rollout, "reshard")
    streams = by_layer_streams(shape, plan, rollout, bucket_bytes)
    for rank in range(layout.ranks):
        parameters = Merged(shape, layout, rank)
        held = replay(plan, streams, True, parameters, rank)
        assert most_layers(held) == 1, f"rank {rank} is in the middle of {most_layers(held)} layers"
        assert set(parameters.reads.values()) == {1}, f"rank {rank} merges {parameters.reads.most_common(3)}"


@pytest.mark.parametrize("by_layer", [False, True])
def test_every_bucket_comes_once_and_those_of_a_stream_in_their_order(by_layer: bool) -> None:
    """So no two ranks wait for each other, and a worker's messages come as it waits for them."""
    rollout = RolloutLayout(2, 2)
    plan = sync_plan(SHAPE, Layout(2, 2), rollout, "reshard")
    streams = by_layer_streams(SHAPE, plan, rollout, 1 << 17)
    sequence = bucket_sequence(plan, streams, by_layer)
    for number, stream in enumerate(streams):
        assert [bucket for bucket, of in sequence if of == number] == list(range(stream.num_buckets))
    assert len(sequence) == sum(stream.num_buckets for stream in streams)
