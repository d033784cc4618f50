"""What ran equals what was planned: the engine returns the shapes it executed, and this compares them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.schedule.plan import MiniBatch, Plan


class PlanMismatch(AssertionError):
    """An engine ran something other than its plan, or ranks have planned unlike; only a bug can do that."""


class Summary(NamedTuple):
    """A plan in a few bytes: its hash, and how many mini-batches and, in all of them, micro-batches a rank runs."""

    hash: str
    mini_batches: int
    micro_batches: int

    @classmethod
    def of(cls, plan: Plan) -> Summary:
        counts = [len(mini_batch.micro_batches[0]) for mini_batch in plan.mini_batches]
        return cls(hashlib.sha256(repr(plan).encode()).hexdigest()[:12], len(counts), sum(counts))

    def __str__(self) -> str:
        return f"{self.micro_batches} micro-batches (mini-batches: {self.mini_batches}, plan {self.hash})"


def agree(step: int, ranks: Sequence[tuple[int, dict[str, Summary]]]) -> None:
    """Raise PlanMismatch where a rank is in another step than rank 0, or would run a phase otherwise, with both values:
    ranks that run unequal forward passes would wait for each other for ever.

    `ranks` has of each rank its step and its plans by phase, in the order in which they run.
    """
    first = ranks[0]
    for rank, (number, plans) in enumerate(ranks):
        if number != first[0]:
            raise PlanMismatch(f"rank 0 is in step {first[0]} and rank {rank} in step {number}")
        if list(plans) != list(first[1]):
            raise PlanMismatch(f"step {step}: rank 0 runs the phases {list(first[1])}, and rank {rank} {list(plans)}")
        for phase, summary in plans.items():
            if summary != first[1][phase]:
                raise PlanMismatch(
                    f"phase {phase} of step {step}: rank 0 has planned {first[1][phase]}, and rank {rank} {summary}; "
                    "they were given other lengths, seeds or schedules"
                )


@dataclass(frozen=True)
class Executed:
    """Shapes one data-parallel rank executed, in the order they ran.

    Sequences, tokens and slots (tokens with alignment padding) of each micro-batch; micro-batches of each pipeline run.
    """

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    runs: tuple[int, ...]


def compare(mini_batch: MiniBatch, data_rank: int, executed: Executed) -> None:
    """Raise PlanMismatch, with both shapes, at the first micro-batch or pipeline run of `data_rank` off the plan."""
    where = f"phase {mini_batch.phase or '(unnamed)'}, data-parallel rank {data_rank}"
    counts = {len(executed.sequences), len(executed.tokens), len(executed.slots), sum(executed.runs)}
    if len(counts) > 1:
        raise PlanMismatch(
            f"{where}: executed reports {len(executed.sequences)} sequence counts, {len(executed.tokens)} token counts, "
            f"{len(executed.slots)} slot counts and runs of {executed.runs} micro-batches"
        )
    planned = [(len(one.samples), one.tokens, one.slots) for one in mini_batch.micro_batches[data_rank]]
    ran = list(zip(executed.sequences, executed.tokens, executed.slots, strict=True))
    for number, (expected, found) in enumerate(zip(planned, ran, strict=False)):
        if expected != found:
            raise PlanMismatch(f"{where}, micro-batch {number}: planned {_shape(expected)}, executed {_shape(found)}")
    if len(planned) != len(ran):
        raise PlanMismatch(f"{where}: planned {len(planned)} micro-batches, executed {len(ran)}")
    if mini_batch.runs != executed.runs:
        raise PlanMismatch(f"{where}: planned pipeline runs of {mini_batch.runs} micro-batches, executed {executed.runs}")


def _shape(micro_batch: tuple[int, int, int]) -> str:
    sequences, tokens, slots = micro_batch
    return f"{sequences} sequences with {tokens} tokens in {slots} slots"
