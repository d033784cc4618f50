"""Where a step's time went, worked by hand: ranks, engines, and the run as a whole."""

from pathlib import Path

import pytest

from megarl.models import ModelShape
from megarl.planner.flops import forward_flops, update_flops
from megarl.platform.diagnostics import peak_of
from megarl.recipe import load_recipe
from megarl.schedule import MicroBatch, MiniBatch
from megarl.telemetry.clock import StepTimes
from megarl.telemetry.time_metrics import Sizes, TimeMetrics, bubble_metrics, engine_metrics, idle_metrics
from tests.runs import tiny_recipe, tiny_run

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
