"""What ran equals what was planned: the engine returns the shapes it executed, and this compares them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.schedule.plan import MiniBatch


class PlanMismatch(AssertionError):
    """An engine ran something other than its plan; only a bug can do that."""


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
