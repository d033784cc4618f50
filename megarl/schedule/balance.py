"""How many micro-batches, and which plan with them, so that the slowest data-parallel rank is fast.

The time of a rank is that of cost.run_times. Counts of micro-batches are equal over the ranks, counts of sequences are
free. For a count the sequences are dealt to the ranks first and cut there second; where a tight cap defeats that, all
are cut first and the micro-batches dealt second. The count with the fastest plan wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megarl.models.layout import Layout
from megarl.schedule.bound import RankModel, least_time
from megarl.schedule.cost import Cost, in_step, ranks_in_step, run_times
from megarl.schedule.pack import best_fit, level, split
from megarl.schedule.ranks import Work, deal_micro_batches, deal_sequences
from megarl.schedule.schedule import Schedule

Ranks = list[list[list[int]]]  # samples as [data-parallel rank][micro-batch][sequence]

# Large batches choose their count on a thinned copy: every n-th sequence, on every n-th rank, but no fewer than these.
_TRIAL_SEQUENCES, _TRIAL_RANKS = 256, 8
# Under a pipeline, counts are tried in steps of this ratio.
_COUNT_RATIO = 1.2
# Times that ranks grouping long sequences may take, as ratios to the bound: sequences cannot be cut to fill it.
_SLACKS = (1.0, 1.03, 1.1)
# A plan this close to what any plan can reach ends the search.
_CLOSE = 1.002


@dataclass(frozen=True)
class _Problem:
    """The sequences of one mini-batch, longest first, and what they are cut for."""

    order: Sequence[int]
    work: Work
    cap: int
    layout: Layout
    cost: Cost

    @cached_property
    def before(self) -> list[float]:
        """Cost of the i longest sequences together."""
        return [0.0, *accumulate(map(self.work.costs.__getitem__, self.order))]

    @property
    def least(self) -> int:
        """Fewest micro-batches of a rank, by tokens and by sequences too long to share one."""
        alone = sum(2 * self.work.slots[sample] > self.cap for sample in self.order)
        slots = sum(map(self.work.slots.__getitem__, self.order))
        fewest = max(-(-slots // (self.cap * self.layout.data)), -(-alone // self.layout.data))
        return -(-fewest // self.step) * self.step

    @property
    def most(self) -> int:
        """Most micro-batches of a rank: none may be empty."""
        return len(self.order) // self.layout.data // self.step * self.step

    @property
    def step(self) -> int:
        return self.layout.micro_batch_step

    def model(self, count: int) -> RankModel:
        return RankModel.of(count, self.layout, self.cost)

    def bound(self, count: int) -> float:
        """Time that no plan with `count` micro-batches a rank is below."""
        return least_time(self.before, self.layout.data, self.model(count))


@dataclass(frozen=True)
class _Choice:
    """A number of micro-batches, and how the sequences are dealt to the ranks for it.

    `slack` None spreads long sequences over the ranks; else ranks group them, and may take `slack` times the bound.
    """

    count: int
    slack: float | None

    def time(self, problem: _Problem) -> float:
        """What this choice aims at, in token-equivalents."""
        return problem.bound(self.count) * (self.slack or 1.0)


def balance(schedule: Schedule, samples: Sequence[int], work: Work, layout: Layout, cost: Cost) -> Ranks:
    """Samples of each micro-batch of each data-parallel rank.

    Costliest micro-batch first: if memory runs out, it does so in the first pass, and the micro-batches of a pipeline run
    are alike. Raises ValueError where a virtual pipeline needs more micro-batches than there are sequences.
    """
    assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
    cap = schedule.max_tokens // layout.micro_batch_multiple * layout.micro_batch_multiple
    order = sorted(samples, key=work.slots.__getitem__, reverse=True)
    problem = _Problem(order, work, cap, layout, cost)
    trial, refused = _thin(problem), set()
    if trial is not problem:
        for _, choice, _ in sorted(_rate(trial), key=_time_of):
            ranks = _attempt(problem, choice, choice.time(problem))
            if ranks is not None:
                return ranks
            refused.add(choice)
    _, _, ranks = min(_rate(problem, refused), key=_time_of, default=(0.0, None, None))
    if ranks is None:
        raise ValueError(_too_few_sequences(schedule, problem))
    return ranks


def _time_of(rated: tuple[float, _Choice, Ranks]) -> float:
    return rated[0]


def _too_few_sequences(schedule: Schedule, problem: _Problem) -> str:
    """Only a virtual pipeline comes here: else one sequence a micro-batch is always a plan."""
    share, data = len(problem.order) // problem.layout.data, problem.layout.data
    needed = -(-len(best_fit(problem.order, problem.work.slots, problem.cap)) // data)
    fits = -(-len(problem.order) // (problem.most * data)) * problem.work.slots[problem.order[0]]
    multiple = problem.layout.micro_batch_multiple
    return (
        f"phases.{schedule.phase}.micro_batch.max_tokens = {schedule.max_tokens} needs {needed} micro-batches a rank, but "
        f"{share} sequences a rank make at most {problem.most}, a multiple of {problem.step} for the virtual pipeline; "
        f"the nearest value that always fits is {-(-fits // multiple) * multiple}"
    )


def _thin(problem: _Problem) -> _Problem:
    """Every n-th sequence and rank of a large problem, alike in lengths to the whole; a small problem itself."""
    every = min(problem.layout.data // _TRIAL_RANKS, len(problem.order) // _TRIAL_SEQUENCES)
    while every > 1 and problem.layout.data % every:
        every -= 1
    if every <= 1:
        return problem
    layout = replace(problem.layout, data=problem.layout.data // every)
    return replace(problem, order=problem.order[every // 2 :: every], layout=layout)


def _rate(problem: _Problem, refused: Collection[_Choice] = ()) -> Iterator[tuple[float, _Choice, Ranks]]:
    """(time of the slowest rank, choice, plan) of the choices for which a plan is found, until none can be faster; without
    those that were `refused` before."""
    best, num_found = float("inf"), 0
    for time, choice in _choices(problem):
        if choice in refused:
            continue
        if best <= time * _CLOSE or (num_found == 2 and problem.layout.pipeline == 1):
            break
        ranks = _attempt(problem, choice, time)
        if ranks is not None:
            found = _time(problem, ranks)
            best, num_found = min(best, found), num_found + 1
            yield found, choice, ranks


def _choices(problem: _Problem) -> list[tuple[float, _Choice]]:
    """(time aimed at, choice), shortest first: without a pipeline, fewest micro-batches first."""
    # Ranks that run in step gain nothing where one of them has the long sequences: the others wait for it.
    groups = problem.layout.pipeline > 1 and ranks_in_step(problem.layout) == 1
    choices = []
    for count in _counts(problem):
        bound = problem.bound(count)
        choices.append((bound, _Choice(count, None)))
        choices += [(bound * slack, _Choice(count, slack)) for slack in _SLACKS if groups]
    return sorted(choices, key=lambda one: one[0])


def _counts(problem: _Problem) -> Iterator[int]:
    """Legal numbers of micro-batches a rank, ascending: all, or under a pipeline a few up to the most."""
    count, ratio = problem.least, _COUNT_RATIO if problem.layout.pipeline > 1 else 1.0
    while count < problem.most:
        yield count
        count = max(count + problem.step, int(count * ratio) // problem.step * problem.step)
    if problem.least <= problem.most:
        yield problem.most


def _attempt(problem: _Problem, choice: _Choice, time: float) -> Ranks | None:
    """A plan, or None where none was found under the cap or, with grouped sequences, near the `time` aimed at."""
    work, cap, data, count = problem.work, problem.cap, problem.layout.data, choice.count
    grouped = choice.slack is not None
    dealt = deal_sequences(problem.order, work, data, cap, problem.model(count), time, grouped)
    ranks: Ranks = []
    for own in dealt or []:
        cut = level(own, work.slots, work.costs, cap, count)
        if cut is None:
            break
        ranks.append(cut)
    if len(ranks) < data:
        bins = [] if grouped else best_fit(problem.order, work.slots, cap)
        if grouped or len(bins) > count * data:
            return None
        ranks = deal_micro_batches(split(bins, work.slots, count * data), work, data)
    return [_costliest_first(own, work.costs) for own in ranks]


def _costliest_first(micro_batches: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    for held in micro_batches:
        held.sort()
    return sorted(micro_batches, key=lambda held: (-sum(map(costs.__getitem__, held)), held[0]))


def _time(problem: _Problem, ranks: Ranks) -> float:
    """Time of the slowest rank."""
    cost_of = problem.work.costs.__getitem__
    costs = [[sum(map(cost_of, held)) for held in own] for own in ranks]
    return max(run_times(own, problem.layout, problem.cost)[0] for own in in_step(costs, problem.layout))
