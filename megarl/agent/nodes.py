"""What the agents of several nodes tell each other when ranks fail, through the store that node 0's agent keeps.

Each start of the ranks has a number, the same on all nodes: a rank looks for its peers under it. So the first node whose
ranks fail says so, and all go on to the next number together.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

# What a store that is there answers within; one that is not leaves the caller without an answer for many minutes.
ANSWER_S = 30.0
LISTEN_S = 0.5


@dataclass(frozen=True)
class Failure:
    """Why the ranks of a node have ended, all of one start; `again`: that node starts its ranks again."""

    again: bool
    sentence: str


NO_ANSWER = Failure(False, "the agent of node 0 has gone, or does not answer")


class OtherNodes:
    """The other nodes' agents. `store` is torchrun's, for what this node says; `listening` a connection of its own to the
    same one, for a thread that waits for what is said."""

    def __init__(self, store: Store, listening: Store) -> None:
        self._store, self._listening = _room(store), _room(listening)
        self._heard: dict[int, Failure] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="other nodes", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, store: Store, master: str, port: int, run_id: str) -> OtherNodes:
        """Those of a job with a fixed master, whose `store` is under `run_id`."""
        own = TCPStore(master, port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)
        return cls(store, PrefixStore(run_id, own))

    def heard(self, start: int) -> Failure | None:
        """What the first node to fail has said of this start."""
        return self._heard.get(start)

    def tell(self, start: int, failure: Failure) -> Failure:
        """Say why this node's ranks have ended; what the first node to fail has said, which counts for all of them."""
        said = _within(lambda: self._store.compare_set(str(start), "", json.dumps(asdict(failure))), ANSWER_S)
        return NO_ANSWER if said is None else Failure(**json.loads(said))

    def close(self) -> None:
        """Listen no more: a thread that is in the store when Python ends would end it with an abort."""
        self._over.set()
        self._thread.join(ANSWER_S)

    def _listen(self) -> None:
        start = 0
        while not self._over.wait(LISTEN_S):
            try:
                # Asked again and again: torch logs every wait that ends with nothing (2.13).
                if self._listening.check([str(start)]):
                    self._heard[start] = Failure(**json.loads(self._listening.get(str(start))))
                    start += 1
            except DistError:  # node 0's agent has ended: nobody is started again
                return


def _room(store: Store) -> Store:
    return PrefixStore("megarl/failed", store)


def _within(call: Callable[[], bytes], timeout_s: float) -> bytes | None:
    """The answer of a call to the store, or None: torch has no deadline for a server whose machine is gone (2.13)."""
    answers: list[bytes] = []

    def ask() -> None:
        try:
            answers.append(call())
        except DistError:  # it is known to be gone
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    return answers[0] if answers else None
