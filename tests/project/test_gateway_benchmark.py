"""The benchmark of the endpoint, small: it runs from its start to its verdict, and misses no target but those of speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.agent
def test_the_load_and_the_memory_of_the_endpoint_are_measured(tmp_path: Path) -> None:
    sizes = ["--rate", "20", "--talking", "40", "--seconds", "3", "--sessions", "20"]
    command = [sys.executable, "benchmarks/gateway.py", *sizes, "--json", str(tmp_path / "found.json"), "--check"]
    ended = subprocess.run(command, cwd=ROOT, check=False, timeout=100, capture_output=True, text=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended.returncode == int("MISSED" in ended.stdout), ended.stderr
    assert found["load"]["wrong"] == 0 and found["load"]["requests"] == 61 and found["load"]["segments_a_session"] == 1.0
    assert found["load"]["added_p99_s"] > 0 and found["memory"]["sessions"] == 20
