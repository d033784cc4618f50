"""Every step is one line, in the metrics file and on the terminal."""

import io
import json
import re
import select

import numpy as np
import pytest
import torch
from rich.console import Console

from megarl.telemetry.clock import PhaseClock
from megarl.telemetry.metrics_file import MetricsWriter, read_metrics
from megarl.telemetry.progress import ProgressLine, advance_work, begin_work, watching_work


def test_a_step_is_one_line_readable_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "run" / "metrics.jsonl")
    metrics = {
        "reward/mean": np.float32(0.5),
        "actor/grad_norm": torch.tensor(2.0),
        "sync/received_bytes": np.int64(7),
        "kl/mean": float("nan"),
        "rollout/finish": "stop",
        "schedule/actor_update/useful_share": 1,
        "idle/device/busy_s": [np.float32(1.5), float("inf")],
    }
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


def test_a_resumed_file_equals_an_uninterrupted_file(tmp_path):
    whole = MetricsWriter(tmp_path / "whole.jsonl")
    for step in range(1, 7):
        whole.write(step, {"reward/mean": step / 7})
    killed = MetricsWriter(tmp_path / "killed.jsonl")
    for step in range(1, 6):
        killed.write(step, {"reward/mean": step / 7})
    killed.close()
    with (tmp_path / "killed.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')
    resumed = MetricsWriter(tmp_path / "killed.jsonl")
    resumed.truncate_after(3)
    for step in range(4, 7):
        resumed.write(step, {"reward/mean": step / 7})
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.jsonl", "whole.jsonl"]


def test_a_missing_metrics_file_is_named_and_a_torn_line_left_out(tmp_path):
    with pytest.raises(ValueError, match="metrics.jsonl is no file"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 2}\n{"step": ')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


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
