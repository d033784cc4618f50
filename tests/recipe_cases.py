"""A legal PPO recipe over a tiny model, and edits of it, for the tests of recipes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.load import sections_of

CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
PPO = {
    "run": {"name": "ppo", "steps": 3}, "model": {"path": "tiny"},
    "algorithm": {
        "advantage": "gae", "group_size": 2, "kl": {"place": "loss", "coefficient": 0.1, "estimator": "k3"}, "gae": {},
        "value_loss": {},
    },
    "data": {"prompts": {"kind": "reasoning_gym", "task": "chain_sum", "size": 64}, "max_prompt_tokens": 32},
    "reward": [{"kind": "last_number"}, {"kind": "function", "target": "statistics:fmean", "weight": 0.1}],
    "trainer": {"ranks": 8, "precision": "fp32"},
    "actor": {"layout": {"tensor": 2, "pipeline": 2}, "optimizer": {"lr": 1e-4}}, "critic": {"optimizer": {"lr": 1e-4}},
    "rollout": {"max_new_tokens": 32},
    "phases": {
        "rollout": {"prompts": 8}, "actor_logprob": {"micro_batch": {"max_tokens": 128}},
        "reference_logprob": {"micro_batch": {"sequences": 4}}, "critic_value": {"micro_batch": {"max_tokens": 256}},
        "critic_update": {"mini_batch": 16, "micro_batch": {"sequences": 2}},
        "actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": 64}},
    },
}  # fmt: skip


def edited(*edits: tuple[str, Any]) -> Callable[[], dict]:
    """The good recipe with dotted keys set, or removed where the value is `...`."""

    return lambda: set_keys(copy.deepcopy(PPO), edits)


def set_keys(data: Any, edits: Iterable[tuple[str, Any]]) -> Any:
    """Set dotted keys of a recipe's content, and remove those whose value is `...`."""
    for key, value in edits:
        parts: list[Any] = [int(part) if part.isdigit() else part for part in key.split(".")]
        *above, last = parts
        here = data
        for part in above:
            here = here[part] if isinstance(here, list) else here.setdefault(part, {})
        if value is ...:
            del here[last]
        else:
            here[last] = value
    return data


def make_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `path` the working directory, with good models, bad ones and a file of questions."""
    for name, config in (
        ("tiny", CONFIG),
        ("deep", CONFIG | {"num_hidden_layers": 8}),
        ("experts", CONFIG | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 36}),
        ("late experts", CONFIG | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
                                   "moe_intermediate_size": 36, "mlp_only_layers": [0]}),
        ("thin", CONFIG | {"intermediate_size": 24}),
        ("short", CONFIG | {"max_position_embeddings": 16}),
        ("bound", CONFIG | {"tie_word_embeddings": True}),
        ("gpt2", {"model_type": "gpt2"}),
        ("torn", {"model_type": "qwen3"}),
    ):  # fmt: skip
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    (path / "qa.jsonl").write_text('{"q": "1+1", "a": "2"}\n')
    monkeypatch.chdir(path)
    return path


def refusals(*edits: tuple[str, Any], overrides: Sequence[str] = ()) -> dict[str, str]:
    """By key: rule and way out of each violation of the recipe with edits, whose models are in the working directory."""
    return refusals_of(edited(*edits), overrides)


def refusals_of(content: str | Callable[[], dict], overrides: Sequence[str] = ()) -> dict[str, str]:
    """As `refusals`, of what stands in the recipe's file."""
    faults = faults_in(write(Path(), content), overrides)
    assert len(dict(faults)) == len(faults), "a key is refused twice"
    return dict(faults)


def faults_in(file: Path, overrides: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Of each violation in a recipe's file: the key, and the rule with the way out."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, list(overrides))
    return [(violation.key, f"{violation.rule} {violation.nearest}") for violation in caught.value.violations]


def write(folder: Path, content: str | Callable[[], dict]) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content()))
    return file


def fields_of(section: type[BaseModel] = Recipe) -> Iterator[tuple[type[BaseModel], str, FieldInfo]]:
    """Every section at or below this one, with the name of each of its fields and the field."""
    for name, field in section.model_fields.items():
        yield section, name, field
        for part in sections_of(field.annotation):
            yield from fields_of(part)
