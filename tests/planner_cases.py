"""Recipes for the planner's tests: a small PPO recipe, and Qwen2.5-7B on eight devices; models are a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner.forecast import Forecast, forecast, job_of
from megarl.planner.roles import PlannedRole
from megarl.recipe import load_recipe
from megarl.recipe.role_sections import FreezeSection, MemorySection
from megarl.telemetry.metrics_file import read_metrics
from tests.recipe_cases import CONFIG, edited

QWEN_7B = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
GRPO_QWEN: dict[str, Any] = {
    "run": {"name": "qwen", "steps": 3},
    "algorithm": {"advantage": "grpo", "group_size": 8, "kl": {"place": "loss", "coefficient": 0.01, "estimator": "k3"}},
    "data": {"prompts": {"kind": "reasoning_gym", "task": "chain_sum", "size": 1024}, "max_prompt_tokens": 1024},
    "reward": [{"kind": "last_number"}], "trainer": {"ranks": 8, "precision": "bf16"},
    "actor": {"layout": {"tensor": 4, "pipeline": 1}, "optimizer": {"lr": 1e-6}},
    "rollout": {"max_new_tokens": 4096, "engines": 2, "tensor": 4, "kv_cache_bytes": 2**33},
    "phases": {
        "rollout": {"prompts": 16}, "actor_logprob": {"micro_batch": {"max_tokens": 8192}},
        "reference_logprob": {"micro_batch": {"max_tokens": 8192}},
        "actor_update": {"mini_batch": 64, "micro_batch": {"max_tokens": 8192}},
    },
    "device": {"memory_gib": 80, "tflops": 400},
}  # fmt: skip


def planned_role(
    *values: Any, memory: MemorySection | None = None, freeze: FreezeSection | None = None, **more: Any
) -> PlannedRole:
    """A role of the planner whose `memory` and `freeze` sections are the defaults where they are not given."""
    memory, freeze = memory or MemorySection(), freeze or FreezeSection()
    named = dict(zip(("name", "shape", "layout", "precision", "trained"), values, strict=False)) | more
    return PlannedRole(**named, memory=memory, freeze=freeze)


def write_small(folder: Path, *edits: tuple[str, Any], model: dict[str, Any] = CONFIG, name: str = "small") -> Path:
    """The PPO recipe of `recipe_cases.py` with edits, and its model, in `folder`; engines take little of a device."""
    return _write(folder, name, model, edited(("rollout.kv_cache_bytes", 2**20), *edits)())


def write_qwen(folder: Path, **sections: Any) -> Path:
    """GRPO on Qwen2.5-7B over 8 x 80 GiB, with some sections replaced."""
    return _write(folder, "qwen", QWEN_7B, GRPO_QWEN | sections)


def _write(folder: Path, name: str, model: dict[str, Any], data: dict[str, Any]) -> Path:
    directory = folder / f"{name}-model"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model))
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(data | {"model": {"path": str(directory)}}))
    return file


def forecast_of(file: Path, overrides: list[str] | None = None, lengths: str = "log-normal", seed: int = 1) -> Forecast:
    """The forecast of a recipe file under overrides."""
    return forecast(job_of(load_recipe(file, overrides or []), lengths, seed, read_metrics=read_metrics))


def document_of(file: Path, *arguments: str) -> dict[str, Any]:
    """What `megarl check --json` says of one legal recipe, with further arguments."""
    result = CliRunner().invoke(app, ["check", str(file), "--json", *arguments])
    (entry,) = json.loads(result.stdout)["recipes"]
    assert isinstance(entry, dict) and entry["legal"], entry
    return entry
