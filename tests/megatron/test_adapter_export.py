"""Adapters in PEFT's format on the base model are the merged export, and both are what the engine trained."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.megatron.export import export, export_adapter
from megarl.models.layout import Layout
from tests.engine_cases import small_batch
from tests.lora_cases import LORA, train_lora
from tests.ranks import run_ranks
from tests.rollout_cases import completion_logits
from tests.runs import tiny_recipe
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.golden


def _run(folder, directory, **changes):
    """A run directory whose last checkpoint holds trained adapters; returns it and what the trainer saw."""
    recipe = tiny_recipe(folder, "lora", False, 2, 2, 1, 2, **changes)
    run = folder / "runs" / "lora"
    run.mkdir(parents=True)
    recipe.replace(run / "recipe.yaml")
    return run, run_ranks(train_lora, 2, str(directory), Layout(tensor=2), 2, 40, str(run / "checkpoints"), 2)[0]


def _logprobs(model):
    """Of the completions of the batch that `train_lora` uses."""
    samples = small_batch(model.config.vocab_size).samples.values()
    with torch.no_grad():
        return torch.cat([completion_logits(model, sample) for sample in samples]).log_softmax(-1)


def _apply(model, target):
    """What PEFT does with its files, by hand."""
    config, tensors = (
        json.loads((target / "adapter_config.json").read_text()),
        load_file(target / "adapter_model.safetensors"),
    )
    modules = dict(model.named_modules())
    names = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors}
    assert {name.rsplit(".", 1)[1] for name in names} == set(config["target_modules"])
    for name in names:
        a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        modules[name].weight.data += config["lora_alpha"] / config["r"] * (b @ a)
    return model


def test_both_exports_are_what_was_trained(tmp_path):
    from transformers import AutoModelForCausalLM

    directory = save_tiny_model(tmp_path / "model", "qwen2")
    run, trained = _run(tmp_path, directory, actor__lora=LORA.model_dump(mode="json"))
    export(run, tmp_path / "merged")
    export_adapter(run, tmp_path / "adapter")
    load = AutoModelForCausalLM.from_pretrained
    merged = _logprobs(load(tmp_path / "merged", dtype=torch.float32))
    adapted = _logprobs(_apply(load(directory, dtype=torch.float32), tmp_path / "adapter"))
    assert (merged - adapted).abs().max() <= 1e-5
    targets = torch.from_numpy(
        np.concatenate([sample.completion.token_ids for sample in small_batch(131).samples.values()]).astype(np.int64)
    )
    logprobs = merged.gather(1, targets[:, None]).squeeze(1).numpy()
    np.testing.assert_allclose(logprobs, trained.adapted, atol=1e-4)
    assert np.abs(logprobs - trained.base).max() > 1e-3


def test_a_run_without_adapters_has_none_to_export(tmp_path):
    save_tiny_model(tmp_path / "model")
    recipe = tiny_recipe(tmp_path, "plain", False, 1, 1, 1, 1)
    run = tmp_path / "runs" / "plain"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    recipe.replace(run / "recipe.yaml")
    with pytest.raises(ValueError, match="no actor.lora; export without --adapter"):
        export_adapter(run, tmp_path / "adapter")
