"""What `rollout.max_staleness` makes of a step's time: a simulation of engines and trainer over several steps.

A decoding step of an engine with k running sequences takes the longer of two times, on each of its workers: the operations
of k tokens at the device's rate, with their share of the prompts' operations; and reading the weights and the cache of k
sequences from the device's memory, whose rate follows from `tflops` by OPERATIONS_PER_BYTE. Of the sync, only reading and
writing a worker's weights once counts. Rewards, environments, and what engines and trainer take from each other on one CPU
are left out. The load is even over the engines.

The simulation follows the rules of the stream. A group starts while fewer than (version + 1 + S) * prompts groups have
started; sequences wait for a slot and keep it to their end; a step takes the groups that finish first among the oldest
`window`, as far as no other group becomes too old for that; the trainer then works for the time of its phases, which
above S = 0 include actor_logprob; engines stop only during the sync. With S = 0 that is generation to the last completion,
training and sync, one after the other.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import deque
from dataclasses import dataclass, field

from megarl.planner.flops import forward_flops
from megarl.planner.forecast import Forecast, Job

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
        train_s=sum(phase_s.values()),
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


NOT_STARTED = sys.maxsize


@dataclass(eq=False)
class _Group:
    left: int  # members that are not complete
    version: int = NOT_STARTED  # of the first token
    tokens: int = 0
    versions: float = 0.0  # the sum of its tokens' versions
    end: int = -1  # the group's place in the order of completion


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
    num_ended: int = 0

    def fill(self, version: int) -> None:
        """Start waiting sequences in the free slots."""
        while self.waiting and len(self.running) < self.slots:
            length, group = self.waiting.popleft()
            group.version = min(group.version, version)
            self.num_started += 1
            heapq.heappush(self.running, (self.ticks + length, self.num_started, self.ticks, self.versions, group))

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

    def end_first(self) -> bool:
        """End the sequence with the fewest tokens left. True: its group is complete."""
        end, _, start, versions, group = heapq.heappop(self.running)
        group.tokens += round(end - start)
        group.versions += self.versions - versions
        group.left -= 1
        if group.left == 0:
            self.num_ended += 1
            group.end = self.num_ended
        return group.left == 0


def simulate(known: Rates, staleness: int, window: int, seed: int) -> StalenessRow:
    """One `rollout.max_staleness` over WARMUP_STEPS + MEASURED_STEPS steps. The same arguments give the same row."""
    prompts = max(1, min(known.prompts, MOST_SEQUENCES // known.group_size))
    scale = known.prompts / prompts
    window = max(prompts, min(round(window / scale), (1 + staleness) * prompts))
    engines = _Engines(known, scale, max(1, round(known.engines * known.slots / scale)))
    train_s = known.train_s + (known.logprob_s if staleness else 0.0)
    generator = random.Random(f"{seed}/stream")
    untaken: list[_Group] = []  # in the order of their prompts
    now, version, begun, num_groups = 0.0, 0, 0.0, 0
    trained_at: float | None = None  # the end of the trainer's work on the groups of this version
    may_take = False  # since the last try a group has ended or a version has begun
    counted, stale, largest, tokens_before = 0, 0.0, 0, 0.0
    while version < WARMUP_STEPS + MEASURED_STEPS:
        while num_groups < (version + 1 + staleness) * prompts:
            group = _Group(known.group_size)
            untaken.append(group)
            engines.waiting.extend((length, group) for length in generator.choices(known.completions, k=known.group_size))
            num_groups += 1
        engines.fill(version)
        if trained_at is None and may_take and (taken := _taken(untaken, window, prompts, version, staleness)):
            untaken = [group for group in untaken if group not in taken]
            trained_at = now + train_s
            if version >= WARMUP_STEPS:
                counted += sum(group.tokens for group in taken)
                stale += sum(version * group.tokens - group.versions for group in taken)
                largest = max([largest, *(version - group.version for group in taken)])
        may_take = False
        ends_at = now + (engines.running[0][0] - engines.ticks) * engines.tick_s if engines.running else float("inf")
        if trained_at is None or ends_at < trained_at:
            engines.run(ends_at - now, version)
            may_take = engines.end_first()
            now = ends_at
            continue
        if engines.running:
            engines.run(trained_at - now, version)
        now, version, trained_at, may_take = trained_at + known.sync_s, version + 1, None, True
        if version == WARMUP_STEPS:
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


def _taken(untaken: list[_Group], window: int, prompts: int, version: int, staleness: int) -> list[_Group]:
    """The groups that step `version` takes; none while they are not complete.

    Each later step takes `prompts` groups too, so of the groups with tokens of version u or before all but
    (u + staleness - version) * prompts must be taken now. Groups that finished first go first where that leaves room.
    """
    due = {
        old: sum(group.version <= old for group in untaken) - (old + staleness - version) * prompts
        for old in range(version - staleness, version)
    }
    taken: list[_Group] = []
    for group in sorted((group for group in untaken[:window] if group.end >= 0), key=lambda group: group.end):
        if all(count < prompts - len(taken) for old, count in due.items() if old < group.version):
            taken.append(group)
            due |= {old: count - 1 for old, count in due.items() if old >= group.version}
        if len(taken) == prompts:
            return taken
    return []
