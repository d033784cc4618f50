"""The exit statuses of a run, for whoever started it."""

COMPLETE = 0
FAILED = 1
BAD_INPUT = 2
"""The recipe, the command or the run directory is wrong. Do not requeue: a new start ends in the same way."""
REQUEUE = 75
"""The run ended early with everything saved; a new start resumes it (sysexits' EX_TEMPFAIL)."""
HUNG = 76
"""A process hung: the watchdog wrote all stacks into the run directory and ended the run."""


class Preempted(Exception):
    """The run left as it was asked to; `status` says whether it may be started again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
