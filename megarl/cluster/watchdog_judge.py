"""Whether a run hangs, and who is at fault: pure functions over where all ranks stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RUNNING, STOPPED, GONE, ENDED = "running", "stopped", "gone", "ended"
# Spans in which a rank waits for other ranks. In those for engines and rewards rank 0 waits for them, and others for it.
FOR_RANKS = ("wait_ranks", "wait_pipeline", "wait_gradients", "wait_layers", "wait_data")
FOR_OTHERS = {"wait_engines": "the rollout engines", "wait_rewards": "the reward workers"}
# How the names of their processes begin.
NAMES = {"wait_engines": "engine-", "wait_rewards": "reward-worker-"}
FILE_PHASES = ("start", "load_checkpoint", "checkpoint")


@dataclass(frozen=True)
class Standing:
    """Where a rank stands. `silent_s`: since its last beat; `phases`: how many it has begun; `note`: a deadline of its own
    that has passed; `call`: the innermost one of its main thread, and whether that `waits`, where its stacks are known."""

    rank: int
    place: str = ""
    step: int = 0
    first: bool = False
    phase: str | None = None
    span: str | None = None
    phases: int = 0
    beats: int = 0
    silent_s: float = 0.0
    state: str = RUNNING
    note: str = ""
    call: str | None = None
    waits: bool = False

    @property
    def waits_for_ranks(self) -> bool:
        """By its span: for other ranks, or for rank 0, which waits for somebody else."""
        return self.state == RUNNING and (self.span in FOR_RANKS or (self.span in FOR_OTHERS and self.rank != 0))

    @property
    def waits_for_others(self) -> bool:
        """By its span: for engines or reward workers."""
        return self.state == RUNNING and self.span in FOR_OTHERS and self.rank == 0


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a rank may stand in one place, by the recipe."""

    first_step_s: float
    step_s: float
    files_s: float
    engines_s: float
    """The longest that rank 0 may have to wait for engines, with every restart."""
    rewards_s: float
    """The same for the rewards of a batch."""

    def of(self, one: Standing) -> tuple[float, str]:
        """The deadline of where a rank stands, and what it follows from."""
        step_s, key = (self.first_step_s, "first_step_s") if one.first else (self.step_s, "step_s")
        if one.phase in FILE_PHASES:
            return self.files_s, f"watchdog.files_s = {self.files_s:g}"
        own = {"wait_engines": self.engines_s, "wait_rewards": self.rewards_s}.get(one.span or "")
        if own is not None and one.rank == 0:
            what = "what engines may take" if one.span == "wait_engines" else "phases.reward.timeout_s of its tasks"
            return own + step_s, f"{what} = {own:g} and watchdog.{key} = {step_s:g}"
        return step_s, f"watchdog.{key} = {step_s:g}"


def overdue(table: Iterable[Standing], deadlines: Deadlines, some_alone: bool = False) -> bool:
    """Whether the run hangs: some rank that does not wait for another one has been silent for longer than it may, or all
    wait and none has moved. Ranks that wait for one that is within its deadline are no sign of anything; nor are any that
    wait where `some_alone` are known, as it may be a rank elsewhere that they wait for."""
    there = [one for one in table if one.state != ENDED]
    if any(one.note for one in there):
        return True
    late = [one.silent_s > deadlines.of(one)[0] for one in there if not one.waits_for_ranks]
    if late or some_alone:
        return any(late)
    return bool(there) and all(one.silent_s > deadlines.of(one)[0] for one in there)


def culprits(table: Iterable[Standing]) -> list[Standing]:
    """The ranks at fault, the first of them the likeliest; none where rank 0 waits for engines or rewards that do not come.

    In this order: ranks whose process is gone or stopped; ranks that wait for nobody, by their span and their innermost
    call, and of these the ones that have begun the fewest phases, the longest silent first; where every rank waits, those
    that are behind."""
    there = [one for one in table if one.state != ENDED]
    for state in (GONE, STOPPED):
        if found := [one for one in there if one.state == state]:
            return _furthest_behind(found)
    busy = [one for one in there if not (one.waits_for_ranks or one.waits or (one.waits_for_others and one.call is None))]
    if busy:
        return _furthest_behind(busy)
    if any(one.waits_for_others for one in there):
        return []
    # Collectives inside of a forward, a backward or the optimizer have no span: their ranks wait by their call alone.
    unlike = [one for one in there if not one.waits_for_ranks]
    behind = _furthest_behind(there)
    return [behind[0]] if not unlike or behind[0].phases < max(one.phases for one in there) else _furthest_behind(unlike)[:1]


def _furthest_behind(found: Sequence[Standing]) -> list[Standing]:
    fewest = min(one.phases for one in found)
    return sorted((one for one in found if one.phases == fewest), key=lambda one: -one.silent_s)


@dataclass(frozen=True)
class OtherProcess:
    """An engine's or a reward worker's process, as it was found."""

    name: str
    pid: int
    state: str
    call: str | None = None
    """The innermost call of a thread that does not wait."""

    def __str__(self) -> str:
        if self.state == STOPPED:
            return f"{self.name} (process {self.pid}) is stopped (SIGSTOP)"
        return f"{self.name} (process {self.pid}) stands in {self.call}" if self.call else f"{self.name} waits"


@dataclass(frozen=True)
class Verdict:
    """What is said of a hang: `step` and `phase` name its folder."""

    step: int
    phase: str
    rank: int | None
    lines: tuple[str, ...] = field(default=())


def judge(table: Sequence[Standing], deadlines: Deadlines, others: Sequence[OtherProcess] = ()) -> Verdict:
    """Whom to name, and in what words."""
    found = culprits(table)
    there = [one for one in table if one.state != ENDED]
    notes = [f"rank {one.rank}: {one.note}" for one in there if one.note]
    if found:
        first = found[0]
        said = [f"{missed(first)}; {_rule(first, deadlines)}"]
        said += [f"{missed(one)}, too" for one in found[1:]]
    else:
        first = next(one for one in there if one.waits_for_others)
        whom = FOR_OTHERS[first.span or ""]
        said = [f"{whom} did not answer rank 0, {_at(first)}"]
        if not first.note:  # else their own deadline has passed, which it names
            said[0] += f"; {_rule(first, deadlines)}"
    # Those that nobody waits for have nothing to do, and stand somewhere all the same.
    asked = [] if found else [one for one in others if one.name.startswith(NAMES[first.span or ""])]
    wrong = [one for one in others if one.state == STOPPED] or [one for one in asked if one.call]
    said += [str(one) for one in wrong]
    waited = [f"rank {one.rank} {one.silent_s:.1f} s{_in(one)}" for one in there if one is not first and one not in found]
    if waited:
        said.append("others waited: " + ", ".join(waited))
    rank = first.rank if found else None
    return Verdict(first.step, first.phase or "between_phases", rank, tuple(notes + said))


def missed(one: Standing) -> str:
    """A rank at fault and where it stands, in words."""
    state = {STOPPED: ": its process is stopped (SIGSTOP)", GONE: ": its process is gone"}.get(one.state, "")
    return f"{name_of(one)} did not arrive: {_at(one)}{state}"


def where(one: Standing) -> str:
    """Any rank and where it stands, in words."""
    return f"{name_of(one)}: {_at(one)}"


def name_of(one: Standing) -> str:
    """A rank with its place in the actor's layout."""
    return f"rank {one.rank} ({one.place})" if one.place else f"rank {one.rank}"


def _at(one: Standing) -> str:
    phase = "between two phases" if one.phase is None else f"in phase {one.phase}"
    return f"step {one.step}, {phase}{_in(one)}, silent for {one.silent_s:.1f} s"


def _in(one: Standing) -> str:
    parts = [part for part in (one.span, one.call) if part]
    return " in " + " at ".join(parts) if parts else ""


def _rule(one: Standing, deadlines: Deadlines) -> str:
    return f"it may stand there for {deadlines.of(one)[1]} s"


def folder_of(run: Path, verdict: Verdict) -> Path:
    """A folder for the stacks, which is not there yet."""
    number, name = 1, f"hang-{verdict.step}-{verdict.phase}"
    while (folder := run / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder
