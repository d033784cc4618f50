"""The model of the links behind `benchmarks/weight_sync_scale.py`: times that can be reckoned by hand, and its laws."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import sync_model, weight_sync_scale
from benchmarks.sync_model import Cluster, Machine, Parts, Rates, Reader, bucket_parts, sync_seconds
from benchmarks.sync_rates import Sync, measured_in_turns, quartile
from benchmarks.weight_sync_scale import (
    CASES,
    Case,
    check_cut,
    machine_order,
    machine_readers,
    main,
    missed,
    predict_machine,
    rate_case,
    receivers,
    traffic,
)
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.weight_sync import copies, in_place, transport
from megarl.weight_sync.engines import engine_plan
from megarl.weight_sync.in_place import Pieces
from megarl.weight_sync.order import copy_order, start_share
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


def test_a_message_to_a_slow_worker_keeps_back_those_behind_it() -> None:
    """Of two workers the first one takes 10 s to place a bucket; the rank's third part waits for it, and the fourth."""
    readers = [Reader([[(0, 10)]] * 4, 1), Reader([[(0, 10)]] * 4, 2)]
    slow = replace(PLAIN, place=1.0)
    # In turns of a second each: the third bucket leaves when the first is in place, and its end is placed behind the last.
    assert sync_seconds(readers, PLAIN) == pytest.approx(8)
    assert sync_seconds(readers, slow) == pytest.approx(2 + 4 * 10)


def test_a_bucket_travels_while_the_other_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    placing = replace(PLAIN, place=10.0)
    readers = [Reader([[(0, 100)]] * 5, node=1)]
    assert sync_seconds(readers, placing) == pytest.approx(60)
    monkeypatch.setattr(sync_model, "NUM_BUCKETS", 1)
    assert sync_seconds(readers, placing) == pytest.approx(100)


def test_workers_that_share_a_copy_get_it_over_nvlink() -> None:
    assert sync_seconds([Reader([[(0, 100)]], 1, followers=2)], PLAIN) == pytest.approx(10 + 2 * 1)


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


def test_buckets_on_one_machine_follow_each_other_where_there_are_cores() -> None:
    buckets: Parts = [[(0, 100)]] * 5
    assert sync_seconds([Reader(buckets, 0)], MACHINE) == pytest.approx(5 * 10 + 5 + 4)
    slow = replace(MACHINE, rates=RATES._replace(place=5.0))  # a bucket that waits to be placed keeps nobody from placing
    assert sync_seconds([Reader(buckets, 0)], slow) == pytest.approx(10 + 5 + 5 * 20)
    assert sync_seconds([Reader(buckets, 0)], replace(slow, num_cores=1)) == pytest.approx(5 * (10 + 5 + 2 + 20))
    # Two ranks write at once, and take turns at nothing but the worker.
    two: Parts = [[(0, 100)], [(1, 100)]]
    assert sync_seconds([Reader(two, 0)], MACHINE) == pytest.approx(10 + 5 + 2 * 4)


def test_a_rank_has_two_buckets_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part is packed while the first is sent; with one bucket it is not."""
    readers = [Reader([[(0, 100)]] * 2, 0), Reader([[(0, 100)]] * 2, 0)]
    even = replace(MACHINE, rates=RATES._replace(send=10.0, receive=10.0))
    assert sync_seconds(readers, even) == pytest.approx(5 * 10 + 4)
    monkeypatch.setattr(sync_model, "NUM_BUCKETS", 1)
    assert sync_seconds(readers, even) == pytest.approx(4 * 20 + 4)


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


def test_the_model_s_numbers_are_those_of_the_code() -> None:
    assert sync_model.NUM_BUCKETS == transport.NUM_BUCKETS
    assert (weight_sync_scale.PIECE_BYTES, weight_sync_scale.MOST_COPY_THREADS) == (
        in_place.PIECE_BYTES,
        copies.MOST_THREADS,
    )


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


def on(case: Case, cluster: Cluster) -> Cluster:
    return replace(cluster, source_nodes=case.source_nodes(cluster))


def test_readers_that_begin_apart_keep_every_stage_busy() -> None:
    """In order, one stage after the other sends to all; a bound of half of that is almost reached."""
    case = Case("Qwen3-30B-A3B", Layout(2, 4, 2, expert=4, expert_tensor=1), RolloutLayout(8), 2, 64 << 20)
    cluster, plan = on(case, H100), engine_plan(case.shape, case.trainer, case.rollout)
    readers = receivers(case, cluster, plan)
    moved = traffic(case, cluster, readers)
    bound = max(moved.into_worker, moved.out_of_stage / 4) / H100.nic
    assert bound <= sync_seconds(readers, cluster) < 1.15 * bound
    assert sync_seconds(receivers(case, cluster, plan, rotated=False), cluster) > 1.5 * bound


def test_bytes_of_a_link_are_counted_where_they_go() -> None:
    """Two engines of two workers on one node, a trainer of two stages that fills another one: half of the model leaves each
    rank, as one copy for both engines."""
    case = Case("Qwen3-30B-A3B", Layout(1, 2), RolloutLayout(2), 2)
    cluster = on(case, replace(H100, node_gpus=4))
    plan = engine_plan(case.shape, case.trainer, case.rollout)
    readers = receivers(case, cluster, plan)
    moved, total = traffic(case, cluster, readers), 2 * int(plan.sizes.sum())
    assert len(readers) == 2 and moved.near == 0
    assert moved.into_worker == max(np.bincount(plan.destination_rank, 2 * plan.sizes))
    assert moved.handed_over == moved.into_worker and moved.out_of_rank == moved.out_of_stage
    assert moved.out_of_rank == max(np.bincount(plan.source_rank, 2 * plan.sizes)) >= total / 2
    beside = on(case, replace(H100, node_gpus=8))  # on the trainer's node: nothing leaves it
    assert traffic(case, beside, receivers(case, beside, plan)).into_worker > 0
    near = [replace(reader, node=0) for reader in receivers(case, beside, plan)]
    assert traffic(case, beside, near).into_worker == 0 and traffic(case, beside, near).near == moved.into_worker


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


@pytest.mark.parametrize("transport_name", ["shared_memory", "gloo"])
def test_the_order_on_one_machine_is_that_of_a_run(transport_name: str) -> None:
    """Both by buckets and in place, at both ends; of the engine that leads where engines have orders of their own."""
    shape, rollout, engines, is_in_place = shape_of("qwen3"), RolloutLayout(2), 3, transport_name == "shared_memory"
    settings = SyncSettings(torch.float32, rollout, engines, 1 << 13, timeout_s=60.0, transport=transport_name)
    plan = engine_plan(shape, Layout(), rollout)
    with contextlib.closing(WeightSync(shape, Layout(), settings, "test", 0, None)) as sync:
        manifest = replace(sync._begin(1, 1, (0, 1, 2)), leaders=(0, 0, 0))
        for worker in range(2):
            order = machine_order(plan, worker, 2, engines, is_in_place)
            assert list(dict.fromkeys(sync._streams[worker].copy.tolist())) == order.tolist()
            pieces = Pieces.of(plan, order, 4)
            if is_in_place:
                assert np.array_equal(sync._in_place[worker].copy, pieces.copy)
            for engine in range(engines):
                reader = StreamReader(shape, worker)
                reader._prepare(manifest, engine)
                assert np.array_equal(reader._stream.copy, sync._streams[worker].copy)
                assert not is_in_place or np.array_equal(reader._pieces.copy, pieces.copy)
            readers = machine_readers(shape, Layout(), rollout, engines, 4, 1 << 13, is_in_place)
            assert readers[worker].buckets == bucket_parts(plan, order, 4, 1 << 13)


def test_another_layout_of_a_model_is_given_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--only Qwen3-30B-A3B --tensor 1 --pipeline 4 --expert 4 --engines 2 --rollout-tensor 2 --json"
    monkeypatch.setattr(sys, "argv", ["weight_sync_scale.py", *options.split(), str(tmp_path / "found.json")])
    assert main() == 0
    (row,) = json.loads((tmp_path / "found.json").read_text())["models"]
    assert (row["trainer"]["tensor"], row["trainer"]["pipeline"], row["trainer"]["data"]) == (1, 4, 4)
    assert (row["engines"], row["rollout"]["tensor"]) == (2, 2)
    assert row["link_bytes"]["into_worker"] == row["worker_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--pipeline 4", ["name it by --only"]),
        ("--only Qwen3-30B-A3B --tensor 0", ["--tensor: 0 must be at least 1"]),
        (
            "--only Qwen3-30B-A3B --tensor 3 --expert 12",
            [
                "--tensor = 3: must divide the model's 32 heads",
                "--expert = 12: must divide the model's 128 experts; nearest: 4",
            ],
        ),
        ("--only Qwen3-30B-A3B --expert 16", ["--expert = 16: ", "must divide the 8 ranks of a stage", "nearest: 8"]),
        ("--only Qwen3-30B-A3B --pipeline 99", ["--pipeline = 99: must divide the model's 48 layers; nearest: 48"]),
        ("--only Qwen3-30B-A3B --rollout-tensor 3", ["--rollout-tensor = 3 must divide the 32 attention heads"]),
        ("--only Qwen3-30B-A3B --rollout-data 5", ["--rollout-tensor x --rollout-data = 4 x 5 must divide the 768"]),
        ("--cores 4", ["without --machine nothing reads --cores"]),
        ("--machine --model {llama} --data 2 --expert 2", ["with --machine nothing reads --data, --expert;"]),
        ("--machine --model {llama} --rollout-data 2 --nic 1e9", ["nothing reads --nic, --rollout-data"]),
        ("--machine --model {llama} --tensor 3", ["--tensor = 3: must divide the model's"]),
        ("--machine --model {llama} --rollout-tensor 3", ["--rollout-tensor = 3 must divide"]),
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


def test_stages_are_uneven_where_they_do_not_divide_the_layers() -> None:
    """As the layers of DeepSeek-V3, whose number is a prime."""
    arguments = argparse.Namespace(tensor=None, pipeline=4, data=None, expert=None, rollout_tensor=None, rollout_data=None)
    arguments.engines = None
    assert CASES[2].cut(arguments).trainer.stages == (15, 16, 15, 15)
    assert CASES[0].cut(arguments).trainer.stages == ()
    arguments.pipeline = 8
    assert CASES[2].cut(arguments) == CASES[2]


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


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_machine_with_few_cores_is_bound_by_their_work(is_in_place: bool) -> None:
    readers = machine_readers(shape_of("llama"), Layout(pipeline=2), RolloutLayout(2), 3, 4, 1 << 12, is_in_place)
    network = (math.inf, math.inf) if is_in_place else (2e4, 4e4)
    machine = Machine(1, Rates(1e4, *network, 5e4), 0.0, copy_threads=2 if is_in_place else 0)
    found = {cores: predict_machine(readers, replace(machine, num_cores=cores), 0.0) for cores in (1, 2, 64)}
    assert found[1]["bytes"] == 4 * engine_plan(shape_of("llama"), Layout(pipeline=2), RolloutLayout(2)).sizes.sum()
    assert found[1]["work"] == pytest.approx(found[1]["bytes"] * (1 / 1e4 + 1 / network[0] + 1 / network[1] + 3 / 5e4))
    assert found[1]["seconds"] == pytest.approx(found[1]["work"]) and found[1]["seconds"] > found[1]["alone"]
    assert found[1]["seconds"] / 2 <= found[2]["seconds"] < found[1]["seconds"]
    assert found[64]["seconds"] == found[64]["alone"]
    messages = sum(len(parts) for reader in readers for parts in reader.buckets)
    assert predict_machine(readers, machine, 0.5)["seconds"] == pytest.approx(found[1]["seconds"] + 0.5 * messages)


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


def test_a_quartile_lies_among_what_was_measured() -> None:
    """By the other method one of two syncs, ten times slower than the other, gave less than no time."""
    assert quartile([0.1, 0.01]) == pytest.approx(0.01 + 0.09 / 4)
    assert quartile([5.0, 1.0, 4.0, 2.0, 3.0]) == 2.0
