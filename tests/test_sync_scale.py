"""The model of the links behind `benchmarks/weight_sync_scale.py`: times that can be reckoned by hand, and its laws."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sync_model
from benchmarks.sync_model import Cluster, Reader, bucket_parts, sync_seconds
from benchmarks.sync_rates import measured_rates
from benchmarks.weight_sync_scale import (
    CASES,
    Case,
    bound_seconds,
    main,
    missed,
    plans,
    predict_machine,
    rate_case,
    schedule_seconds,
    streams,
)
from megarl.reshard.boxes import Layout, RolloutLayout
from megarl.reshard.engines import engine_plan
from megarl.reshard.megatron import checkpoint_sizes
from megarl.reshard.order import copy_order, start_share
from tests.test_family_table import CONFIGS, shape_of

# A link moves 10 bytes a second, NVLink 100; packing and placing take nothing.
PLAIN = Cluster(8, nvlink=100.0, nic=10.0, pack=float("inf"), place=float("inf"), latency=0.0)
H100 = Cluster(8, nvlink=450e9, nic=50e9, pack=1.5e12, place=1.5e12, latency=30e-6)


def test_one_message_takes_each_of_its_ways_once() -> None:
    slow = Cluster(8, nvlink=100.0, nic=10.0, pack=50.0, place=25.0, latency=0.5)
    seconds = sync_seconds([Reader([[(0, 100)]], node=1)], [0], slow)
    assert seconds == pytest.approx(0.5 + 2 + 10 + 0.5 + 4)
    assert sync_seconds([Reader([[(0, 100)]], node=0)], [0], slow) == pytest.approx(0.5 + 2 + 1 + 0.5 + 4)


def test_a_link_s_messages_take_turns() -> None:
    one_rank = [Reader([[(0, 100)]], node) for node in (1, 2)]
    assert sync_seconds(one_rank, [0], PLAIN) == pytest.approx(20)
    one_worker = [Reader([[(0, 100), (1, 100)]], node=1)]
    assert sync_seconds(one_worker, [0, 0], PLAIN) == pytest.approx(20)
    apart = [Reader([[(rank, 100)]], 1 + rank) for rank in (0, 1)]
    assert sync_seconds(apart, [0, 0], PLAIN) == pytest.approx(10)


def test_a_bucket_travels_while_the_other_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    placing = replace(PLAIN, place=10.0)
    readers = [Reader([[(0, 100)]] * 5, node=1)]
    assert sync_seconds(readers, [0], placing) == pytest.approx(60)
    monkeypatch.setattr(sync_model, "NUM_BUCKETS", 1)
    assert sync_seconds(readers, [0], placing) == pytest.approx(100)


def test_workers_that_share_a_copy_get_it_over_nvlink() -> None:
    assert sync_seconds([Reader([[(0, 100)]], 1, followers=2)], [0], PLAIN) == pytest.approx(10 + 2 * 1)
    shared = Cluster.machine(write=10.0, read=20.0, latency=0.0)
    assert sync_seconds([Reader([[(0, 100)]], 0, followers=2)], [0], shared) == pytest.approx(10 + 5)


def test_buckets_are_full_and_hold_what_each_rank_sends() -> None:
    shape = shape_of("deepseek_v3")
    plan = engine_plan(shape, Layout(2, 2, 2, expert=2), RolloutLayout(2, expert_parallel=True))
    order = copy_order(plan, 1, 1, 2)
    parts = bucket_parts(plan, order, itemsize=2, bucket_bytes=1000)
    filled = [sum(size for _, size in bucket) for bucket in parts]
    assert set(filled[:-1]) == {1000} and sum(filled) == 2 * int(plan.sizes[order].sum())
    for rank in range(8):
        sent = sum(size for bucket in parts for source, size in bucket if source == rank)
        assert sent == 2 * int(plan.sizes[order][plan.source_rank[order] == rank].sum())


@pytest.mark.parametrize("readers", [1, 2, 3, 8, 12, 64, 100])
def test_readers_begin_apart_and_so_do_those_next_to_each_other(readers: int) -> None:
    shares = [start_share(reader, readers) for reader in range(readers)]
    assert sorted(shares) == [Fraction(number, readers) for number in range(readers)]
    for few in range(2, readers + 1):
        places = np.sort([float(share) for share in shares[:few]])
        gaps = np.diff(np.r_[places, places[0] + 1])
        assert gaps.max() <= 3 / few, f"the first {few} of {readers} leave a gap of {gaps.max():.2f} of a round"


def test_readers_that_begin_apart_keep_every_stage_busy() -> None:
    """In order, one stage after the other sends to all; a bound of half of that is almost reached."""
    case = Case("Qwen3-30B-A3B", Layout(2, 4, 2, expert=4, expert_tensor=1), RolloutLayout(8), 2)
    received = streams(case, H100, list(plans(case, H100)))
    bound = max(bound_seconds(case, H100, received))
    assert bound <= schedule_seconds(case, H100, received, rotated=True) < 1.15 * bound
    assert schedule_seconds(case, H100, received, rotated=False) > 1.5 * bound


def test_the_smallest_case_of_the_benchmark_reaches_its_targets() -> None:
    row = rate_case(CASES[0], H100)
    assert missed(row) == []
    # 8 engines of 4 workers on 4 nodes: of two engines on a node one receives.
    assert row["model_bytes"] == pytest.approx(61.06e9, rel=0.01) and row["bound_workers"] == pytest.approx(0.305, rel=0.01)
    assert missed(row | {"megarl": 1.2 * row["bound"], "most_share": 1.1, "plan_peak_bytes": 3e9}) == [
        "bytes",
        "schedule",
        "plan",
    ]


def test_a_machine_with_few_cores_is_bound_by_their_work() -> None:
    plan = engine_plan(shape_of("llama"), Layout(pipeline=2), RolloutLayout(2))
    machine = Cluster.machine(write=1e4, read=2e4, latency=1e-3)
    found = {cores: predict_machine(plan, 2, 3, 4, 1 << 12, machine, cores) for cores in (1, 64)}
    assert found[1]["work"] == pytest.approx(found[1]["bytes"] * (1 / 1e4 + 3 / 2e4))
    assert found[1]["seconds"] == found[1]["work"] > found[1]["alone"] == found[64]["seconds"]


def test_a_sync_on_this_machine_is_predicted_from_a_model_s_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"]}))
    command = ["weight_sync_scale.py", "--machine", "--model", str(tmp_path), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(
        sys, "argv", [*command, "--write", "1e9", "--read", "1e6", "--bytes-per-weight", "4", "--engines", "3"]
    )
    assert main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    elements = sum(rows * columns for rows, columns in checkpoint_sizes(shape_of("llama")).values())
    assert found["bytes"] == 4 * elements
    # Three engines read what was written once, much slower than it is written.
    assert 1.5 * found["bytes"] / 1e6 < found["work"] < 1.6 * found["bytes"] / 1e6
    assert "a worker reads 0.0" in capsys.readouterr().out


def test_rates_are_measured_with_both_ends_of_a_sync() -> None:
    """The worker is a process of its own; it would not answer if it had not received and verified what the rank sent."""
    write, read = measured_rates(shape_of("llama"), 4, 1 << 13, "shared_memory", rounds=1)
    assert 0 < write < float("inf") and 0 < read < float("inf")
