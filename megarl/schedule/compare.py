"""What ran equals what was planned: the engine returns the shapes it executed, and this compares them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.schedule.plan import MiniBatch


class PlanMismatch(AssertionError):
    """An engine ran something other than its plan; only a bug can do that."""


@dataclass(frozen=True)
class Executed:
    """Shapes one data-parallel rank executed: sequences and tokens of each micro-batch, in the order they ran."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]


def compare(plan: MiniBatch, data_rank: int, executed: Executed) -> None:
    """Raise PlanMismatch at the first micro-batch of `data_rank` that differs from the plan."""
    planned = [(len(one.samples), one.tokens) for one in plan.micro_batches[data_rank]]
    where = f"phase {plan.phase or '(unnamed)'}, data-parallel rank {data_rank}"
    if len(executed.sequences) != len(executed.tokens):
        raise PlanMismatch(
            f"{where}: executed reports {len(executed.sequences)} sequence counts and {len(executed.tokens)} token counts"
        )
    ran = list(zip(executed.sequences, executed.tokens, strict=True))
    for number, (expected, found) in enumerate(zip(planned, ran, strict=False)):
        if expected != found:
            raise PlanMismatch(
                f"{where}, micro-batch {number}: planned {expected[0]} sequences with {expected[1]} tokens, "
                f"executed {found[0]} sequences with {found[1]} tokens"
            )
    if len(planned) != len(ran):
        raise PlanMismatch(f"{where}: planned {len(planned)} micro-batches, executed {len(ran)}")
