"""Rows, recipes and a Hugging Face reference of supervised runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megarl.algorithm.loss import loss_weights
from megarl.data.prompts import PromptStream
from megarl.data.sample import Example
from megarl.data.tokenizer import load_tokenizer
from megarl.recipe import load_recipe
from tests.runs import set_keys, tiny_run

LR, STEPS, MINI_BATCH = 5e-3, 3, 8


def supervised_run(folder: Path, family: str = "qwen3") -> Path:
    """A tiny model, chats of one and of two turns, and pairs; returns the model's directory."""
    model = tiny_run(folder, family)
    chats, pairs = [], []
    for a in range(8):
        for b in range(3):
            turns = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]
            more = [{"role": "user", "content": "again?"}, {"role": "assistant", "content": "yes, " * (a % 3) + "done"}]
            chats.append({"messages": turns + (more if b else [])})
            pairs.append({"question": f"{a}+{b}", "chosen": f"it is {a + b}", "rejected": "so " * b + str(a + b + 1)})
    held_out = [{"messages": [{"role": "user", "content": f"{a}+1+0"}, {"role": "assistant", "content": str(a + 1)},
                              *chats[4]["messages"][2:]]} for a in range(5)]  # fmt: skip
    for name, rows in (("chats", chats), ("held_out", held_out), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def supervised_recipe(folder: Path, name: str, kind: str = "sft", ranks: int = 1, **changes: Any) -> Path:
    """Write a recipe for `supervised_run`'s folder; `changes` are dotted keys with `__` for the dot."""
    source: dict[str, Any] = {"kind": "jsonl", "path": str(folder / "chats.jsonl"), "prompt_field": "messages"}
    if kind != "sft":
        source = {"kind": "jsonl", "path": str(folder / "pairs.jsonl"), "prompt_field": "question",
                  "answer_field": "chosen", "rejected_field": "rejected"}  # fmt: skip
    recipe: dict[str, Any] = {
        "run": {"name": name, "kind": kind, "steps": STEPS, "dir": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "data": {"prompts": source, "prompt_format": "messages" if kind == "sft" else "text", "max_tokens": 48},
        "trainer": {"ranks": ranks, "precision": "fp32", "collective_timeout_s": 120},
        "actor": {"optimizer": {"lr": LR}},
        "phases": {"actor_update": {"mini_batch": MINI_BATCH, "micro_batch": {"max_tokens": 96}}},
    }
    if kind != "sft":
        recipe["phases"]["actor_logprob"] = {"micro_batch": {"max_tokens": 64}}
    if kind == "dpo":
        recipe["algorithm"] = {"dpo": {"beta": 0.3, "label_smoothing": 0.1}}
        recipe["phases"]["reference_logprob"] = {"micro_batch": {"sequences": 3}}
    set_keys(recipe, changes)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def batches_of(file: Path) -> Iterator[list[Example]]:
    """The sequences of each step of a recipe, in their order."""
    recipe = load_recipe(file)
    rows = PromptStream(recipe.data, recipe.run.seed, load_tokenizer(recipe.model.path))
    for _ in range(recipe.run.steps):
        yield [example for row in rows.take(recipe.phases.rollout.prompts) for example in row.examples]


def token_logprobs(model: Any, example: Example) -> Tensor:
    """Log-probabilities of the trained tokens of one sequence by Hugging Face's model: neither packed nor padded."""
    ids = torch.from_numpy(example.token_ids).long()
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(example.trained[1:])]


def sft_loss(model: Any, batch: list[Example], aggregation: str = "token_mean") -> Tensor:
    """What Hugging Face's Trainer minimises: with `token_mean` the mean cross-entropy of a batch's labels."""
    parts = [token_logprobs(model, example) for example in batch]
    if aggregation == "token_mean":
        return -torch.cat(parts).mean()
    weights = loss_weights(
        torch.tensor([len(part) for part in parts]), torch.ones(len(parts), dtype=torch.bool), aggregation
    )
    return -sum(weight * part.sum() for weight, part in zip(weights, parts, strict=True))


def dpo_loss(model: Any, reference: Any, batch: list[Example], beta: float, smoothing: float) -> Tensor:
    """Equation 7 of Rafailov et al. with label smoothing, by autograd through the whole."""
    sums = torch.stack([token_logprobs(model, example).sum() for example in batch])
    with torch.no_grad():
        sums_before = torch.stack([token_logprobs(reference, example).sum() for example in batch])
    rewards = beta * (sums - sums_before)
    margin = rewards[0::2] - rewards[1::2]
    log = torch.nn.functional.logsigmoid
    return (-(1 - smoothing) * log(margin) - smoothing * log(-margin)).mean()


def score_loss(backbone: Any, head: Tensor, batch: list[Example]) -> Tensor:
    """The Bradley-Terry loss of scores at the last token, by autograd."""
    scores = torch.stack([
        backbone(torch.from_numpy(example.token_ids).long()[None]).last_hidden_state[0, -1] @ head for example in batch
    ])  # fmt: skip
    return -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()
