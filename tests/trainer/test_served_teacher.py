"""A teacher gives the same whether the trainer's ranks hold it or an engine serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.learning_cases import RECIPES
from tests.runs import train_on_ranks
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def first_step(folder: Path, name: str, models: list[Path], teacher: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step, in which each of two teachers judges about half of the completions."""
    recipe = yaml.safe_load((RECIPES / "distill.yaml").read_text())
    recipe["run"] |= {"name": name, "dir": str(folder / "runs"), "steps": 1}
    recipe["model"]["path"] = str(models[0])
    recipe["teachers"] = {"served": {"path": str(models[1])} | teacher, "held": {"path": str(models[2])}}
    recipe["algorithm"]["distillation"] = {"place": "loss"}
    recipe["phases"]["actor_update"] |= {"mini_batch": 32, "epochs": 1}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    train_on_ranks(file)
    metrics: dict[str, Any] = json.loads((folder / "runs" / name / "metrics.jsonl").read_text())
    return metrics


def test_a_step_is_the_same_whoever_runs_the_teacher(tmp_path: Path) -> None:
    models = [save_tiny_model(tmp_path / f"model-{seed}", seed=seed, layers=2, head_dim=32) for seed in (7, 0, 3)]
    for model in models:
        save_tiny_tokenizer(model)
    held = first_step(tmp_path, "held", models, {})
    served = first_step(tmp_path, "served", models, {"engine": {}})
    for name in ("actor/teacher_kl", "actor/loss", "actor/grad_norm"):
        assert served[name] == pytest.approx(held[name], rel=1e-4)
    assert 0 < served["schedule/teacher_logprob.served/sequences"] < 32
    assert served["time/teacher_logprob.served"] > 0 and served["schedule/teacher_logprob.served/tokens"] > 0
