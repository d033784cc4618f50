"""`run` and `watchdog`: name, length, seed and files of a run, and how long a rank may stand still before it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megarl.recipe.section import Count, FilePath, Positive, Seconds, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class RunSection(Section):
    kind: Literal["rl", "sft", "dpo", "reward_model"] = "rl"
    """What the run learns from. `rl`: from rollouts. `sft`: from the texts or chats of `data` (supervised fine-tuning).
    `dpo`: from pairs of a chosen and a rejected answer (direct preference optimization). `reward_model`: the same pairs; the
    actor gets one output a sequence, its score. All but `rl` take one update a step and run no engines: `rollout`, `reward`
    and `environment` are left out, and `algorithm` may be."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run and of its directory: letters, digits, `.`, `_` and `-`."""
    steps: Positive
    """Steps to train."""
    seed: Count = 1
    """Seeds prompt order, sampling, mini-batch order and new weights (a value head)."""
    dir: FilePath = "runs"
    """Parent of run directories, from the working directory. In every path of a recipe `~` is the home directory and `$NAME`
    an environment variable."""
    checkpoint_every: Count = 0
    """Write a checkpoint every this many steps, and always after the last step."""
    dump_rollouts: bool = False
    """Write every step's rollouts into the run directory, for `rollout.replay`."""
    preemption: Literal["finish", "abandon"] = "finish"
    """At SIGTERM or SIGUSR1, finish the step and save it, or leave at the next phase boundary: that saves the state of the
    step before, or keeps the last checkpoint if this step has changed weights already."""
    trace: Literal["none", "phases", "spans"] = "phases"
    """What each rank writes into `trace/` of the run directory, for `megarl trace`: its phases, or also the spans in them
    (micro-batches, waits, optimizer). With either, rank 0 writes when each engine request came, began and ended."""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """If a loss, gradient, log-probability, value or reward is not finite: stop before the update, or skip that update or
    sample, counted in `finite/...`. Weights that are not finite always stop the run."""
    grace_s: Seconds = 120.0
    """Seconds to leave after such a signal; then remaining processes are killed."""

    @property
    def is_supervised(self) -> bool:
        """Whether the run learns from rows of data, not from rollouts."""
        return self.kind != "rl"

    @property
    def learns_from_pairs(self) -> bool:
        """Whether a row is a pair of a chosen and a rejected answer."""
        return self.kind in ("dpo", "reward_model")


# Shares of trainer.collective_timeout_s: a collective that times out names no rank.
FIRST_STEP_SHARE, STEP_SHARE = 0.8, 0.5


class WatchdogSection(Section):
    first_step_s: Seconds | None = None
    """How long a rank may stay in one phase or span in its first step, which compiles and allocates; below
    `trainer.collective_timeout_s`. null: 0.8 of that."""
    step_s: Seconds | None = None
    """The same in all later steps. null: half of `trainer.collective_timeout_s`, or `first_step_s` where that is less."""
    files_s: Seconds = 1800.0
    """The same in phases that read or write model files: `start`, `load_checkpoint` and `checkpoint`."""
    stacks_s: Seconds = 5.0
    """Time for the processes of a hanging run to write their stacks before they are killed."""


def watchdog_rules(recipe: Recipe) -> Violations:
    """The watchdog must fire before a collective times out, which names no rank, and not while a rank compiles."""
    section, trainer, (first_step_s, _) = recipe.watchdog, recipe.trainer, recipe.standing_s
    for key, seconds in (("first_step_s", section.first_step_s), ("step_s", section.step_s)):
        if seconds is None:
            continue
        if seconds >= trainer.collective_timeout_s:
            rule = f"must be below trainer.collective_timeout_s = {trainer.collective_timeout_s:g}, whose end names no rank"
            yield Violation(f"watchdog.{key}", seconds, rule, f"{STEP_SHARE * trainer.collective_timeout_s:g}")
    if section.step_s is not None and section.step_s > first_step_s:
        rule = f"must not pass watchdog.first_step_s = {first_step_s:g}: a first step takes longer than the others"
        yield Violation("watchdog.step_s", section.step_s, rule, f"{first_step_s:g}")
