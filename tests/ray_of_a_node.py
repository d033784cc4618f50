"""The Ray of one node, as `megarl.cluster.node` starts it, with an actor that has a child, as engines have. Sends all
of them the signals of a preemption, which none may get, then kills the actor alone, which may leave nothing."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import ray

from megarl.cluster.node_settings import read_node_settings
from megarl.cluster.preemption import SIGNALS, keep_holding_signals
from megarl.cluster.processes import Descendants
from megarl.cluster.ray_cluster import join_cluster, start_node_daemons, stop_cluster

DEADLINE_S = 240.0


class WithChild:
    def start(self) -> int:
        keep_holding_signals()
        import multiprocessing

        self.child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        self.child.start()
        return os.getpid()

    def child_lives(self) -> bool:
        return self.child.is_alive()


def main(port: str) -> None:
    settings = read_node_settings({"NUM_NODES": "1", "NODE_RANK": "0", "RANKS_PER_NODE": "1", "MASTER_ADDRESS": "127.0.0.1",
                                   "RAY_PORT": port})  # fmt: skip
    descendants = Descendants()
    with tempfile.TemporaryDirectory(prefix="megarl-", dir=settings.temporary, ignore_cleanup_errors=True) as directory:
        try:
            daemons = psutil.Process(start_node_daemons(settings, Path(directory)).pid)
            join_cluster(settings.ray_address)
            actor = ray.remote(WithChild).options(num_cpus=0).remote()
            engine = psutil.Process(ray.get(actor.start.remote(), timeout=DEADLINE_S))
            of_engine = engine.children()
            assert len(of_engine) == 2, "its child and the tracker of resources"
            everybody = [daemons, *daemons.children(recursive=True)]
            for number in SIGNALS:
                for process in everybody:
                    process.send_signal(number)
            assert ray.get(actor.child_lives.remote(), timeout=DEADLINE_S)
            gone = [process.name() for process in everybody if process.status() == psutil.STATUS_ZOMBIE]
            assert gone == []

            engine.send_signal(signal.SIGKILL)
            end = time.monotonic() + DEADLINE_S
            while any(process.is_running() for process in of_engine) and time.monotonic() < end:
                descendants.tend((daemons.pid,))
                time.sleep(0.1)
            assert [process.cmdline() for process in of_engine if process.is_running()] == []
            stop_cluster()
        finally:
            descendants.end()
    assert psutil.Process().children() == []


if __name__ == "__main__":
    main(sys.argv[1])
