"""The pool of rank processes that engine tests run on: it tells what failed, and a failure does not reach the next call."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from megarl.models.layout import Layout
from tests.engine_cases import train
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model


def _who():
    return os.getpid(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _stray():
    """A function that leaves much behind."""
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    os.environ["STRAY"] = "here"
    os.chdir("/")
    return torch.rand(1).item()


def _found():
    return dist.is_initialized(), "STRAY" in os.environ, os.getcwd(), torch.rand(1).item()


def _threads_and_files(before=None):
    """How many this rank has; where it had so many `before`, once there are no more: a thread's end takes a moment."""
    end = time.monotonic() + 60
    while True:
        found = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        allowed = found if before is None else before[int(os.environ["RANK"])]
        if all(one <= most for one, most in zip(found, allowed, strict=True)) or time.monotonic() > end:
            return found
        time.sleep(0.05)


def _fail(which):
    if int(os.environ["RANK"]) == which:
        raise ValueError(f"the cause on {which}")
    dist.init_process_group("gloo")  # waits for the rank that fails


def _die(which):
    if int(os.environ["RANK"]) == which:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo")


def _start_a_process():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def _hang(which):
    while int(os.environ["RANK"]) == which:
        time.sleep(0.1)


def test_processes_live_on_and_answer_in_rank_order():
    first, second, alone = run_ranks(_who, 2), run_ranks(_who, 2), run_ranks(_who, 1)
    assert first == second and [one[1:] for one in first] == [(0, 2), (1, 2)]
    assert alone == [(first[0][0], 0, 1)]


def test_nothing_of_a_case_reaches_the_next(tmp_path):
    strayed = run_ranks(_stray, 2)
    assert run_ranks(_found, 2) == [(False, False, os.getcwd(), number) for number in strayed]
    directory = str(save_tiny_model(tmp_path))
    run_ranks(train, 2, directory, {"actor": Layout(tensor=2), "critic": Layout(pipeline=2)}, 1, 64)
    before = run_ranks(_threads_and_files, 2)
    run_ranks(train, 2, directory, {"actor": Layout(tensor=2), "critic": Layout(pipeline=2)}, 1, 64)
    after = run_ranks(_threads_and_files, 2, before)
    for found, allowed in zip(after, before, strict=True):
        assert found[0] <= allowed[0] and found[1] <= allowed[1], "groups and their threads go with the engines"


@pytest.mark.parametrize(
    "function,deadline_s,says",
    [
        (_fail, 240.0, "rank 1:\n(?s:.*)in _fail(?s:.*)ValueError: the cause on 1"),
        (_die, 240.0, "rank 1 died: exit code -9"),
        (_hang, 5.0, r"ranks \[1\] said nothing for 5 s\nrank 1:\n(?s:.*)in _hang"),
    ],
)
def test_a_rank_that_fails_dies_or_hangs_is_named_and_the_next_case_runs(function, deadline_s, says):
    before = run_ranks(_who, 2)
    with pytest.raises(AssertionError, match=says):
        run_ranks(function, 2, 1, deadline_s=deadline_s)
    after = run_ranks(_who, 2)
    assert not {pid for pid, _, _ in before} & {pid for pid, _, _ in after}, "new processes"


def test_no_process_of_a_rank_outlives_a_failure():
    started = run_ranks(_start_a_process, 2)
    assert all(psutil.pid_exists(pid) for pid in started)
    with pytest.raises(AssertionError):
        run_ranks(_fail, 2, 0)
    end = time.monotonic() + 60
    while alive := [pid for pid in started if _lives(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
