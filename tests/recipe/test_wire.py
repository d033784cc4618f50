"""Rules on the form of weights on their way to the engines, of recipes for machines with GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megarl.models import ModelShape
from megarl.recipe.recipe import Recipe
from megarl.recipe.role_sections import adapters_fit_model
from megarl.recipe.rollout_section import rollout_rules
from megarl.recipe.weight_sync_section import weight_sync_fits_model
from tests.rollout_cases import recipe
from tests.weight_sync.test_buckets import BLOCKS

MODEL = Path("model")  # no rule here reads it
MOE = BLOCKS | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip


def fp8_recipe(**changes: Any) -> Recipe:
    made = recipe(MODEL, **({"quantization": "fp8", "precision": "bf16"} | changes))
    return made.model_copy(update={"weight_sync": made.weight_sync.model_copy(update={"bucket_bytes": 1 << 17})})


def messages(made: Recipe, config: dict[str, Any]) -> list[str]:
    found = [*rollout_rules(made), *weight_sync_fits_model(made, ModelShape.from_config(config))]
    return [f"{one.key}: {one.rule}; {one.nearest}" for one in found]


def test_blocks_that_stay_whole_are_legal() -> None:
    assert messages(fp8_recipe(), BLOCKS) == []
    assert messages(fp8_recipe(tensor=2), BLOCKS) == []
    assert messages(fp8_recipe(tensor=2, expert_parallel=True), BLOCKS | MOE) == []
    assert messages(recipe(MODEL), BLOCKS | {"head_dim": 64}) == [], "without quantisation nothing is asked"


@pytest.mark.parametrize(
    ("changes", "config", "text"),
    [
        ({"precision": "fp32"}, {}, "rollout.quantization: FP8 weights work with activations of 16 bits"),
        ({}, {"head_dim": 64}, "rollout.quantization: FP8 weights have one scale .*k_proj.weight cuts a block"),
        ({"tensor": 2}, {"intermediate_size": 384}, "worker 0's part .*0:192.* of model.layers.0.mlp.gate_proj.weight"),
        ({}, {"intermediate_size": 2048}, "weight_sync.bucket_bytes: must hold a row of FP8 blocks of 2048 columns"),
        (
            {},
            MOE | {"moe_intermediate_size": 192},
            "rollout.quantization: .*worker 0's part .* starts inside a block of .*w13",
        ),
    ],
)
def test_what_blocks_do_not_go_with_is_named(changes: dict[str, Any], config: dict[str, Any], text: str) -> None:
    (found,) = messages(fp8_recipe(**changes), BLOCKS | config)
    assert re.search(text, found), found


def test_adapters_that_travel_alone_have_a_rank_that_vllm_takes() -> None:
    """Merged ones may be wider, and so may those of a run that reads its rollouts."""
    shape = ModelShape.from_config(BLOCKS | {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8})
    for send, rank, replay, refused in (
        ("adapter", 512, None, []),
        ("adapter", 513, None, ["512, or actor.lora.send: merged"]),
        ("merged", 513, None, []),
        ("adapter", 513, ".", []),
    ):
        made = recipe(MODEL, replay=replay).model_dump()
        made["actor"]["lora"] = {"rank": rank, "alpha": 1.0, "targets": ["proj"], "send": send}
        assert [one.nearest for one in adapters_fit_model(Recipe.model_validate(made), shape)] == refused, (send, rank)


def test_whole_tensors_are_not_quantised() -> None:
    made = fp8_recipe()
    made = made.model_copy(update={"weight_sync": made.weight_sync.model_copy(update={"mode": "checkpoint"})})
    assert ["weight_sync.mode checkpoint" in one for one in messages(made, BLOCKS)] == [True]
