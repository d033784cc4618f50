"""Decide whether a run hangs, and which rank is at fault: pure functions of all ranks' standings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic would make the watching process larger and slower to start
    from megarl.recipe import Recipe

RUNNING, STOPPED, GONE, ENDED = "running", "stopped", "gone", "ended"
# In these spans a rank waits for other ranks.
WAITS_FOR_RANKS = ("wait_ranks", "wait_pipeline", "wait_gradients", "wait_layers", "wait_data")
# In these spans rank 0 waits for processes whose names have the given prefix; other ranks wait for rank 0.
WAITS_FOR_PROCESSES = {
    "wait_engines": ("the rollout engines", "engine-"),
    "wait_rewards": ("the reward workers", "reward-worker-"),
}
FILE_PHASES = ("start", "load_checkpoint", "checkpoint")


@dataclass(frozen=True)
class Standing:
    """What a rank was doing when its watcher last looked."""

    rank: int
    place: str = ""
    """The rank's place in the actor's layout."""
    step: int = 0
    first: bool = False
    """Whether this is the first step since the start."""
    phase: str | None = None
    span: str | None = None
    phases: int = 0
    """Number of phases that the rank has begun."""
    note: str = ""
    """The error message, once a deadline inside the rank has passed."""
    silent_s: float = 0.0
    """Seconds since the rank last entered or left a phase or a span."""
    state: str = RUNNING
    call: str | None = None
    """The innermost call of the main thread, once the stacks are known; `waits` tells whether the call waits."""
    waits: bool = False

    @property
    def waits_for_ranks(self) -> bool:
        """Whether the rank's span waits for other ranks, directly or through rank 0, which waits for processes."""
        span_waits = self.span in WAITS_FOR_RANKS or (self.span in WAITS_FOR_PROCESSES and self.rank != 0)
        return self.state == RUNNING and span_waits

    @property
    def waits_for_processes(self) -> bool:
        """Whether the rank's span waits for engines or reward workers."""
        return self.state == RUNNING and self.span in WAITS_FOR_PROCESSES and self.rank == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.place})" if self.place else f"rank {self.rank}"

    @property
    def where(self) -> str:
        phase = "between two phases" if self.phase is None else f"in phase {self.phase}"
        return f"step {self.step}, {phase}{self.span_and_call}, silent for {self.silent_s:.1f} s"

    @property
    def span_and_call(self) -> str:
        parts = [part for part in (self.span, self.call) if part]
        return " in " + " at ".join(parts) if parts else ""

    @property
    def accusation(self) -> str:
        """The sentence that blames this rank."""
        state = {STOPPED: ": its process is stopped (SIGSTOP)", GONE: ": its process is gone"}.get(self.state, "")
        return f"{self.name} did not arrive: {self.where}{state}"


@dataclass(frozen=True)
class Deadlines:
    """Time limits from the recipe, in seconds. The first five bound how long a rank may stay in one place."""

    first_step_s: float
    step_s: float
    files_s: float
    engines_s: float
    """The longest wait of rank 0 for engines, with every restart."""
    rewards_s: float
    """The longest wait of rank 0 for the rewards of a batch."""
    stacks_s: float
    collective_s: float

    @classmethod
    def of(cls, recipe: Recipe, engines_s: float, rewards_s: float) -> Deadlines:
        watchdog = recipe.watchdog
        collective_s = recipe.trainer.collective_timeout_s
        return cls(*recipe.standing_s, watchdog.files_s, engines_s, rewards_s, watchdog.stacks_s, collective_s)

    def limit(self, standing: Standing) -> tuple[float, str]:
        """Return how many seconds a rank may stay in its place, and the setting that sets this limit."""
        if standing.phase in FILE_PHASES:
            return self.files_s, f"watchdog.files_s = {self.files_s:g}"
        key = "first_step_s" if standing.first else "step_s"
        step_s = self.first_step_s if standing.first else self.step_s
        rule = f"watchdog.{key} = {step_s:g}"
        if standing.rank == 0 and standing.span == "wait_engines":
            return self.engines_s + step_s, f"what engines may take = {self.engines_s:g} and {rule}"
        if standing.rank == 0 and standing.span == "wait_rewards":
            return self.rewards_s + step_s, f"phases.reward.timeout_s of its tasks = {self.rewards_s:g} and {rule}"
        return step_s, rule


def overdue(table: Iterable[Standing], deadlines: Deadlines, some_unknown: bool = False) -> bool:
    """Return whether the run hangs: a rank that waits for no other rank has passed its limit, or all ranks wait and all have
    passed their limits. With `some_unknown`, waiting ranks prove nothing: they may wait for a rank that is not in the
    table."""
    present = [standing for standing in table if standing.state != ENDED]
    if any(standing.note for standing in present):
        return True
    late = [standing for standing in present if standing.silent_s > deadlines.limit(standing)[0]]
    if some_unknown or not all(standing.waits_for_ranks for standing in present):
        return any(not standing.waits_for_ranks for standing in late)
    return bool(present) and late == present


def culprits(table: Iterable[Standing]) -> list[Standing]:
    """Return the ranks at fault, the likeliest first; none if rank 0 waits for missing engines or rewards.

    First come ranks whose process is gone or stopped; then ranks that do not wait, by their span and innermost call. In both
    cases only the ranks with the fewest phases count. If every rank waits, the rank that is furthest behind is at fault.
    """
    present = [standing for standing in table if standing.state != ENDED]
    for state in (GONE, STOPPED):
        if ranks := [standing for standing in present if standing.state == state]:
            return _furthest_behind(ranks)
    busy = [
        standing for standing in present
        if not (standing.waits_for_ranks or standing.waits or (standing.waits_for_processes and standing.call is None))
    ]  # fmt: skip
    if busy:
        return _furthest_behind(busy)
    if any(standing.waits_for_processes for standing in present):
        return []
    # Collectives inside a forward pass, a backward pass or the optimizer have no span: only the call shows the wait.
    outside_waits = [standing for standing in present if not standing.waits_for_ranks]
    behind = _furthest_behind(present)
    if not outside_waits or behind[0].phases < max(standing.phases for standing in present):
        return behind[:1]
    return _furthest_behind(outside_waits)[:1]


def _furthest_behind(ranks: Sequence[Standing]) -> list[Standing]:
    """Return the ranks that have begun the fewest phases, the longest silent rank first."""
    fewest = min(standing.phases for standing in ranks)
    return sorted((standing for standing in ranks if standing.phases == fewest), key=lambda rank: -rank.silent_s)


@dataclass(frozen=True)
class OtherProcess:
    """A process of an engine or a reward worker. `call` is the innermost call of a thread that does not wait."""

    name: str
    pid: int
    state: str
    call: str | None = None

    def __str__(self) -> str:
        if self.state == STOPPED:
            return f"{self.name} (process {self.pid}) is stopped (SIGSTOP)"
        return f"{self.name} (process {self.pid}) stands in {self.call}" if self.call else f"{self.name} waits"


@dataclass(frozen=True)
class HangVerdict:
    """The watchdog's verdict on a hang; `rank` is None if no rank is at fault. The stacks go to `folder`."""

    folder: Path
    rank: int | None
    lines: tuple[str, ...]


def judge(run: Path, table: Sequence[Standing], deadlines: Deadlines, processes: Sequence[OtherProcess] = ()) -> HangVerdict:
    """Return the verdict on a hang. The verdict's folder does not exist yet."""
    present = [standing for standing in table if standing.state != ENDED]
    lines = [f"rank {standing.rank}: {standing.note}" for standing in present if standing.note]
    suspects = [process for process in processes if process.state == STOPPED]
    named = culprits(table)
    if named:
        first = named[0]
        lines.append(f"{first.accusation}; it may stand there for {deadlines.limit(first)[1]} s")
        lines += [f"{standing.accusation}, too" for standing in named[1:]]
    else:
        first = next(standing for standing in present if standing.waits_for_processes)
        whom, prefix = WAITS_FOR_PROCESSES[first.span or ""]
        rule = "" if first.note else f"; it may stand there for {deadlines.limit(first)[1]} s"  # a note names the rule
        lines.append(f"{whom} did not answer rank 0, {first.where}{rule}")
        # Name only processes that rank 0 waits for: idle processes have a call too.
        suspects = suspects or [process for process in processes if process.name.startswith(prefix) and process.call]
    lines += [str(process) for process in suspects]
    waiting = [standing for standing in present if standing is not first and standing not in named]
    if waiting:
        times = [f"rank {standing.rank} {standing.silent_s:.1f} s{standing.span_and_call}" for standing in waiting]
        lines.append("others waited: " + ", ".join(times))
    number, name = 1, f"hang-{first.step}-{first.phase or 'between_phases'}"
    while (folder := run / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return HangVerdict(folder, first.rank if named else None, tuple(lines))
