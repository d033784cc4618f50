"""The benchmark of a static padded schedule against token budgets, small: both run the same tokens, one the padding too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_padded_schedule_is_diagnosed_by_the_figures_of_the_run(tmp_path):
    command = [sys.executable, "benchmarks/idle_schedules.py", "--steps", "2", "--hidden", "128", "--sequences", "32"]
    subprocess.run([*command, "--json", str(tmp_path / "found.json")], cwd=ROOT, check=True, timeout=500)
    found = json.loads((tmp_path / "found.json").read_text())["schedules"]
    assert found["static"]["useful_share"] < 0.5 < found["budget"]["useful_share"] == 1.0
    assert found["static"]["imbalance"] > 1.05 > found["budget"]["imbalance"]
    assert found["budget"]["tokens_per_hour"] > found["static"]["tokens_per_hour"]
