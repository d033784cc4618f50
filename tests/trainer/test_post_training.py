"""The worked example of docs/post-training.md, run as it stands: fine-tuning, reinforcement, distillation."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.learning_cases import CHANCE, GOAL, LAST, rewards_of
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"megarl": [sys.executable, "-m", "megarl.cli"], "python": [sys.executable]}


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.learning
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_chain_on_tiny_models_teaches_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    save_tiny_tokenizer(save_tiny_model(tmp_path / "models" / "tiny-qwen3", layers=2, head_dim=32))  # as `make setup` does
    text = (ROOT / "docs" / "post-training.md").read_text()
    (block,) = re.findall(r"```sh\n((?:(?!```).)*tests\.tiny_models.*?)```", text, re.DOTALL)
    for command in block.splitlines():
        program, *arguments = shlex.split(command)
        done = subprocess.run(
            [*PROGRAMS[program], *arguments], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    losses = [line["evaluation/loss"] for line in lines_of(tmp_path, "cpu-sft") if "evaluation/loss" in line]
    taught, learned = (rewards_of(lines_of(tmp_path, name)) for name in ("cpu-grpo", "cpu-distill"))
    print("fine-tuning:", *(f"{loss:.2f}" for loss in losses))
    print("reinforcement:", *(f"{reward:.2f}" for reward in taught[::5]))
    print("distillation:", *(f"{reward:.2f}" for reward in learned[::5]))
    assert losses == sorted(losses, reverse=True) and losses[-1] <= losses[0] - 0.3, "of held-out sums of larger numbers"
    assert taught[0] >= CHANCE, "it starts from what fine-tuning taught"
    assert fmean(taught[-LAST:]) >= GOAL
    assert fmean(learned[:LAST]) <= fmean(taught[-LAST:]) - CHANCE
    assert fmean(learned[-LAST:]) >= 0.9 * fmean(taught[-LAST:])
