"""Advice names legal changes only, and the numbers it promises are those the planner gives after the change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.planner.advice import ALIKE, WORTHWHILE, PlanAdvice, advise, fit
from megarl.planner.forecast import Forecast
from megarl.recipe.sizes import GIB
from tests.planner_cases import forecast_of, write_qwen, write_small
from tests.recipe_cases import CONFIG

VIRTUAL = "actor.layout={tensor: 2, pipeline: 2, virtual_pipeline: 2, sequence_parallel: true}"
# Recipe, its overrides, and the kinds of advice that it must draw, with their phase.
SMALL: dict[str, tuple[list[str], set[tuple[str, str]]]] = {
    "alike": (["actor.layout.pipeline=1", "phases.actor_logprob.micro_batch={max_tokens: 64}"], set()),
    "unlike rules, sizes within a factor of two": (
        ["actor.layout.pipeline=1", "phases.actor_logprob.micro_batch={max_tokens: 128}"],
        set(),
    ),
    "unlike sizes": (
        ["actor.layout.pipeline=1", "phases.actor_logprob.micro_batch={max_tokens: 512}"],
        {("ratio_drift", "actor_logprob")},
    ),
    "sequences": (
        [
            "trainer.ranks=1",
            "actor.layout={tensor: 1, pipeline: 1}",
            "phases.actor_update={mini_batch: 16, micro_batch: {sequences: 2}, epochs: 2}",
        ],
        {("cap", "actor_update")},
    ),
    "idle": (
        ["actor.layout={tensor: 1, pipeline: 4}", "phases.actor_update={mini_batch: 4, micro_batch: {max_tokens: 64}}"],
        {("mini_batch", "actor_update")},
    ),
}
QWEN: dict[str, tuple[list[str], set[tuple[str, str]]]] = {
    "good": ([], set()),
    "one at a time": (["phases.reference_logprob.micro_batch={sequences: 1}"], {("cap", "reference_logprob")}),
    "cap too large": (["phases.actor_update.micro_batch.max_tokens=60000"], {("memory", "actor_update")}),
    "sequences too many": (["phases.actor_update.micro_batch={sequences: 12}"], {("memory", "actor_update")}),
    "layout too small": (
        ["actor.layout={tensor: 1, pipeline: 1}", "phases.actor_logprob.micro_batch.max_tokens=8192"],
        {("memory", "actor_update"), ("engine", "rollout")},
    ),
    "cap too large for four stages": (
        [
            "actor.layout={tensor: 1, pipeline: 4}",
            "phases.actor_update.micro_batch.max_tokens=5120",
            "device.memory_gib=66",
        ],
        {("memory", "actor_update")},
    ),
    "virtual pipeline": ([VIRTUAL, "device.memory_gib=90"], set()),
    "virtual pipeline too large": (
        [VIRTUAL, "device.memory_gib=40"],
        {("memory", "actor_update"), ("engine", "rollout")},
    ),
    "virtual pipeline in single sequences": (
        [VIRTUAL, "phases.reference_logprob.micro_batch={sequences: 1}"],
        {("cap", "reference_logprob")},
    ),
    "cache too large": (["rollout.kv_cache_bytes=51539607552"], {("engine", "rollout")}),
    "share too large": (["rollout.memory_utilization=0.65"], {("engine", "rollout")}),
    "share and cache too large": (
        ["rollout.kv_cache_bytes=51539607552", "rollout.memory_utilization=0.65"],
        {("engine", "rollout")},
    ),
    "share too small": (["rollout.memory_utilization=0.05"], {("engine", "rollout")}),
    "device too small": (["device.memory_gib=20"], {("memory", "actor_update"), ("engine", "rollout")}),
}


# Nightly: kinds of advice that another one draws too.
RARE = {"share and cache too large", "share too small", "virtual pipeline in single sequences", "sequences too many"}
OF_QWEN = [pytest.param(name, marks=[pytest.mark.nightly] if name in RARE else []) for name in QWEN]


def advice_on(found: Forecast) -> list[PlanAdvice]:
    return [*fit(found), *advise(found)]


def measured(found: Forecast, one: PlanAdvice) -> float:
    """What the forecast says of an advice's measure."""
    if one.measure == "engine_bytes":
        engines, device = found.job.engines, found.job.device_bytes
        assert engines is not None and device is not None
        return int(engines.utilization * device) if engines.utilization is not None else engines.memory.total
    phase = next(phase for phase in found.phases if phase.phase == one.phase)
    if one.measure == "device_bytes":
        return phase.worst_memory.total + found.job.bytes_during_training
    value = getattr(phase.quality, one.measure)
    assert isinstance(value, int | float)
    return value


def drift_gap(found: Forecast) -> float:
    """How many times the largest planned micro-batch of one side of the policy ratio is that of the other."""
    few, many = sorted(one.quality.max_slots for one in found.phases if one.phase in ("actor_logprob", "actor_update"))
    return many / few


def check_promises(file: Path, overrides: list[str], expected: set[tuple[str, str]]) -> None:
    found = forecast_of(file, overrides)
    advice = advice_on(found)
    assert expected <= {(one.kind, one.phase) for one in advice}, advice
    assert bool(expected) == bool(advice), advice
    for one in advice:
        assert measured(found, one) == pytest.approx(one.before)
        assert one.kind != "ratio_drift" or drift_gap(found) > ALIKE
        if not one.changes:
            assert one.after is None
            continue
        changed = forecast_of(file, [*overrides, *one.changes])  # raises where a change is not legal
        assert one.after is not None and measured(changed, one) == pytest.approx(one.after)
        if one.kind == "ratio_drift":
            assert drift_gap(changed) < drift_gap(found)
            continue
        again = {(other.kind, other.phase) for other in advice_on(changed)}
        assert (one.kind, one.phase) not in again, f"{one} does not solve it"


@pytest.mark.parametrize("name", SMALL)
def test_every_change_keeps_its_promise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_small(tmp_path, ("phases.critic_update.micro_batch", {"max_tokens": 128}))
    check_promises(file, ["phases.reference_logprob.micro_batch={max_tokens: 128}", *SMALL[name][0]], SMALL[name][1])


@pytest.mark.parametrize("name", OF_QWEN)
def test_every_change_to_a_stated_device_keeps_its_promise(name: str, tmp_path: Path) -> None:
    check_promises(write_qwen(tmp_path), *QWEN[name])


@pytest.mark.parametrize("name", OF_QWEN)
def test_following_the_advice_ends(name: str, tmp_path: Path) -> None:
    """Change by change, the first that is offered each time: no two pieces of advice undo each other."""
    file, overrides = write_qwen(tmp_path), list(QWEN[name][0])
    for _ in range(8):
        found = forecast_of(file, overrides)
        changes = next((one.changes for one in advice_on(found) if one.changes), ())
        if not changes:
            break
        overrides += changes
    assert not changes
    assert found.fits or name == "device too small"


@pytest.mark.parametrize("cap", [262144, 8192])
def test_the_rule_of_the_update_is_not_named_where_it_widens_the_gap(cap: int, tmp_path: Path) -> None:
    """A mini-batch of eight is all that an update has to fill a cap with; the whole batch of the other phase fills it."""
    stated = [
        "trainer.ranks=1",
        "actor.layout={tensor: 1, pipeline: 1}",
        "rollout={max_new_tokens: 4096, engines: 1, tensor: 1, kv_cache_bytes: 4294967296}",
        "device=null",
        "phases.actor_update={mini_batch: 8, micro_batch: {max_tokens: 262144}}",
        f"phases.actor_logprob.micro_batch.max_tokens={cap}",
    ]
    found = forecast_of(write_qwen(tmp_path), stated)
    (one,) = [one for one in advise(found) if one.kind == "ratio_drift"]
    assert drift_gap(found) > ALIKE and "the same rule" not in one.text
    changed = forecast_of(write_qwen(tmp_path), [*stated, *one.changes])
    assert drift_gap(changed) <= ALIKE and not [one for one in advise(changed) if one.kind == "ratio_drift"]


def test_actor_logprob_is_never_sped_up_away_from_actor_update(tmp_path: Path) -> None:
    single = [f"phases.{phase}.micro_batch={{sequences: 1}}" for phase in ("actor_logprob", "actor_update")]
    kinds = {(one.kind, one.phase) for one in advice_on(forecast_of(write_qwen(tmp_path), single))}
    assert ("cap", "actor_update") in kinds
    assert not {phase for _, phase in kinds} & {"actor_logprob"}


def test_what_cannot_fit_is_said_without_a_change(tmp_path: Path) -> None:
    found = forecast_of(write_qwen(tmp_path), ["device.memory_gib=14"])
    said = ("no cap and no layout of these ranks fits", "neither memory.recompute: full nor", "the trainer must hold less")
    advice = [one for one in fit(found) if one.kind != "savings" or one.phase == "actor_update"]
    assert {one.kind for one in advice} == {"memory", "savings", "engine"}
    for one in advice:
        assert (one.changes, one.after) == ((), None)
        assert any(text in one.text for text in said), one.text


def test_memory_that_limits_is_answered_with_recompute_and_offload(tmp_path: Path) -> None:
    """The mildest that is enough: less kept where activations are what is too much, and what rests on the host where
    optimizer states are, each of which fits where it is taken."""
    file = write_qwen(tmp_path)
    for stated, change in (
        (["device.memory_gib=60"], "actor.memory.recompute=selective"),
        (["device.memory_gib=40"], "actor.memory.recompute=full"),
        (["device.memory_gib=26"], "actor.memory.offload=optimizer"),
    ):
        advice = [one for one in fit(forecast_of(file, stated)) if one.kind == "savings"]
        assert advice and any(change in one.changes for one in advice), (change, advice)
        for one in advice:
            changed = forecast_of(file, [*stated, *one.changes])
            held = next(phase.worst_memory.total for phase in changed.phases if phase.phase == one.phase)
            assert one.after is None or held == one.after <= (changed.job.usable_bytes or 0)


def test_more_memory_is_asked_for_only_where_it_is_known_to_be_there(tmp_path: Path) -> None:
    file, single = write_qwen(tmp_path), ["phases.reference_logprob.micro_batch={sequences: 2}"]
    takes = {}
    for device in ("{memory_gib: 80}", "null"):
        stated = [*single, f"device={device}"]
        before = forecast_of(file, stated)
        (one,) = [one for one in advice_on(before) if one.phase == "reference_logprob"]
        assert one.after is not None and one.after >= one.before * (1 + WORTHWHILE)
        after = forecast_of(file, [*stated, *one.changes])
        takes[device] = tuple(
            next(phase for phase in found.phases if phase.phase == "reference_logprob").worst_memory.total
            for found in (before, after)
        )
    assert takes["{memory_gib: 80}"][1] > takes["{memory_gib: 80}"][0]
    assert takes["null"][1] <= takes["null"][0]


def test_a_larger_mini_batch_names_the_phase_that_then_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_small(tmp_path, ("phases.actor_logprob", {"micro_batch": {"max_tokens": 64}}), model=CONFIG)
    layout = "actor.layout={tensor: 1, pipeline: 4}"
    (one,) = [one for one in advise(forecast_of(file, [layout])) if (one.kind, one.phase) == ("mini_batch", "actor_update")]
    assert one.changes == ("phases.actor_update.mini_batch=16", "phases.actor_logprob=null")
    in_reward = [layout, "algorithm.kl.place=reward"]
    (kept,) = [
        one for one in advise(forecast_of(file, in_reward)) if (one.kind, one.phase) == ("mini_batch", "actor_update")
    ]
    assert kept.changes == ("phases.actor_update.mini_batch=16",)


def test_a_phase_that_does_not_fit_gets_no_advice_on_its_speed(tmp_path: Path) -> None:
    found = forecast_of(write_qwen(tmp_path), ["phases.actor_update.micro_batch={sequences: 12}"])
    kinds: dict[str, list[Any]] = {}
    for one in advice_on(found):
        kinds.setdefault(one.phase, []).append(one.kind)
    assert kinds["actor_update"] == ["memory", "savings"]
    assert found.device_peak > 72 * GIB
