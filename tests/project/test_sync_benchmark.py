"""The model of the links behind `benchmarks/weight_sync_scale.py`: times that can be computed by hand, and its laws."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sync_model
from benchmarks.sync_model import Cluster, Machine, Parts, Rates, Reader, sync_seconds
from benchmarks.sync_rates import Sync, measured_in_turns
from benchmarks.weight_sync_scale import BYTES, CASES, MODELS, Case, check_cut, main, missed, rate_case
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.weight_sync.buckets import sync_rounds
from megarl.weight_sync.manifest import SyncSettings, WeightManifest
from megarl.weight_sync.plan import sync_plan
from megarl.weight_sync.publish import WeightSync
from megarl.weight_sync.read import WeightReader
from tests.models.test_table import CONFIGS, shape_of

# A link moves 10 bytes a second, NVLink 100; copies take no time. Both ranks are on node 0.
PLAIN = Cluster(8, nvlink=100.0, nic=10.0, copy=math.inf, latency=0.0, source_nodes=(0, 0))


def seconds_of(readers: Sequence[Reader], resources: Cluster | Machine) -> float:
    """With every worker's next bucket in each round."""
    workers = {reader.worker: len(reader.buckets) for reader in readers}
    rounds = [
        [(bucket, worker) for worker, num_buckets in workers.items() if bucket < num_buckets]
        for bucket in range(max(workers.values()))
    ]
    return sync_seconds(readers, rounds, resources)


H100 = Cluster(8, nvlink=450e9, nic=50e9, copy=1.5e12, latency=30e-6)


def test_a_message_takes_each_of_its_steps_once() -> None:
    slow = replace(PLAIN, copy=50.0, latency=0.5)
    assert seconds_of([Reader([[(0, 100)]], node=1)], slow) == pytest.approx(2 + 0.5 + 10 + 0.5 + 2 + 0.5)
    assert seconds_of([Reader([[(0, 100)]], node=0)], slow) == pytest.approx(2 + 0.5 + 1 + 0.5 + 2 + 0.5)


def test_the_messages_of_a_link_take_turns() -> None:
    one_rank = [Reader([[(0, 100)]], node, worker=node) for node in (1, 2)]
    assert seconds_of(one_rank, PLAIN) == pytest.approx(20)
    one_worker = [Reader([[(0, 100), (1, 100)]], node=1)]
    assert seconds_of(one_worker, PLAIN) == pytest.approx(20)
    apart = [Reader([[(rank, 100)]], 1 + rank, worker=rank) for rank in (0, 1)]
    assert seconds_of(apart, PLAIN) == pytest.approx(10)


def test_a_bucket_travels_while_the_other_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    placing = replace(MACHINE, rates=RATES._replace(write=math.inf, send=10.0, place=10.0))
    readers = [Reader([[(0, 100)]] * 5)]
    assert seconds_of(readers, placing) == pytest.approx(60)
    monkeypatch.setattr(sync_model, "NUM_BUCKETS", 1)
    assert seconds_of(readers, placing) == pytest.approx(100)


def test_in_two_legs_a_server_s_rounds_take_turns_and_the_worker_copies_what_has_arrived() -> None:
    apart = replace(PLAIN, source_nodes=(0, 1))
    readers = [Reader([[(1 - server, 100)]], node=server, worker=server, server=server) for server in (0, 1)]
    assert seconds_of(readers[:1], apart) == pytest.approx(10)
    assert seconds_of(readers, apart) == pytest.approx(10)  # each rank sends and receives at the same time
    # Rank 1 sends in the first round and receives in the second.
    assert sync_seconds(readers, [[(0, 0)], [(0, 1)]], apart) == pytest.approx(20)
    # Packed, copied into the bucket, and copied out of it by the worker, without a link.
    local = [Reader([[(0, 100)]], node=0, server=0)]
    assert seconds_of(local, replace(apart, copy=50.0)) == pytest.approx(2 + 2 + 2)
    # The first bucket is handed over once the second is written.
    twice = [Reader([[(0, 100)]] * 2, node=0, server=0)]
    assert seconds_of(twice, replace(apart, copy=50.0, latency=0.5)) == pytest.approx(2 * (2 + 2) + 0.5 + 2 + 2 + 0.5)


# A rank writes 10 bytes a second and sends 20; the second thread of a worker takes 50, its main thread 25; copies are free.
RATES = Rates(write=10.0, send=20.0, receive=50.0, place=25.0, copy=math.inf)
MACHINE = Machine(num_cores=64, rates=RATES, latency=0.0)


def test_a_bucket_on_one_machine_takes_each_thread_once() -> None:
    reader = [Reader([[(0, 100)]])]
    assert seconds_of(reader, MACHINE) == pytest.approx(10 + 5 + 4)  # sending takes longer than receiving meanwhile
    assert seconds_of(reader, replace(MACHINE, num_cores=1)) == pytest.approx(10 + 5 + 2 + 4)
    assert seconds_of(reader, replace(MACHINE, latency=0.5)) == pytest.approx(10 + 0.5 + 5 + 0.5 + 4 + 0.5)


def test_mapped_pieces_are_shared_by_threads_and_hashed_by_ranks_behind_all_copies() -> None:
    machine = replace(MACHINE, copy_threads=2)
    pieces: Parts = [[(0, 100)]] * 5
    engines = [Reader(pieces, engine=engine) for engine in range(4)]
    assert seconds_of(engines[:1], machine) == pytest.approx(3 * 4 + 500 / 10)
    assert seconds_of(engines, machine) == pytest.approx(3 * 4 + 500 / 10)
    assert seconds_of(engines, replace(machine, num_cores=2)) == pytest.approx(10 * 4 + 500 / 10)
    assert seconds_of(engines[:1], replace(machine, copy_threads=1)) == pytest.approx(5 * 4 + 500 / 10)
    # The first rank's pieces are hashed while the second's are still copied.
    two: Parts = [[(0, 100)], [(1, 100)]]
    assert seconds_of([Reader(two)], replace(machine, copy_threads=1)) == pytest.approx(2 * 4 + 100 / 10)


def test_the_streams_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every worker, at both ends; and the rounds."""
    shape, rollout, engines = shape_of("qwen3"), RolloutLayout(2), 3
    monkeypatch.setitem(MODELS, "tiny", {"model_type": "qwen3", **CONFIGS["qwen3"]})
    case = Case("tiny", Layout(), rollout, engines, 1 << 13)
    settings = SyncSettings("bf16", rollout, engines, case.bucket_bytes, timeout_s=60.0, transport="group")
    plan = sync_plan(shape, Layout(), rollout)
    assert settings.dtype.itemsize == BYTES
    with contextlib.closing(WeightSync(shape, Layout(), settings, 0, None)) as sync:
        manifest = WeightManifest(
            **vars(settings), version=1, attempt=1, plan_hash=plan.hash, layout=Layout(), engines=(0, 1, 2), port=0,
            groups=(0, 0, 0),
        )  # fmt: skip
        streams = case.streams(plan)
        assert sync._rounds == sync_rounds(plan, streams, False)
        for worker, stream in enumerate(sync._streams):
            reader = WeightReader(shape, worker)
            reader._prepare(manifest)
            for other in (reader._stream, streams[worker]):
                assert np.array_equal(other.copy, stream.copy) and np.array_equal(other.offset, stream.offset)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ("--pipeline 4", ["name it by --only"]),
        ("--only Qwen3-30B-A3B --tensor 3", ["--tensor = 3: must divide the model's 32 heads"]),
        ("--only Qwen3-30B-A3B --expert 16", ["--expert = 16: ", "must divide the 8 ranks of a stage", "nearest: 8"]),
        ("--only Qwen3-30B-A3B --rollout-data 5", ["--rollout-tensor x --rollout-data = 4 x 5 must divide the 768"]),
        (
            "--only Qwen3-30B-A3B --data 1 --expert 2 --rollout-data 2",
            ["= 8 workers of an engine", "the 4 GPUs of the trainer"],
        ),
        ("--machine --model {llama} --data 2 --expert 2", ["with --machine nothing reads --data, --expert;"]),
        ("--machine", ["--machine needs --model"]),
        ("--machine --model {llama} --rates 1 1 1 1 1 --check", ["--check compares", "with --rates"]),
    ],
)
def test_options_that_cut_no_model_or_that_nothing_reads_are_named(
    options: str, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"]}))
    monkeypatch.setattr(sys, "argv", ["weight_sync_scale.py", *options.format(llama=tmp_path).split()])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(text in error for text in messages), error


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_a_recipe_may_have_the_layouts_of_the_benchmark(case: Case) -> None:
    check_cut(case.shape, case.trainer, case.rollout)


def test_the_smallest_case_of_the_benchmark_reaches_its_targets() -> None:
    row = rate_case(CASES[0], H100)
    assert missed(row) == []
    # 8 engines of 4 workers, and 16 ranks that send to all of them.
    assert row["model_bytes"] == pytest.approx(61.06e9, rel=0.01)
    assert row["bound_workers"] == pytest.approx(0.305, rel=0.01) and row["bound_ranks"] == pytest.approx(0.611, rel=0.01)
    assert missed(row | {"megarl": 1.2 * row["bound"], "most_share": 1.1, "plan_peak_bytes": 3e9}) == [
        "bytes",
        "schedule",
        "plan",
    ]


def test_where_engines_and_ranks_share_gpus_each_worker_has_a_server_of_its_own() -> None:
    case = CASES[0].colocated()
    cluster = replace(H100, source_nodes=case.source_nodes(H100))
    readers = case.readers(cluster, case.streams(sync_plan(case.shape, case.trainer, case.rollout)))
    assert [reader.server for reader in readers] == list(range(case.trainer.ranks))
    assert all(reader.node == cluster.source_nodes[reader.server or 0] for reader in readers)


def test_a_sync_on_this_machine_is_predicted_from_a_model_s_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"]}))
    command = ["weight_sync_scale.py", "--machine", "--model", str(tmp_path), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(
        sys, "argv", [*command, "--rates", "1e9", "inf", "inf", "1e6", "inf", "--bytes-per-weight", "4", "--engines", "3"]
    )
    assert main() == 0
    prediction = json.loads((tmp_path / "found.json").read_text())
    elements = sum(rows * columns for rows, columns in checkpoint_sizes(shape_of("llama")).values())
    assert prediction["bytes"] == 3 * 4 * elements
    # Three engines copy on two cores; hashing is much faster. The bytes are those of all three.
    assert 0.5 * prediction["bytes"] / 1e6 < prediction["seconds"] < 0.6 * prediction["bytes"] / 1e6
    assert "place 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("transport", ["mapped", pytest.param("group", marks=pytest.mark.nightly), "two_legs"])
def test_rates_are_measured_with_both_ends_of_a_sync(transport: str) -> None:
    """The worker is a process of its own; it would not answer if it had not received and verified what the rank sent."""
    sync = Sync(shape_of("llama"), Layout(pipeline=2), RolloutLayout(), 1, transport, 4, 1 << 13)
    rates, simplest_s, sync_s = measured_in_turns(sync, turns=1, rounds=2)
    assert sync_s > 0 and min(simplest_s.values()) > 0 and len(simplest_s) == (2 if transport == "two_legs" else 1)
    assert 0 < rates.write < math.inf and 0 < rates.place < math.inf
    assert ((rates.send, rates.receive) == (math.inf, math.inf)) == (transport == "mapped")
