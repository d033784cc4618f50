"""What every phase of a step will run, hold and take, from its plan: the numbers behind `megarl check --plan`.

A teacher runs the rollouts that it judges. Its time is that of its share of the groups, its worst memory that of all.

Time: with F operations of a phase, R ranks at `tflops` and the plan's efficiency e (padding, imbalance, bubble and the
fixed cost of micro-batches are what e lacks to 1), the phase takes F / (R * tflops * e). F of an update counts what it runs
again for `recompute`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import starmap

from megarl.planner.engine_memory import PlannedEngines
from megarl.planner.flops import executed_flops, forward_flops, sequence_cost
from megarl.planner.lengths import DISTRIBUTIONS, Lengths, ReadMetrics, find_lengths
from megarl.planner.memory_estimate import (
    BatchLimits,
    DeviceMemory,
    Load,
    largest_cap,
    most_held,
    peak,
    resting,
    usable_bytes,
    worst_load,
)
from megarl.planner.roles import PlannedRole
from megarl.recipe import Recipe, role_of
from megarl.recipe.sizes import engines_of, limits_of, memory_roles, teacher_engines
from megarl.recipe.weight_sync_section import BUCKET_BYTES, obstacle_to_mapping
from megarl.schedule import Quality, Schedule, plan_phase, quality, violations

DEFAULT_LENGTHS = "log-normal"
# GPUs of a node where nobody says: as `megarl launch` assumes.
USUAL_DEVICES = 8
# As in `weight_sync/`, which is on a higher floor; a test keeps them equal.
NUM_BUCKETS, MOST_WRITTEN = 2, 1.5


@dataclass(frozen=True)
class Job:
    """One step to forecast.

    `schedules` are those of the engine phases that run, in order. `engines` is None where rollouts are replayed.
    `device_bytes` and `tflops` are of one trainer rank's device, None where nobody said. `bucket_bytes` are what the buckets
    of a weight sync take of it (`bucket_bytes_of`). `supervised` is the job of a warm-up's steps as a run of their own.
    `max_staleness` is the recipe's.
    """

    roles: tuple[PlannedRole, ...]
    schedules: tuple[Schedule, ...]
    lengths: Lengths
    limits: BatchLimits
    seed: int
    engines: PlannedEngines | None
    device_bytes: int | None = None
    tflops: float | None = None
    bucket_bytes: int = 0
    supervised: Job | None = None
    teachers: dict[str, PlannedEngines] = field(default_factory=dict)  # engines that serve a teacher, by its name
    max_staleness: int = 0

    def role(self, phase: str) -> PlannedRole:
        """The role that runs an engine phase."""
        return next(role for role in self.roles if role.name == role_of(phase))

    def runs(self, schedule: Schedule) -> bool:
        """Whether the role's layout runs a schedule for every batch that the recipe allows."""
        layout = self.role(schedule.phase).layout
        return not violations(schedule, self.limits.num_sequences, layout, self.limits.longest)

    @property
    def warmup(self) -> Job | None:
        """The job of a warm-up's step, with the same devices; None without a warm-up."""
        if (alone := self.supervised) is None:
            return None
        roles = tuple(role.supervised if role.name == "actor" else role for role in self.roles)
        return replace(
            self, roles=roles, schedules=alone.schedules, limits=alone.limits, lengths=alone.lengths, supervised=None
        )

    @property
    def ranks(self) -> int:
        """Trainer ranks."""
        return self.roles[0].layout.ranks

    @property
    def sequences_under_way(self) -> int:
        """The most sequences that engines may work on at a time: those of 1 + S steps (`schedule/admission.py`)."""
        return (1 + self.max_staleness) * self.limits.num_sequences

    @property
    def groups(self) -> tuple[int, ...]:
        """The group of each sequence; completions of one prompt follow each other."""
        return tuple(sample // self.limits.group_size for sample in range(self.limits.num_sequences))

    def num_run(self, schedule: Schedule) -> int:
        """How many of the sequences a phase runs: all, or those of a teacher's share of the groups, and more up to a number
        that its layout can run (`megatron/teaching.py`)."""
        role, total = self.role(schedule.phase), self.limits.num_sequences
        groups = total // self.limits.group_size
        least = max(1, round(role.share * groups)) * self.limits.group_size
        legal = (n for n in range(least, total) if not violations(schedule, n, role.layout, self.limits.longest))
        return next(legal, total)

    def teacher_flops(self, name: str) -> float:
        """Operations of the engine of a teacher, which scores prompts and completions of its share of the rollouts."""
        teacher, lengths = self.teachers[name], self.lengths.totals
        return teacher.share * sum(forward_flops(teacher.shape, length, length) for length in lengths)

    def teacher_s(self, name: str) -> float | None:
        """Seconds that `teacher_flops` take at the device's rate."""
        return None if self.tflops is None else self.teacher_flops(name) / (self.teachers[name].workers * self.tflops * 1e12)

    @property
    def engine_bytes(self) -> int:
        """What working engines take of one device; on a CPU, of one trainer rank's share of the machine."""
        rollout = 0 if self.engines is None else self.engines.awake_bytes(self.ranks, self.device_bytes)
        return rollout + sum(teacher.bytes_during_training(self.ranks) for teacher in self.teachers.values())

    @property
    def engine_share(self) -> float | None:
        """Share of a device that must be free for an engine to start (vLLM's `gpu_memory_utilization`); None without
        engines or a device, and on CPUs."""
        if self.engines is None or self.engines.shared or self.device_bytes is None:
            return None
        return self.engine_bytes / self.device_bytes

    @property
    def bytes_during_training(self) -> int:
        """What engines hold of a trainer rank's device while the trainer works."""
        every = [*([] if self.engines is None else [self.engines]), *self.teachers.values()]
        return sum(engine.bytes_during_training(self.ranks) for engine in every)

    @property
    def usable_bytes(self) -> int | None:
        """The device without the reserve and the buckets of a weight sync, which stay from sync to sync."""
        return None if self.device_bytes is None else usable_bytes(self.device_bytes) - self.bucket_bytes

    @property
    def budget_bytes(self) -> int | None:
        """What a working trainer rank may hold: the device without the reserve and without what engines hold then."""
        return None if self.usable_bytes is None else self.usable_bytes - self.bytes_during_training


def job_of(
    recipe: Recipe,
    lengths: str = DEFAULT_LENGTHS,
    seed: int = 1,
    tflops: float | None = None,
    read_metrics: ReadMetrics | None = None,
) -> Job:
    """The planner's view of a loaded recipe, for lengths as `find_lengths` takes them. Those of a warm-up's rows are drawn
    (DEFAULT_LENGTHS) where `lengths` is a run of rollouts.

    `tflops` wins over the recipe's `device.tflops`. Raises what `find_lengths` raises.
    """
    roles, limits, device = memory_roles(recipe), limits_of(recipe), recipe.device
    drawn = lengths if lengths in DISTRIBUTIONS else DEFAULT_LENGTHS
    return Job(
        roles=tuple(roles.values()),
        schedules=tuple(recipe.schedule(phase) for phase in recipe.engine_phases if recipe.runs(phase)),
        lengths=find_lengths(lengths, limits, seed, read_metrics),
        limits=limits,
        seed=seed,
        engines=engines_of(recipe, roles["actor"].shape),
        device_bytes=None if device is None else device.memory_bytes,
        tflops=tflops if tflops is not None or device is None else device.tflops,
        bucket_bytes=bucket_bytes_of(recipe),
        supervised=None if recipe.supervised is None else job_of(recipe.supervised, drawn, seed),
        teachers=teacher_engines(recipe),
        max_staleness=recipe.rollout.max_staleness,
    )


def bucket_bytes_of(recipe: Recipe) -> int:
    """What the buckets of `weight_sync.transport: group` take of the fullest GPU: those of a trainer rank, and on shared
    devices those of a worker, which in two legs its rank holds for it. None where weights are mapped, or `wire: delta` keeps
    the buckets on the host. More devices than USUAL_DEVICES are taken for several hosts."""
    section, device, rollout = recipe.weight_sync, recipe.device, recipe.rollout
    if device is None or device.kind == "cpu" or section.wire == "delta" or recipe.sent_adapter is not None:
        return 0
    if not recipe.has_engines:
        return 0
    separate = rollout.placement == "separate"
    devices = recipe.trainer.ranks + (rollout.engines * rollout.layout.workers if separate else 0)
    if section.transport != "group" and devices <= USUAL_DEVICES and obstacle_to_mapping(recipe, on_cpu=False) is None:
        return 0
    return int(NUM_BUCKETS * (MOST_WRITTEN + (not separate)) * (section.bucket_bytes or BUCKET_BYTES["gpu"]))


@dataclass(frozen=True)
class PhaseForecast:
    """One engine phase of one step.

    `memory` is that of the fullest trainer rank with the forecast's lengths, `worst_memory` with every micro-batch as
    full as the schedule allows; both without engines. `largest_cap` is the largest `max_tokens` that fits the device in
    the worst case: None without a device, 0 where nothing fits. `seconds` is None without a rate.
    """

    schedule: Schedule
    role: PlannedRole
    num_mini_batches: int
    quality: Quality
    memory: DeviceMemory
    worst_memory: DeviceMemory
    largest_cap: int | None
    flops: float
    seconds: float | None

    @property
    def phase(self) -> str:
        return self.schedule.phase


@dataclass(frozen=True)
class Forecast:
    """One step: its engine phases, and the memory of one device.

    `rollout_flops` are those of prefill and decoding together. `worst_memory` is the fullest device by phase, with
    everything on it: of engine phases, and of those in which vLLM's engines work. `engine_room` is what one worker of an
    engine may take.
    """

    job: Job
    phases: tuple[PhaseForecast, ...]
    rollout_flops: float
    worst_memory: dict[str, DeviceMemory]
    engine_room: int | None
    warmup: Forecast | None = None  # of a warm-up's step

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
    shape, lengths = job.role("actor_update").shape, job.lengths
    pairs = zip(lengths.totals, lengths.completions, strict=True)
    worst = {phase.phase: phase.worst_memory for phase in phases}
    warmup = None if job.warmup is None else forecast(job.warmup)
    if warmup is not None:
        worst["warmup.sft"] = warmup.phases[0].worst_memory
    flops = sum(forward_flops(shape, length, head) for length, head in pairs)
    return Forecast(job, phases, flops, on_devices(job, worst), engine_room(job, list(worst.values())), warmup)


def on_devices(job: Job, worst: dict[str, DeviceMemory]) -> dict[str, DeviceMemory]:
    """The fullest device by phase, from the trainer's `worst` by engine phase. While engines work the trainer's roles are
    idle, and in the sync the actor's weights are on the device; engines on devices of their own share with no role."""
    memories = {phase: memory + DeviceMemory(engine=job.bytes_during_training) for phase, memory in worst.items()}
    if job.engines is None:
        return memories
    awake = DeviceMemory(engine=job.engine_bytes)
    if not job.engines.shared and not job.engines.sleeps:
        return {"rollout": awake, **memories}
    return {"rollout": resting(job.roles) + awake, **memories, "weight_sync": resting(job.roles, "actor") + awake}


def engine_room(job: Job, worst: list[DeviceMemory]) -> int | None:
    """What one worker of an engine may take of a device, from the trainer's `worst` in each engine phase; None without a
    device or engines."""
    if job.engines is None or job.usable_bytes is None:
        return None
    if job.engines.shared:
        trainer = max(memory.total for memory in worst)
        return (job.usable_bytes - trainer) * job.ranks // job.engines.workers
    return job.usable_bytes - (resting(job.roles, "actor").total if job.engines.sleeps else 0)


def forecast_phase(job: Job, schedule: Schedule) -> PhaseForecast:
    """The forecast of one phase under `schedule`, which need not be one of the job's."""
    role, count = job.role(schedule.phase), job.num_run(schedule)
    lengths, completions, prompts = job.lengths.totals[:count], job.lengths.completions[:count], job.lengths.prompts[:count]
    cost = sequence_cost(role.shape)
    plan = plan_phase(schedule, lengths, role.layout, job.seed, cost, job.groups[:count], prompts)
    plan_quality, micro_batches = quality(plan, lengths, cost, prompts), plan.micro_batches

    def operations(length: int, head_tokens: int) -> float:
        if schedule.is_update:
            return executed_flops(role, length, head_tokens)
        return forward_flops(role.shape, length, role.head_passes * head_tokens, role.has_value_head)

    # Where prompts are shared, sequences leave out the prompt that another one has.
    spared = [length for micro_batch in micro_batches for length in micro_batch.spared(prompts)]
    flops = schedule.epochs * sum(starmap(operations, zip(lengths, completions, strict=True)))
    flops -= sum(operations(length, 0) for length in spared)
    planned_load = Load(
        schedule.is_update,
        slots=max(micro_batch.slots for micro_batch in micro_batches),
        head_tokens=max(sum(completions[sample] for sample in micro_batch.samples) for micro_batch in micro_batches),
        longest=job.limits.longest,
        num_micro_batches=min(most_held(role.layout), max(mini.num_micro_batches for mini in plan.mini_batches)),
        copied_rows=max(micro_batch.rows_behind_prompts(lengths) for micro_batch in micro_batches),
    )
    return PhaseForecast(
        schedule,
        role,
        len(plan.mini_batches),
        plan_quality,
        peak(job.roles, role, planned_load),
        worst_memory(job, schedule),
        cap_that_fits(job, schedule),
        flops,
        None if job.tflops is None else flops / (job.ranks * job.tflops * 1e12 * plan_quality.efficiency),
    )


def worst_memory(job: Job, schedule: Schedule) -> DeviceMemory:
    """The fullest trainer rank when every micro-batch is as full as the schedule allows and the pipeline is full."""
    role = job.role(schedule.phase)
    return peak(job.roles, role, worst_load(role, schedule, job.limits))


def cap_that_fits(job: Job, schedule: Schedule) -> int | None:
    """The largest `max_tokens` whose worst case fits what the device leaves the trainer; None without a device, 0 where no
    cap fits."""
    if job.budget_bytes is None:
        return None
    return largest_cap(job.roles, job.role(schedule.phase), schedule, job.limits, job.budget_bytes) or 0
