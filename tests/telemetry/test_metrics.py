"""Every step is one line, in the metrics file and on the terminal. A profile is of the steps and ranks asked for; a masked
reward is no zero; memory that runs out is told apart."""

from __future__ import annotations

import io
import json
import re
import select
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from megarl.recipe.telemetry_section import ProfileSection
from megarl.telemetry.clock import PhaseClock
from megarl.telemetry.disk import read_lines
from megarl.telemetry.metrics_file import MetricsWriter
from megarl.telemetry.progress import ProgressLine, advance_work, begin_work, watching_work
from megarl.telemetry.run_directory import RunDirectory
from megarl.telemetry.run_writer import Profiler, RunWriter, snapshot_on_out_of_memory
from megarl.telemetry.samples import SampleTable


def test_a_step_is_one_line_readable_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "run" / "metrics.jsonl")
    metrics = {
        "reward/mean": np.float32(0.5), "actor/grad_norm": torch.tensor(2.0), "sync/received_bytes": np.int64(7),
        "kl/mean": float("nan"), "rollout/finish": "stop", "schedule/actor_update/useful_share": 1,
        "idle/device/busy_s": [np.float32(1.5), float("inf")],
    }  # fmt: skip
    writer.write(1, metrics)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count("\n") == 1
    assert json.loads(text) == {
        "step": 1, "reward/mean": 0.5, "actor/grad_norm": 2.0, "sync/received_bytes": 7, "kl/mean": None,
        "rollout/finish": "stop", "schedule/actor_update/useful_share": 1, "idle/device/busy_s": [1.5, None],
    }  # fmt: skip
    with pytest.raises(ValueError, match="'reward' is not named area/name"):
        writer.write(2, {"reward": 1.0})
    with pytest.raises(ValueError, match="'reward/all' is a dict"):
        writer.write(2, {"reward/all": [{}]})


def test_without_a_terminal_each_step_is_one_plain_line():
    output = io.StringIO()
    with ProgressLine(12, console=Console(file=output, force_terminal=False, width=100)) as progress:
        clock = PhaseClock(on_phase=progress.phase)
        for step in (1, 2, 3):
            with clock.phase("critic_update"), watching_work(progress.work):
                begin_work("micro-batches", 4)
                advance_work()
            seconds = {1: 60.0, 2: 30.0, 3: 20.0}[step]
            tokens = {"tokens/per_s": 300 / seconds}
            progress.step(step, {"reward/mean": 0.25 * step, "time/step": seconds, "actor/entropy": None} | tokens)
        progress.step(12, {"reward/mean": 1.0})
    assert output.getvalue().splitlines() == [
        "step  1/12  reward 0.250  seconds 60.0  tokens/s 5  left 11 min",
        "step  2/12  reward 0.500  seconds 30.0  tokens/s 10  left 5 min",  # the first step warmed up and no longer counts
        "step  3/12  reward 0.750  seconds 20.0  tokens/s 15  left 4 min",
        "step 12/12  reward 1.000",
    ]


@pytest.mark.parametrize("columns", [80, 140])
def test_a_terminal_shows_the_running_phase_its_progress_and_the_end(columns):
    """On a pseudo-terminal a rank writes a line per step, and below them one live line that fits the width."""
    import fcntl
    import os
    import pty
    import struct
    import termios

    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    written = b""
    with open(writer, "w") as file:
        console = Console(file=file, width=columns)
        assert console.is_terminal
        with ProgressLine(12, console=console) as progress:
            for step in (1, 2):
                progress.phase("critic_update")
                with watching_work(progress.work):
                    begin_work("micro-batches", 4, parts=2)
                    for _ in range(5):
                        advance_work()
                assert progress._live is not None
                progress._live.refresh()
                progress.step(step, {"reward/mean": 0.25 * step, "time/step": 60.0, "tokens/per_s": 100.0})
                progress.phase("actor_update")
            written = b""
            while select.select([reader], [], [], 0.0)[0]:  # a terminal returns its content in parts
                written += os.read(reader, 100_000)
    os.close(reader)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", written.decode())
    assert "step  2/12  reward 0.500  seconds 60.0  tokens/s 100  left 10 min" in text
    lines = [part for part in re.split(r"[\r\n]+", text) if "critic_update" in part or "actor_update" in part]
    assert any(re.search(r"step +\d/12 .+critic_update +2/4 micro-batches", line) for line in lines), lines
    assert all(len(line) <= columns for line in lines)
    assert any("actor_update" in line for line in lines), lines
    assert not any("micro-batches" in line for line in lines if "actor_update" in line)


class RecordingPlatform:
    """Keeps what the profiler has the device do; stands for a GPU with Nsight Systems."""

    def __init__(self):
        self.calls = []

    @contextmanager
    def capture(self):
        self.calls.append("start")
        yield SimpleNamespace(open=self.calls.append, close=lambda: self.calls.append("end"))
        self.calls.append("stop")

    def record_allocations(self):
        self.calls.append("record")

    def write_allocations(self, path):
        self.calls.append(path)
        return path


def steps_of_a_rank(rank):
    platform, clock = RecordingPlatform(), PhaseClock()
    section = ProfileSection(kind="nsight", steps=(2, 3), ranks=(0, 2))
    profiler = Profiler(section, Path(), rank, clock, platform)
    for number in (1, 2, 3, 4):
        platform.calls.append(number)
        with profiler.step(number):
            with clock.phase("reward"):
                pass
            with clock.phase("actor_update"), clock.span("forward"):
                pass
        profiler.write(number)
    return platform.calls


def test_nsight_captures_the_steps_asked_for_with_a_range_for_each_phase_and_span():
    step = ["start", "reward", "end", "actor_update", "forward", "end", "end", "stop"]
    assert steps_of_a_rank(2) == [1, 2, *step, 3, *step, 4]
    assert steps_of_a_rank(1) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("a shape is wrong"), False),
    ],
)
def test_only_an_error_of_memory_leaves_a_snapshot(tmp_path, error, is_so):
    platform = RecordingPlatform()
    with pytest.raises(type(error)) as raised, snapshot_on_out_of_memory(tmp_path, 3, platform):
        try:
            raise error
        except MemoryError as memory:
            raise type(error)("while it did something else") from memory
    notes = " ".join(getattr(raised.value, "__notes__", []))
    path = tmp_path / "memory" / "rank-00003.pickle"
    assert is_so == (str(path) in notes), notes
    assert platform.calls == ["record", path] if is_so else platform.calls == ["record"]


def test_a_snapshot_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "memory").write_text("in the way")
    with pytest.raises(MemoryError) as raised, snapshot_on_out_of_memory(tmp_path, 0, RecordingPlatform()):
        raise MemoryError
    assert "no memory snapshot of rank 0: " in raised.value.__notes__[0]


class Rollouts:
    """Sixteen samples of two tokens; is its own payload."""

    payload, episodes = property(lambda self: self), None

    def __len__(self):
        return 16

    def fetch(self, samples):
        return {sample: SimpleNamespace(group=sample // 4, prompt_ids=np.array([7]), completion=SimpleNamespace(
            token_ids=np.array([sample, 1]), finish_reason="length", first_version=3, last_version=4,
            own=np.array([True, False]), versions=np.array([3, 4])))
            for sample in samples}  # fmt: skip


def test_a_masked_reward_is_null_and_says_why(tmp_path):
    rewards = np.arange(16, dtype=np.float32)
    rewards[12] = np.nan
    scored = SimpleNamespace(parts={"exact": rewards}, failures={12: "the verifier took longer than 5 s"})
    batch = SimpleNamespace(
        rewards=rewards,
        valid=np.isfinite(rewards),
        rollouts=np.arange(16),
        fields={"advantages": [torch.ones(2)] * 16},
        sampled=True,
    )
    table = SampleTable(tmp_path, 4, lambda ids: "\u2028".join(map(str, ids)))  # a line separator, but none of JSON's
    for step in (1, 2, 3):
        table.write(step, Rollouts(), scored, batch)
    rows = read_lines(tmp_path / "samples" / "step-000002.jsonl")
    assert [row["sample"] for row in rows] == [0, 4, 8, 12], "spread over the groups"
    assert rows[1] == {
        "step": 2, "sample": 4, "rollout": 4, "group": 1, "prompt": "7", "completion": "4\u20281", "reward": 4.0,
        "parts": {"exact": 4.0}, "turn_rewards": [],
        "turns": [{"own": True, "tokens": 1, "text": "4", "versions": [3, 3]},
                  {"own": False, "tokens": 1, "text": "1", "versions": [4, 4]}],
        "advantage": 1.0, "valid": True, "reason": None, "prompt_tokens": 1, "completion_tokens": 2,
        "finish_reason": "length", "version": 4, "first_version": 3,
    }  # fmt: skip
    masked = rows[3]
    assert not masked["valid"] and masked["reason"] == "the verifier took longer than 5 s"
    assert masked["reward"] is masked["advantage"] is masked["parts"]["exact"] is None
    recipe: Any = SimpleNamespace(run=SimpleNamespace(trace="none"), evaluation=None, supervised=None)
    other: Any = None
    RunWriter(recipe, RunDirectory(tmp_path), 0, 1, other, other, other, other, other)  # resumed after step 1
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000001.jsonl"]
