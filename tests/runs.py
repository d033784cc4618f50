"""Whole runs on tiny models: recipes, prompts, and the metrics a run leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from megarl.recipe import load_recipe
from tests import recipe_cases
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

if TYPE_CHECKING:
    from megarl.rollout.groups import EpisodeFacts, GroupResult, RolloutBatch

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
    recipe_cases.set_keys(recipe, [(key.replace("__", "."), value) for key, value in changes.items()])


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
    from megarl.data.sample import Completion
    from megarl.data.tokenizer import load_tokenizer
    from megarl.recipe.data_section import DataSection
    from megarl.rollout.groups import GroupResult
    from megarl.rollout.replay import dump_rollout

    recipe = yaml.safe_load(tiny_recipe(folder, "fake", False, 1, 1, 1, steps).read_text())
    stream = PromptStream(DataSection.model_validate(recipe["data"]), 1, load_tokenizer(str(folder / "model")))
    generator = np.random.default_rng(3)
    for step in range(1, steps + 1):
        groups = []
        for prompt in stream.take(num_prompts):
            completions = []
            for _ in range(group_size):
                length = int(generator.integers(1, longest + 1)) if draw is None else draw(generator)
                tokens = generator.integers(2, 97, length).astype(np.int32)
                logprobs = np.full(length, -4.0, np.float32)
                completions.append(Completion(tokens, logprobs, "stop", np.zeros(length, np.int64)))
            groups.append(GroupResult.of(prompt.index, prompt.token_ids, completions))
        dump_rollout(into or folder / "rollouts", step, batch_of(groups))
    return into or folder / "rollouts"


def batch_of(groups: Sequence[GroupResult], episodes: EpisodeFacts | None = None) -> RolloutBatch:
    """The batch of a step with its samples in memory."""
    from megarl.rollout.groups import GroupFacts, RolloutBatch, RolloutExecuted
    from megarl.rollout.taken import DataPayload

    samples = tuple(group.sample(number) for group in groups for number in range(len(group.lengths)))
    facts = [GroupFacts.of(group) for group in groups]
    executed = RolloutExecuted(len(groups), int(groups[0].members.max()) + 1, 64)
    return replace(RolloutBatch.of(facts, DataPayload(samples), executed, {}), episodes=episodes)


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


def evaluations_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a run's evaluations."""
    lines = (folder / "runs" / name / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _train(recipe: str, resume: bool) -> None:
    from megarl.build import train
    from megarl.cluster.ray_cluster import start_cluster
    from megarl.telemetry.run_directory import Resume

    loaded = load_recipe(recipe)
    if os.environ["RANK"] == "0" and loaded.has_engines:
        start_cluster()  # as long as the rank lives: one for all runs
    train(loaded, Resume.of(resume, False))


def copy_until(folder: Path, name: str, step: int, copy: str) -> None:
    """Copy a run without the checkpoints of later steps, so that a resume of the copy goes on from `step`."""
    target = folder / "runs" / copy
    shutil.copytree(folder / "runs" / name, target)
    forget_after(target, step)


def forget_after(run: Path, step: int) -> None:
    """Remove a run's checkpoints of later steps."""
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name > f"step-{step:06d}":
            shutil.rmtree(checkpoint)


def metrics_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without its timings and the sync of a start, which a resume has once more."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not _is_of_time_or_start(key)} for line in lines]


def _is_of_time_or_start(key: str) -> bool:
    return key.startswith(("time/", "idle/", "mfu/", "offload/", "start_sync/")) or key.endswith(("_s", "per_hour"))
