"""Where a legal change of the recipe does better by the planner's own numbers, and which change that is.

Every piece of advice is one change that stands alone, with the numbers before and after it; where two solve the same
problem (a smaller cap, a smaller KV cache), either does. A change that asks for more memory than the recipe already
takes is only named where the device is known and holds it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
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
    """Advice on phases whose memory fits, by phase; `fit` has the advice on memory."""
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
    """The smallest cap that is as good as the best up to `largest`; None where no such cap is legal.

    Tried are the length of a longest sequence, its doubles, and `largest`.
    """
    caps, cap = [], longest_slots(job, job.role(schedule.phase).layout)
    while cap < largest:
        caps.append(cap)
        cap *= 2
    if not caps and cap > largest:
        return None
    legal = [one for one in (with_cap(schedule, cap) for cap in (*caps, largest)) if job.runs(one)]
    if not legal:
        return None
    tried = [forecast_phase(job, one) for one in legal]
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
    sizes = [size for size in range(schedule.mini_batch + 1, total + 1) if total % size == 0]
    larger = [(size, replace(schedule, mini_batch=size)) for size in sizes]
    tried = [(size, forecast_phase(job, one)) for size, one in larger if job.runs(one)]
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
    """The policy ratio is taken between actor_logprob and actor_update: micro-batches of unlike sizes may round unlike.

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
        f"its largest planned micro-batch has {slots} slots, that of actor_update {size}: kernels may round unlike and the "
        "first ratios drift from 1 (actor/ratio_drift_max in metrics.jsonl, bounded by algorithm.max_ratio_drift)"
    )
    narrower = _nearer_cuts(forecast, before, update)
    if not narrower:
        text += "; neither the same rule nor a cap of that size brings the two nearer"
        yield Advice("ratio_drift", "actor_logprob", text, (), "max_slots", slots, None)
        return
    # The same rule is first, and enough if it brings the two near.
    what, after = next((one for one in narrower if _gap(one[1], update) <= ALIKE), None) or min(
        narrower, key=lambda one: _gap(one[1], update)
    )
    schedule = after.schedule
    rule = f"sequences: {schedule.sequences}" if schedule.sequences is not None else f"max_tokens: {schedule.max_tokens}"
    changes = (f"phases.actor_logprob.micro_batch={{{rule}}}",)
    text += (
        f"; {shown(changes)}, {what}, gives {after.quality.max_slots} slots against {size} (efficiency "
        f"{before.quality.efficiency:.2f} -> {after.quality.efficiency:.2f})"
    )
    yield Advice("ratio_drift", "actor_logprob", text, changes, "max_slots", slots, after.quality.max_slots)


def _gap(one: PhaseForecast, other: PhaseForecast) -> float:
    """How many times the larger of the phases' largest planned micro-batches is larger."""
    few, many = sorted((one.quality.max_slots, other.quality.max_slots))
    return many / few


def _nearer_cuts(forecast: Forecast, before: PhaseForecast, update: PhaseForecast) -> list[tuple[str, PhaseForecast]]:
    """Cuts of actor_logprob, and what they are, that bring it nearer to actor_update and take no memory that is missing."""
    job, rule = forecast.job, update.schedule
    least = longest_slots(job, before.role.layout)
    cuts = (
        ("the same rule", replace(before.schedule, sequences=rule.sequences, max_tokens=rule.max_tokens)),
        ("a cap near that size", with_cap(before.schedule, max(least, update.quality.max_slots))),
    )
    budget = job.budget_bytes
    # Where the device is not known, no more than the recipe may take already.
    room = forecast.trainer_peak if budget is None else max(budget, before.worst_memory.total)
    tried = [(what, forecast_phase(job, cut)) for what, cut in cuts if job.runs(cut)]
    return [
        (what, one) for what, one in tried if _gap(one, update) < _gap(before, update) and one.worst_memory.total <= room
    ]


# A changed schedule or layout: the overrides, and the bytes of the fullest device in the phase's worst case.
Fix = tuple[tuple[str, ...], int]
# What is asked of roles by name: keys of their `memory` section and values.
Wanted = dict[str, dict[str, str]]
# Values of one key, the one that saves more behind the one that saves less.
_ORDER = ("none", "false", "selective", "full", "optimizer", "all", "true")


def fit(forecast: Forecast) -> list[Advice]:
    """Advice on memory; none without a device."""
    return [*_phases(forecast), *_engines(forecast)]


def _phases(forecast: Forecast) -> Iterator[Advice]:
    """Phases whose worst case is above the device."""
    job = forecast.job
    if job.usable_bytes is None or job.device_bytes is None:
        return
    for phase in forecast.phases:
        before = phase.worst_memory.total + job.beside_bytes
        if before <= job.usable_bytes:
            continue
        changes, after = _other_cap(job, phase) or _other_layout(job, phase) or ((), None)
        engines = " with engines" if job.beside_bytes else ""
        held = f"takes up to {gib(before)}{engines}; the device has {gib(job.device_bytes)}, {gib(job.usable_bytes)} usable"
        way_out = (
            f"{shown(changes)} takes {gib(after)}"
            if after is not None
            else f"no cap and no layout of these ranks fits{' beside the engines' if job.beside_bytes else ''}"
        )
        yield Advice("memory", phase.phase, f"{held}; {way_out}", changes, "device_bytes", before, after)
        yield _savings(job, phase, before)


def _savings(job: Job, phase: PhaseForecast, before: int) -> Advice:
    """The mildest of `recompute` and `offload` with which a phase fits its schedule and layout as they are."""
    for changes, saved in _saved_jobs(job, phase.role.name if phase.schedule.is_update else None):
        after = worst_memory(saved, phase.schedule).total + saved.beside_bytes
        if after <= (job.usable_bytes or 0):
            again = ", and computes again what it does not keep" if any("recompute" in one for one in changes) else ""
            text = f"{shown(changes)} takes {gib(after)}{again}"
            return Advice("savings", phase.phase, text, changes, "device_bytes", before, after)
    text = "neither memory.recompute: full nor memory.offload: all of every role makes room"
    return Advice("savings", phase.phase, text, (), "device_bytes", before, None)


def _saved_jobs(job: Job, updated: str | None) -> Iterator[tuple[tuple[str, ...], Job]]:
    """The job under savings, the mildest first, and the overrides that ask for them: the role that is `updated` keeps less,
    the others go to the host, then both."""
    movable = [role for role in job.roles if role.name not in (updated, "reward_model") and not role.borrows_weights]
    optimizers: Wanted = {role.name: {"offload": "optimizer"} for role in movable if role.trained}
    away: Wanted = {role.name: {"offload": "all"} for role in movable}
    choices = [optimizers, away]
    if updated is not None:
        selective, full = ({updated: {"recompute": granularity}} for granularity in ("selective", "full"))
        offloaded = {updated: {"recompute": "full", "offload_activations": "true"}}
        choices = [selective, full, *choices, away | full, away | offloaded]
    for wanted in choices:
        changes = [
            (role.name, key, value)
            for role in job.roles
            for key, value in wanted.get(role.name, {}).items()
            if _ORDER.index(value) > _ORDER.index(str(getattr(role.savings, key)).lower())
        ]
        if changes:
            yield tuple(f"{name}.memory.{key}={value}" for name, key, value in changes), _saved(job, changes)


def _saved(job: Job, changes: Sequence[tuple[str, str, str]]) -> Job:
    """The job with (role, key of its savings, value as a recipe writes it)."""
    roles = list(job.roles)
    for at, role in enumerate(roles):
        values = {key: value if value != "true" else True for name, key, value in changes if name == role.name}
        roles[at] = replace(role, savings=replace(role.savings, **values))  # type: ignore[arg-type]
    return replace(job, roles=tuple(roles))


def _other_cap(job: Job, phase: PhaseForecast) -> Fix | None:
    """The largest cap that fits."""
    cap = cap_that_fits(job, phase.schedule)
    if not cap or not job.runs(capped := with_cap(phase.schedule, cap)):
        return None
    return (cap_change(phase.schedule, cap),), worst_memory(job, capped).total + job.beside_bytes


def _other_layout(job: Job, phase: PhaseForecast) -> Fix | None:
    """The simplest layout of all roles under which every phase fits with the schedules as they are."""
    for layout in layouts_of(job, "actor"):
        if any(layout not in layouts_of(job, role.name) for role in job.roles):
            continue
        moved = with_layouts(job, {role.name: layout for role in job.roles})
        if any(one.max_tokens is not None and one.max_tokens < longest_slots(job, layout) for one in job.schedules):
            continue
        if all(worst_memory(moved, one).total <= (moved.budget_bytes or 0) for one in moved.schedules):
            values = {role.name: layout_text(layout) if role.name == "actor" else "null" for role in job.roles}
            changes = tuple(f"{role}.layout={value}" for role, value in values.items())
            return changes, worst_memory(moved, phase.schedule).total + moved.beside_bytes
    return None


def _engines(forecast: Forecast) -> Iterator[Advice]:
    """What a worker of an engine takes against what it needs and against what it may take."""
    job, room = forecast.job, forecast.engine_room
    if room is None or job.engines is None or job.device_bytes is None:
        return
    engines = job.engines
    stated = None if engines.shared else engines.utilization  # vLLM for CPUs does not look at it
    needed = engines.memory.total
    taken = needed if stated is None else int(stated * job.device_bytes)
    if taken <= room and taken >= needed:
        return
    if taken > room:
        text = f"a worker of an engine takes {gib(taken)}, and {_room(forecast)}"
    else:
        text = f"a worker of an engine needs {gib(needed)} and rollout.memory_utilization = {stated:g} gives it {gib(taken)}"
    # Shares have three digits, rounded so that they are safe and enough.
    share = min(-(-1000 * needed // job.device_bytes), max(0, 1000 * room // job.device_bytes)) / 1000
    room = min(room, int(share * job.device_bytes)) if stated is not None else room
    cache = min(engines.kv_cache_bytes, engines.kv_cache_bytes - needed + room)
    if cache < engines.token_bytes * job.limits.longest:
        changes = _room_by_offload(forecast, needed) if engines.rests else ()
        way_out = "the trainer must hold less" if engines.shared or engines.rests else "cut the engines more"
        way_out = f"{shown(changes)} makes room" if changes else way_out
        yield Advice("engine", "rollout", f"{text}; no whole sequence's KV cache fits: {way_out}", changes,
                     "engine_bytes", taken, needed if changes else None)  # fmt: skip
        return
    keys = [] if stated is None else [f"rollout.memory_utilization={share:g}"]
    if cache < engines.kv_cache_bytes:
        keys.append(f"rollout.kv_cache_bytes={cache}")
    after = needed - engines.kv_cache_bytes + cache if stated is None else int(share * job.device_bytes)
    yield Advice(
        "engine",
        "rollout",
        f"{text}; {shown(tuple(keys))} takes {gib(after)}",
        tuple(keys),
        "engine_bytes",
        taken,
        after,
    )


def _room_by_offload(forecast: Forecast, needed: int) -> tuple[str, ...]:
    """The overrides that move the least of the resting roles to the host to make room for a worker; () where none do."""
    job = forecast.job
    for changes, saved in _saved_jobs(job, None):
        room = engine_room(saved, [phase.worst_memory for phase in forecast.phases])
        if room is not None and needed <= room:
            return changes
    return ()


def _room(forecast: Forecast) -> str:
    """What there is for a worker, and why no more."""
    engines, room = forecast.job.engines, forecast.engine_room
    assert engines is not None and room is not None
    if engines.shared:
        return f"beside the trainer's worst case {gib(max(0, room))} are left for each of {engines.workers} on this machine"
    where = "beside the trainer's roles at rest" if engines.rests else "on a device of its own"
    return f"{where} rollout.memory_utilization = {forecast.safe_utilization or 0:.3f} is the largest that is safe"
