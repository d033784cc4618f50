"""docs/phases.md says what the code does: its keys exist, its phases are all of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megarl.megatron.step_metrics import schedule_metrics
from megarl.models.layout import Layout
from megarl.recipe.phases_section import PHASES, ForwardPhaseSection, PhasesSection, UpdatePhaseSection
from megarl.rollout.groups import rollout_metrics
from megarl.schedule import Cost, Executed, Schedule, plan_phase

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "phases.md").read_text(encoding="utf-8")


def test_every_phase_has_its_row_and_its_keys() -> None:
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", PAGE, re.MULTILINE)}
    assert list(rows)[: len(PHASES)] == list(PHASES)
    for phase, field in PhasesSection.model_fields.items():
        assert f"`phases.{phase}" in rows[phase], phase
        assert field.description
    for key in (*ForwardPhaseSection.model_fields, *UpdatePhaseSection.model_fields):
        assert f"`{key}" in PAGE or f".{key}`" in PAGE, key


def written_metrics() -> set[str]:
    """The metrics that a run writes for a step's rollouts and for one phase's schedule."""
    plan = plan_phase(Schedule("actor_update", max_tokens=64, mini_batch=2), [30, 40], Layout(), seed=1)
    (mini_batch,) = plan.mini_batches
    micro_batches = mini_batch.micro_batches[0]
    executed = Executed(
        tuple(len(micro.samples) for micro in micro_batches),
        tuple(micro.tokens for micro in micro_batches),
        tuple(micro.slots for micro in micro_batches),
    )
    rollouts = SimpleNamespace(
        completion_lengths=np.array([3, 4]),
        prompt_lengths=np.array([5, 6]),
        finish_reasons=["stop", "length"],
        last_version=np.array([1, 1]),
        episodes=None,
        executed=SimpleNamespace(prompts=1, max_concurrent=2),
        metrics={},
    )
    return {*schedule_metrics(plan, [[executed]], [30, 40], Cost()), *rollout_metrics(rollouts)}  # type: ignore[arg-type]


def test_every_metric_on_the_page_is_written_by_a_run() -> None:
    """In the section on what a run proves; the tests of runs read the values."""
    section = PAGE.split("## What a run proves")[1].split("## ")[0]
    of_phase = set(re.findall(r"`([a-z_]+)`", section))
    of_rollouts = set(re.findall(r"`(rollout/\w+)[^`]*`", section))
    assert len(of_phase) >= 12 and len(of_rollouts) == 2
    written = written_metrics()
    assert {f"schedule/actor_update/{name}" for name in of_phase} | of_rollouts <= written
    first, last = re.findall(r"`rollout/completion_length(_p\d+) \.\.\. (_p\d+)`", section)[0]
    assert {f"rollout/completion_length{quantile}" for quantile in (first, last)} <= written
