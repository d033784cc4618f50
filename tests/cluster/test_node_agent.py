"""The agent's verdict on the ends of its ranks, and the time that ranks have to leave."""

import os
import signal
import subprocess
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

from megarl.cluster.node_agent import STORE_GONE, OtherNodes, Outcome, judge, main
from megarl.telemetry.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE
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
    ],
)
def test_the_exit_status_is_that_of_the_ranks_that_ended_by_themselves(ended, killed, signals, can_resume, status, words):
    outcome = judge(ended, killed, signals, can_resume)
    assert outcome.status == status and words in outcome.sentence, outcome


# An agent that waits one second instead of ten to fifteen.
AGENT = """
import sys
from megarl.cluster import node_agent as agent
agent.REFUSAL_S = agent.STRAGGLER_S = 1.0
sys.exit(agent.main(sys.argv[1:]))
"""


@contextmanager
def _agent(folder, *words, node=None, port=0, restarts=1):
    """Start an agent with two ranks, alone or as a `node` of two; end it with the test."""
    program = Path(__file__).parents[1].joinpath("exiting_rank.py")
    command = [sys.executable, "-c", AGENT, "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command += [*(["--standalone"] if node is None else place), str(program), *words]
    agent = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield agent
    finally:
        if agent.poll() is None:
            for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
                process.kill()
            agent.communicate()


def test_a_signal_reaches_the_ranks_and_a_slow_rank_may_finish_and_no_rank_restarts(tmp_path):
    with _agent(tmp_path, "save=3") as agent:
        end = time.monotonic() + DEADLINE_S
        while not all((tmp_path / f"starts-{rank}").is_file() for rank in "01"):
            assert agent.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        os.kill(agent.pid, signal.SIGHUP)
        _, errors = agent.communicate(timeout=DEADLINE_S)
    assert agent.returncode == REQUEUE, errors
    assert (tmp_path / "saved").read_text() == "SIGHUP", (
        "rank 1 left three seconds earlier, and the agent did not stop rank 0"
    )
    assert (tmp_path / "starts-0").read_text() == "0\n"


@pytest.mark.parametrize(
    ("end", "status", "starts", "words"),
    [("-9", FAILED, "0\n1\n", "rank 1 was killed by SIGKILL"), ("2", BAD_INPUT, "0\n", "rank 1 ended with exit status 2")],
)
def test_a_killed_rank_is_restarted_and_a_refusal_is_not(tmp_path, end, status, starts, words):
    with _agent(tmp_path, f"1={end}") as agent:
        _, errors = agent.communicate(timeout=DEADLINE_S)
    assert agent.returncode == status and words in errors, errors
    assert (tmp_path / "starts-1").read_text() == starts


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
        errors = [agent.communicate(timeout=DEADLINE_S)[1] for agent in (first, second)]
    assert [first.returncode, second.returncode] == [COMPLETE if restarts else FAILED] * 2, errors
    assert [(tmp_path / f"starts-{rank}").read_text() for rank in range(4)] == ["0\n1\n" if restarts else "0\n"] * 4
    assert restarts or "megarl.cluster.node_agent: on another node rank 3 was killed by SIGKILL" in errors[0]
    assert restarts or "megarl.cluster.node_agent: rank 3 was killed by SIGKILL" in errors[1]


def test_no_node_restarts_ranks_without_the_store_of_node_0():
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    others = OtherNodes.connect("127.0.0.1", server.port, "job", 2, keeps_store=False)
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
