"""`run`: name, length, seed and files of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.recipe.section import Count, FilePath, Positive, Seconds, Section


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run and of its directory: letters, digits, `.`, `_` and `-`."""
    steps: Positive
    """Steps to train."""
    seed: Count = 1
    """Seeds prompt order, sampling, mini-batch order and new weights (a value head)."""
    dir: FilePath = "runs"
    """Directory that holds run directories, from the working directory. In this and every other path of a recipe `~` is the
    home directory, and `$NAME` an environment variable."""
    checkpoint_every: Count = 0
    """Write a checkpoint every this many steps, and always after the last step."""
    dump_rollouts: bool = False
    """Write every step's rollouts into the run directory, for `rollout.replay`."""
    preemption: Literal["finish", "abandon"] = "finish"
    """What a run does at SIGTERM or SIGUSR1: finish the step and save it, or leave at the next phase boundary. Then what the
    step before left is saved, or, where this step has changed weights already, the last checkpoint stands."""
    trace: Literal["none", "phases", "spans"] = "phases"
    """What each rank writes of its steps into `trace/` of the run directory, for `megarl trace`: when its phases ran, or
    also the spans in them (micro-batches, waits, optimizer). With either, rank 0 writes when each request of the rollout
    engines came, began and ended."""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """What a run does where a loss, gradient, log-probability, value or reward is not a finite number: stop before the
    update, or leave out that update or that sample, counted in `finite/...`. Broken weights end it in any case."""
    grace_s: Seconds = 120.0
    """Time to leave after such a signal, in seconds; what is still there then is killed."""
