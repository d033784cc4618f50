"""The agent's verdict on the ends of its ranks, and the time that ranks have to leave."""

import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from megarl.cluster import node_agent
from megarl.cluster.node_agent import STORE_GONE, OtherNodes, Outcome, judge, main
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, HUNG, REQUEUE
from tests.ports import unused_port
from tests.ranks import run_ranks

DEADLINE_S = 240
TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL


@pytest.mark.parametrize(
    ("ended", "killed", "signals", "can_resume", "status", "words"),
    [
        ({0: 0, 1: 0}, (), (), False, COMPLETE, "complete"),
        ({0: 75, 1: 75}, (), (USR1,), True, REQUEUE, "started again"),
        ({0: 75, 1: 0}, (), (), True, REQUEUE, "started again"),
        ({1: 75}, (), (), False, REQUEUE, "started again"),
        ({0: 75, 1: 3}, (), (USR1,), True, FAILED, "rank 1 ended with exit status 3"),
        ({0: 1, 1: 2}, (), (), True, BAD_INPUT, "rank 1 ended with exit status 2"),
        ({2: -KILL}, (), (), True, FAILED, "rank 2 was killed by SIGKILL"),
        ({0: 75, 3: -signal.SIGSEGV}, (), (TERM,), True, FAILED, "rank 3 was killed by SIGSEGV"),
        # The agent forwarded a signal before the rank had its handler: the signal killed the rank, or Ray's handler ended
        # it.
        ({0: 75, 1: -TERM}, (), (TERM,), False, REQUEUE, "ranks 1 left before"),
        ({0: 15}, (), (TERM,), False, REQUEUE, "ranks 0 left before"),
        ({0: -TERM}, (), (USR1,), False, FAILED, "rank 0 was killed by SIGTERM"),
        ({}, (0, 1), (TERM,), True, REQUEUE, "ranks 0, 1 did not leave within run.grace_s"),
        ({0: 75}, (1,), (TERM,), False, FAILED, "no checkpoint to resume from"),
        ({0: -KILL, 1: HUNG}, (0,), (), True, HUNG, "the watchdog has ended the run"),
    ],
)
def test_the_exit_status_is_that_of_the_ranks_that_ended_by_themselves(ended, killed, signals, can_resume, status, words):
    outcome = judge(ended, killed, signals, can_resume)
    assert outcome.status == status and words in outcome.sentence, outcome


PROGRAM = str(Path(__file__).parents[1] / "exiting_rank.py")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload"])


def _run_agent(folder, arguments):
    """An agent that waits one second instead of ten to fifteen, in a process of its own."""
    os.chdir(folder)
    os.dup2(os.open(f"errors-{os.getpid()}", os.O_CREAT | os.O_WRONLY), 2)
    node_agent.REFUSAL_S = node_agent.STRAGGLER_S = 1.0
    sys.exit(main(arguments))


@contextmanager
def _agent(folder, *words, node=None, port=0, restarts=1):
    """Start an agent with two ranks, alone or as a `node` of two; end it with the test."""
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    options = ["--nproc-per-node", "2", "--max-restarts", str(restarts), *(["--standalone"] if node is None else place)]
    agent = CONTEXT.Process(target=_run_agent, args=(folder, [*options, PROGRAM, *words]))
    agent.start()
    try:
        yield agent
    finally:
        if agent.is_alive():
            for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
                process.kill()
            agent.join()


def _ended(agent, folder):
    """Return the exit status of an agent, and what it said."""
    agent.join(DEADLINE_S)
    return agent.exitcode, (folder / f"errors-{agent.pid}").read_text()


def test_a_signal_reaches_the_ranks_and_a_slow_rank_may_finish_and_no_rank_restarts(tmp_path):
    with _agent(tmp_path, "save=3") as agent:
        end = time.monotonic() + DEADLINE_S
        while not all((tmp_path / f"starts-{rank}").is_file() for rank in "01"):
            assert agent.is_alive() and time.monotonic() < end
            time.sleep(0.1)
        os.kill(agent.pid, signal.SIGHUP)
        status, errors = _ended(agent, tmp_path)
    assert status == REQUEUE, errors
    # Rank 1 left three seconds earlier, and the agent did not stop rank 0.
    assert (tmp_path / "saved").read_text() == "SIGHUP"
    assert (tmp_path / "starts-0").read_text() == "0\n"


@pytest.mark.parametrize(
    ("status", "words"),
    [(BAD_INPUT, "rank 1 ended with exit status 2"), (HUNG, "the watchdog has ended the run")],
)
def test_ranks_that_refuse_or_hung_are_not_restarted(tmp_path, status, words):
    with _agent(tmp_path, f"1={status}") as agent:
        ended, errors = _ended(agent, tmp_path)
    assert ended == status and words in errors, errors
    assert (tmp_path / "starts-1").read_text() == "0\n"


def test_a_rendezvous_of_changing_nodes_is_refused(capsys):
    assert main(["--nnodes", "2", "--rdzv-backend", "c10d", "-m", "megarl", "recipe.yaml"]) == BAD_INPUT
    errors = capsys.readouterr().err
    assert "--rdzv-backend = c10d" in errors and "--nnodes = 2" in errors and "--master-addr" in errors


@pytest.mark.parametrize("restarts", [1, 0])
def test_a_rank_killed_on_one_node_restarts_or_ends_the_ranks_of_both(tmp_path, restarts):
    """Without the agents' agreement the other ranks would sleep for minutes: no rank of the first node fails."""
    settings = {"port": unused_port(), "restarts": restarts}
    with (
        _agent(tmp_path, "3=-9", "again=0", node=0, **settings) as first,
        _agent(tmp_path, "3=-9", "again=0", node=1, **settings) as second,
    ):
        statuses, errors = zip(*(_ended(agent, tmp_path) for agent in (first, second)), strict=True)
    assert statuses == (COMPLETE if restarts else FAILED,) * 2, errors
    assert [(tmp_path / f"starts-{rank}").read_text() for rank in range(4)] == ["0\n1\n" if restarts else "0\n"] * 4
    assert restarts or "megarl.cluster.node_agent: on another node rank 3 was killed by SIGKILL" in errors[0]
    assert restarts or "megarl.cluster.node_agent: rank 3 was killed by SIGKILL" in errors[1]


def test_no_node_restarts_ranks_without_the_store_of_node_0():
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    others = OtherNodes("127.0.0.1", server.port, "job", 2, keeps_store=False)
    del server
    assert others.publish(0, Outcome(FAILED, "rank 3 was killed by SIGKILL", restarts=True)) == STORE_GONE
    others.close()


def _start_twice(port):
    """Return the sum over all ranks in a first and a second start, which use the same store of torchrun."""
    from megarl.platform import current

    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sums = []
    for start in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
        current.start_process_group(int(os.environ["LOCAL_RANK"]), 60.0)
        ones = torch.ones(())
        dist.all_reduce(ones)
        sums.append(ones.item())
        dist.destroy_process_group()
    return sums


def test_restarted_ranks_find_each_other_and_not_the_ranks_before():
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    assert run_ranks(_start_twice, 2, store.port) == [[2.0, 2.0]] * 2
