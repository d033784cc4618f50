"""`python -m megarl.cluster.watchdog`, started by the first rank of a node with its settings on stdin."""

import signal
import sys

from megarl.cluster.watchdog_settings import WatcherSettings
from megarl.cluster.watcher import Watcher
from megarl.telemetry.output import endure_output

if __name__ == "__main__":
    endure_output()
    # It ends with the ranks: what ends these must not end it before.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        watcher = Watcher(WatcherSettings.load(sys.stdin.read()))
    except (OSError, ValueError) as error:
        # Mostly the ranks have ended before it was there.
        print(f"watchdog: cannot look at the ranks of this node ({error}): nobody watches them", file=sys.stderr, flush=True)
        sys.exit(0)
    try:
        watcher.watch()
    except BaseException as error:  # whatever ends it: the rank that started it says so, and starts another one
        watcher.say_last(error)
        raise
