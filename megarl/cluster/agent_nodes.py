"""How a node's ranks ended, and how the agents of several nodes agree on what follows.

All nodes must count starts alike, because ranks find their peers under the number of the start. So the agent whose ranks
fail first publishes their end in the store of node 0's agent, and all agents start their ranks again together, or end.

torch's c10d rendezvous does not serve here (2.13): it numbers nodes by address, and node 0 must be the head of Ray; each
agent counts its own restarts; and an agent waits without a deadline for a store whose machine is gone.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from megarl.telemetry.exit_status import COMPLETE, FAILED, REQUEUE

# How long an agent waits for an answer of the store.
ANSWER_S = 30.0
POLL_S = 0.5
# How long node 0's agent keeps the store for the other nodes to read how the job ended.
LINGER_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a node ended: exit status, a sentence, the rank and signal that explain it, and whether the node
    starts its ranks again."""

    status: int
    sentence: str
    rank: int | None = None
    signal: str | None = None
    restarts: bool = False

    @property
    def ends_job(self) -> bool:
        """Whether ranks of other nodes would wait for this node's ranks forever. Ranks that finished let them finish too."""
        return not self.restarts and self.status not in (COMPLETE, REQUEUE)


STORE_GONE = Outcome(FAILED, "the agent of node 0 is gone, or does not answer")


class OtherNodes:
    """The agents of the other nodes. One thread alone talks to the store, so that a store whose machine is gone blocks only
    this thread: torch has no deadline for it (2.13)."""

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
        """Publish why this node's ranks ended, and return the first published outcome, which counts for all nodes."""
        with self._news:
            self._local[start] = outcome
            self._news.wait_for(lambda: self.agreed(start) is not None, ANSWER_S)
        return self.agreed(start) or STORE_GONE

    def close(self) -> None:
        """End the thread: Python would abort at exit if it were inside the store."""
        self._closed.set()
        self._thread.join(ANSWER_S)

    def _exchange(self) -> None:
        start = 0
        try:
            while not self._closed.wait(POLL_S):
                # Polling: torch logs an error for every wait that times out (2.13).
                if start in self._local:
                    text = self._store.compare_set(str(start), "", json.dumps(asdict(self._local[start])))
                elif self._store.check([str(start)]):
                    text = self._store.get(str(start))
                else:
                    continue
                outcome = Outcome(**json.loads(text))
                num_told = self._store.add(f"told {start}", 1)
                with self._news:
                    self._agreed[start] = outcome
                    self._news.notify_all()
                if outcome.ends_job:
                    end = time.monotonic() + LINGER_S
                    while self._keeps_store and num_told < self._num_nodes and time.monotonic() < end:
                        time.sleep(POLL_S / 5)
                        num_told = self._store.add(f"told {start}", 0)
                    return
                start += 1
        except DistError:  # node 0's agent has ended: nobody starts ranks again
            with self._news:
                self._is_gone = True
                self._news.notify_all()
