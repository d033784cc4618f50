"""What every phase of a step will run, hold and take, from its own plan: the numbers behind `megarl check --plan`.

Time: with F operations of a phase, R ranks at `tflops` and the plan's efficiency e (padding, imbalance, bubble and the
fixed cost of micro-batches are what e lacks to 1), the phase takes F / (R * tflops * e). F of an update counts what it runs
again for `recompute`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap

from megarl.planner.cap import largest_cap
from megarl.planner.flops import executed_flops, forward_flops, sequence_cost
from megarl.planner.job import Job
from megarl.planner.layouts import longest_slots
from megarl.planner.memory import Memory, most_held, peak, resting
from megarl.planner.roles import Role
from megarl.schedule import Plan, Quality, Schedule, most_rows_behind_prompts, plan_phase, quality


@dataclass(frozen=True)
class PhaseForecast:
    """One engine phase of one step.

    `memory` is that of the fullest trainer rank with the forecast's lengths, `worst_memory` with every micro-batch as
    full as the schedule allows; both without engines. `largest_cap` is the largest `max_tokens` that fits the device in
    the worst case: None without a device, 0 where nothing fits. `seconds` is None without a rate.
    """

    schedule: Schedule
    role: Role
    num_mini_batches: int
    quality: Quality
    memory: Memory
    worst_memory: Memory
    largest_cap: int | None
    flops: float
    seconds: float | None

    @property
    def phase(self) -> str:
        return self.schedule.phase


@dataclass(frozen=True)
class Forecast:
    """One step: its engine phases, and the memory picture of one device.

    `rollout_flops` are those of prefill and decoding together; `waves` counts how often the engines' concurrent
    sequences must be renewed. `worst_memory` is that of the fullest device by phase, with all that lies on it: of the engine
    phases, and of those in which vLLM's engines work. `engine_room` is what one worker of an engine may take.
    """

    job: Job
    phases: tuple[PhaseForecast, ...]
    rollout_flops: float
    waves: int | None
    worst_memory: dict[str, Memory]
    engine_room: int | None

    @property
    def trainer_peak(self) -> int:
        """Bytes of the fullest trainer rank in the worst case, without engines."""
        return max(one.worst_memory.total for one in self.phases)

    @property
    def fullest(self) -> str:
        """The phase with the highest worst case."""
        return max(self.worst_memory, key=lambda phase: self.worst_memory[phase].total)

    @property
    def device_peak(self) -> int:
        """Bytes of the fullest device in the worst case."""
        return self.worst_memory[self.fullest].total

    @property
    def safe_utilization(self) -> float | None:
        """The largest share of the device that one worker may have; None without a device or engines, and on CPUs."""
        if self.engine_room is None or self.job.device_bytes is None or self.job.engines is None or self.job.engines.shared:
            return None
        return max(0.0, self.engine_room / self.job.device_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the worst case fits the device without its reserve; None without a device."""
        usable = self.job.usable_bytes
        return None if usable is None else self.device_peak <= usable


def forecast(job: Job) -> Forecast:
    """The forecast of one step."""
    phases = tuple(forecast_phase(job, schedule) for schedule in job.schedules)
    shape, lengths, engines = job.role("actor_update").shape, job.lengths, job.engines
    pairs = zip(lengths.totals, lengths.completions, strict=True)
    waves = None if engines is None else -(-job.limits.num_sequences // (engines.count * engines.max_concurrent))
    worst = {one.phase: one.worst_memory for one in phases}
    flops = sum(forward_flops(shape, length, head) for length, head in pairs)
    return Forecast(job, phases, flops, waves, on_devices(job, worst), engine_room(job, list(worst.values())))


def on_devices(job: Job, worst: dict[str, Memory]) -> dict[str, Memory]:
    """The fullest device by phase, from the `worst` of the trainer by engine phase. While engines work the trainer's roles
    rest, and in the sync the actor's weights are there; engines on devices of their own meet none of that."""
    found = {phase: held + Memory(engine=job.beside_bytes) for phase, held in worst.items()}
    if job.engines is None:
        return found
    awake = Memory(engine=job.engine_bytes)
    if not job.engines.shared and not job.engines.rests:
        return {"rollout": awake, **found}
    return {"rollout": resting(job.roles) + awake, **found, "weight_sync": resting(job.roles, "actor") + awake}


def engine_room(job: Job, worst: list[Memory]) -> int | None:
    """What one worker of an engine may take of a device, from the `worst` of the trainer in each engine phase; None without
    a device or engines."""
    if job.engines is None or job.usable_bytes is None:
        return None
    if job.engines.shared:
        held = max(one.total for one in worst)
        return (job.usable_bytes - held) * job.ranks // job.engines.workers
    return job.usable_bytes - (resting(job.roles, "actor").total if job.engines.rests else 0)


def forecast_phase(job: Job, schedule: Schedule) -> PhaseForecast:
    """The forecast of one phase under `schedule`, which need not be the job's own."""
    role, lengths = job.role(schedule.phase), job.lengths.totals
    cost = sequence_cost(role.shape)
    plan = plan_phase(schedule, lengths, role.layout, job.seed, cost, job.groups, job.lengths.prompts)
    found = quality(plan, lengths, cost, job.lengths.prompts)
    pairs = zip(lengths, job.lengths.completions, strict=True)

    def operations(length: int, head_tokens: int) -> float:
        if is_update(schedule):
            return executed_flops(role, length, head_tokens)
        return forward_flops(role.shape, length, head_tokens, role.critic)

    # Where prompts are shared, what sequences leave out.
    spared = [length for one in plan.micro_batches for length in one.spared(job.lengths.prompts)]
    flops = schedule.epochs * sum(starmap(operations, pairs)) - sum(operations(length, 0) for length in spared)
    seconds = None
    if (rate := job.rate(schedule.phase)) is not None:
        seconds = flops / (job.ranks * rate * found.efficiency)
    return PhaseForecast(
        schedule,
        role,
        len(plan.mini_batches),
        found,
        _planned_memory(job, role, schedule, plan),
        worst_memory(job, schedule),
        cap_that_fits(job, schedule),
        flops,
        seconds,
    )


def is_update(schedule: Schedule) -> bool:
    """Update phases have mini-batches, forward phases have none."""
    return schedule.mini_batch is not None


def worst_memory(job: Job, schedule: Schedule) -> Memory:
    """The fullest trainer rank when every micro-batch is as full as the schedule allows and the pipeline is full."""
    role, size = job.role(schedule.phase), schedule.mini_batch or job.limits.num_sequences
    if schedule.sequences is not None:
        size = sequences = min(schedule.sequences, size // role.layout.data)
        slots = sequences * longest_slots(job, role.layout)
        head_tokens = sequences * job.limits.max_completion
    else:
        assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
        slots = min(schedule.max_tokens, size * longest_slots(job, role.layout))
        head_tokens = slots
    copied_rows, limits = 0, job.limits
    if schedule.share_prompts:
        copied_rows = most_rows_behind_prompts(slots, size, limits.longest, limits.group_size, limits.max_prompt)
    return _peak(job, role, schedule, slots, head_tokens, limits.longest, most_held(role.layout), copied_rows)


def cap_that_fits(job: Job, schedule: Schedule, budget_bytes: int | None = None) -> int | None:
    """The largest `max_tokens` whose worst case fits `budget_bytes`, by default what the device leaves the trainer.

    None without a budget, 0 where no cap fits.
    """
    budget_bytes = job.budget_bytes if budget_bytes is None else budget_bytes
    if budget_bytes is None:
        return None
    role = job.role(schedule.phase)
    cap = largest_cap(
        job.roles,
        role,
        schedule,
        budget_bytes,
        num_sequences=job.limits.num_sequences,
        longest=job.limits.longest,
        longest_prompt=job.limits.max_prompt,
        group_size=job.limits.group_size,
    )
    return cap or 0


def _planned_memory(job: Job, role: Role, schedule: Schedule, plan: Plan) -> Memory:
    """The fullest trainer rank with the plan's largest micro-batch."""
    completions, every = job.lengths.completions, plan.micro_batches
    return _peak(
        job,
        role,
        schedule,
        max(one.slots for one in every),
        max(sum(completions[sample] for sample in one.samples) for one in every),
        job.limits.longest,
        min(most_held(role.layout), max(mini_batch.num_micro_batches for mini_batch in plan.mini_batches)),
        max(one.rows_behind_prompts(job.lengths.totals) for one in every),
    )


def _peak(
    job: Job,
    role: Role,
    schedule: Schedule,
    slots: int,
    head_tokens: int,
    longest: int,
    num_micro_batches: int,
    copied_rows: int,
) -> Memory:
    return peak(
        job.roles,
        role,
        update=is_update(schedule),
        slots=slots,
        head_tokens=head_tokens,
        longest=longest,
        num_micro_batches=num_micro_batches,
        copied_rows=copied_rows,
    )
