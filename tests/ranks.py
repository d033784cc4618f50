"""Run a function on several gloo ranks of this machine and bring back what each returned.

The ranks are processes that live on from call to call, because starting them costs more than most of what they run. Between
two calls each destroys its process groups and is put back: environment, working directory, random state, megatron-core's
globals. A function that changes a module puts it back itself.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.ports import unused_port

DEADLINE_S = 300.0
STACKS_S = 60.0  # in which ranks that hang write where
SETTLE_S = 0.25  # in which what they write does not grow any more
END_S = 30.0
CLEAN, END = b"clean", b""


class RankPool:
    """Rank processes, as many as the largest call so far; one of n ranks uses the first n."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preload"])
        self._processes: list[Any] = []
        self._connections: list[multiprocessing.connection.Connection] = []
        self._owner = os.getpid()

    def run(self, function: Callable[..., Any], ranks: int, *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """`function(*args)` on ranks 0 … ranks-1 with a torchrun environment; results in rank order.

        Raises AssertionError with the first failing rank's traceback, with the exit code of a rank that died, or at the
        deadline with the ranks that are silent and where they hang. Then new processes are started for the next call.
        """
        environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(unused_port())}  # fmt: skip
        case = pickle.dumps((function, args, environment, os.getcwd()))
        try:
            while len(self._processes) < ranks:
                self._start_one()
            for connection in self._connections[:ranks]:
                connection.send_bytes(case)
            results = self._collect(ranks, deadline_s)
            for connection in self._connections[:ranks]:
                connection.send_bytes(CLEAN)  # not before: groups are in use until the last rank has answered
        except BaseException:
            self.close(at_once=True)
            raise
        return results

    @functools.cached_property
    def _stacks(self) -> Path:
        """The folder of the ranks' stacks. A process that only imports this module, as each rank does, has no folder."""
        return Path(tempfile.mkdtemp(prefix="megarl-ranks-"))

    def _start_one(self) -> None:
        ours, theirs = self._context.Pipe()
        rank = len(self._processes)
        process = self._context.Process(target=_serve, args=(theirs, rank, self._stacks / str(rank)))
        process.start()
        theirs.close()  # the process has its own; without this its death would not end our reading
        self._processes.append(process)
        self._connections.append(ours)

    def _collect(self, ranks: int, deadline_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        end = time.monotonic() + deadline_s
        while len(results) < ranks:
            waiting = {self._connections[rank]: rank for rank in range(ranks) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} said nothing for {deadline_s:.0f} s\n" + self._where(waiting)
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    value, failure = pickle.loads(self._connections[rank].recv_bytes())
                except EOFError:
                    self._processes[rank].join(timeout=END_S)
                    raise AssertionError(f"rank {rank} died: exit code {self._processes[rank].exitcode}") from None
                assert failure is None, f"rank {rank}:\n{failure}"
                results[rank] = value
        return [results[rank] for rank in range(ranks)]

    def _where(self, waiting: dict[Any, int]) -> str:
        for rank in waiting.values():
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        files, end = [self._stacks / str(rank) for rank in waiting.values()], time.monotonic() + STACKS_S
        sizes: list[int] = []
        while time.monotonic() < end:
            before, sizes = sizes, [file.stat().st_size for file in files]
            if sizes == before and all(sizes):
                break
            time.sleep(SETTLE_S)
        return "\n".join(f"rank {file.name}:\n{file.read_text()}" for file in files)

    def close(self, at_once: bool = False) -> None:
        """End the processes; `at_once` those that may hang."""
        if os.getpid() != self._owner:  # a fork of the process that owns them
            return
        for process, connection in zip(self._processes, self._connections, strict=True):
            if at_once:
                _kill_with_children(process.pid)
            else:
                connection.send_bytes(END)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(timeout=END_S)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        if self._processes:
            shutil.rmtree(self._stacks)
            del self._stacks
        self._processes.clear()
        self._connections.clear()


def _kill_with_children(pid: int) -> None:
    """A rank that saved a checkpoint has a process of its own for that, which would live on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(pid)
        for process in (*rank.children(recursive=True), rank):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _serve(connection: multiprocessing.connection.Connection, rank: int, stack: Path) -> None:
    """A rank's process: case after case until the owner says END or is gone."""
    import torch

    torch.set_num_threads(1)
    before = dict(os.environ) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    random_state = torch.get_rng_state()
    caches = [cache for cache in gc.get_objects() if isinstance(cache, functools._lru_cache_wrapper)]
    caches = [cache for cache in caches if cache.__module__.startswith("megatron.core")]
    gc.freeze()  # what is loaded now stays; the collections between the cases need not look at it
    gc.freeze = lambda: None  # a whole run freezes its models and groups, which nothing would then collect
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            while (message := connection.recv_bytes()) != END:
                if message == CLEAN:
                    _clean_up(caches)
                    continue
                torch.set_rng_state(random_state)
                connection.send_bytes(_answer(message, before))
        except (EOFError, OSError):  # the owner is gone, before a case or in the middle of one
            pass
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # the manager process a checkpoint started
    os._exit(0)  # skip the teardown of process groups whose peers may be gone


def _answer(message: bytes, environment: dict[str, str]) -> bytes:
    try:
        os.environ.clear()
        os.environ.update(environment)
        function, args, more, folder = pickle.loads(message)
        os.environ.update(more)
        os.chdir(folder)
        return pickle.dumps((function(*args), None))
    except BaseException:  # SystemExit too: it is an answer, and the process serves on
        return pickle.dumps((None, traceback.format_exc()))


def _clean_up(caches: list[Any]) -> None:
    import torch.distributed as dist

    from megarl.megatron import parallel

    from megatron.core.distributed import DistributedDataParallel  # isort: skip

    # A trained model is held by the hooks of autograd nodes that it holds, and no collector sees that circle; in it are its
    # engine, its optimizer and all groups with their threads.
    tracked = None
    for tracked in gc.get_objects():
        if issubclass(type(tracked), DistributedDataParallel):  # `isinstance` follows weak proxies, which may be dead
            vars(tracked).clear()
    del tracked
    for cache in caches:  # rotary embeddings hold their context group
        cache.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    parallel._control = None  # of the ranks before: the next ones are others, or more of them
    vars(parallel.parallel_state).update(parallel._NO_PLACE)
    parallel.get_cuda_rng_tracker().reset()
    gc.collect()


_POOL = RankPool()
atexit.register(_POOL.close)
run_ranks = _POOL.run
