"""Spans sum to their phases, waits have a cause, and the traces of all ranks become one; where a step's time went, worked by
hand: ranks, engines, and the run as a whole."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]  # in no stub

from megarl.megatron.spans import MegatronTimers, span_of, timed_waits
from megarl.models import ModelShape
from megarl.planner.flops import forward_flops, update_flops
from megarl.platform.diagnostics import peak_of
from megarl.recipe import load_recipe
from megarl.schedule import MicroBatch, MiniBatch
from megarl.telemetry.clock import Event, PhaseClock, StepTimes, recording, span, start_span
from megarl.telemetry.progress import begin_work, watching_work
from megarl.telemetry.time_metrics import Sizes, TimeMetrics, bubble_metrics, engine_metrics, idle_metrics
from megarl.telemetry.trace import TraceWriter, merge
from tests.runs import tiny_recipe, tiny_run

NAMES = ["forward", "backward", "wait_ranks", "wait_engines"]
# Trees of seconds and nested spans.
TREES = st.recursive(
    st.integers(0, 9), lambda inner: st.tuples(st.sampled_from(NAMES), st.lists(inner, max_size=3)), max_leaves=12
)


class Time:
    """A clock that moves only when a test moves it."""

    def __init__(self):
        self.seconds = 50.0

    def __call__(self):
        return self.seconds


def run_tree(tree, time, current, expected):
    """Run a tree of spans, and add its seconds to `expected` by span."""
    if isinstance(tree, int):
        time.seconds += tree
        expected[current] = expected.get(current, 0) + tree
        return
    name, inner = tree
    with span(name):
        for part in inner:
            run_tree(part, time, current if current.startswith("wait_") else name, expected)


@given(st.lists(TREES, max_size=4))
def test_every_second_is_in_one_span(trees):
    time = Time()
    clock = PhaseClock(now=time)
    expected: dict[str, int] = {}
    with recording(clock):
        with clock.phase("actor_update"):
            for tree in trees:
                run_tree(tree, time, "unaccounted", expected)
        for tree in trees:  # outside of a phase there are no spans
            run_tree(tree, time, "unaccounted", {})
    times = clock.take()
    local = {name: seconds for (phase, name), seconds in times.spans.items() if phase == "actor_update" and seconds}
    assert local == {name: seconds for name, seconds in expected.items() if seconds}
    assert sum(local.values()) == times.phases["actor_update"]
    assert sum(times.by_span().values()) == times.seconds == 2 * times.phases["actor_update"]
    metrics = times.metrics()
    assert metrics.pop("time/step") == times.seconds == sum(metrics.values())


def test_an_error_names_its_phase_and_rank_and_ends_the_phase_with_the_span_it_left_open():
    time = Time()
    received: list[str | None] = []
    clock = PhaseClock(rank=3, on_phase=received.append, now=time)
    with recording(clock), pytest.raises(RuntimeError) as caught, clock.phase("actor_update"):
        start_span("forward")
        time.seconds += 3
        raise RuntimeError("lost")
    assert caught.value.__notes__ == ["in phase actor_update on rank 3"]
    assert received == ["actor_update", None] and clock.current is None
    with clock.phase("advantage"):
        time.seconds += 1
    times = clock.take()
    assert times.phases == {"actor_update": 3, "advantage": 1} and sum(times.by_span().values()) == 4


def test_a_phase_waits_for_the_device():
    """The device works 3 s longer than the host; these seconds belong to the phase."""
    time = Time()

    def settle():
        time.seconds += 3

    clock = PhaseClock(now=time, synchronize=settle)
    with clock.phase("actor_update"):
        time.seconds += 1
    times = clock.take()
    assert times.spans["actor_update", "device"] == 3 and times.phases == {"actor_update": 4}
    with pytest.raises(RuntimeError), clock.phase("actor_update"):
        raise RuntimeError("the device is lost, and a wait would hide this error")
    assert ("actor_update", "device") not in clock.take().spans


def test_megatron_s_timers_are_spans():
    time = Time()
    clock, timers = PhaseClock(now=time, keep_spans=True), MegatronTimers()
    done: list[float] = []
    with recording(clock), watching_work(lambda _, number, total: done.append(number)), clock.phase("actor_update"):
        begin_work("micro-batches", 4, parts=2)
        timers("forward-backward", log_level=1).start(barrier=True)
        for name, seconds in (("forward-recv", 2), ("forward-compute", 5), ("backward-send-forward-recv", 1)):
            timers(name, log_level=2).start()
            time.seconds += seconds
            timers(name).stop()
        timers("forward-backward").stop()
        timers("all-grads-sync", log_level=1).start(barrier=True)
        time.seconds += 4
        timers("all-grads-sync").stop()
    assert done == [0, 0.5]  # only the forward pass counts, not the receive and the reduction
    times = clock.take()
    assert {name: seconds for (_, name), seconds in times.spans.items() if seconds} == {
        "wait_pipeline": 3, "forward": 5, "wait_gradients": 4,
    }  # fmt: skip
    assert times.events[0] == Event("wait_pipeline", 2, 0.0, 2.0) and times.events[-1] == Event("actor_update", 0, 0.0, 12.0)
    assert span_of("params-all-gather") == "wait_gradients"


def test_every_wait_for_a_collective_has_a_span():
    """A wait in a layer is `wait_layers`, in the optimizer `wait_gradients`; inside a wait it keeps the name of that
    wait."""
    clock = PhaseClock(keep_spans=True)
    untouched = Work.wait
    with recording(clock), timed_waits(clock), clock.phase("actor_update"):
        for name in ("forward", "backward", "optimizer", "metrics", "wait_engines"):
            with span(name):
                assert finished_work().wait()
        assert finished_work().wait()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(finished_work().wait).result()  # a clock times one thread only
    assert Work.wait is untouched
    assert [event.name for event in clock.take().events] == [
        "wait_layers", "forward", "wait_layers", "backward", "wait_gradients", "optimizer", "wait_ranks", "metrics",
        "wait_engines", "wait_ranks", "actor_update",
    ]  # fmt: skip


def finished_work():
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future)


def test_traces_of_all_ranks_become_one_on_one_clock(tmp_path):
    def times(start, event):
        return StepTimes(start, 2.0, {}, {}, [Event(*event)])

    for rank, offset in ((0, 0.0), (1, 100.0)):
        writer = TraceWriter(tmp_path, rank, "here", offset)
        for step in (1, 2):
            writer.write(step, times(offset + 1000.0 + step, ("rollout", 0, 0.5, 1.0)))
        writer.close()
    with (tmp_path / "trace" / "rank-00001.jsonl").open("a") as file:
        file.write('{"step": 3, "sta')  # rank 1 was killed
    (tmp_path / "trace" / "rank-00002.jsonl").touch()
    again = TraceWriter(tmp_path, 1, "there", 50.0)  # rank 1 restarted and repeats step 2
    again.write(2, times(1060.0, ("wait_ranks", 1, 0.25, 0.5)))
    again.close()
    with (tmp_path / "trace" / "rank-00001.jsonl").open("a") as file:
        file.write('{"step": 3, "sta')
    events = merge(tmp_path)["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0 on here", "rank 1 on there"]
    keys = ("pid", "name", "cat", "ts", "dur")
    slices = [tuple(event[key] for key in keys) for event in events if event["ph"] == "X"]
    assert slices == [
        (0, "step 1", "step", 1_001_000_000, 2_000_000), (0, "rollout", "phase", 1_001_500_000, 1_000_000),
        (0, "step 2", "step", 1_002_000_000, 2_000_000), (0, "rollout", "phase", 1_002_500_000, 1_000_000),
        (1, "step 1", "step", 1_001_000_000, 2_000_000), (1, "rollout", "phase", 1_001_500_000, 1_000_000),
        (1, "step 2", "step", 1_010_000_000, 2_000_000), (1, "wait_ranks", "wait", 1_010_250_000, 500_000),
    ]  # fmt: skip
    json.dumps(events)
    with pytest.raises(ValueError, match=r"trace has no rank-\*.jsonl: the run was started with run.trace: none"):
        merge(tmp_path / "other")


# Two ranks in a step of 10 s: rank 1 computes for longer, and rank 0 waits for it.
RANKS = [
    {("rollout", "wait_engines"): 3.0, ("critic_update", "forward"): 0.5, ("critic_update", "wait_pipeline"): 1.5,
     ("actor_update", "forward"): 1.0, ("actor_update", "wait_layers"): 1.0, ("actor_update", "wait_pipeline"): 1.0,
     ("actor_update", "offload"): 1.0, ("actor_update", "unaccounted"): 0.5, ("", "unaccounted"): 0.5},
    {("rollout", "wait_engines"): 3.0, ("critic_update", "forward"): 1.5, ("critic_update", "wait_pipeline"): 0.5,
     ("actor_update", "forward"): 3.0, ("actor_update", "wait_pipeline"): 0.5, ("actor_update", "offload"): 1.0,
     ("", "unaccounted"): 0.5},
]  # fmt: skip
# Two engines, of which the first has requests for 2 of the 3 s of the rollout.
BUSY_S = [2.0, 2.75]


def test_idle_time_has_a_cause_and_a_straggler():
    assert idle_metrics(RANKS) == pytest.approx({
        "idle/share": 10.5 / 20, "idle/engines_share": 6 / 20, "idle/pipeline_share": 3.5 / 20, "idle/layers_share": 1 / 20,
        "offload/share": 2 / 20, "idle/unaccounted_share": 1.5 / 20, "idle/straggler_rank": 1,
        "idle/straggler_s": (3.5 + 1.0) / 2 - 1.0,
    })  # fmt: skip


def test_the_bubble_is_a_share_of_the_pipelines_own_time():
    assert bubble_metrics(RANKS) == {"idle/critic_update/bubble_share": 2 / 4, "idle/actor_update/bubble_share": 1.5 / 6.5}


def test_engines_wait_for_each_other_for_weights_and_for_the_trainer():
    assert engine_metrics(BUSY_S, 10.0, 3.0, 1.0) == pytest.approx({
        "idle/engines/busy_share": 4.75 / 20, "idle/engines/tail_share": 1.25 / 20, "idle/engines/weight_sync_share": 2 / 20,
        "idle/engines/training_share": 12 / 20, "idle/slowest_engine": 1, "idle/slowest_engine_s": 0.375,
    })  # fmt: skip
    assert engine_metrics([], 10.0, 3.0, 1.0) == {}
    # Requests continue while the trainer works: no part is negative, and the parts still sum to the step.
    ahead = engine_metrics([9.5], 10.0, 3.0, 1.0)
    assert ahead["idle/engines/weight_sync_share"] == pytest.approx(0.05) and ahead["idle/engines/training_share"] == 0


def test_the_page_explains_every_metric():
    page = (Path(__file__).parents[2] / "docs" / "reading-a-run.md").read_text()
    waits = {("actor_update", f"wait_{whom}"): 1.0
             for whom in ("engines", "rewards", "data", "pipeline", "layers", "gradients", "ranks")}  # fmt: skip
    spans = [{**waits, ("actor_update", "offload"): 1.0, ("", "unaccounted"): 1.0}]
    metrics = idle_metrics(spans) | engine_metrics([1.0], 2.0, 1.0, 1.0)
    metrics |= {key.replace("actor_update", "<phase>"): value for key, value in bubble_metrics(spans).items()}
    metrics |= {"tokens/useful": 0, "tokens/per_s": 0, "tokens/per_hour": 0, "mfu/<phase>": 0}
    metrics |= {"run/start_s": 0}
    assert [key for key in metrics if f"`{key}`" not in page] == []


def test_peaks_are_found_by_whole_words_of_a_devices_name():
    assert peak_of("NVIDIA H100 80GB HBM3", "bf16") == 989.0 and peak_of("NVIDIA H100 PCIe", "bf16") == 756.0
    assert peak_of("NVIDIA A100-SXM4-80GB", "fp16") == 312.0 and peak_of("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_of("NVIDIA L40S", "fp8") == 733.0 and peak_of("NVIDIA L4", "fp32") == 30.3
    assert peak_of("NVIDIA RTX A4000", "bf16") is None, "another device, whose name has an A40 in it"


def recipe_with(folder, **telemetry):
    return load_recipe(tiny_recipe(folder, "metrics", True, 2, 1, 2, 1, telemetry=telemetry))


def test_utilisation_and_rates_count_only_useful_work(tmp_path):
    """Two ranks and an engine run on devices of 2 * 10**12 operations a second."""
    shape = ModelShape.from_directory(tiny_run(tmp_path))
    recipe = recipe_with(tmp_path, peak_tflops=2.0)
    once = MiniBatch(0, (0, 1), ((MicroBatch((0,), 7, 7),), (MicroBatch((1,), 7, 7),)))
    sizes = Sizes([3, 5], [4, 2], [True, False], {"actor_update": (once, once), "critic_value": (once,)})
    times = StepTimes(0.0, 10.0, {"rollout": 2.0, "actor_update": 4.0, "critic_value": 1.0}, {}, [])
    shapes = dict.fromkeys(("actor", "reference", "critic"), shape)
    done = {"schedule/actor_update/tokens": 28}
    metrics = TimeMetrics(recipe, shapes, 1, lambda precision: None).of(times, RANKS, sizes, [2.0], done)
    assert metrics["tokens/useful"] == 7 and metrics["tokens/per_s"] == 0.7 and metrics["tokens/per_hour"] == 2520
    updates = 2 * sum(update_flops(shape, 7, completion) for completion in (4, 2))  # of two epochs
    assert metrics["mfu/actor_update"] == pytest.approx(updates / (4.0 * 2 * 2e12))
    assert metrics["mfu/rollout"] == pytest.approx(updates / 2 / 3 / (2.0 * 1 * 2e12))
    values = sum(forward_flops(shape, 7, completion, critic=True) for completion in (4, 2))
    assert metrics["mfu/critic_value"] == pytest.approx(values / (1.0 * 2 * 2e12))
    assert "mfu/critic_update" not in metrics, "it did not run"
    unknown = TimeMetrics(recipe_with(tmp_path), shapes, 1, lambda precision: None)
    assert not any(key.startswith("mfu/") for key in unknown.of(times, RANKS, sizes, [2.0], done))
    known = TimeMetrics(recipe_with(tmp_path), shapes, 1, {"fp32": 2.0}.get)
    assert known.of(times, RANKS, sizes, [2.0], done)["mfu/actor_update"] == metrics["mfu/actor_update"]
