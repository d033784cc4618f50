"""A run that must leave saves and leaves on all ranks, and resumes bit for bit, with each step once in its sinks and sample
tables; the rules of preemption on their own. The uninterrupted run is also profiled."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from megarl.cluster import preemption
from megarl.cluster.node import ForwardedSignals
from megarl.cluster.preemption import SIGNALS, Abandoned, Asked, LeaveNow, Preemption, handle_signals
from megarl.telemetry.disk import read_lines
from megarl.telemetry.exit_status import FAILED, REQUEUE, Preempted, record_end, record_start, starts_summary
from megarl.telemetry.run_directory import Resume, RunDirectory, RunDirectoryError
from tests.ranks import run_ranks
from tests.runs import RUN_DEADLINE_S, fake_rollouts, metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.sink_cases import tensorboard_points

STEPS, RANKS, SAMPLES, PROFILED = 6, 2, 3, 2
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


def test_a_repeated_signal_counts_once_and_a_later_signal_is_the_second():
    now = [100.0]
    request = Asked(lambda: now[0])
    for moment in (100.0, 100.1, 104.9):  # the step, the agent and the batch script may all forward it
        now[0] = moment
        request.note(TERM, None)
    assert request.name == "SIGTERM" and request.seconds() == pytest.approx(4.9)
    now[0] = 105.1
    with pytest.raises(LeaveNow):
        request.note(USR1, None)


def test_a_closing_terminal_makes_a_run_save_unless_nohup_ignores_the_signal():
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    try:
        for result in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, result)
            request = Asked()
            handle_signals(request.note)
            signal.raise_signal(signal.SIGHUP)
            assert request.name == (None if result == signal.SIG_IGN else "SIGHUP")
            received: list[int] = []
            ForwardedSignals().target = received.append
            signal.raise_signal(signal.SIGHUP)
            assert received == ([] if result == signal.SIG_IGN else [signal.SIGHUP])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_before_the_run_has_begun_the_first_signal_ends_it():
    request = Asked()
    with pytest.raises(LeaveNow), request.nothing_begun():
        request.note(USR1, None)
    with pytest.raises(LeaveNow), request.nothing_begun():  # the signal came before
        pytest.fail("the run would start engines for nothing")


PHASES = ("rollout", "reward", "critic_update", "actor_update", "weight_sync")


@pytest.mark.parametrize(
    ("abandons", "step", "saved", "asked_before", "left_before", "moved"),
    [
        (False, 2, 1, "rollout", None, False),
        (True, 2, None, "rollout", "rollout", False),
        (True, 2, None, "critic_update", "critic_update", False),
        (True, 3, 1, "actor_update", "actor_update", True),
        (True, 1, None, "actor_update", "actor_update", True),
        (True, 3, None, "actor_update", None, True),  # two steps would be lost, so this step is finished and saved
        (True, 3, 2, "weight_sync", None, True),
    ],
)
def test_a_step_is_abandoned_only_if_no_step_is_lost(abandons, step, saved, asked_before, left_before, moved):
    signals: list[str | None] = [None, None]  # of two ranks
    rules = Preemption(abandons, 60.0, lambda name: signals)
    rules.saved = saved
    rules.begin(step)
    result = None
    for phase in PHASES:
        if phase == asked_before:
            signals[1] = "SIGTERM"
        try:
            rules.boundary(phase)
        except Abandoned as left:
            result = left
            break
    assert (result and result.phase) == left_before
    assert result is None or result.moved == moved
    assert rules.agreed()


def test_the_message_names_the_signal_and_the_saved_step_and_a_slow_save(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(preemption, "ASKED", Asked(lambda: now[0]))
    preemption.ASKED.note(USR1, None)
    rules = Preemption(False, 60.0, lambda word: [word])
    assert rules.agreed()
    first = rules.left(0, 9, "runs/x")
    assert first.status == REQUEUE and "nothing was saved" in str(first)
    lost = rules.left(2, 9, "runs/x")
    assert lost.status == FAILED and "2 finished steps are lost" in str(lost)
    rules.saved, now[0] = 3, 61.0
    saved = rules.left(3, 9, "runs/x")
    assert saved.status == REQUEUE
    for words in ("SIGUSR1 after step 3 of 9", "step 3 is saved in runs/x", "took 61 s", "run.grace_s = 60", "--resume"):
        assert words in str(saved)


def test_a_new_start_keeps_metrics_without_a_checkpoint_and_refuses_another_recipe(tmp_path):
    from megarl.recipe import load_recipe

    tiny_run(tmp_path)
    recipe = load_recipe(tiny_recipe(tmp_path, "anew", False, 1, 1, 1, 2))
    run = RunDirectory.of(recipe)
    run.prepare(recipe, None)
    run.metrics.write_text('{"step": 1}\n')
    assert run.check(recipe, Resume.IF_SAVED) is None and not run.can_go_on
    with pytest.raises(RunDirectoryError, match="no complete checkpoint"):
        run.check(recipe, Resume.ALWAYS)
    old_metrics = run.prepare(recipe, None)
    assert old_metrics == run.path / "metrics.1.jsonl" and old_metrics.read_text() == '{"step": 1}\n'
    assert not run.metrics.exists()
    (run.checkpoints / "step-000002").mkdir(parents=True)
    assert run.check(recipe, Resume.IF_SAVED) == run.checkpoints / "step-000002" and run.can_go_on
    other = load_recipe(tiny_recipe(tmp_path, "anew", False, 1, 1, 1, 2, run__seed=7))
    with pytest.raises(RunDirectoryError, match=r"another recipe: run\.seed was 1 and is 7 now"):
        run.check(other, Resume.IF_SAVED)
    path = tiny_recipe(tmp_path, "anew", False, 1, 1, 1, 2)
    faster = load_recipe(path, ["actor.optimizer.lr=0.5", "run.steps=9", "trainer.collective_timeout_s=7"])
    with pytest.raises(RunDirectoryError, match=r"actor\.optimizer was .* or --resume to change it"):
        run.check(faster, Resume.IF_SAVED)
    assert run.check(faster, Resume.ALWAYS) == run.checkpoints / "step-000002"
    # Keys that are newer than the run do not count as changes.
    written = yaml.safe_load(run.recipe.read_text())
    for key in ("prompt_format", "answer_format", "on_bad_row", "on_long_prompt", "curriculum"):
        del written["data"][key]
    del written["algorithm"]["early_stop"]
    run.recipe.write_text(yaml.safe_dump(written))
    longer = load_recipe(path, ["run.steps=9", "trainer.collective_timeout_s=7"])
    assert run.check(longer, Resume.IF_SAVED) == run.checkpoints / "step-000002"


def test_the_starts_of_a_run_are_recorded_with_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    record_start(tmp_path, ["a", "a", "b"], 0)
    record_end(tmp_path, REQUEUE, "SIGUSR1 after step 3")
    record_end(tmp_path, REQUEUE, "the ranks ask to be started again")  # the agent, after the rank
    record_start(tmp_path, ["a"], 3)
    record_end(tmp_path, FAILED, "rank 0 ended with exit status 1", 0)  # this node lost its peer,
    record_end(tmp_path, FAILED, "rank 3 was killed by SIGKILL", 3, "SIGKILL")  # and that one says why
    record_start(tmp_path, ["a"], 3)
    record_start(tmp_path, ["a"], 5)
    lines = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [line["from_step"] for line in lines] == [0, 3, 3, 5]
    assert lines[0]["hosts"] == ["a", "b"] and lines[0]["ranks"] == 3
    assert lines[0]["slurm_restart"] == 2 and lines[0]["torchrun_restart"] == 1
    assert lines[0]["before"] is None
    assert [line["before"]["how"] for line in lines[1:]] == ["requeued", "failed", "unknown"]
    assert (lines[2]["before"]["rank"], lines[2]["before"]["signal"]) == (3, "SIGKILL")
    summary = "\n".join(starts_summary(tmp_path))
    assert "started 4 times" in summary and "1 x requeued: SIGUSR1 after step 3" in summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, replayed rollouts, and an uninterrupted run."""
    path = tmp_path_factory.mktemp("preempted")
    tiny_run(path, layers=2)
    fake_rollouts(path, STEPS)
    train_on_ranks(_recipe(path, "whole", "finish", profile={"steps": [PROFILED], "ranks": [1]}))
    return path


def _recipe(folder, name, mode, **telemetry):
    telemetry |= {"sinks": [{"kind": "tensorboard"}], "samples_per_step": SAMPLES}
    changes = {"rollout__replay": str(folder / "rollouts"), "run__preemption": mode, "telemetry": telemetry}
    return tiny_recipe(folder, name, True, RANKS, 1, 2, STEPS, **changes)


def _train_until(recipe, resume, step, phase):
    """Run `train` on this rank; the last rank gets SIGTERM in a phase of a step. Return the message of Preempted, or
    None."""
    from megarl import build as run
    from megarl.recipe import load_recipe
    from megarl.trainer import Trainer

    class Signalling(Trainer):
        number = 0

        def step(self, number):
            self.number = number
            return super().step(number)

        @contextmanager
        def _phase(self, name):
            with super()._phase(name):
                if (self.number, name, self.rank) == (step, phase, RANKS - 1):
                    os.kill(os.getpid(), TERM)
                yield

    request = Asked()
    previous_handler = signal.signal(TERM, request.note)
    try:
        with (
            patch.object(preemption, "ASKED", request),
            patch.object(run, "ASKED", request),
            patch.object(run, "Trainer", Signalling),
        ):
            run.train(load_recipe(recipe), resume)
    except Preempted as left:
        return str(left)
    finally:
        signal.signal(TERM, previous_handler)
    return None


def test_a_repeatedly_preempted_run_equals_an_uninterrupted_run(folder):
    stations = [
        # mode, signal in step and phase, steps in the metrics, checkpoints
        ("finish", 2, "reward", 2, [2]),
        ("abandon", 4, "reference_logprob", 3, [2, 3]),  # step 4 has not changed a weight, so step 3 is saved
        ("abandon", 5, "critic_update", 4, [2, 3]),  # the critic has changed, so the checkpoint of step 3 counts
        ("finish", 0, "", 6, [2, 3, 6]),
    ]
    run = folder / "runs" / "again"
    for mode, step, phase, done, checkpoints in stations:
        recipe = _recipe(folder, "again", mode)
        messages = run_ranks(_train_until, RANKS, str(recipe), Resume.IF_SAVED, step, phase, deadline_s=RUN_DEADLINE_S)
        assert all((message is None) == (done == STEPS) for message in messages), messages
        assert len(metrics_of(folder, "again")) == done
        assert sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir()) == checkpoints
        if step:
            assert f"step {checkpoints[-1]} is saved" in messages[0]
    lines = metrics_of(folder, "again")
    assert lines == metrics_of(folder, "whole")
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [line["from_step"] for line in starts] == [0, 2, 3, 3]
    assert [line["telemetry/sink_failures"] for line in lines] == [0] * STEPS
    expected = [(line["step"], pytest.approx(line["actor/grad_norm"], abs=1e-3)) for line in lines]
    assert tensorboard_points(run / "tensorboard", "actor/grad_norm") == expected
    tables = sorted((run / "samples").iterdir())
    assert [table.name for table in tables] == [f"step-{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    rows = read_lines(tables[-1])
    assert [(row["step"], row["sample"]) for row in rows] == [(STEPS, 0), (STEPS, 5), (STEPS, 10)]
    for row in rows:
        assert re.search(r"\d\+\d", row["prompt"]) and row["prompt_tokens"] == 4 and 1 <= row["completion_tokens"] <= 12
        assert row["valid"] and row["reward"] == row["parts"]["digits"] >= 0 and isinstance(row["advantage"], float)


def test_the_profile_of_a_step_shows_its_phases_on_the_rank_that_was_asked_for(folder):
    (file,) = (folder / "runs" / "whole" / "profile").iterdir()
    assert file.name == f"step-{PROFILED:06d}-rank-00001.json.gz"
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    names = {event["name"] for event in ranges}
    assert {"rollout", "reward", "plan", "advantage", "actor_update", "weight_sync", "forward", "backward"} <= names
    (update,) = [event for event in ranges if event["name"] == "actor_update"]
    inside = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::mm"
              and update["ts"] <= event["ts"] <= update["ts"] + update["dur"]]  # fmt: skip
    assert inside, "the products of the update are shown in its range"


@pytest.mark.parametrize("stage", ["SigCgt", "SigBlk"], ids=["checks the recipe", "imports the agent"])
def test_a_signal_before_there_are_ranks_ends_the_command_with_the_requeue_status(folder, stage):
    """Send the signal as soon as the command has a handler, or blocks the signal for the agent that replaces the command.
    Otherwise the signal would kill the process."""
    command = [sys.executable, "-m", "megarl.cli", "train", str(_recipe(folder, f"early-{stage}", "finish"))]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + RUN_DEADLINE_S
        while not _signal_set(run.pid, stage) and run.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        run.send_signal(TERM)
        _, message = run.communicate(timeout=RUN_DEADLINE_S)
    finally:
        run.kill()
    assert run.returncode == REQUEUE, message


def _signal_set(pid, name):
    """Return whether SIGTERM is in a set of signals of a process: its caught or its blocked signals."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)), 16) >> (TERM - 1) & 1
