"""Layouts, engines and caps for a model on a cluster, each with its reason: what `megarl check --suggest` proposes.

The search takes the least cut under which everything fits with room: in every phase a cap of four mean sequences
(packing then wastes under 2 %), and a KV cache for as many mean sequences as an engine decodes at a time. Where none has
that room, it asks for one longest sequence of each.
Engines are cut by tensor ranks alone, one worker a device: of the trainer's, or of as many as the recipe's engines have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.models import vllm_weights as vllm
from megarl.models.layout import Layout, RolloutLayout
from megarl.planner.advice import MIB, best_cap, gib, with_cap
from megarl.planner.engine_memory import Engines
from megarl.planner.fit import kv_bytes_per_token
from megarl.planner.forecast import Forecast, cap_that_fits, engine_room, forecast, on_devices, worst_memory
from megarl.planner.job import Job
from megarl.planner.layouts import NODE_RANKS, layout_values, layouts_of, longest_slots, with_layouts
from megarl.recipe.layout_rules import tensor_divides
from megarl.schedule import Schedule

# Mean sequences in a cap that leaves the packing free to fill it.
ROOMY = 4


@dataclass(frozen=True)
class Suggestion:
    """A value for a dotted recipe key, and why."""

    key: str
    value: Any
    reason: str


class NoDevice(ValueError):
    """The recipe does not say what must fit."""


class NothingFits(ValueError):
    """No layout on these ranks holds the model; the message says what the best one would take."""


def suggest(job: Job) -> list[Suggestion]:
    """Keys that make the job's model run on its ranks.

    Raises NoDevice and NothingFits.
    """
    if job.device_bytes is None:
        raise NoDevice("--suggest needs the memory of one trainer rank's device; add device: {memory_gib: 80}")
    roomy = _search(job, roomy=True)
    chosen = roomy or _search(job, roomy=False)
    if chosen is None:
        raise NothingFits(_what_is_missing(job))
    chosen = _with_caps(_with_kv_cache(_with_own_layouts(chosen)))
    found = forecast(chosen)
    return [*_layout_keys(job, found, roomy is not None), *_engine_keys(found, job), *_phase_keys(job, found)]


def _search(job: Job, roomy: bool) -> Job | None:
    """The job under the layout, the same for all roles, and the engines that cut the model least and fit together."""
    for layout, engines in _pairs(job, roomy):
        tried = _tried(job, layout, engines, roomy)
        if _fits(tried):
            return tried
    return None


def _tried(job: Job, layout: Layout, engines: Engines | None, roomy: bool) -> Job:
    """The job under one layout of all roles, with engines, and with the least caps."""
    tried = replace(with_layouts(job, {role.name: layout for role in job.roles}), engines=engines)
    return replace(tried, schedules=tuple(with_cap(one, _least_cap(tried, one, roomy)) for one in job.schedules))


def _holds(job: Job, schedule: Schedule) -> bool:
    assert job.budget_bytes is not None, "a suggestion has a device"
    return worst_memory(job, schedule).total <= job.budget_bytes


def _pairs(job: Job, roomy: bool) -> list[tuple[Layout, Engines | None]]:
    """Layouts and engines by the product of their cuts: a trainer cut less must not cost engines that are cut more."""
    pairs = [(layout, engines) for layout in _common_layouts(job) for engines in _engine_sizes(job, roomy)]
    # The sort is stable: among equals the simplest layout is first.
    return sorted(pairs, key=lambda pair: pair[0].tensor * pair[0].pipeline * (pair[1].layout.tensor if pair[1] else 1))


def _common_layouts(job: Job) -> list[Layout]:
    """Layouts that every role may have."""
    others = [layouts_of(job, role.name) for role in job.roles]
    return [layout for layout in layouts_of(job, "actor") if all(layout in legal for legal in others)]


def _engine_sizes(job: Job, roomy: bool) -> Iterator[Engines | None]:
    """Engines over all devices that they have, small ones first: they talk least. None where rollouts are replayed."""
    if job.engines is None:
        yield None
        return
    shape, groups = job.engines.shape, job.limits.num_sequences // job.limits.group_size
    devices = _engine_devices(job)
    for tensor in range(1, min(NODE_RANKS, devices) + 1):
        if devices % tensor or not tensor_divides(shape, tensor) or vllm.padded_vocab(shape) % tensor:
            continue
        if shape.experts is not None and shape.experts.ffn % tensor:  # an engine cuts every expert
            continue
        engines = replace(job.engines, count=min(devices // tensor, groups), layout=RolloutLayout(tensor))
        tokens = job.limits.longest
        if roomy:
            tokens = max(tokens, _concurrent(job, engines) * sum(job.lengths.totals) // len(job.lengths.totals))
        yield _with_share(job, replace(engines, kv_cache_bytes=tokens * kv_bytes_per_token(engines)))


def _engine_devices(job: Job) -> int:
    """Devices for engines: the trainer's, or as many as the stated ones have of their own."""
    assert job.engines is not None, "asked of engines alone"
    return job.engines.workers if job.engines.placement == "separate" else job.ranks


def _concurrent(job: Job, engines: Engines) -> int:
    """Sequences an engine decodes at a time, never more than its part of the batch."""
    return min(engines.max_concurrent, -(-job.limits.num_sequences // engines.count))


def _with_share(job: Job, engines: Engines) -> Engines:
    """The engines with the share of the device that holds what they need, in thousandths; on CPUs there is none."""
    assert job.device_bytes is not None, "a suggestion has a device"
    if engines.shared:
        return replace(engines, utilization=None)
    return replace(engines, utilization=-(-1000 * engines.memory.total // job.device_bytes) / 1000)


def _least_cap(job: Job, schedule: Schedule, roomy: bool) -> int:
    """The cap below which a phase should not go: for mean sequences with room, always for one longest."""
    layout = job.role(schedule.phase).layout
    longest = longest_slots(job, layout)
    mean = sum(job.lengths.totals) // len(job.lengths.totals)
    share = (schedule.mini_batch or job.limits.num_sequences) // layout.data
    return max(longest, min(ROOMY, share) * mean) if roomy else longest


def _fits(job: Job) -> bool:
    """Every device in every phase. What engines meet is looked at first: it does not depend on schedules."""
    awake = on_devices(job, {})
    usable = job.usable_bytes
    assert usable is not None, "a suggestion has a device"
    return all(held.total <= usable for held in awake.values()) and all(_holds(job, one) for one in job.schedules)


def _with_own_layouts(job: Job) -> Job:
    """Reference and critic under the simplest layout that still fits, where it is simpler than the actor's."""
    for role in job.roles[1:]:
        if role.borrows_weights:
            continue  # under another layout it would need weights of its own
        for layout in layouts_of(job, role.name):
            moved = with_layouts(job, {role.name: layout})
            holds = all(one.max_tokens is None or one.max_tokens >= longest_slots(moved, layout) for one in job.schedules)
            if holds and _fits(moved):
                job = moved
                break
    return job


def _with_caps(job: Job) -> Job:
    """The cap of each phase that its plan is best with; actor_logprob is cut like actor_update, as the ratio wants it."""
    caps: dict[str, int] = {}
    for schedule in reversed(job.schedules):  # actor_update is the last phase, and actor_logprob follows it
        largest = cap_that_fits(job, schedule)
        assert largest, "the search proved that a cap fits"
        if schedule.phase == "actor_logprob" and caps["actor_update"] <= largest:
            caps[schedule.phase] = caps["actor_update"]
            continue
        best = best_cap(job, schedule, largest)
        assert best is not None and best.schedule.max_tokens is not None, "the largest cap holds a longest sequence"
        caps[schedule.phase] = best.schedule.max_tokens
    return replace(job, schedules=tuple(with_cap(one, caps[one.phase]) for one in job.schedules))


def _with_kv_cache(job: Job) -> Job:
    """The KV cache that the least caps leave room for, up to every concurrent sequence at its longest.

    It comes before larger caps: an engine without room computes a sequence again, a cap above four mean sequences saves
    a per cent or two.
    """
    if job.engines is None:
        return job
    assert job.usable_bytes is not None and job.device_bytes is not None, "a suggestion has a device"
    most = engine_room(job, [worst_memory(job, schedule) for schedule in job.schedules])
    assert most is not None, "a suggestion has a device, and here engines"
    room = most if job.engines.shared else 1000 * most // job.device_bytes * job.device_bytes // 1000
    without_cache = job.engines.memory.total - job.engines.kv_cache_bytes
    wanted = _concurrent(job, job.engines) * job.limits.longest * kv_bytes_per_token(job.engines)
    cache = max(job.engines.kv_cache_bytes, min(wanted, room - without_cache) // MIB * MIB)
    return replace(job, engines=_with_share(job, replace(job.engines, kv_cache_bytes=cache)))


def _what_is_missing(job: Job) -> str:
    """The least that any layout would take, for the longest sequence."""
    tried = [_tried(job, *pair, roomy=False) for pair in _pairs(job, roomy=False)]
    if not tried:
        return f"no layout of {job.ranks} ranks divides the model, the batch and the mini-batches"
    takes = [_peak(one) for one in tried]
    least = min(takes)
    best = tried[takes.index(least)]
    return (
        f"nothing fits {gib(job.usable_bytes or 0)} usable on each of {job.ranks} ranks: the least, "
        f"{gib(least)}, takes {_name(best.roles[0].layout)}; more trainer.ranks, a shorter "
        "rollout.max_new_tokens or a larger device"
    )


def _peak(job: Job) -> int:
    """Bytes of the fullest device at worst."""
    worst = {schedule.phase: worst_memory(job, schedule) for schedule in job.schedules}
    return max(held.total for held in on_devices(job, worst).values())


def _name(layout: Layout) -> str:
    expert = f" x EP{layout.expert}" if layout.expert > 1 else ""
    return f"TP{layout.tensor} x PP{layout.pipeline}{expert}"


def _layout_keys(job: Job, found: Forecast, roomy: bool) -> Iterator[Suggestion]:
    actor = found.job.roles[0].layout
    peak, usable = gib(found.device_peak), gib(job.usable_bytes or 0)
    engines = found.job.engines
    beside = "" if engines is None else f" beside engines of TP{engines.layout.tensor}"
    why_not = _why_not_simpler(job, actor, engines)
    for role in found.job.roles:
        layout = role.layout
        fits = f"{peak} at worst of {usable} usable, engines included"
        if role.name != "actor":
            same = layout == actor
            reason = "cut like the actor" if same else f"the simplest with which everything fits: {fits}"
        elif why_not:
            reason = f"the simplest that {'has room' if roomy else 'fits'}{beside}: {fits}; {why_not}"
        else:
            reason = f"no cut is needed: {fits}"
        yield Suggestion(f"{role.name}.layout", layout_values(layout), f"{reason}; {layout.data} data-parallel ranks")


def _why_not_simpler(job: Job, chosen: Layout, engines: Engines | None) -> str:
    """What keeps each layout that is simpler than the chosen one from being suggested beside the same engines."""
    found: dict[str, list[str]] = {}
    for layout in _common_layouts(job):
        if layout == chosen:
            break
        found.setdefault(_shortfall(job, layout, engines), []).append(_name(layout))
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in found.items())


def _shortfall(job: Job, layout: Layout, engines: Engines | None) -> str:
    sizes = _engine_sizes(job, roomy=False)
    least = next(one for one in sizes if one is None or (engines is not None and one.layout == engines.layout))
    if _fits(_tried(job, layout, least, roomy=False)):
        return f"no room for caps of {ROOMY} mean sequences and the KV cache"
    return "would not fit"


def _engine_keys(found: Forecast, asked: Job) -> Iterator[Suggestion]:
    """The engines found, cut by tensor ranks alone, in place of those that were `asked` about."""
    job, engines, stated = found.job, found.job.engines, asked.engines
    if engines is None or stated is None:
        return
    memory = engines.memory
    reason = f"{engines.count} x {engines.layout.tensor} of {_engine_devices(asked)} devices decode"
    yield Suggestion("rollout.engines", engines.count, reason)
    reason = f"{gib(memory.weights)} of weights a worker"
    yield Suggestion("rollout.tensor", engines.layout.tensor, reason)
    for key, value in asdict(engines.layout).items():
        if key != "tensor" and asdict(stated.layout)[key] != value:
            yield Suggestion(f"rollout.{key}", value, "tensor ranks alone make the engines fit")
    reason = f"up to {engines.max_concurrent * engines.count} at a time, of {asked.limits.num_sequences} in a step"
    yield Suggestion("phases.rollout.max_concurrent", engines.max_concurrent, reason)
    tokens = engines.kv_cache_bytes // kv_bytes_per_token(engines)
    reason = f"{tokens} tokens: {tokens // job.limits.longest} longest sequences, of {_concurrent(job, engines)} at a time"
    yield Suggestion("rollout.kv_cache_bytes", engines.kv_cache_bytes, reason)
    if engines.shared:
        return
    beside = " beside the trainer" if engines.rests else ""
    reason = f"a worker takes {gib(memory.total)}; up to {found.safe_utilization or 0:.3f} is safe{beside}"
    yield Suggestion("rollout.memory_utilization", engines.utilization, reason)


def _phase_keys(job: Job, found: Forecast) -> Iterator[Suggestion]:
    for phase in found.phases:
        quality, cap = phase.quality, phase.schedule.max_tokens
        reason = (
            f"efficiency {quality.efficiency:.2f}, {quality.num_micro_batches} micro-batches a rank, "
            f"{gib(phase.worst_memory.total)} at worst; caps up to {phase.largest_cap} fit"
        )
        if phase.phase == "actor_logprob":
            reason = f"the rule of actor_update, which keeps the first policy ratios near 1; {reason}"
        yield Suggestion(f"phases.{phase.phase}.micro_batch", {"max_tokens": cap}, reason)
