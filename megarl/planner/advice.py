"""Where a legal change of the recipe does better by the planner's own numbers, and which change that is.

Every piece of advice is one change that stands alone, with the numbers before and after it; where two solve the same
problem (a smaller cap, a smaller KV cache), either does. A change that asks for more memory than the recipe already
takes is only named where the device is known and holds it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.planner.forecast import Forecast, PhaseForecast, cap_that_fits, forecast_phase
from megarl.planner.job import Job
from megarl.planner.layouts import longest_slots
from megarl.recipe.memory import GIB
from megarl.schedule import Schedule

# A change must raise the efficiency of a phase by this share to be worth a line.
WORTHWHILE = 0.02
# Caps this close to the best one are as good, and the smallest of them takes the least memory.
AS_GOOD = 0.005
# A pipeline that idles more than this is named when a larger mini-batch would help; that changes the algorithm.
IDLE = 0.2
MIB = 2**20


@dataclass(frozen=True)
class Advice:
    """One change. `changes` are overrides as `megarl check` takes them, () where nothing that is legal helps.

    `measure` says what `before` and `after` are: `efficiency`, `bubble_share`, `max_slots`, or bytes of one device
    (`device_bytes` with everything on it, `engine_bytes`). `after` is None without a change.
    """

    kind: str
    phase: str
    text: str
    changes: tuple[str, ...]
    measure: str
    before: float
    after: float | None


def advise(forecast: Forecast) -> list[Advice]:
    """Advice on phases whose memory fits, by phase (`fit.py` has the advice on memory)."""
    budget = forecast.job.budget_bytes
    found: list[Advice] = []
    for phase in forecast.phases:
        if budget is None or phase.worst_memory.total <= budget:
            found += _cap(forecast.job, phase)
            found += _mini_batch(forecast.job, phase)
    return [*found, *_ratio(forecast)]


def shown(changes: tuple[str, ...]) -> str:
    """Changes as a shell takes them."""
    return " ".join(shlex.quote(change) if " " in change else change for change in changes)


def cap_change(schedule: Schedule, cap: int) -> str:
    """The override that gives a phase the cap."""
    if schedule.sequences is None:
        return f"phases.{schedule.phase}.micro_batch.max_tokens={cap}"
    return f"phases.{schedule.phase}.micro_batch={{max_tokens: {cap}}}"


def with_cap(schedule: Schedule, cap: int) -> Schedule:
    """The schedule under a cap."""
    return replace(schedule, sequences=None, max_tokens=cap)


def gib(num_bytes: float) -> str:
    """Bytes as GiB, small ones as MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def best_cap(job: Job, schedule: Schedule, largest: int) -> PhaseForecast | None:
    """The smallest cap that is as good as the best up to `largest`; None where no legal cap is that small.

    Tried are the length of a longest sequence, its doubles, and `largest`.
    """
    caps, cap = [], longest_slots(job, job.role(schedule.phase).layout)
    while cap < largest:
        caps.append(cap)
        cap *= 2
    if not caps and cap > largest:
        return None
    tried = [forecast_phase(job, with_cap(schedule, one)) for one in (*caps, largest)]
    best = max(one.quality.efficiency for one in tried)
    return next(one for one in tried if one.quality.efficiency >= best * (1 - AS_GOOD))


def _cap(job: Job, phase: PhaseForecast) -> Iterator[Advice]:
    """A cap that shortens the phase: the largest that pays, a smaller one, or a cap in place of `sequences`."""
    if phase.phase == "actor_logprob":
        return  # it should be cut like actor_update, see _ratio
    before = phase.quality
    # Where the device is not known, no more than the phase may take already.
    largest = phase.largest_cap or cap_that_fits(job, phase.schedule, phase.worst_memory.total)
    best = best_cap(job, phase.schedule, largest or 0)
    if best is None or best.schedule.max_tokens is None or best.quality.efficiency < before.efficiency * (1 + WORTHWHILE):
        return
    after, changes = best.quality, (cap_change(phase.schedule, best.schedule.max_tokens),)
    text = (
        f"{shown(changes)} raises efficiency {before.efficiency:.2f} -> {after.efficiency:.2f} "
        f"(micro-batches a rank {before.num_micro_batches} -> {after.num_micro_batches}, "
        f"useful {before.useful_share:.2f} -> {after.useful_share:.2f}, "
        f"bubble {before.bubble_share:.0%} -> {after.bubble_share:.0%}, "
        f"peak at worst {gib(phase.worst_memory.total)} -> {gib(best.worst_memory.total)})"
    )
    yield Advice("cap", phase.phase, text, changes, "efficiency", before.efficiency, after.efficiency)


def _mini_batch(job: Job, phase: PhaseForecast) -> Iterator[Advice]:
    """A mini-batch too small for its pipeline: the smallest larger one that does not idle so, or the best."""
    schedule, before, total = phase.schedule, phase.quality, job.limits.num_sequences
    if schedule.mini_batch is None or before.bubble_share <= IDLE:
        return
    sizes = range(schedule.mini_batch + 1, total + 1)
    legal = [size for size in sizes if total % size == 0 and size % phase.role.layout.data == 0]
    tried = [(size, forecast_phase(job, replace(schedule, mini_batch=size))) for size in legal]
    better = [
        (size, one)
        for size, one in tried
        if one.quality.efficiency >= before.efficiency * (1 + WORTHWHILE) and _holds(job, phase, one)
    ]
    if not better:
        return
    enough = [(size, one) for size, one in better if one.quality.bubble_share <= IDLE]
    size, found = enough[0] if enough else better[-1]
    changes = (f"phases.{schedule.phase}.mini_batch={size}", *_without_logprob(job, schedule, size))
    updates_before, updates = (total // one * schedule.epochs for one in (schedule.mini_batch, size))
    text = (
        f"the pipeline idles {before.bubble_share:.0%} of the time; {shown(changes)} idles "
        f"{found.quality.bubble_share:.0%} (efficiency {before.efficiency:.2f} -> {found.quality.efficiency:.2f}) and takes "
        f"{updates_before} -> {updates} updates of a batch, which is another algorithm"
    )
    after = found.quality.bubble_share
    yield Advice("mini_batch", phase.phase, text, changes, "bubble_share", before.bubble_share, after)


def _holds(job: Job, before: PhaseForecast, after: PhaseForecast) -> bool:
    return after.worst_memory.total <= max(before.worst_memory.total, job.budget_bytes or 0)


def _without_logprob(job: Job, schedule: Schedule, mini_batch: int) -> tuple[str, ...]:
    """With one update a batch the phase actor_logprob does not run, and a section for it is not legal."""
    once = schedule.phase == "actor_update" and schedule.epochs == 1 and mini_batch == job.limits.num_sequences
    needless = once and job.schedule("actor_logprob") is not None and not job.kl_in_reward
    return ("phases.actor_logprob=null",) if needless else ()


def _ratio(forecast: Forecast) -> Iterator[Advice]:
    """The policy ratio is taken between actor_logprob and actor_update: cut unlike, they may round unlike."""
    phases = {phase.phase: phase for phase in forecast.phases}
    if "actor_logprob" not in phases:
        return
    before, update = phases["actor_logprob"], phases["actor_update"].schedule
    rule = (update.sequences, update.max_tokens)
    if (before.schedule.sequences, before.schedule.max_tokens) == rule:
        return
    alike = replace(before.schedule, sequences=update.sequences, max_tokens=update.max_tokens)
    after, size = forecast_phase(forecast.job, alike), phases["actor_update"].quality.max_slots
    rule_text = f"sequences: {update.sequences}" if update.sequences is not None else f"max_tokens: {update.max_tokens}"
    changes = (f"phases.actor_logprob.micro_batch={{{rule_text}}}",)
    text = (
        f"its micro-batches have up to {before.quality.max_slots} slots, those of actor_update {size}: kernels may round "
        "unlike and the first ratios drift from 1 (actor/ratio_drift_max in metrics.jsonl, bounded by "
        f"algorithm.max_ratio_drift); {shown(changes)} makes both alike (up to {after.quality.max_slots} slots, efficiency "
        f"{before.quality.efficiency:.2f} -> {after.quality.efficiency:.2f})"
    )
    yield Advice(
        "ratio_drift", "actor_logprob", text, changes, "max_slots", before.quality.max_slots, after.quality.max_slots
    )
