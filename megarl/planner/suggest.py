"""Layouts, engines and caps for a model on a cluster, each with its reason: what `megarl check --suggest` proposes.

The search takes the layout with the least model parallelism under which everything fits with room: in every phase a cap of
four mean sequences (packing then wastes under 2 %), and a KV cache for as many mean sequences as an engine decodes at
a time. Where no layout has that room, one longest sequence of each is enough; where that does not fit either, roles
recompute and offload, the mildest setting first.
Engines are sharded over tensor ranks only, one worker a device: the trainer's devices, or as many as the recipe's engines
have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.models import vllm_weights as vllm
from megarl.models.layout import Layout, RolloutLayout
from megarl.planner.engine_memory import PlannedEngines
from megarl.planner.forecast import (
    Forecast,
    Job,
    PhaseForecast,
    cap_that_fits,
    engine_room,
    forecast,
    forecast_phase,
    on_devices,
    worst_memory,
)
from megarl.planner.memory_estimate import MIB, gib
from megarl.recipe import kind_of, role_of
from megarl.recipe.layout_section import divisors, tensor_divides
from megarl.schedule import Schedule
from megarl.schedule.schedule import in_micro_batch

# Ranks of one machine. A tensor group communicates twice a layer, which only the links inside a machine carry.
NODE_RANKS = 8
# Mean sequences in a cap that leaves the packing free to fill it.
ROOMY = 4
# Caps this close to the best one are as good, and the smallest of them takes the least memory.
AS_GOOD = 0.005
# Settings of `ROLE.memory` where no layout fits without them, the mildest first, and the values of a key in that order.
SAVINGS: tuple[dict[str, str | bool], ...] = (
    {"recompute": "selective"},
    {"recompute": "full"},
    {"offload": "optimizer"},
    {"offload": "all"},
    {"offload": "all", "recompute": "full"},
    {"offload": "all", "recompute": "full", "offload_activations": True},
)
_ORDER = ("none", False, "selective", "full", "optimizer", "all", True)


@dataclass(frozen=True)
class Suggestion:
    """A value for a dotted recipe key, and why."""

    key: str
    value: Any
    reason: str


class NoDevice(ValueError):
    """The recipe does not say what must fit."""


class NothingFits(ValueError):
    """No layout on these ranks holds the model, even with all of `memory`."""


def suggest(job: Job) -> list[Suggestion]:
    """Keys that make the job's model run on its ranks.

    Raises NoDevice and NothingFits.
    """
    if job.device_bytes is None:
        raise NoDevice("--suggest needs the memory of one trainer rank's device; add device: {memory_gib: 80}")
    roomy = _search(job, roomy=True)
    chosen = roomy or _search(job, roomy=False)
    if chosen is None:
        saving_jobs = (_saving_job(job, settings) for settings in SAVINGS)
        chosen = next((fitting for saving in saving_jobs if (fitting := _search(saving, roomy=False)) is not None), None)
        if chosen is None:
            raise NothingFits(
                f"nothing fits {gib(job.usable_bytes or 0)} usable on each of {job.ranks} ranks, with any layout that "
                "divides the model and the batch, and with all of `memory`: more trainer.ranks, a shorter "
                "rollout.max_new_tokens, or a larger device"
            )
    # The other roles under the simplest layout that still fits.
    for role in chosen.roles[1:]:
        # A reference that borrows the actor's weights would need its own under another layout. A reference that follows the
        # actor copies the shards of its rank.
        has_actor_layout = role.borrows_weights or role.follows_actor
        for layout in [] if has_actor_layout else layouts_of(chosen, role.name):
            moved, longest = with_layouts(chosen, {role.name: layout}), in_micro_batch(job.limits.longest, layout)
            holds = all(schedule.max_tokens is None or schedule.max_tokens >= longest for schedule in chosen.schedules)
            if holds and _fits(moved):
                chosen = moved
                break
    plan = forecast(_with_caps(_with_kv_cache(chosen)))
    keys = [*_layout_keys(job, plan, roomy is not None), *_memory_keys(job, plan)]
    return [*keys, *_engine_keys(plan, job), *_phase_keys(plan)]


def layouts_of(job: Job, role_name: str) -> list[Layout]:
    """Legal layouts of a role: few ranks for a copy of the model first, then few pipeline stages.

    Fewer ranks a copy leave more data-parallel ranks, which do not communicate inside a step; a tensor group waits less than
    a pipeline of the same size, which idles while it fills. Sequence parallelism is always on: it costs nothing and saves
    memory.
    """
    role = next(role for role in job.roles if role.name == role_name)
    total, shape = job.limits.num_sequences, role.shape
    sizes = [schedule.mini_batch or total for schedule in job.schedules if role_of(schedule.phase) == role_name]
    layouts = []
    for tensor in range(1, min(NODE_RANKS, job.ranks) + 1):
        if not tensor_divides(shape, tensor):
            continue
        for pipeline in range(1, job.ranks // tensor + 1):
            if job.ranks % (tensor * pipeline) or shape.num_layers % pipeline:
                continue
            layout = Layout(tensor, pipeline, job.ranks // (tensor * pipeline), tensor > 1)
            if sizes and any(size % layout.data for size in (total, *sizes)):
                continue
            if shape.experts is None or shape.experts.ffn % tensor == 0:
                layouts.append(layout)
            if shape.experts is not None:  # experts that are spread over ranks are whole
                expert_sizes = divisors(math.gcd(shape.experts.count, tensor * layout.data))[1:]
                expert_tensor = None if tensor == 1 else 1
                layouts += [replace(layout, expert=size, expert_tensor=expert_tensor) for size in expert_sizes]
    return sorted(layouts, key=lambda layout: (layout.tensor * layout.pipeline, layout.pipeline, layout.expert))


def with_layouts(job: Job, layouts: Mapping[str, Layout]) -> Job:
    """The job with other layouts, by role."""
    return replace(job, roles=tuple(replace(role, layout=layouts.get(role.name, role.layout)) for role in job.roles))


def layout_values(layout: Layout) -> dict[str, int]:
    """The keys of a layout in a recipe; expert keys only where they are not the default."""
    values: dict[str, int] = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    values["sequence_parallel"] = layout.sequence_parallel
    if layout.expert > 1:
        values["expert"] = layout.expert
    if layout.expert_tensor is not None:
        values["expert_tensor"] = layout.expert_tensor
    return values


def with_cap(schedule: Schedule, cap: int) -> Schedule:
    """The schedule under a cap."""
    return replace(schedule, sequences=None, max_tokens=cap)


def best_cap(job: Job, schedule: Schedule, largest: int) -> PhaseForecast | None:
    """The smallest cap that is as good as the best up to `largest`; None where no such cap is legal.

    Tries the smallest legal cap, its doubles, and `largest`. The smallest holds one longest sequence, or all segments of a
    rollout where they must share a micro-batch.
    """
    caps, cap = [], in_micro_batch(job.limits.longest, job.role(schedule.phase).layout, schedule.together)
    if cap > largest:
        return None
    while cap < largest:
        caps.append(cap)
        cap *= 2
    capped = [with_cap(schedule, cap) for cap in (*caps, largest)]
    tried = [forecast_phase(job, schedule) for schedule in capped if job.runs(schedule)]
    best = max((phase.quality.efficiency for phase in tried), default=0.0)
    return next((phase for phase in tried if phase.quality.efficiency >= best * (1 - AS_GOOD)), None)


def _saving_job(job: Job, settings: dict[str, str | bool]) -> Job:
    """The job with each role's `memory` saving at least as much as `settings`, as far as the role has such a key."""
    roles = []
    for role in job.roles:
        # The `memory` of a reference and of a teacher has `offload` alone; a reward model has none.
        has_offload = not role.trained and role.name != "reward_model" and not role.borrows_weights
        has_key = role.trained or (has_offload and settings.get("offload") == "all")
        stated = {key: getattr(role.memory, key) for key in settings if has_key and (role.trained or key == "offload")}
        update = {key: max(value, settings[key], key=_ORDER.index) for key, value in stated.items()}
        roles.append(replace(role, memory=role.memory.model_copy(update=update)))
    return replace(job, roles=tuple(roles))


def _search(job: Job, roomy: bool) -> Job | None:
    """The job under the layout, the same for all roles, and the engines that shard the model least and fit together."""
    for layout, engines in _pairs(job, roomy):
        tried = replace(with_layouts(job, {role.name: layout for role in job.roles}), engines=engines)
        schedules = tuple(with_cap(schedule, _least_cap(tried, schedule, roomy)) for schedule in job.schedules)
        tried = replace(tried, schedules=schedules)
        if _fits(tried):
            return tried
    return None


def _pairs(job: Job, roomy: bool) -> list[tuple[Layout, PlannedEngines | None]]:
    """Layouts that every role may have, and engines, by the product of their shards: fewer for the trainer must not cost the
    engines more."""
    legal = [layouts_of(job, role.name) for role in job.roles]
    layouts = [layout for layout in layouts_of(job, "actor") if all(layout in of_role for of_role in legal)]
    pairs = [(layout, engines) for layout in layouts for engines in _engine_sizes(job, roomy)]
    # The sort is stable: among equals the simplest layout is first.
    return sorted(pairs, key=lambda pair: pair[0].tensor * pair[0].pipeline * (pair[1].layout.tensor if pair[1] else 1))


def _engine_sizes(job: Job, roomy: bool) -> Iterator[PlannedEngines | None]:
    """Engines over all their devices, small ones first: these communicate less. None where rollouts are replayed."""
    if job.engines is None:
        yield None
        return
    shape, groups = job.engines.shape, job.limits.num_sequences // job.limits.group_size
    devices = _engine_devices(job)
    for tensor in range(1, min(NODE_RANKS, devices) + 1):
        if devices % tensor or any(vllm.layout_faults(shape, RolloutLayout(tensor))):
            continue
        engines = replace(job.engines, count=min(devices // tensor, groups), layout=RolloutLayout(tensor))
        tokens = job.limits.longest
        if roomy:
            tokens = max(tokens, _concurrent(job, engines) * sum(job.lengths.totals) // len(job.lengths.totals))
        yield _with_utilization(job, replace(engines, kv_cache_bytes=tokens * engines.token_bytes))


def _engine_devices(job: Job) -> int:
    """Devices for engines: the trainer's, or as many as the stated ones have of their own."""
    assert job.engines is not None, "asked of engines alone"
    return job.engines.workers if job.engines.placement == "separate" else job.ranks


def _concurrent(job: Job, engines: PlannedEngines) -> int:
    """Sequences an engine decodes at a time, never more than its part of those under way."""
    return min(engines.max_concurrent, -(-job.sequences_under_way // engines.count))


def _with_utilization(job: Job, engines: PlannedEngines) -> PlannedEngines:
    """The engines with the share of the device that holds what they need, in thousandths; on CPUs there is none."""
    assert job.device_bytes is not None, "a suggestion has a device"
    if engines.shared:
        return replace(engines, utilization=None)
    return replace(engines, utilization=-(-1000 * engines.memory.total // job.device_bytes) / 1000)


def _least_cap(job: Job, schedule: Schedule, roomy: bool) -> int:
    """The cap below which a phase should not go: for mean sequences with room, always for one longest, or for all
    segments of a rollout where they must share a micro-batch."""
    layout = job.role(schedule.phase).layout
    longest = in_micro_batch(job.limits.longest, layout, schedule.together)
    mean = sum(job.lengths.totals) // len(job.lengths.totals)
    share = (schedule.mini_batch or job.limits.num_sequences) // layout.data
    return max(longest, min(ROOMY, share) * mean) if roomy else longest


def _fits(job: Job) -> bool:
    """Whether every device fits in every phase. Engines come first: they do not depend on schedules."""
    usable, budget = job.usable_bytes, job.budget_bytes
    assert usable is not None and budget is not None, "a suggestion has a device"
    if any(memory.total > usable for memory in on_devices(job, {}).values()):
        return False
    jobs = [job] if job.warmup is None else [job, job.warmup]
    phases = [(part, schedule) for part in jobs for schedule in part.schedules]
    return all(part.runs(schedule) and worst_memory(part, schedule).total <= budget for part, schedule in phases)


def _with_caps(job: Job) -> Job:
    """The best cap of each phase. actor_logprob gets the cap of actor_update, which keeps the policy ratio near 1."""
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
    return replace(job, schedules=tuple(with_cap(schedule, caps[schedule.phase]) for schedule in job.schedules))


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
    wanted = _concurrent(job, job.engines) * job.limits.longest * job.engines.token_bytes
    cache = max(job.engines.kv_cache_bytes, min(wanted, room - without_cache) // MIB * MIB)
    return replace(job, engines=_with_utilization(job, replace(job.engines, kv_cache_bytes=cache)))


def _layout_keys(job: Job, plan: Forecast, roomy: bool) -> Iterator[Suggestion]:
    actor = plan.job.roles[0].layout
    simplest = f"the simplest that {'has room' if roomy else 'fits'}: {gib(plan.device_peak)} at worst of "
    simplest += f"{gib(job.usable_bytes or 0)} usable, engines included"
    for role in plan.job.roles:
        reason = "as the actor" if role.name != "actor" and role.layout == actor else simplest
        reason += f"; {role.layout.data} data-parallel ranks"
        yield Suggestion(f"{role.name}.layout", layout_values(role.layout), reason)


def _memory_keys(job: Job, plan: Forecast) -> Iterator[Suggestion]:
    """Settings of `ROLE.memory` that differ from the recipe's."""
    for stated, chosen in zip(job.roles, plan.job.roles, strict=True):
        for key, value in chosen.memory.model_dump().items():
            if getattr(stated.memory, key) != value:
                yield Suggestion(f"{chosen.name}.memory.{key}", value, "no layout of these ranks fits without it")


def _engine_keys(plan: Forecast, request: Job) -> Iterator[Suggestion]:
    """The planned engines, sharded over tensor ranks only, in place of those of the recipe."""
    job, engines, stated = plan.job, plan.job.engines, request.engines
    if engines is None or stated is None:
        return
    memory = engines.memory
    reason = f"{engines.count} x {engines.layout.tensor} of {_engine_devices(request)} devices decode"
    yield Suggestion("rollout.engines", engines.count, reason)
    reason = f"{gib(memory.weights)} of weights a worker"
    yield Suggestion("rollout.tensor", engines.layout.tensor, reason)
    for key, value in asdict(engines.layout).items():
        if key != "tensor" and asdict(stated.layout)[key] != value:
            yield Suggestion(f"rollout.{key}", value, "tensor ranks alone make the engines fit")
    steps = "a step" if job.max_staleness == 0 else f"{1 + job.max_staleness} steps"
    reason = f"up to {engines.max_concurrent * engines.count} at a time, of {job.sequences_under_way} in {steps}"
    yield Suggestion("phases.rollout.max_concurrent", engines.max_concurrent, reason)
    tokens = engines.kv_cache_bytes // engines.token_bytes
    reason = f"{tokens} tokens: {tokens // job.limits.longest} longest sequences, of {_concurrent(job, engines)} at a time"
    yield Suggestion("rollout.kv_cache_bytes", engines.kv_cache_bytes, reason)
    if engines.shared:
        return
    with_trainer = " with the trainer" if engines.sleeps else ""
    reason = f"a worker takes {gib(memory.total)}; up to {plan.safe_utilization or 0:.3f} is safe{with_trainer}"
    yield Suggestion("rollout.memory_utilization", engines.utilization, reason)


def _phase_keys(plan: Forecast) -> Iterator[Suggestion]:
    for phase in plan.phases:
        quality = phase.quality
        reason = (
            f"efficiency {quality.efficiency:.2f}, {quality.num_micro_batches} micro-batches a rank, "
            f"{gib(phase.worst_memory.total)} at worst; caps up to {phase.largest_cap} fit"
        )
        if phase.phase == "actor_logprob":
            reason = f"the rule of actor_update, which keeps the first policy ratios near 1; {reason}"
        yield Suggestion(f"phases.{kind_of(phase.phase)}.micro_batch", {"max_tokens": phase.schedule.max_tokens}, reason)
