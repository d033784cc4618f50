"""How good a plan is: what it pads, how even its ranks are, how long its pipeline idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.schedule.cost import Cost, in_step, run_times
from megarl.schedule.plan import MicroBatch, Plan
from megarl.schedule.schedule import padded


@dataclass(frozen=True)
class Quality:
    """The figures of a plan; shares are between 0 and 1.

    `num_micro_batches` is of each data-parallel rank, summed over mini-batches. `useful_share` is tokens / slots.
    `imbalance` compares the costliest data-parallel rank with the mean, 1.0 being even; over several mini-batches, the
    sum of the highest with the sum of the means. `bubble_share` is the part of the ranks' time in which pipeline stages
    wait while it fills and drains. `efficiency` is the cost of the real tokens over what the ranks could have done in the
    time of the slowest one: padding, imbalance, bubble and the fixed cost of micro-batches are what it lacks to 1.
    """

    num_micro_batches: int
    tokens: int
    slots: int
    max_slots: int
    useful_share: float
    imbalance: float
    bubble_share: float
    efficiency: float


def quality(plan: Plan, lengths: Sequence[int], cost: Cost, prompts: Sequence[int] | None = None) -> Quality:
    """The figures of `plan` for the batch of `lengths`, and of `prompts` where it shares them, that it was made for."""
    costs = [cost.sequence(slots) for slots in padded([int(length) for length in lengths], plan.layout)]
    layout, every = plan.layout, plan.micro_batches
    useful = highest = mean = slowest = spent = bubble = 0.0
    for mini_batch in plan.mini_batches:
        useful += sum(cost.sequence(int(lengths[sample])) for sample in mini_batch.samples)
        cuts = []
        for rank in mini_batch.micro_batches:
            spared = [_spared(one, prompts, cost) for one in rank]
            useful -= sum(spared)
            cut = [sum(costs[sample] for sample in one.samples) - less for one, less in zip(rank, spared, strict=True)]
            cuts.append(cut)
        rank_costs = [sum(cut) for cut in cuts]
        times = [run_times(cut, layout, cost) for cut in in_step(cuts, layout)]
        highest, mean = highest + max(rank_costs), mean + sum(rank_costs) / layout.data
        slowest += max(time for time, _ in times)
        spent, bubble = spent + sum(time for time, _ in times), bubble + sum(idle for _, idle in times)
    tokens, slots = sum(one.tokens for one in every), sum(one.slots for one in every)
    return Quality(
        num_micro_batches=sum(mini_batch.num_micro_batches for mini_batch in plan.mini_batches),
        tokens=tokens,
        slots=slots,
        max_slots=max(one.slots for one in every),
        useful_share=tokens / slots,
        imbalance=highest / mean,
        bubble_share=bubble / spent,
        efficiency=useful / (layout.data * slowest),
    )


def _spared(micro_batch: MicroBatch, prompts: Sequence[int] | None, cost: Cost) -> float:
    """Cost of the prompts that sequences of a micro-batch leave out, as another one has them."""
    if not micro_batch.sharing:
        return 0.0
    assert prompts is not None, "a plan that shares prompts is rated with their lengths"
    return sum(map(cost.sequence, micro_batch.spared(prompts)))
