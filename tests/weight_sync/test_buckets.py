"""The streams of a sync: every element travels once and alone in its place, in an order in which no two ranks wait for each
other; messages between GPUs that wait for each other, as NCCL's do, never wait in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.quantised_blocks import quantised_tensors
from megarl.weight_sync.buckets import ALIGNMENT, PieceStream, sync_rounds, sync_stream
from megarl.weight_sync.checks import CHECKSUM_BYTES
from megarl.weight_sync.group import BucketSender
from megarl.weight_sync.manifest import SyncSettings, WeightManifest
from megarl.weight_sync.plan import ReshardPlan, sync_plan
from tests.models.test_table import shape_of
from tests.weight_sync.test_memory import SHAPE as DEEP

SHAPE = shape_of("qwen3", hidden_size=96, head_dim=16, intermediate_size=80, num_hidden_layers=3, num_key_value_heads=2)
BLOCKS = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 131, "hidden_size": 256, "head_dim": 128,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MOE = BLOCKS | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
DTYPES = {2: torch.bfloat16, 4: torch.float32}
LAYOUTS = [Layout(), Layout(2, 3), Layout(4, 1, 2), Layout(1, 3, 2)]
ROLLOUTS = [RolloutLayout(), RolloutLayout(2), RolloutLayout(2, 3)]

cases = st.tuples(
    st.sampled_from(LAYOUTS),
    st.sampled_from(ROLLOUTS),
    st.sampled_from([2, 4]),
    st.integers(1024, 20_000),
    st.integers(0, 5),
)


def stream_of(case: tuple[Layout, RolloutLayout, int, int, int]) -> tuple[ReshardPlan, np.ndarray, PieceStream]:
    layout, rollout, itemsize, bucket_bytes, worker = case
    plan, worker = sync_plan(SHAPE, layout, rollout), worker % rollout.workers
    copies = plan.to_destination(worker)
    return plan, copies, PieceStream.of(plan, copies, DTYPES[itemsize], bucket_bytes)


@settings(max_examples=30, deadline=None)
@given(cases)
def test_every_row_of_every_copy_travels_once_in_a_place_of_its_own(case: tuple) -> None:  # type: ignore[type-arg]
    """The rows of a rank keep their order, and in a bucket they are one part."""
    plan, copies, stream = stream_of(case)
    for rank in range(case[0].ranks):
        of_rank = copies[plan.source_rank[copies] == rank]
        rows = [(copy, row) for copy in of_rank.tolist() for row in range(int(plan.rows[copy]))]
        pieces = np.flatnonzero(stream.source == rank)
        sent = [
            (int(copy), int(first) + row)
            for copy, first, count in zip(stream.copy[pieces], stream.row[pieces], stream.rows[pieces], strict=True)
            for row in range(int(count))
        ]
        assert sent == rows
    assert (np.diff(stream.bucket) >= 0).all()
    for bucket in range(stream.num_buckets):
        used = np.zeros(stream.capacity, dtype=int)
        ends = 0
        for part in stream.parts[bucket]:
            assert part.start >= ends and part.start % ALIGNMENT == 0
            ends = part.end
            for piece in part.pieces:
                assert plan.source_rank[stream.copy[piece]] == part.source_rank
                start, size = int(stream.offset[piece]), int(stream.size[piece])
                assert start % ALIGNMENT == 0 and part.start <= start and start + size <= part.check
                used[start : start + size] += 1
            assert part.check % CHECKSUM_BYTES == 0
            used[part.check : part.end] += 1
        assert used.max() == 1 and ends <= stream.capacity
        pieces = np.flatnonzero(stream.bucket == bucket).tolist()
        assert sorted(np.concatenate([part.pieces for part in stream.parts[bucket]])) == pieces


@pytest.mark.parametrize("rollout", [RolloutLayout(), RolloutLayout(2), RolloutLayout(4)])
@pytest.mark.parametrize("layout", [Layout(), Layout(1, 4), Layout(2, 2, 2), Layout(1, 1, 4)])
def test_all_ranks_send_all_the_time(layout: Layout, rollout: RolloutLayout) -> None:
    """When a share of the buckets has travelled, every rank has sent that share of what it sends, up to a part: a rank may
    send one in every second bucket. In a round no rank writes more than one and a half."""
    plan = sync_plan(DEEP, layout, rollout)
    streams = streams_of(DEEP, plan, rollout, 1 << 20, by_layer=False)
    rounds = sync_rounds(plan, streams, False)
    sent = np.zeros((len(rounds), layout.ranks))
    for number, entries in enumerate(rounds):
        for bucket, worker in entries:
            for part in streams[worker].parts[bucket]:
                sent[number, part.source_rank] += part.size
    assert sent.max() <= 1.5 * (1 << 20)
    shares = np.cumsum(sent, axis=0) / sent.sum(axis=0)
    expected = (np.arange(len(rounds))[:, None] + 1) / len(rounds)
    assert len(rounds) > 10 and np.abs(shares - expected).max() < 2.5 / len(rounds), np.abs(shares - expected).max()


def test_buckets_are_full_but_for_less_than_a_row() -> None:
    """Otherwise half-empty buckets would slow a sync down."""
    plan = sync_plan(SHAPE, Layout(), RolloutLayout())
    stream = PieceStream.of(plan, plan.to_destination(0), torch.float32, 16_384)
    overhead = stream.num_buckets * (96 * 4 + 3 * ALIGNMENT) + len(stream.copy) * ALIGNMENT
    assert stream.num_buckets * 16_384 <= stream.size.sum() + overhead


@pytest.mark.parametrize(
    ("bucket_bytes", "head_dim", "message"),
    [
        (511, 128, r"weight_sync\.bucket_bytes = 511 is less than a row of model\.\S+ needs, \d+ bytes with its checksum"),
        (20_000, 128, r"bucket_bytes = 20000 is less than a row of blocks of model\.layers\.0\."),
        (1 << 16, 64, r"FP8 blocks: model\.layers\.0\.self_attn\.k_proj\.weight .* starts inside one"),
    ],
    ids=["row", "row of blocks", "cut blocks"],
)
def test_what_no_bucket_can_carry_is_refused(bucket_bytes: int, head_dim: int, message: str) -> None:
    shape = ModelShape.from_config(BLOCKS | {"head_dim": head_dim})
    plan = sync_plan(shape, Layout(), RolloutLayout())
    with pytest.raises(ValueError, match=message):
        PieceStream.of(plan, plan.to_destination(0), torch.bfloat16, bucket_bytes, quantised_tensors(shape))


def streams_of(
    shape: ModelShape, plan: ReshardPlan, rollout: RolloutLayout, bucket_bytes: int, by_layer: bool
) -> list[PieceStream]:
    settings = SyncSettings("bf16", rollout, 1, bucket_bytes, 60.0, transport="group", merges=by_layer)
    return [sync_stream(shape, plan, worker, settings) for worker in range(rollout.workers)]


@pytest.mark.parametrize("bucket_bytes", [1 << 17, 1 << 22], ids=["parts of a layer", "more than a layer"])
@pytest.mark.parametrize(
    ("shape", "layout", "rollout"),
    [
        *[(DEEP, Layout(), RolloutLayout(workers)) for workers in (1, 2, 4, 8)],
        # The two stages have different layers.
        (DEEP, Layout(), RolloutLayout(2, 2)),
        (DEEP, Layout(2, 2), RolloutLayout(4)),
        (DEEP, Layout(1, 2, virtual_pipeline=2), RolloutLayout(1, 2)),
        # Workers hold different numbers of experts.
        (shape_of("qwen3_moe"), Layout(2, 1, 2, expert=2), RolloutLayout(1, 1, 3, True)),
    ],
)
def test_by_layer_all_workers_take_a_layer_before_the_next_begins(
    shape: ModelShape, layout: Layout, rollout: RolloutLayout, bucket_bytes: int
) -> None:
    """So a rank that merges adapters holds the weights of one layer, and merges each weight once."""
    plan = sync_plan(shape, layout, rollout)
    streams = streams_of(shape, plan, rollout, bucket_bytes, by_layer=True)
    seen = list[str]()
    for bucket, number in chain.from_iterable(sync_rounds(plan, streams, by_layer=True)):
        pieces = streams[number].at_destination(plan, np.flatnonzero(streams[number].bucket == bucket))
        parameters = {piece.box.parameter for piece in pieces}
        layers = {name.split(".")[2] for name in parameters if ".layers." in name}
        assert len(layers) <= 1, f"a bucket with pieces of the layers {layers}"
        seen += [layer for layer in layers if seen[-1:] != [layer]]
    assert len(seen) == len(set(seen)) == shape.num_layers


pytestmark = pytest.mark.sync
# What starts together: the sizes of the messages to ("send") and from ("receive") each rank, in their order.
Batch = dict[tuple[str, int], deque[int]]


class Recorder:
    """In the place of the group of the ranks, or of an engine: records messages, and takes them for done."""

    lost: dict[int, str] = {}

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self._is_open = False

    @contextmanager
    def together(self) -> Iterator[None]:
        self.batches.append({})
        self._is_open = True
        yield
        self._is_open = False
        if not self.batches[-1]:
            self.batches.pop()

    def send(self, content: torch.Tensor, member: int, *more: Any) -> None:
        self._add("send", content, member)

    def receive(self, content: torch.Tensor, member: int, *more: Any) -> None:
        self._add("receive", content, member)

    def finish(self, *arguments: Any) -> bool:
        return True

    def _add(self, end: str, content: torch.Tensor, member: int) -> None:
        if not self._is_open:
            self.batches.append({})
        self.batches[-1].setdefault((end, member), deque()).append(len(content))


class Engines(Recorder):
    def start(self, call: str, engine: int, worker: int, content: torch.Tensor, what: str) -> None:
        """A bucket is handed over ("send"), or free again ("receive")."""


def batches_of(rank: int, layout: Layout, manifest: WeightManifest, by_layer: bool) -> deque[Batch]:
    plan = sync_plan(SHAPE, layout, manifest.rollout)
    streams = [sync_stream(SHAPE, plan, worker, manifest) for worker in range(manifest.rollout.workers)]
    group = Recorder()
    engines: Any = Engines()
    store: Any = None
    rounds = sync_rounds(plan, streams, by_layer)
    sender = BucketSender(streams, rounds, rank, engines, store, manifest)
    sender._ranks = group  # type: ignore[assignment]
    sender.begin(manifest)
    for entries in rounds:
        sender.send(entries, sender.room(entries))
    sender.finish()
    return group.batches


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(
    ("layout", "rollout", "servers"),
    [
        (Layout(2), RolloutLayout(), ((0,), (1,))),
        (Layout(2, 3), RolloutLayout(2), ((0, 1), (2, 3), (4, 5))),
        (Layout(1, 3, 2), RolloutLayout(2), ((3, 2), (0, 1), (5, 4))),
        (Layout(4), RolloutLayout(1, 2), ((0, 0), (1, 2))),
    ],
)
def test_no_two_ranks_wait_for_each_other(
    layout: Layout, rollout: RolloutLayout, servers: tuple[tuple[int, ...], ...], by_layer: bool
) -> None:
    """Each rank's batches go in their order, and each message only together with its other end."""
    engines = tuple(range(len(servers)))
    manifest = WeightManifest(
        version=1, attempt=1, plan_hash="", layout=layout, rollout=rollout, mode="reshard", precision="fp32",
        bucket_bytes=8192, timeout_s=60.0, num_engines=len(servers), engines=engines, transport="group", port=0,
        groups=engines, merges=by_layer, servers=servers,
    )  # fmt: skip
    queues = [batches_of(rank, layout, manifest, by_layer) for rank in range(layout.ranks)]
    total = sum(map(len, queues))
    while passed := [
        (rank, peer)
        for rank, queue in enumerate(queues)
        for end, peer in (queue[0] if queue else ())
        if end == "send" and queues[peer] and ("receive", rank) in queues[peer][0]
    ]:
        for rank, peer in passed:
            sent, received = queues[rank][0], queues[peer][0]
            assert sent.pop(("send", peer)) == received.pop(("receive", rank)), "other messages than the peer waits for"
        for queue in queues:
            if queue and not queue[0]:
                queue.popleft()
    assert total > 20 and not any(queues), [queue and queue[0] for queue in queues]
