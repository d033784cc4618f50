"""What the agent makes of its ranks' ends, and that they have their time to leave."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.agent import judge
from megarl.exit_status import BAD_INPUT, COMPLETE, FAILED, REQUEUE

DEADLINE_S = 240
TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL


@pytest.mark.parametrize(
    ("ended", "killed", "asked", "can_resume", "status", "words"),
    [
        ({0: 0, 1: 0}, (), (), False, COMPLETE, "complete"),
        ({0: 75, 1: 75}, (), (USR1,), True, REQUEUE, "started again"),
        ({0: 75, 1: 0}, (), (), True, REQUEUE, "started again"),
        ({1: 75}, (), (), False, REQUEUE, "started again"),
        ({0: 75, 1: 3}, (), (USR1,), True, FAILED, "rank 1 ended with exit status 3"),
        ({0: 1, 1: 2}, (), (), True, BAD_INPUT, "rank 1 ended with exit status 2"),
        ({2: -KILL}, (), (), True, FAILED, "rank 2 was killed by SIGKILL"),
        ({0: 75, 3: -signal.SIGSEGV}, (), (TERM,), True, FAILED, "rank 3 was killed by SIGSEGV"),
        # Signals that the agent passed on, before the rank's handler was there: its own end by one, and Ray's handler's.
        ({0: 75, 1: -TERM}, (), (TERM,), False, REQUEUE, "ranks 1 left before"),
        ({0: 15}, (), (TERM,), False, REQUEUE, "ranks 0 left before"),
        ({0: -TERM}, (), (USR1,), False, FAILED, "rank 0 was killed by SIGTERM"),
        ({}, (0, 1), (TERM,), True, REQUEUE, "ranks 0, 1 did not leave within run.grace_s"),
        ({0: 75}, (1,), (TERM,), False, FAILED, "no checkpoint to go on from"),
    ],
)
def test_the_exit_status_is_that_of_the_ranks_that_ended_by_themselves(ended, killed, asked, can_resume, status, words):
    verdict = judge(ended, killed, asked, can_resume)
    assert verdict.status == status and words in verdict.sentence, verdict


@contextmanager
def _agent(folder, *words):
    """It ends with the test, whatever becomes of that."""
    program = Path(__file__).with_name("exiting_rank.py")
    command = [sys.executable, "-m", "megarl.agent", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += [str(program), *words]
    agent = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield agent
    finally:
        if agent.poll() is None:
            for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
                process.kill()
            agent.communicate()


def test_a_signal_reaches_the_ranks_and_a_slow_one_may_finish_and_none_is_restarted(tmp_path):
    with _agent(tmp_path, "save=3") as agent:
        end = time.monotonic() + DEADLINE_S
        while not all((tmp_path / f"starts-{rank}").is_file() for rank in "01"):
            assert agent.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        os.kill(agent.pid, signal.SIGUSR1)
        _, said = agent.communicate(timeout=DEADLINE_S)
    assert agent.returncode == REQUEUE, said
    assert (tmp_path / "saved").read_text() == "SIGUSR1", "rank 1 left three seconds before, and nobody stopped rank 0"
    assert (tmp_path / "starts-0").read_text() == "0\n"


@pytest.mark.parametrize(
    ("end", "status", "starts", "words"),
    [("-9", FAILED, "0\n1\n", "rank 1 was killed by SIGKILL"), ("2", BAD_INPUT, "0\n", "rank 1 ended with exit status 2")],
)
def test_a_killed_rank_is_restarted_and_a_refusal_is_not(tmp_path, end, status, starts, words):
    with _agent(tmp_path, f"1={end}") as agent:
        _, said = agent.communicate(timeout=DEADLINE_S)
    assert agent.returncode == status and words in said, said
    assert (tmp_path / "starts-1").read_text() == starts
