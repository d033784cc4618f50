"""What the agents of several nodes tell each other when ranks end, through the store that node 0's agent keeps.

Each start of the ranks has a number, the same on all nodes: a rank looks for its peers under it. So the first node whose
ranks fail says so, and all go on to the next number together, or end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from megarl.telemetry.exit_status import COMPLETE, FAILED, REQUEUE

# What a store that is there answers within; one that is not leaves the caller without an answer for many minutes.
ANSWER_S = 30.0
LISTEN_S = 0.5
# How long node 0's agent, and the store with it, stays for the others to hear what was said.
HEARD_S = 10.0


@dataclass(frozen=True)
class End:
    """Why the ranks of a node have ended, all of one start; `again`: that node starts its ranks again."""

    again: bool
    status: int
    sentence: str

    @property
    def is_final(self) -> bool:
        """Whether ranks of other nodes would wait for those of this one for ever: not for some that have finished."""
        return not self.again and self.status not in (COMPLETE, REQUEUE)


NO_ANSWER = End(False, FAILED, "the agent of node 0 has gone, or does not answer")


class OtherNodes:
    """The other nodes' agents. `store` is torchrun's, for what this node says; `listening` a connection of its own to the
    same one, for a thread that waits for what is said."""

    def __init__(self, store: Store, listening: Store) -> None:
        self._store, self._listening = _room(store), _room(listening)
        self._heard: dict[int, End] = {}
        self._gone = False
        self._counted: set[int] = set()
        self._counting = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="other nodes", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, store: Store, master: str, port: int, run_id: str) -> OtherNodes:
        """Those of a job with a fixed master, whose `store` is under `run_id`."""
        own = TCPStore(master, port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)
        return cls(store, PrefixStore(run_id, own))

    def heard(self, start: int) -> End | None:
        """What the first node whose ranks ended has said of this start."""
        return self._heard.get(start, NO_ANSWER if self._gone else None)

    def tell(self, start: int, end: End) -> End:
        """Say why this node's ranks have ended; what the first node to say so has said, which counts for all of them."""
        if start in self._heard:  # and node 0's agent, with the store, may have gone since
            return self._heard[start]

        def ask() -> bytes:
            said: bytes = self._store.compare_set(str(start), "", json.dumps(asdict(end)))
            self._count(self._store, start)
            return said

        said = _within(ask, ANSWER_S)
        return NO_ANSWER if said is None else End(**json.loads(said))

    def wait_until_heard(self, start: int, num_nodes: int) -> None:
        """For the node that keeps the store, before it leaves: until all have heard, those that are there."""
        until = time.monotonic() + HEARD_S
        while not self._gone and time.monotonic() < until:
            if self._store.add(f"heard {start}", 0) >= num_nodes:
                return
            time.sleep(LISTEN_S / 5)

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
                    self._heard[start] = End(**json.loads(self._listening.get(str(start))))
                    self._count(self._listening, start)
                    if self._heard[start].is_final:
                        return
                    start += 1
            except DistError:  # node 0's agent has ended: nobody is started again
                self._gone = True
                return

    def _count(self, store: Store, start: int) -> None:
        """This node is one more that has heard what was said of a start."""
        with self._counting:
            if start not in self._counted:
                self._counted.add(start)
                store.add(f"heard {start}", 1)


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
