"""What `check --plan` says of `rollout.max_staleness`: times that follow from both sides, and a bound that holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner.forecast import forecast, job_of
from megarl.planner.staleness import STALENESSES, Rates, balanced_devices, rates, staleness_row, staleness_rows
from megarl.recipe import load_recipe
from tests.planner_cases import document_of, forecast_of, write_qwen

SEPARATE = ["rollout.placement=separate"]
AHEAD = ["rollout.max_staleness=2", "weight_sync.in_flight=keep", "algorithm.mismatch={correction: truncate}"]
# Sequences of 100 tokens, a second each, in as many slots as a step has sequences.
EQUAL = Rates(
    engines=2, slots=8, compute_s=0.0, weights_s=0.01, cache_s=0.0, train_s=0.5, logprob_s=0.25, sync_s=0.125,
    group_size=4, completions=(100,) * 16,
)  # fmt: skip


def test_at_staleness_0_a_step_is_generation_then_training_then_sync() -> None:
    assert staleness_row(EQUAL, 0, None).step_s == pytest.approx(1.0 + 0.5 + 0.125)
    one_slow = replace(EQUAL, completions=(10,) * 15 + (100,))
    assert staleness_row(one_slow, 0, None).step_s == pytest.approx(1.0 + 0.5 + 0.125)
    assert staleness_row(replace(EQUAL, slots=4), 0, None).step_s == pytest.approx(2.0 + 0.5 + 0.125)


@pytest.mark.parametrize(("train_s", "step_s"), [(0.5, 1.0 + 0.125), (3.0, 3.0 + 0.25 + 0.125)])
def test_above_staleness_0_a_step_is_the_slower_side(train_s: float, step_s: float) -> None:
    row = staleness_row(replace(EQUAL, train_s=train_s), 1, None)
    assert row.step_s == pytest.approx(step_s)
    assert row.trainer_share == pytest.approx((train_s + 0.25) / step_s)
    assert row.engines_share == pytest.approx(1.0 / step_s)


def test_a_completion_longer_than_a_step_needs_more_than_one_version_of_lead() -> None:
    """One sequence in 16 takes as long as four trainings."""
    tailed = replace(EQUAL, completions=(10,) * 15 + (300,), slots=64)
    one, two, four = (staleness_row(tailed, staleness, None).step_s for staleness in (1, 2, 4))
    assert one > 1.2 * two > 1.2 * four
    assert four == pytest.approx(0.5 + 0.25 + 0.125)


def test_a_window_too_small_for_the_slots_costs_the_engines_time() -> None:
    small, large = (staleness_row(replace(EQUAL, slots=16), 1, window).step_s for window in (4, 8))
    assert small == pytest.approx(1.0 + 0.125)
    assert large == pytest.approx((1.0 + 0.5 + 0.25) / 2 + 0.125), "the longest completion's"


@pytest.mark.parametrize("lengths", ["uniform", "log-normal", "long-tail"])
def test_a_larger_bound_makes_no_step_slower(lengths: str, tmp_path: Path) -> None:
    rows = staleness_rows(forecast_of(write_qwen(tmp_path), SEPARATE, lengths), None)
    assert [row.max_staleness for row in rows] == list(STALENESSES)
    seconds = [row.step_s for row in rows]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.7 * seconds[0]


def test_the_balanced_ratio_balances(tmp_path: Path) -> None:
    """With that many trainer devices for the engines' devices both sides take equally long."""
    plan = forecast_of(write_qwen(tmp_path), SEPARATE)
    known, ratio = rates(plan), balanced_devices(plan)
    assert known is not None and ratio is not None
    trainer_s = (known.train_s + known.sync_s) * plan.job.ranks / (plan.job.engines.workers / ratio)  # type: ignore[union-attr]
    assert trainer_s == pytest.approx(known.sample_s(known.slots))


def test_a_step_with_one_update_takes_one_more_pass_above_staleness_0(tmp_path: Path) -> None:
    once = ["phases.actor_update.mini_batch=128", "phases.actor_logprob=null", *SEPARATE]
    known, twice = (rates(forecast_of(write_qwen(tmp_path), overrides)) for overrides in (once, SEPARATE))
    assert known is not None and twice is not None
    assert known.logprob_s == pytest.approx(twice.train_s - known.train_s, rel=0.3) and twice.logprob_s == 0


def test_check_shows_what_the_placement_allows(tmp_path: Path) -> None:
    file = write_qwen(tmp_path)
    entry = document_of(file, [*SEPARATE, *AHEAD, "rollout.window=24"])
    assert entry["stream"] == {"max_staleness": 2, "window": 24}
    assert [row["max_staleness"] for row in entry["by_staleness"]] == list(STALENESSES)
    asleep = document_of(file)
    assert asleep["stream"] == {"max_staleness": 0, "window": 16}
    assert [row["max_staleness"] for row in asleep["by_staleness"]] == [0]
    assert document_of(file, ["device.tflops=null"])["by_staleness"] == []
    on_cpus = document_of(file, ["device={memory_gib: 900, kind: cpu, tflops: 1}", "rollout.tensor=1"])
    assert [row["max_staleness"] for row in on_cpus["by_staleness"]] == list(STALENESSES)
    unknown = staleness_rows(forecast(job_of(load_recipe(file, ["device=null"]), tflops=1.0)), None)
    assert [row.max_staleness for row in unknown] == list(STALENESSES)
    shown = {
        (): "needs rollout.placement: separate",
        (*SEPARATE,): "engine devices for each trainer device; the recipe has 1",
        ("device.tflops=null",): "device.tflops is not stated",
    }
    for overrides, text in shown.items():
        assert text in CliRunner().invoke(app, ["check", str(file), "--plan", *overrides]).output
