"""What a run's exit status says to whoever started it. Floor 0: `megarl check` reads it too."""

COMPLETE = 0
FAILED = 1
BAD_INPUT = 2
"""The recipe, the command or the run directory: starting it again gives the same, so do not requeue."""
REQUEUE = 75
"""Ended before its time with everything saved: start it again, and it goes on (sysexits' EX_TEMPFAIL)."""
HUNG = 76
"""Some process did not go on: the watchdog has written the stacks of all into the run directory, and ended the run."""
