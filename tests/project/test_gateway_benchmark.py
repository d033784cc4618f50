"""The benchmark of the endpoint, small: every request is answered, by its own session, and missed targets are named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gateway import Sizes, missed

pytestmark = pytest.mark.agent
ROOT = Path(__file__).resolve().parents[2]


def test_each_request_is_answered_by_its_own_session(tmp_path: Path) -> None:
    """The command runs from its start to its verdict, and misses no target but those of speed."""
    sizes = ["--rate", "20", "--talking", "40", "--seconds", "3", "--sessions", "100"]
    command = [sys.executable, "benchmarks/gateway.py", *sizes, "--json", str(tmp_path / "found.json"), "--check"]
    ended = subprocess.run(command, cwd=ROOT, check=False, timeout=100, capture_output=True, text=True)
    found = json.loads((tmp_path / "found.json").read_text())
    others = [
        name for name in ended.stdout.split("MISSED: ")[1:] if not re.match(r"\d+ requests a second|added latency", name)
    ]
    assert ended.returncode == int("MISSED" in ended.stdout) and others == [], ended.stdout + ended.stderr
    load = found["load"]
    assert load["requests"] == 61 and load["wrong"] == 0, "forty sessions, a request each two seconds"
    assert load["segments_a_session"] == 1.0 and load["added_p50_s"] > 0
    assert found["memory"]["sessions"] == 100


def test_missed_targets_are_named() -> None:
    load = {"rate": 500.0, "wrong": 0, "segments_a_session": 1.0, "added_p99_s": 0.02}
    reached = {"load": load, "memory": {"sessions": 100_000, "growth": 0.01}}
    assert missed(reached, Sizes()) == []
    slow = {"rate": 400.0, "wrong": 2, "segments_a_session": 1.5, "added_p99_s": 0.03}
    names = missed({"load": slow, "memory": {"sessions": 100_000, "growth": 0.1}}, Sizes())
    assert [name.split()[0] for name in names] == ["2", "400", "added", "1.50", "memory"]
