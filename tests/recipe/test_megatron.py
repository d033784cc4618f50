"""What a recipe says in Megatron's own words: `trainer.megatron` and recompute, checked without importing megatron-core."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megarl import platform  # noqa: F401  # before megatron.core
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.foreign_fields import dataclass_fields
from megarl.recipe.role_sections import MemorySection
from megarl.recipe.trainer_section import FIXED, OWNER_OF
from tests.recipe_cases import CONFIG, edited, refusals, write
from tests.tiny_models import save_tiny_model

MODULE = "megatron.core.transformer.transformer_config"
SELECTIVE = {"recompute": "selective"}

# (edits, {key: a text of its rule or way out})
BROKEN: dict[str, tuple[list[tuple[str, Any]], dict[str, str]]] = {
    "options that other keys own, misspelt ones, and options of no TransformerConfig": (
        [("trainer.megatron", {"num_layers": 2, "context_parallel_size": 2, "recompute_modules": ["mlp"], "bf16": True,
                               "moe_router_dtype": "fp64", "kv_lora_rank": 64, "moe_router_topkk": 2,
                               "tensor_model_parallel_sizes": 2, "moe_router_dtypes": "fp64", "kv_lora_ranks": 64,
                               "attention_softmax_in_fp31": True, "_cpu_offloading_context": None})],
        {"trainer.megatron.num_layers": "config.json", "trainer.megatron.context_parallel_size": "ROLE.layout",
         "trainer.megatron.recompute_modules": "ROLE.memory.recompute_modules", "trainer.megatron.bf16": "trainer.precision",
         "trainer.megatron.moe_router_dtype": "needs it as it is", "trainer.megatron.kv_lora_rank": "config.json",
         "trainer.megatron.moe_router_topkk": "no such field model.path, whose config.json says it",
         "trainer.megatron.tensor_model_parallel_sizes": "ROLE.layout",
         "trainer.megatron.moe_router_dtypes": "remove trainer.megatron.moe_router_dtypes",
         "trainer.megatron.kv_lora_ranks": "remove",
         "trainer.megatron.attention_softmax_in_fp31": "trainer.megatron.attention_softmax_in_fp32",
         "trainer.megatron._cpu_offloading_context": "no such field"}),
    "settings of a recompute that is not taken": (
        [("actor.memory", {"recompute_modules": ["mlp"]})],
        {"actor.memory.recompute_modules": "memory.recompute: selective"}),
    "modules that a dense model has none of": (
        [("actor.memory", SELECTIVE | {"recompute_modules": ["mlp", "moe"]}),
         ("critic.memory", SELECTIVE | {"recompute_modules": ["layernorm"]})],
        {"actor.memory.recompute_modules": "[mlp]", "critic.memory.recompute_modules": "fused into the next linear layer"}),
    "modules that a model of experts has none of": (
        [("model.path", "experts"), ("actor.memory", SELECTIVE | {"recompute_modules": ["mlp", "core_attn"]}),
         ("critic.memory", SELECTIVE | {"recompute_modules": ["shared_experts"]}), ("actor.layout.sequence_parallel", True)],
        {"actor.memory.recompute_modules": "[core_attn]", "critic.memory.recompute_modules": "do not have"}),
    "modules that need Transformer Engine, on CPUs": (
        [("model.path", "experts"), ("actor.memory", SELECTIVE | {"recompute_modules": ["moe_act", "core_attn"]}),
         ("device", {"memory_gib": 8.0, "kind": "cpu"}), ("actor.layout.sequence_parallel", True)],
        {"actor.memory.recompute_modules": "Transformer Engine's layers alone"}),
    "a module twice": (
        [("actor.memory", SELECTIVE | {"recompute_modules": ["mlp", "mlp"]})],
        {"actor.memory.recompute_modules": "[mlp]"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_every_fault_is_named_with_a_way_out(name: str, folder: Path) -> None:
    edits, expected = BROKEN[name]
    refused = refusals(*edits)
    assert expected.keys() <= refused.keys()
    assert [refused[key] for key, text in expected.items() if text not in refused[key]] == []


def test_a_start_refuses_what_needs_transformer_engine(folder: Path) -> None:
    """Where `check` did not know the device: on a CPU, a GPU before Hopper, or without Transformer Engine."""
    from megarl.build import check_models

    moe_act = ("actor.memory", SELECTIVE | {"recompute_modules": ["moe_act", "core_attn"]})
    edits = [("model.path", "experts"), ("actor.layout.sequence_parallel", True), ("actor.layout.expert_tensor", 1), moe_act]
    recipe = load_recipe(write(folder, edited(*edits)))
    with pytest.raises(RecipeError) as caught:
        check_models(recipe)
    (refusal,) = [violation for violation in caught.value.violations if violation.key == "actor.memory.recompute_modules"]
    assert "Transformer Engine's layers alone" in refusal.rule and refusal.nearest == "[core_attn]"


def test_legal_options_and_recompute_pass(folder: Path) -> None:
    options = {"attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "cp_comm_type": "a2a", "moe_z_loss_coeff": 1}
    edits = [
        ("trainer.megatron", options),
        ("actor.memory", SELECTIVE | {"recompute_modules": ["core_attn", "mlp"]}),
        ("critic.memory", {"recompute": "full"}),
    ]
    recipe = load_recipe(write(folder, edited(*edits)))
    assert recipe.trainer.megatron == options


@pytest.mark.parametrize("name", ["TransformerConfig", "MLATransformerConfig"])
def test_fields_read_from_source_are_those_of_the_class(name: str) -> None:
    from megatron.core.transformer import transformer_config

    fields = dataclasses.fields(getattr(transformer_config, name))
    assert set(dataclass_fields(MODULE, name) or {}) == {field.name for field in fields if not field.name.startswith("_")}
    assert dataclass_fields("absent.package", name) is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "gemma3"])
def test_no_option_overrides_what_megarl_sets(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field that megarl gives a TransformerConfig, but for fusions, is refused under `trainer.megatron`."""
    from megarl.megatron import model

    given: dict[str, Any] = {}
    monkeypatch.setattr(model, "TransformerConfig", lambda **settings: given.update(settings))
    shape = ModelShape.from_directory(save_tiny_model(tmp_path, family, tied=family == "gemma3"))
    for memory in (MemorySection(recompute="selective"), MemorySection(recompute="full")):
        layout = Layout(tensor=2, pipeline=2, sequence_parallel=True)
        model.transformer_config(shape, layout, "bf16", "delayed", memory)
    assert given.keys() - OWNER_OF.keys() - FIXED == set()


def test_options_reach_megatron_and_its_refusal_is_named() -> None:
    from megarl.megatron.model import transformer_config

    shape = ModelShape.from_config(CONFIG)
    assert transformer_config(shape, Layout(), "fp32", options={"fp32_residual_connection": True}).fp32_residual_connection
    with pytest.raises(ValueError, match="trainer.megatron = .*apply_rope_fusion"):
        transformer_config(shape, Layout(), "fp32", options={"apply_rope_fusion": True})
