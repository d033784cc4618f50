"""What a run's exit status says to whoever started it."""

COMPLETE = 0
FAILED = 1
BAD_INPUT = 2
"""The recipe, the command or the run directory: starting it again gives the same, so do not requeue."""
REQUEUE = 75
"""Ended before its time with everything saved: start it again, and it goes on (sysexits' EX_TEMPFAIL)."""
HUNG = 76
"""Some process did not go on: the watchdog has written the stacks of all into the run directory, and ended the run."""


class Preempted(Exception):
    """The run has left as it was asked to; `status` says whether it may be started again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
