"""What the ends of a node's ranks mean for its exit status."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, HUNG, REQUEUE


@dataclass(frozen=True)
class Verdict:
    """How the ranks of this node ended."""

    status: int
    sentence: str
    rank: int | None = None
    signal: str | None = None


def judge(
    ended: Mapping[int, int],
    killed: Collection[int],
    asked: Collection[int],
    can_resume: bool,
    hung: str | None = None,
) -> Verdict:
    """`ended`: exit codes, as Python gives them, by rank, of those that ended before the agent stopped any; `killed`: those
    that did not leave in time; `asked`: the signals passed on; `can_resume`: there is a checkpoint, or no step yet; `hung`:
    what the watchdog has said, where the run directory is this node's, too."""
    if hung is not None or HUNG in ended.values():
        return Verdict(HUNG, hung or "the watchdog has ended the run; the first node's output says why")
    # Before its own handler is there, a rank ends by the signal, or by Ray's handler, which makes it an exit status.
    left = {rank for rank, code in ended.items() if abs(code) in asked}
    codes = {rank: code for rank, code in sorted(ended.items()) if rank not in left}
    for rank, code in codes.items():
        if code < 0:
            name = signal.Signals(-code).name
            return Verdict(FAILED, f"rank {rank} was killed by {name}", rank, name)
    refused = [rank for rank, code in codes.items() if code == BAD_INPUT]
    failed = [rank for rank, code in codes.items() if code not in (COMPLETE, REQUEUE)]
    for rank in (refused or failed)[:1]:
        status = BAD_INPUT if refused else FAILED
        return Verdict(status, f"rank {rank} ended with exit status {codes[rank]}", rank)
    if killed:
        stands = "what was saved before stands" if can_resume else "there is no checkpoint to go on from"
        sentence = f"ranks {_named(killed)} did not leave within run.grace_s and were killed; {stands}"
        return Verdict(REQUEUE if can_resume else FAILED, sentence, min(killed), signal.SIGKILL.name)
    if left:
        return Verdict(REQUEUE, f"ranks {_named(left)} left before they had begun")
    if REQUEUE in codes.values():
        return Verdict(REQUEUE, "the ranks ask to be started again")
    return Verdict(COMPLETE, "complete")


def _named(ranks: Collection[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
