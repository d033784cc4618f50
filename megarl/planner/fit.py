"""What does not fit the device, and the mildest legal change that does: a cap, a layout, recompute or
offload, a KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megarl.planner.advice import Advice, cap_change, gib, shown, with_cap
from megarl.planner.attention_cost import cache_width
from megarl.planner.engine_memory import Engines, cached_layers
from megarl.planner.forecast import Forecast, PhaseForecast, cap_that_fits, engine_room, is_update, worst_memory
from megarl.planner.job import Job
from megarl.planner.layouts import layout_text, layouts_of, longest_slots, with_layouts
from megarl.planner.roles import BYTES

# A changed schedule or layout: the overrides, and the bytes of the fullest device in the phase's worst case.
Fix = tuple[tuple[str, ...], int]
# What is asked of roles by name: keys of their `memory` section and values.
Wanted = dict[str, dict[str, str]]
# Values of one key, the one that saves more behind the one that saves less.
_ORDER = ("none", "false", "selective", "full", "optimizer", "all", "true")


def fit(forecast: Forecast) -> list[Advice]:
    """Advice on memory; none without a device."""
    return [*_phases(forecast), *_engines(forecast)]


def kv_bytes_per_token(engines: Engines) -> int:
    """KV cache of one token on one worker of an engine."""
    shape, layout = engines.shape, engines.layout
    return cached_layers(shape, layout) * cache_width(shape, layout.tensor) * BYTES[engines.precision]


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
    for changes, saved in _saved_jobs(job, phase.role.name if is_update(phase.schedule) else None):
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
        kept = [{updated: {"recompute": "selective"}}, {updated: {"recompute": "full"}}]
        both = away | kept[1]
        choices = [*kept, *choices, both, away | {updated: {"recompute": "full", "offload_activations": "true"}}]
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
    schedule, cap = phase.schedule, cap_that_fits(job, phase.schedule)
    if not cap:
        return None
    capped = schedule
    changes: tuple[str, ...] = ()
    if schedule.max_tokens is None or schedule.max_tokens > cap:
        capped, changes = with_cap(schedule, cap), (cap_change(schedule, cap),)
    return (changes, worst_memory(job, capped).total + job.beside_bytes) if job.runs(capped) else None


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
    if cache < kv_bytes_per_token(engines) * job.limits.longest:
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
    beside = "beside the trainer's roles at rest" if engines.rests else "on a device of its own"
    return f"{beside} rollout.memory_utilization = {forecast.safe_utilization or 0:.3f} is the largest that is safe"
