"""Compare the executed shapes, which a role returns, with the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from megarl.schedule.phase_plan import MiniBatch, Plan, Shape


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


# What one data-parallel rank executed, in order.
Executed = tuple[Shape, ...]


def compare(mini_batch: MiniBatch, data_rank: int, executed: Executed) -> None:
    """Raise PlanMismatch, with both shapes, for the first micro-batch of `data_rank` that differs from the plan."""
    where = f"phase {mini_batch.phase or '(unnamed)'}, data-parallel rank {data_rank}"
    planned = [micro_batch.shape for micro_batch in mini_batch.micro_batches[data_rank]]
    for number, (expected, actual) in enumerate(zip(planned, executed, strict=False)):
        if expected != actual:
            raise PlanMismatch(f"{where}, micro-batch {number}: planned {expected}, executed {actual}")
    if len(planned) != len(executed):
        raise PlanMismatch(f"{where}: planned {len(planned)} micro-batches, executed {len(executed)}")
