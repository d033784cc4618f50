"""A rank that ends as its arguments say: RANK=STATUS, RANK=-SIGNAL; without one it waits for a signal and then asks for a
requeue, rank 0 after `save` seconds and with a file named so. `again=STATUS`: all end with that when they are started again.
With `again`, no rank ends before all have begun. Each start appends a line to `starts`."""

import os
import signal
import sys
import time
from pathlib import Path

RANK = os.environ["RANK"]
words = dict(word.split("=", 1) for word in sys.argv[1:])


def leave(number: int, frame: object) -> None:
    if RANK == "0":
        time.sleep(float(words["save"]))
        Path("saved").write_text(signal.Signals(number).name)
    sys.exit(75)


signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGHUP, leave)
with open(f"starts-{RANK}", "a") as starts:
    starts.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\n")
while "again" in words and len(list(Path().glob("starts-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)
if "again" in words and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit(int(words["again"]))
end = int(words.get(RANK, 0))
if end < 0:
    os.kill(os.getpid(), -end)
if RANK in words:
    sys.exit(end)
time.sleep(600)
