"""Whole runs on tiny models: recipes, prompts, and the metrics a run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megarl.recipe import load_recipe
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

RUN_DEADLINE_S = 420


def tiny_run(folder: Path, family: str = "qwen3", tied: bool = False, layers: int = 4) -> Path:
    """A folder with a tiny model, a tokenizer and prompts; returns the model's directory."""
    model = save_tiny_model(folder / "model", family, tied, layers=layers, head_dim=32)
    save_tiny_tokenizer(model)
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def set_keys(recipe: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set the keys of a recipe; a key has `__` for each dot."""
    for key, value in changes.items():
        *path, last = key.split("__")
        section = recipe
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value


def tiny_recipe(
    folder: Path, name: str, ppo: bool, ranks: int, tensor: int, pipeline: int, steps: int, **changes: Any
) -> Path:
    """Write a recipe for `tiny_run`'s folder; `changes` are dotted keys with `__` for the dot."""
    recipe: dict[str, Any] = {
        "run": {"name": name, "steps": steps, "dir": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "algorithm": {"advantage": "grpo", "group_size": 4, "entropy_coefficient": 0.01},
        "data": {"prompts": {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "prompt_field": "question",
                             "answer_field": "answer"}, "max_prompt_tokens": 8},
        "reward": [{"kind": "function", "target": "tests.rewards:digits"}],
        "trainer": {"ranks": ranks, "precision": "fp32", "collective_timeout_s": 120},
        "actor": {"layout": {"tensor": tensor, "pipeline": pipeline}, "optimizer": {"lr": 1e-3}},
        "rollout": {"max_new_tokens": 12, "timeout_s": 180, "kv_cache_bytes": 16 << 20},
        "phases": {"rollout": {"prompts": 4}, "actor_update": {"mini_batch": 16, "micro_batch": {"max_tokens": 64}}},
    }  # fmt: skip
    if ppo:
        recipe["algorithm"] |= {"advantage": "gae", "gae": {"discount": 0.99, "smoothing": 0.9}, "value_loss": {"clip": 0.2},
                                "kl": {"place": "reward", "coefficient": 0.05, "estimator": "k1"}}  # fmt: skip
        recipe["critic"] = {"optimizer": {"lr": 1e-3}}
        recipe["phases"] |= {
            "actor_logprob": {"micro_batch": {"max_tokens": 48}},
            "reference_logprob": {"micro_batch": {"sequences": 4}},
            "critic_value": {"micro_batch": {"max_tokens": 96}},
            "critic_update": {"mini_batch": 8, "micro_batch": {"sequences": 2}},
            "actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": 64}, "epochs": 2},
        }
    set_keys(recipe, changes)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def replayed_recipe(folder: Path, *arguments: Any, **changes: Any) -> Path:
    """As `tiny_recipe`, of a run that replays the rollouts of `folder`."""
    return tiny_recipe(folder, *arguments, **{"rollout__replay": str(folder / "rollouts")} | changes)


def fake_rollouts(
    folder: Path,
    steps: int,
    num_prompts: int = 4,
    group_size: int = 4,
    longest: int = 12,
    draw: Callable[[np.random.Generator], int] | None = None,
    into: Path | None = None,
) -> Path:
    """Dumped rollouts of random tokens for the prompts of a tiny recipe's steps, in `rollouts` or `into`; completions of up
    to `longest` tokens, or of lengths that `draw` gives."""
    from megarl.data.prompts import PromptStream
    from megarl.data.sample import Completion, Sample
    from megarl.data.tokenizer import load_tokenizer
    from megarl.recipe.data_section import DataSection
    from megarl.rollout.groups import RolloutBatch, RolloutExecuted
    from megarl.rollout.replay import dump_rollout

    class InMemory:
        def __init__(self, samples: list[Sample]) -> None:
            self.samples = samples

        def fetch(self, sample_ids: Any) -> dict[int, Sample]:
            return {sample: self.samples[sample] for sample in sample_ids}

    recipe = yaml.safe_load(tiny_recipe(folder, "fake", False, 1, 1, 1, steps).read_text())
    stream = PromptStream(DataSection.model_validate(recipe["data"]), 1, load_tokenizer(str(folder / "model")))
    generator = np.random.default_rng(3)
    for step in range(1, steps + 1):
        samples = []
        for prompt in stream.take(num_prompts):
            for _ in range(group_size):
                length = int(generator.integers(1, longest + 1)) if draw is None else draw(generator)
                tokens = generator.integers(2, 97, length).astype(np.int32)
                logprobs = np.full(length, -4.0, np.float32)
                completion = Completion(tokens, logprobs, "stop", np.zeros(length, np.int64))
                samples.append(Sample(prompt.index, prompt.token_ids, completion))
        batch = RolloutBatch(
            payload=InMemory(samples), groups=np.array([sample.group for sample in samples]),
            prompt_lengths=np.array([len(sample.prompt_ids) for sample in samples]),
            completion_lengths=np.array([len(sample.completion.token_ids) for sample in samples]),
            finish_reasons=["stop"] * len(samples), first_version=np.zeros(len(samples), int),
            last_version=np.zeros(len(samples), int), executed=RolloutExecuted(num_prompts, group_size, 64),
        )  # fmt: skip
        dump_rollout(into or folder / "rollouts", step, batch)
    return into or folder / "rollouts"


def megarl(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "megarl.cli", *arguments], capture_output=True, text=True, timeout=RUN_DEADLINE_S
    )
    assert not check or done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def train_on_ranks(recipe: Path, resume: bool = False, deadline_s: float = RUN_DEADLINE_S) -> None:
    """A run on the rank processes that the tests share: `megarl train` without torchrun's start and every rank's imports,
    which take longer than the run; engines, if the recipe has any, are started as always. Raises AssertionError with a
    failing rank's traceback."""
    run_ranks(_train, load_recipe(recipe).trainer.ranks, str(recipe), resume, deadline_s=deadline_s)


def _train(recipe: str, resume: bool) -> None:
    from megarl.build import train
    from megarl.cluster.ray_cluster import start_cluster
    from megarl.telemetry.run_directory import Resume

    loaded = load_recipe(recipe)
    if os.environ["RANK"] == "0" and loaded.has_engines:
        start_cluster()  # as long as the rank lives: one for all runs
    train(loaded, Resume.of(resume, False))


def metrics_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without its timings and the sync of a start, which a resume has once more."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not _is_of_time_or_start(key)} for line in lines]


def _is_of_time_or_start(key: str) -> bool:
    return key.startswith(("time/", "idle/", "mfu/", "offload/", "start_sync/")) or key.endswith(("_s", "per_hour"))
