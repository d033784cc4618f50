"""What the process beside the ranks is told when it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from megarl.cluster.watchdog_judge import Deadlines

# What a rank is told: that it hangs, with a folder for what it knows; then, or from itself, that this is over.
TOLD, OVER = b"h", b"o"
# Or that some rank of its node has ended: one that has lost a peer need not wait to be told of a hang.
ENDING = b"e"
RECORDER = "flight-recorder-"


@dataclass(frozen=True)
class WatchedRank:
    """A rank of this node: its process, and two files of that."""

    rank: int
    place: str
    pid: int
    beats: int
    ear: int
    """The end of a pipe to it."""


@dataclass(frozen=True)
class WatcherSettings:
    """`node` 0 judges; the others connect to `master` there and say `token`, which also marks the run's processes."""

    run: str
    node: int
    ranks: tuple[WatchedRank, ...]
    deadlines: Deadlines
    stacks_s: float
    token: str
    master: tuple[str, int] | None = None
    listener: int | None = None
    """File of node 0's socket, where there are several nodes."""
    words: int | None = None
    """File for what it has to say when it ends too early."""
    num_nodes: int = 1
    """Those that have ranks."""
    replaces: bool = False
    """One before it has ended too early."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> WatcherSettings:
        content = json.loads(text)
        content["ranks"] = tuple(WatchedRank(**one) for one in content["ranks"])
        content["deadlines"] = Deadlines(**content["deadlines"])
        content["master"] = None if content["master"] is None else tuple(content["master"])
        return cls(**content)
