"""What `rollout.max_staleness` makes of a step's time.

A decoding step of an engine with k running sequences takes the longer of two times, on each of its workers: the operations
of k tokens at the device's rate, with their share of the prompts' operations; and reading the weights and the cache of k
sequences from the device's memory, whose rate follows from `tflops` by OPERATIONS_PER_BYTE. Of the sync, only reading and
writing a worker's weights once counts. Rewards, environments, and what engines and trainer take from each other on one CPU
are left out. The load is even over the engines.

With S = 0 a step is generation to the last completion, training and sync, one after the other. Above, engines stop only
during the sync, and training includes actor_logprob. A step then takes the longest of three times: training and sync;
sampling as many tokens with the slots busy, and sync; and, as a group that starts with one version is trained at the latest
S versions later, 1 / (S + 1) of the longest completion and its training, and sync.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

from megarl.planner.flops import forward_flops
from megarl.planner.forecast import Forecast, Job

STALENESSES = (0, 1, 2, 4)
# Operations in the time of one byte from memory, both at sustained rates. An H100 has 990 TFLOPS in bf16 and 3.35 TB/s; of
# them training sustains 40 to 50 % and decoding 70 to 80 %. A CPU has some 2 TFLOPS and 0.2 TB/s.
OPERATIONS_PER_BYTE = {"gpu": 170.0, "cpu": 10.0}


@dataclass(frozen=True)
class Rates:
    """Seconds of both sides, and the completions of a step.

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
    group_size: int
    completions: tuple[int, ...]

    def token_s(self, running: float) -> float:
        """Seconds until each of the `running` sequences of an engine has one more token; an engine with less than one is
        idle in turns."""
        running = max(1.0, running)
        return max(running * self.compute_s, self.weights_s + running * self.cache_s)

    def sample_s(self, slots: float) -> float:
        """Seconds to sample a step's tokens with so many slots of each engine busy."""
        return sum(self.completions) / (self.engines * slots) * self.token_s(slots)

    @property
    def generation_s(self) -> float:
        """Seconds from the first token of a step's completions to the last, where nothing else runs."""
        free, ends = [0] * (self.engines * self.slots), [0]  # in tokens of a running sequence
        for length in self.completions:
            ends.append(heapq.heapreplace(free, free[0] + length) + length)
        running = [min(len(free), len(self.completions) - ended) for ended in range(len(self.completions))]
        intervals = zip(pairwise(sorted(ends)), running, strict=True)
        return sum((end - start) * self.token_s(count / self.engines) for (start, end), count in intervals)


@dataclass(frozen=True)
class StalenessRow:
    """The forecast for one `rollout.max_staleness`: seconds of a step, the engines' tokens as a share of those with all
    slots busy, and the trainer's share of the time at work."""

    max_staleness: int
    step_s: float
    engines_share: float
    trainer_share: float


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
        group_size=group,
        completions=lengths.completions,
    )


def staleness_rows(plan: Forecast, window: int | None) -> list[StalenessRow]:
    """A row for each of STALENESSES that the placement allows; none without engines or `tflops`. `window` is the recipe's
    `rollout.window`."""
    known = rates(plan)
    if known is None:
        return []
    return [staleness_row(known, staleness, window) for staleness in (STALENESSES[:1] if sleeps(plan.job) else STALENESSES)]


def staleness_row(known: Rates, staleness: int, window: int | None) -> StalenessRow:
    """One `rollout.max_staleness`; `window` groups are under way at most, by default those of two steps."""
    train_s = known.train_s + (known.logprob_s if staleness else 0.0)
    step_groups = len(known.completions) / known.group_size
    groups = min(window or 2 * step_groups, (1 + staleness) * step_groups)
    slots = min(known.slots, groups * known.group_size / known.engines)
    longest_s = max(known.completions) * known.token_s(slots)
    if staleness == 0:
        step_s = known.generation_s + train_s + known.sync_s
    else:
        step_s = max(train_s, known.sample_s(slots), (longest_s + train_s) / (staleness + 1)) + known.sync_s
    return StalenessRow(staleness, step_s, known.sample_s(known.slots) / step_s, train_s / step_s)


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
    return known.sample_s(known.slots) * plan.job.engines.workers / trainer_s
