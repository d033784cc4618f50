"""The model of the links behind `benchmarks/weight_sync_scale.py`: times that can be reckoned by hand, and its laws."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import sync_model
from benchmarks.sync_model import Cluster, Machine, Parts, Rates, Reader, sync_seconds
from benchmarks.sync_rates import Sync, measured_in_turns
from benchmarks.weight_sync_scale import CASES, Case, check_cut, main, missed, rate_case
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.weight_sync.plan import engine_plan
from megarl.weight_sync.publish import SyncSettings, WeightSync
from megarl.weight_sync.read import StreamReader
from megarl.weight_sync.transport import engines_of
from tests.models.test_table import CONFIGS, shape_of

# A link moves 10 bytes a second, NVLink 100; packing and placing take nothing. All ranks are on node 0.
PLAIN = Cluster(8, nvlink=100.0, nic=10.0, pack=math.inf, place=math.inf, latency=0.0, source_nodes=(0, 0))
H100 = Cluster(8, nvlink=450e9, nic=50e9, pack=1.5e12, place=1.5e12, latency=30e-6)


def test_one_message_takes_each_of_its_ways_once() -> None:
    slow = replace(PLAIN, pack=50.0, place=25.0, latency=0.5)
    assert sync_seconds([Reader([[(0, 100)]], node=1)], slow) == pytest.approx(2 + 0.5 + 10 + 0.5 + 4 + 0.5)
    assert sync_seconds([Reader([[(0, 100)]], node=0)], slow) == pytest.approx(2 + 0.5 + 1 + 0.5 + 4 + 0.5)


def test_a_link_s_messages_take_turns() -> None:
    one_rank = [Reader([[(0, 100)]], node) for node in (1, 2)]
    assert sync_seconds(one_rank, PLAIN) == pytest.approx(20)
    one_worker = [Reader([[(0, 100), (1, 100)]], node=1)]
    assert sync_seconds(one_worker, PLAIN) == pytest.approx(20)
    apart = [Reader([[(rank, 100)]], 1 + rank) for rank in (0, 1)]
    assert sync_seconds(apart, PLAIN) == pytest.approx(10)


def test_a_bucket_travels_while_the_other_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    placing = replace(PLAIN, place=10.0)
    readers = [Reader([[(0, 100)]] * 5, node=1)]
    assert sync_seconds(readers, placing) == pytest.approx(60)
    monkeypatch.setattr(sync_model, "NUM_BUCKETS", 1)
    assert sync_seconds(readers, placing) == pytest.approx(100)


# A rank writes 10 bytes a second and sends 20, a worker's second thread takes 50, its own 25.
RATES = Rates(write=10.0, send=20.0, receive=50.0, place=25.0)
MACHINE = Machine(num_cores=64, rates=RATES, latency=0.0)


def test_a_bucket_on_one_machine_takes_each_thread_once() -> None:
    one = [Reader([[(0, 100)]], 0)]
    assert sync_seconds(one, MACHINE) == pytest.approx(10 + 5 + 4)  # sending takes longer than receiving beside it
    assert sync_seconds(one, replace(MACHINE, num_cores=1)) == pytest.approx(10 + 5 + 2 + 4)
    assert sync_seconds(one, replace(MACHINE, latency=0.5)) == pytest.approx(10 + 0.5 + 5 + 0.5 + 4 + 0.5)
    assert sync_seconds([Reader([[(0, 100)]], 0, followers=2)], MACHINE) == pytest.approx(10 + 5 + 4)
    assert sync_seconds([Reader([[(0, 100)]], 0, followers=2)], replace(MACHINE, num_cores=2)) == pytest.approx(10 + 5 + 8)


def test_in_place_a_worker_s_threads_share_the_pieces_and_ranks_hash_behind_all() -> None:
    machine = replace(MACHINE, copy_threads=2, rates=RATES._replace(send=math.inf, receive=math.inf))
    buckets: Parts = [[(0, 100)]] * 5
    assert sync_seconds([Reader(buckets, 0)], machine) == pytest.approx(3 * 4 + 500 / 10)
    assert sync_seconds([Reader(buckets, 0, followers=3)], machine) == pytest.approx(3 * 4 + 500 / 10)
    assert sync_seconds([Reader(buckets, 0, followers=3)], replace(machine, num_cores=2)) == pytest.approx(10 * 4 + 50)
    assert sync_seconds([Reader(buckets, 0)], replace(machine, copy_threads=1)) == pytest.approx(5 * 4 + 500 / 10)
    # The first rank's pieces are hashed while the second's are still copied.
    two: Parts = [[(0, 100)], [(1, 100)]]
    assert sync_seconds([Reader(two, 0)], replace(machine, copy_threads=1)) == pytest.approx(2 * 4 + 100 / 10)


def on(case: Case, cluster: Cluster) -> Cluster:
    return replace(cluster, source_nodes=case.source_nodes(cluster))


def test_the_order_is_that_of_a_run(tmp_path: Path) -> None:
    """Of every engine's workers, at both ends."""
    shape, rollout, engines = shape_of("qwen3"), RolloutLayout(2), 3
    settings = SyncSettings(torch.float32, rollout, engines, 1 << 13, timeout_s=60.0, transport="gloo")
    case, plan = Case("", Layout(), rollout, engines), engine_plan(shape, Layout(), rollout)
    with contextlib.closing(WeightSync(shape, Layout(), settings, "test", 0, None)) as sync:
        manifest = replace(sync._begin(1, 1, (0, 1, 2)), leaders=(0, 1, 2))  # each on a node of its own
        assert [engines_of(number, manifest) for number in range(6)] == [(0,), (0,), (1,), (1,), (2,), (2,)]
        for number, stream in enumerate(sync._streams):
            engine, worker = divmod(number, 2)
            reader = StreamReader(shape, worker)
            reader._prepare(manifest, engine)
            assert np.array_equal(reader._stream.copy, stream.copy) and np.array_equal(reader._stream.offset, stream.offset)
            assert list(dict.fromkeys(stream.copy.tolist())) == case.order(plan, engine, worker).tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--pipeline 4", ["name it by --only"]),
        ("--only Qwen3-30B-A3B --tensor 3", ["--tensor = 3: must divide the model's 32 heads"]),
        ("--only Qwen3-30B-A3B --expert 16", ["--expert = 16: ", "must divide the 8 ranks of a stage", "nearest: 8"]),
        ("--only Qwen3-30B-A3B --rollout-data 5", ["--rollout-tensor x --rollout-data = 4 x 5 must divide the 768"]),
        ("--machine --model {llama} --data 2 --expert 2", ["with --machine nothing reads --data, --expert;"]),
        ("--machine", ["--machine needs --model"]),
        ("--machine --model {llama} --rates 1 1 1 1 --check", ["--check compares", "with --rates"]),
    ],
)
def test_options_that_cut_no_model_or_that_nothing_reads_are_named(
    options: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"]}))
    monkeypatch.setattr(sys, "argv", ["weight_sync_scale.py", *options.format(llama=tmp_path).split()])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(text in error for text in said), error


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_a_recipe_may_have_the_layouts_of_the_benchmark(case: Case) -> None:
    check_cut(case.shape, case.trainer, case.rollout)


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


def test_a_sync_on_this_machine_is_predicted_from_a_model_s_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"]}))
    command = ["weight_sync_scale.py", "--machine", "--model", str(tmp_path), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(
        sys, "argv", [*command, "--rates", "1e9", "inf", "inf", "1e6", "--bytes-per-weight", "4", "--engines", "3"]
    )
    assert main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    elements = sum(rows * columns for rows, columns in checkpoint_sizes(shape_of("llama")).values())
    assert found["bytes"] == 4 * elements
    # Three engines on two cores read what is hashed much faster.
    assert 1.5 * found["bytes"] / 1e6 < found["work"] < 1.6 * found["bytes"] / 1e6
    assert "a worker 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("transport_name", ["shared_memory", "gloo"])
def test_rates_are_measured_with_both_ends_of_a_sync(transport_name: str) -> None:
    """The worker is a process of its own; it would not answer if it had not received and verified what the rank sent."""
    sync = Sync(shape_of("llama"), Layout(pipeline=2), RolloutLayout(), 1, transport_name, 4, 1 << 13)
    rates, simplest_s, sync_s = measured_in_turns(sync, turns=1, rounds=2)
    assert simplest_s > 0 and sync_s > 0
    assert 0 < rates.write < math.inf and 0 < rates.place < math.inf
    assert ((rates.send, rates.receive) == (math.inf, math.inf)) == (transport_name == "shared_memory")
