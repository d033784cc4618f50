"""Compare the executed shapes, which a role returns, with the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.schedule.phase_plan import MiniBatch, Plan


class PlanMismatch(AssertionError):
    """A role did not run its plan, or ranks have different plans; only a bug can cause this error."""


class Summary(NamedTuple):
    """A plan in a few bytes: its hash, and how many mini-batches and micro-batches a rank runs in total."""

    hash: str
    mini_batches: int
    micro_batches: int

    @classmethod
    def of(cls, plan: Plan) -> Summary:
        counts = [len(mini_batch.micro_batches[0]) for mini_batch in plan.mini_batches]
        return cls(hashlib.sha256(repr(plan).encode()).hexdigest()[:12], len(counts), sum(counts))

    def __str__(self) -> str:
        return f"{self.micro_batches} micro-batches (mini-batches: {self.mini_batches}, plan {self.hash})"


class PhaseStart(NamedTuple):
    """The step, phase and plan that a rank is about to run."""

    step: int
    phase: str
    plan: Summary

    @property
    def digest(self) -> int:
        """A hash of 63 bits, which differs if step, phase or plan differ."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 1


def refuse_unlike(starts: Sequence[PhaseStart]) -> None:
    """Raise PlanMismatch, with both values, if a rank starts another phase or plan than rank 0: ranks with different forward
    passes would wait for each other forever. `starts` has the start of every rank, in rank order."""
    first = starts[0]
    for rank, start in enumerate(starts):
        if start.step != first.step:
            raise PlanMismatch(f"rank 0 is in step {first.step} and rank {rank} in step {start.step}")
        if start.phase != first.phase:
            raise PlanMismatch(f"step {first.step}: rank 0 begins phase {first.phase}, and rank {rank} phase {start.phase}")
        if start.plan != first.plan:
            raise PlanMismatch(
                f"phase {first.phase} of step {first.step}: rank 0 has planned {first.plan}, and rank {rank} {start.plan}; "
                "their lengths, seeds or schedules differ"
            )


@dataclass(frozen=True)
class Executed:
    """The shapes that one data-parallel rank executed, in order: sequences, tokens and slots (tokens with alignment padding)
    of each micro-batch."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    slots: tuple[int, ...]

    def __add__(self, more: Executed) -> Executed:
        return Executed(self.sequences + more.sequences, self.tokens + more.tokens, self.slots + more.slots)


def compare(mini_batch: MiniBatch, data_rank: int, executed: Executed) -> None:
    """Raise PlanMismatch, with both shapes, for the first micro-batch of `data_rank` that differs from the plan."""
    where = f"phase {mini_batch.phase or '(unnamed)'}, data-parallel rank {data_rank}"
    if len({len(executed.sequences), len(executed.tokens), len(executed.slots)}) > 1:
        raise PlanMismatch(
            f"{where}: executed reports {len(executed.sequences)} sequence counts, {len(executed.tokens)} token counts and "
            f"{len(executed.slots)} slot counts"
        )
    rank = mini_batch.micro_batches[data_rank]
    planned = [(len(micro_batch.samples), micro_batch.tokens, micro_batch.slots) for micro_batch in rank]
    ran = list(zip(executed.sequences, executed.tokens, executed.slots, strict=True))
    for number, (expected, actual) in enumerate(zip(planned, ran, strict=False)):
        if expected != actual:
            raise PlanMismatch(f"{where}, micro-batch {number}: planned {_shape(expected)}, executed {_shape(actual)}")
    if len(planned) != len(ran):
        raise PlanMismatch(f"{where}: planned {len(planned)} micro-batches, executed {len(ran)}")


def _shape(micro_batch: tuple[int, int, int]) -> str:
    sequences, tokens, slots = micro_batch
    return f"{sequences} sequences with {tokens} tokens in {slots} slots"
