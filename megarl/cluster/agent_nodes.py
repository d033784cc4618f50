"""How a node's ranks ended, and how the agents of several nodes agree to restart or to end.

Ranks find their peers under the number of the start, so all nodes must count starts alike. The agent whose ranks fail first
publishes their end in the store of node 0's agent; then all agents restart their ranks together, or end.

torch's c10d rendezvous does not fit (2.13): it numbers nodes by address, while node 0 must be the head of Ray; each agent
counts its own restarts; and an agent waits without a deadline for a store whose machine is gone.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from megarl.telemetry.exit_status import COMPLETE, FAILED, REQUEUE

# How long an agent waits for the store.
ANSWER_S = 30.0
POLL_S = 0.5
# How long node 0's agent keeps the store, so that other nodes read how the job ended.
LINGER_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """How a node's ranks ended: exit status, reason, the rank and signal at fault, and whether the node restarts them."""

    status: int
    sentence: str
    rank: int | None = None
    signal: str | None = None
    restarts: bool = False

    @property
    def ends_job(self) -> bool:
        """Whether ranks of other nodes would wait forever for this node. Finished ranks let the others finish too."""
        return not self.restarts and self.status not in (COMPLETE, REQUEUE)


STORE_GONE = Outcome(FAILED, "the agent of node 0 is gone, or does not answer")


class OtherNodes:
    """The agents of the other nodes. Only one thread talks to the store: torch has no deadline for a store whose machine is
    gone (2.13)."""

    def __init__(self, store: Store, num_nodes: int, keeps_store: bool) -> None:
        self._store, self._num_nodes, self._keeps_store = PrefixStore("megarl/ends", store), num_nodes, keeps_store
        self._local: dict[int, Outcome] = {}
        self._agreed: dict[int, Outcome] = {}
        self._is_gone = False
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="other nodes", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, host: str, port: int, run_id: str, num_nodes: int, keeps_store: bool) -> OtherNodes:
        """Connect to the store of node 0's agent."""
        store = TCPStore(host, port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)
        return cls(PrefixStore(run_id, store), num_nodes, keeps_store)

    def agreed(self, start: int) -> Outcome | None:
        """Return the first outcome that a node published for a start; None if there is none yet."""
        return self._agreed.get(start, STORE_GONE if self._is_gone else None)

    def publish(self, start: int, outcome: Outcome) -> Outcome:
        """Publish this node's outcome and return the first published one, which counts for all nodes."""
        with self._news:
            self._local[start] = outcome
            self._news.wait_for(lambda: self.agreed(start) is not None, ANSWER_S)
        return self.agreed(start) or STORE_GONE

    def close(self) -> None:
        """End the thread, because Python aborts at exit while it is inside the store."""
        self._closed.set()
        self._thread.join(ANSWER_S)

    def _exchange(self) -> None:
        start = 0
        try:
            while not self._closed.wait(POLL_S):
                # Poll, because torch logs an error for each wait that times out (2.13).
                if start in self._local:
                    text = self._store.compare_set(str(start), "", json.dumps(asdict(self._local[start])))
                elif self._store.check([str(start)]):
                    text = self._store.get(str(start))
                else:
                    continue
                outcome = Outcome(**json.loads(text))
                num_informed = self._store.add(f"informed {start}", 1)
                with self._news:
                    self._agreed[start] = outcome
                    self._news.notify_all()
                if outcome.ends_job:
                    end = time.monotonic() + LINGER_S
                    while self._keeps_store and num_informed < self._num_nodes and time.monotonic() < end:
                        time.sleep(POLL_S / 5)
                        num_informed = self._store.add(f"informed {start}", 0)
                    return
                start += 1
        except DistError:  # node 0's agent has ended, so nobody restarts ranks
            with self._news:
                self._is_gone = True
                self._news.notify_all()
