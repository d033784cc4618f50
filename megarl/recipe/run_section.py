"""`run`: name, length, seed and files of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.recipe.section import Count, FilePath, Positive, Seconds, Section


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
