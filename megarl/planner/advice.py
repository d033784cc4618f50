"""Legal changes of the recipe that do better by the planner's numbers.

Every piece of advice is one change that stands alone, with the numbers before and after it; where two solve the same
problem (a smaller cap, a smaller KV cache), either is enough. A change that takes more memory than the recipe already takes
is only named where the device is known and holds it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.planner.forecast import Forecast, Job, PhaseForecast, cap_that_fits, engine_room, forecast_phase, worst_memory
from megarl.planner.layouts import layout_text, layouts_of, longest_slots, with_layouts
from megarl.recipe.sizes import GIB
from megarl.schedule import Schedule

# A change must raise the efficiency of a phase by this share to be worth a line.
WORTHWHILE = 0.02
# Caps this close to the best one are as good, and the smallest of them takes the least memory.
AS_GOOD = 0.005
# The two sides of the policy ratio may differ in their largest micro-batch by this factor.
ALIKE = 2
# A pipeline that idles more than this is named when a larger mini-batch would help; that changes the algorithm.
IDLE = 0.2
MIB = 2**20


@dataclass(frozen=True)
class PlanAdvice:
    """One change. `changes` are overrides as `megarl check` takes them, () where no legal change helps.

    `measure` names what `before` and `after` are: `efficiency`, `bubble_share`, `max_slots`, or bytes of one device
    (`device_bytes` with everything on it, `engine_bytes`). `after` is None without a change.
    """

    kind: str
    phase: str
    text: str
    changes: tuple[str, ...]
    measure: str
    before: float
    after: float | None


def advise(forecast: Forecast) -> list[PlanAdvice]:
    """Advice on speed, for phases whose memory fits; `fit` has the advice on memory."""
    budget = forecast.job.budget_bytes
    advice: list[PlanAdvice] = []
    for phase in forecast.phases:
        if budget is None or phase.worst_memory.total <= budget:
            advice += _cap(forecast.job, phase)
            advice += _mini_batch(forecast.job, phase)
    return [*advice, *_ratio(forecast)]


def shown(changes: tuple[str, ...]) -> str:
    """Changes as a shell takes them."""
    return " ".join(shlex.quote(change) if " " in change else change for change in changes)


def with_cap(schedule: Schedule, cap: int) -> Schedule:
    """The schedule under a cap."""
    return replace(schedule, sequences=None, max_tokens=cap)


def gib(num_bytes: float) -> str:
    """Bytes as GiB, small ones as MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def best_cap(job: Job, schedule: Schedule, largest: int) -> PhaseForecast | None:
    """The smallest cap that is as good as the best up to `largest`; None where no such cap is legal.

    Tried are the length of a longest sequence, its doubles, and `largest`.
    """
    caps, cap = [], longest_slots(job, job.role(schedule.phase).layout)
    if cap > largest:
        return None
    while cap < largest:
        caps.append(cap)
        cap *= 2
    capped = [with_cap(schedule, cap) for cap in (*caps, largest)]
    tried = [forecast_phase(job, schedule) for schedule in capped if job.runs(schedule)]
    best = max((phase.quality.efficiency for phase in tried), default=0.0)
    return next((phase for phase in tried if phase.quality.efficiency >= best * (1 - AS_GOOD)), None)


def _cap_change(schedule: Schedule, cap: int) -> str:
    """The override that gives a phase the cap."""
    if schedule.sequences is None:
        return f"phases.{schedule.phase}.micro_batch.max_tokens={cap}"
    return f"phases.{schedule.phase}.micro_batch={{max_tokens: {cap}}}"


def _cap(job: Job, phase: PhaseForecast) -> Iterator[PlanAdvice]:
    """A cap that shortens the phase: the largest that pays, a smaller one, or a cap in place of `sequences`."""
    if phase.phase == "actor_logprob":
        return  # its micro-batches should be those of actor_update, see _ratio
    before = phase.quality
    # Where the device is not known, no more than the phase may take already.
    largest = phase.largest_cap or cap_that_fits(job, phase.schedule, phase.worst_memory.total)
    best = best_cap(job, phase.schedule, largest or 0)
    if best is None or best.schedule.max_tokens is None or best.quality.efficiency < before.efficiency * (1 + WORTHWHILE):
        return
    after, changes = best.quality, (_cap_change(phase.schedule, best.schedule.max_tokens),)
    text = (
        f"{shown(changes)} raises efficiency {before.efficiency:.2f} -> {after.efficiency:.2f} "
        f"(micro-batches a rank {before.num_micro_batches} -> {after.num_micro_batches}, "
        f"useful {before.useful_share:.2f} -> {after.useful_share:.2f}, "
        f"bubble {before.bubble_share:.0%} -> {after.bubble_share:.0%}, "
        f"peak at worst {gib(phase.worst_memory.total)} -> {gib(best.worst_memory.total)})"
    )
    yield PlanAdvice("cap", phase.phase, text, changes, "efficiency", before.efficiency, after.efficiency)


def _mini_batch(job: Job, phase: PhaseForecast) -> Iterator[PlanAdvice]:
    """A mini-batch too small for its pipeline: the smallest larger one that does not idle so, or the best."""
    schedule, before, total = phase.schedule, phase.quality, job.limits.num_sequences
    if schedule.mini_batch is None or before.bubble_share <= IDLE:
        return
    better = []
    room = max(phase.worst_memory.total, job.budget_bytes or 0)
    for size in range(schedule.mini_batch + 1, total + 1):
        larger = replace(schedule, mini_batch=size)
        if total % size or not job.runs(larger):
            continue
        tried = forecast_phase(job, larger)
        if tried.quality.efficiency >= before.efficiency * (1 + WORTHWHILE) and tried.worst_memory.total <= room:
            better.append((size, tried.quality))
    if not better:
        return
    size, after = next((pair for pair in better if pair[1].bubble_share <= IDLE), better[-1])
    changes: tuple[str, ...] = (f"phases.{schedule.phase}.mini_batch={size}",)
    # With one update a batch the phase actor_logprob does not run, and a section for it is not legal.
    once = schedule.phase == "actor_update" and schedule.epochs == 1 and size == total
    if once and not job.kl_in_reward and any(other.phase == "actor_logprob" for other in job.schedules):
        changes += ("phases.actor_logprob=null",)
    updates_before, updates = total // schedule.mini_batch * schedule.epochs, total // size * schedule.epochs
    text = (
        f"the pipeline idles {before.bubble_share:.0%} of the time; {shown(changes)} idles {after.bubble_share:.0%} "
        f"(efficiency {before.efficiency:.2f} -> {after.efficiency:.2f}) and takes {updates_before} -> {updates} updates of "
        "a batch, which is another algorithm"
    )
    yield PlanAdvice("mini_batch", phase.phase, text, changes, "bubble_share", before.bubble_share, after.bubble_share)


def _ratio(forecast: Forecast) -> Iterator[PlanAdvice]:
    """The policy ratio is taken between actor_logprob and actor_update: micro-batches of different sizes may round
    differently.

    Equal rules do not make equal micro-batches (a pipeline is planned with small ones), so planned sizes are compared.
    """
    phases = {phase.phase: phase for phase in forecast.phases}
    if "actor_logprob" not in phases:
        return
    before, update = phases["actor_logprob"], phases["actor_update"]
    slots, size = before.quality.max_slots, update.quality.max_slots
    if _gap(before, update) <= ALIKE:
        return
    text = (
        f"its largest planned micro-batch has {slots} slots, that of actor_update {size}: kernels may round differently and "
        "the first ratios drift from 1 (actor/ratio_drift_max in metrics.jsonl, bounded by algorithm.max_ratio_drift)"
    )
    nearer = _nearer_micro_batches(forecast, before, update)
    if not nearer:
        text += "; neither the same rule nor a cap of that size brings the two nearer"
        yield PlanAdvice("ratio_drift", "actor_logprob", text, (), "max_slots", slots, None)
        return
    # The same rule is first, and enough if it brings the two near.
    near = [choice for choice in nearer if _gap(choice[1], update) <= ALIKE]
    reason, after = near[0] if near else min(nearer, key=lambda choice: _gap(choice[1], update))
    schedule = after.schedule
    rule = f"sequences: {schedule.sequences}" if schedule.sequences is not None else f"max_tokens: {schedule.max_tokens}"
    changes = (f"phases.actor_logprob.micro_batch={{{rule}}}",)
    text += (
        f"; {shown(changes)}, {reason}, gives {after.quality.max_slots} slots against {size} (efficiency "
        f"{before.quality.efficiency:.2f} -> {after.quality.efficiency:.2f})"
    )
    yield PlanAdvice("ratio_drift", "actor_logprob", text, changes, "max_slots", slots, after.quality.max_slots)


def _gap(phase: PhaseForecast, other: PhaseForecast) -> float:
    """How many times the larger of the phases' largest planned micro-batches is larger."""
    few, many = sorted((phase.quality.max_slots, other.quality.max_slots))
    return many / few


def _nearer_micro_batches(
    forecast: Forecast, before: PhaseForecast, update: PhaseForecast
) -> list[tuple[str, PhaseForecast]]:
    """Schedules of actor_logprob, each with its reason, that bring it nearer to actor_update in the memory that there is."""
    job, rule = forecast.job, update.schedule
    cap = max(longest_slots(job, before.role.layout), update.quality.max_slots)
    choices = (
        ("the same rule", replace(before.schedule, sequences=rule.sequences, max_tokens=rule.max_tokens)),
        ("a cap near that size", with_cap(before.schedule, cap)),
    )
    # Where the device is not known, no more than the recipe may take already.
    room = forecast.trainer_peak if job.budget_bytes is None else max(job.budget_bytes, before.worst_memory.total)
    tried = [(reason, forecast_phase(job, schedule)) for reason, schedule in choices if job.runs(schedule)]
    gap = _gap(before, update)
    return [(reason, phase) for reason, phase in tried if _gap(phase, update) < gap and phase.worst_memory.total <= room]


# Values of one `memory` key in the order of what they save.
_ORDER = ("none", "false", "selective", "full", "optimizer", "all", "true")


def fit(forecast: Forecast) -> list[PlanAdvice]:
    """Advice on memory; none without a device."""
    return [*_phases(forecast.job, forecast.phases), *_engines(forecast)]


def _phases(job: Job, phases: tuple[PhaseForecast, ...]) -> Iterator[PlanAdvice]:
    """Phases whose worst case is above the device."""
    if job.usable_bytes is None or job.device_bytes is None:
        return
    for phase in phases:
        before = phase.worst_memory.total + job.bytes_during_training
        if before <= job.usable_bytes:
            continue
        changes: tuple[str, ...] = ()
        after = None
        cap = cap_that_fits(job, phase.schedule)
        if cap and job.runs(capped := with_cap(phase.schedule, cap)):
            changes = (_cap_change(phase.schedule, cap),)
            after = worst_memory(job, capped).total + job.bytes_during_training
        elif (moved := _with_other_layout(job)) is not None:
            layout = layout_text(moved.roles[0].layout)
            changes = tuple(f"{role.name}.layout={layout if role.name == 'actor' else 'null'}" for role in job.roles)
            after = worst_memory(moved, phase.schedule).total + moved.bytes_during_training
        engines = " with engines" if job.bytes_during_training else ""
        text = (
            f"takes up to {gib(before)}{engines}; the device has {gib(job.device_bytes)}, {gib(job.usable_bytes)} usable; "
        )
        if after is not None:
            text += f"{shown(changes)} takes {gib(after)}"
        else:
            text += f"no cap and no layout of these ranks fits{engines}"
        yield PlanAdvice("memory", phase.phase, text, changes, "device_bytes", before, after)
        yield _savings(job, phase, before)


def _savings(job: Job, phase: PhaseForecast, before: int) -> PlanAdvice:
    """The mildest of `recompute` and `offload` with which a phase fits its schedule and layout as they are."""
    for changes, saving_job in _saving_jobs(job, phase.role.name if phase.schedule.is_update else None):
        after = worst_memory(saving_job, phase.schedule).total + saving_job.bytes_during_training
        if after <= (job.usable_bytes or 0):
            recomputes = any("recompute" in change for change in changes)
            text = f"{shown(changes)} takes {gib(after)}" + (
                ", and computes again what it does not keep" if recomputes else ""
            )
            return PlanAdvice("savings", phase.phase, text, changes, "device_bytes", before, after)
    text = "neither memory.recompute: full nor memory.offload: all of every role makes room"
    return PlanAdvice("savings", phase.phase, text, (), "device_bytes", before, None)


def _saving_jobs(job: Job, updated: str | None) -> Iterator[tuple[tuple[str, ...], Job]]:
    """The job with `memory` settings that save memory, the mildest first, and their overrides: the role that is `updated`
    keeps less, the others are offloaded, then both."""
    movable = [role for role in job.roles if role.name not in (updated, "reward_model") and not role.borrows_weights]
    optimizers = {role.name: {"offload": "optimizer"} for role in movable if role.trained}
    away = {role.name: {"offload": "all"} for role in movable}
    choices = [optimizers, away]
    if updated is not None:
        selective, full = ({updated: {"recompute": granularity}} for granularity in ("selective", "full"))
        offloaded = {updated: {"recompute": "full", "offload_activations": "true"}}
        choices = [selective, full, *choices, away | full, away | offloaded]
    for settings in choices:
        changes, roles = [], []
        for role in job.roles:
            update: dict[str, str | bool] = {}
            for key, value in settings.get(role.name, {}).items():
                if _ORDER.index(value) > _ORDER.index(str(getattr(role.memory, key)).lower()):
                    changes.append(f"{role.name}.memory.{key}={value}")
                    update[key] = value == "true" or value
            roles.append(replace(role, memory=role.memory.model_copy(update=update)))
        if changes:
            yield tuple(changes), replace(job, roles=tuple(roles))


def _with_other_layout(job: Job) -> Job | None:
    """The job under the simplest layout of all roles with which every phase fits with the schedules as they are."""
    for layout in layouts_of(job, "actor"):
        if any(layout not in layouts_of(job, role.name) for role in job.roles):
            continue
        moved, longest = with_layouts(job, {role.name: layout for role in job.roles}), longest_slots(job, layout)
        if any(schedule.max_tokens is not None and schedule.max_tokens < longest for schedule in job.schedules):
            continue
        if all(worst_memory(moved, schedule).total <= (moved.budget_bytes or 0) for schedule in moved.schedules):
            return moved
    return None


def _engines(forecast: Forecast) -> Iterator[PlanAdvice]:
    """A worker of an engine that takes more than it may, or less than it needs."""
    job, room, engines = forecast.job, forecast.engine_room, forecast.job.engines
    if room is None or engines is None or job.device_bytes is None:
        return
    stated = None if engines.shared else engines.utilization  # vLLM for CPUs does not look at it
    needed = engines.memory.total
    taken = needed if stated is None else int(stated * job.device_bytes)
    if taken <= room and taken >= needed:
        return
    if taken <= room:
        text = f"a worker of an engine needs {gib(needed)} and rollout.memory_utilization = {stated:g} gives it {gib(taken)}"
    elif engines.shared:
        left = f"{gib(max(0, room))} are left for each of {engines.workers} on this machine"
        text = f"a worker of an engine takes {gib(taken)}, and with the trainer's worst case {left}"
    else:
        where = "with the trainer's idle roles" if engines.sleeps else "on a device of its own"
        largest = f"rollout.memory_utilization = {forecast.safe_utilization or 0:.3f} is the largest that is safe"
        text = f"a worker of an engine takes {gib(taken)}, and {where} {largest}"
    # Shares have three digits, rounded so that they are safe and enough.
    share = min(-(-1000 * needed // job.device_bytes), max(0, 1000 * room // job.device_bytes)) / 1000
    room = min(room, int(share * job.device_bytes)) if stated is not None else room
    cache = min(engines.kv_cache_bytes, engines.kv_cache_bytes - needed + room)
    changes: tuple[str, ...] = ()
    if cache < engines.token_bytes * job.limits.longest:
        worst = [phase.worst_memory for phase in forecast.phases]
        if engines.sleeps:  # the least of the idle roles that must go to the host
            rooms = ((changes, engine_room(saving_job, worst)) for changes, saving_job in _saving_jobs(job, None))
            changes = next((changes for changes, room in rooms if room is not None and needed <= room), ())
        way_out = "the trainer must hold less" if engines.shared or engines.sleeps else "use more rollout.tensor"
        text += f"; no whole sequence's KV cache fits: {f'{shown(changes)} makes room' if changes else way_out}"
        after = needed if changes else None
    else:
        changes += () if stated is None else (f"rollout.memory_utilization={share:g}",)
        changes += (f"rollout.kv_cache_bytes={cache}",) if cache < engines.kv_cache_bytes else ()
        after = needed - engines.kv_cache_bytes + cache if stated is None else int(share * job.device_bytes)
        text += f"; {shown(changes)} takes {gib(after)}"
    yield PlanAdvice("engine", "rollout", text, changes, "engine_bytes", taken, after)
