"""What `rollout.max_staleness` makes of a step's time: a simulation of engines and trainer over several steps.

A decoding step of an engine with k running sequences takes the longer of two times, on each of its workers: the operations
of k tokens at the device's rate, with their share of the prompts' operations; and reading the weights and the cache of k
sequences from the device's memory, whose rate follows from `tflops` by OPERATIONS_PER_BYTE. Of the sync, only reading and
writing a worker's weights once counts. Rewards, environments, and what engines and trainer take from each other on one CPU
are left out. The load is even over the engines.

The stream's own rule (megarl/schedule/admission.py) says which groups start, and which a step takes. Sequences wait for a
slot and keep it to their end; the trainer works for the time of its phases, which above S = 0 include actor_logprob; engines
stop only during the sync. With S = 0 that is generation to the last completion, training and sync, one after the other.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from megarl.planner.flops import forward_flops
from megarl.planner.forecast import Forecast, Job
from megarl.schedule.admission import Admission

STALENESSES = (0, 1, 2, 4)
# Operations in the time of one byte from memory, both at sustained rates. An H100 has 990 TFLOPS in bf16 and 3.35 TB/s; of
# them training sustains 40 to 50 % and decoding 70 to 80 %. A CPU has some 2 TFLOPS and 0.2 TB/s.
OPERATIONS_PER_BYTE = {"gpu": 170.0, "cpu": 10.0}
# Larger steps are simulated by a part of their groups; the first steps fill the stream and do not count.
MOST_SEQUENCES, WARMUP_STEPS, MEASURED_STEPS = 512, 6, 8


@dataclass(frozen=True)
class Rates:
    """Seconds of both sides, and the sizes of a step.

    An engine with k running sequences makes one token of each in max(k * `compute_s`, `weights_s` + k * `cache_s`) seconds,
    and has `slots` sequences at most.
    """

    engines: int
    slots: int
    compute_s: float
    weights_s: float
    cache_s: float
    train_s: float
    logprob_s: float  # what actor_logprob adds to `train_s` above staleness 0
    sync_s: float
    prompts: int
    group_size: int
    completions: tuple[int, ...]

    def token_s(self, running: float) -> float:
        """Seconds until each of the `running` sequences of an engine has one more token."""
        return max(running * self.compute_s, self.weights_s + running * self.cache_s)

    @property
    def full_s(self) -> float:
        """Seconds to sample a step's tokens with all slots busy."""
        return sum(self.completions) / (self.engines * self.slots) * self.token_s(self.slots)


@dataclass(frozen=True)
class StalenessRow:
    """The forecast for one `rollout.max_staleness`: seconds of a step, the engines' tokens as a share of those with all
    slots busy, the trainer's share of the time at work, and the mean and largest staleness of a trained token."""

    max_staleness: int
    step_s: float
    engines_share: float
    trainer_share: float
    mean_staleness: float
    largest_staleness: int


def rates(plan: Forecast) -> Rates | None:
    """The rates of a forecast's job; None without engines or `tflops`."""
    job, engines = plan.job, plan.job.engines
    if engines is None or job.tflops is None:
        return None
    lengths, layout, memory = job.lengths, engines.layout, engines.memory
    operations_per_s = job.tflops * 1e12
    bytes_per_s = operations_per_s / OPERATIONS_PER_BYTE["cpu" if engines.shared else "gpu"]
    tokens, group = sum(lengths.completions), job.limits.group_size
    # The members of a group share the prompt in the prefix cache.
    spared = sum(forward_flops(engines.shape, length, 0) for at, length in enumerate(lengths.prompts) if at % group)
    mean_tokens = sum(lengths.totals) / len(lengths.totals)
    cached = layout.data * engines.kv_cache_bytes / (engines.token_bytes * mean_tokens)
    phase_s = {phase.phase: phase.seconds or 0.0 for phase in plan.phases}
    epochs = next(schedule.epochs for schedule in job.schedules if schedule.phase == "actor_update")
    context = mean_tokens - tokens / len(lengths.completions) / 2  # of a token, on average
    return Rates(
        engines=engines.count,
        slots=max(1, min(engines.max_concurrent, int(cached))),
        compute_s=(plan.rollout_flops - spared) / tokens / (layout.workers * operations_per_s),
        weights_s=memory.weights / bytes_per_s,
        cache_s=context * engines.token_bytes / layout.data / bytes_per_s,
        train_s=sum(phase_s.values()) + sum(job.teacher_s(name) or 0.0 for name in job.teachers),
        logprob_s=0.0 if "actor_logprob" in phase_s else phase_s["actor_update"] / (3 * epochs),
        sync_s=2 * memory.weights / bytes_per_s,
        prompts=job.limits.num_sequences // group,
        group_size=group,
        completions=lengths.completions,
    )


def staleness_rows(plan: Forecast, window: int | None) -> list[StalenessRow]:
    """A row for each of STALENESSES that the placement allows; none without engines or `tflops`. `window` is the recipe's
    `rollout.window`; a row that it would be too large for has the largest legal window."""
    known = rates(plan)
    if known is None or plan.job.engines is None:
        return []
    stalenesses = STALENESSES[:1] if sleeps(plan.job) else STALENESSES
    return [simulate(known, staleness, window or 2 * known.prompts, plan.job.seed) for staleness in stalenesses]


def sleeps(job: Job) -> bool:
    """Whether engines sleep while the trainer works, so that they cannot sample ahead; without a device nobody knows."""
    return job.device_bytes is not None and job.engines is not None and job.engines.sleeps


def balanced_devices(plan: Forecast) -> float | None:
    """Devices of engines for each device of the trainer with which both sides take equally long above staleness 0; None
    without engines or `tflops`."""
    known = rates(plan)
    if known is None or plan.job.engines is None:
        return None
    trainer_s = (known.train_s + known.logprob_s + known.sync_s) * plan.job.ranks
    return known.full_s * plan.job.engines.workers / trainer_s


@dataclass(eq=False)
class _Group:
    number: int  # of `Admission`
    left: int  # members that are not complete
    version: int | None = None  # of the first token
    tokens: int = 0
    versions: float = 0.0  # the sum of its tokens' versions


@dataclass
class _Engines:
    """All engines together. Every running sequence has `ticks` tokens more than at tick 0, so one heap orders their ends."""

    rates: Rates
    scale: float
    slots: int
    waiting: deque[tuple[int, _Group]] = field(default_factory=deque)
    # (tick of the end, number, tick of the start, `versions` at the start, group)
    running: list[tuple[float, int, float, float, _Group]] = field(default_factory=list)
    ticks: float = 0.0
    versions: float = 0.0  # the versions of the ticks so far, summed
    tokens: float = 0.0
    num_started: int = 0

    def fill(self, version: int) -> list[_Group]:
        """Start waiting sequences in the free slots; return the groups of which some are the first."""
        begun = []
        while self.waiting and len(self.running) < self.slots:
            length, group = self.waiting.popleft()
            if group.version is None:
                group.version = version
                begun.append(group)
            self.num_started += 1
            heapq.heappush(self.running, (self.ticks + length, self.num_started, self.ticks, self.versions, group))
        return begun

    @property
    def tick_s(self) -> float:
        """Seconds of a tick. An engine with less than one sequence is idle in turns, and as slow as with one."""
        return self.rates.token_s(max(1.0, len(self.running) * self.scale / self.rates.engines))

    def run(self, seconds: float, version: int) -> None:
        """Go on for `seconds`, in which no sequence ends."""
        ticks = seconds / self.tick_s
        self.ticks += ticks
        self.versions += version * ticks
        self.tokens += ticks * len(self.running)

    def end_first(self) -> _Group:
        """End the sequence with the fewest tokens left; return its group."""
        end, _, start, versions, group = heapq.heappop(self.running)
        group.tokens += round(end - start)
        group.versions += self.versions - versions
        group.left -= 1
        return group


def simulate(known: Rates, staleness: int, window: int, seed: int) -> StalenessRow:
    """One `rollout.max_staleness` over WARMUP_STEPS + MEASURED_STEPS steps. The same arguments give the same row."""
    prompts = max(1, min(known.prompts, MOST_SEQUENCES // known.group_size))
    scale = known.prompts / prompts
    window = max(prompts, min(round(window / scale), (1 + staleness) * prompts))
    engines = _Engines(known, scale, max(1, round(known.engines * known.slots / scale)))
    train_s = known.train_s + (known.logprob_s if staleness else 0.0)
    generator = random.Random(f"{seed}/stream")
    admission, groups = Admission(prompts, staleness, window), {}  # by number
    now, begun = 0.0, 0.0
    trained_at: float | None = None  # the end of the trainer's work on the groups of this version
    may_take = False  # a group has ended, or a version has begun
    counted, stale, largest, tokens_before = 0, 0.0, 0, 0.0
    while (version := admission.version) < WARMUP_STEPS + MEASURED_STEPS:
        for number in [admission.start() for _ in range(admission.num_to_start())]:
            group = groups[number] = _Group(number, known.group_size)
            engines.waiting.extend((length, group) for length in generator.choices(known.completions, k=known.group_size))
        for group in engines.fill(version):
            admission.send(group.number)
        if may_take and trained_at is None and (taken := admission.take()):
            trained_at = now + train_s
            chosen = [groups.pop(number) for number in taken[0]]
            assert not taken[1], "no group is given up"
            if version >= WARMUP_STEPS:
                counted += sum(group.tokens for group in chosen)
                stale += sum(version * group.tokens - group.versions for group in chosen)
                largest = max([largest, *(version - (group.version or 0) for group in chosen)])
        may_take = False
        ends_at = now + (engines.running[0][0] - engines.ticks) * engines.tick_s if engines.running else float("inf")
        if trained_at is None or ends_at < trained_at:
            engines.run(ends_at - now, version)
            now, group = ends_at, engines.end_first()
            may_take = group.left == 0
            if may_take and group.version is not None:
                admission.sampled(group.number, group.version)
                admission.finish(group.number)
            continue
        if engines.running:
            engines.run(trained_at - now, version)
        now, trained_at, may_take = trained_at + known.sync_s, None, True
        admission.begin(version + 1)
        if version + 1 == WARMUP_STEPS:
            begun, tokens_before = now, engines.tokens
    seconds = now - begun
    full = seconds / known.token_s(known.slots) * known.engines * known.slots / scale
    return StalenessRow(
        staleness,
        seconds / MEASURED_STEPS,
        (engines.tokens - tokens_before) / full,
        train_s * MEASURED_STEPS / seconds,
        max(0.0, stale / counted),
        largest,
    )
