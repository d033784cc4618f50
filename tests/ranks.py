"""Run a function on several gloo ranks of this machine and bring back what each returned."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_S = 300.0


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`function(*args)` in `ranks` fresh processes with a torchrun environment; results in rank order.

    The processes fork from a server that has torch and megatron-core loaded, so that a test does not pay for imports.
    Raises AssertionError with the first failing rank's traceback, or at the deadline with the ranks that are silent.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    answers = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=_rank, args=(answers, function, rank, ranks, port, args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    try:
        while len(results) < ranks:
            try:
                rank, value, failure = answers.get(timeout=1.0)
            except queue.Empty:
                silent = sorted(set(range(ranks)) - set(results))
                assert time.monotonic() < deadline, f"ranks {silent} said nothing for {DEADLINE_S:.0f} s"
                dead = [rank for rank in silent if processes[rank].exitcode not in (None, 0)]
                assert not dead, f"ranks {dead} died: {[processes[rank].exitcode for rank in dead]}"
                continue
            assert failure is None, f"rank {rank}:\n{failure}"
            results[rank] = value
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(ranks)]


def _rank(answers: Any, function: Callable[..., Any], rank: int, ranks: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        answers.put((rank, function(*args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # the manager process a checkpoint started
    os._exit(0)  # skip the teardown of process groups whose peers may be gone
