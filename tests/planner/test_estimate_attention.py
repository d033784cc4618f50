"""Weights and operations of attention, against the weight tables and against counting pairs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models import LatentAttention, ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import parameter_sizes
from megarl.planner.activations import MASK_ROWS, mask_bytes
from megarl.planner.engine_memory import cache_width
from megarl.planner.flops import product_flops
from megarl.planner.roles import layer_weights
from tests.planner_cases import planned_role

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 12, "vocab_size": 131,
}  # fmt: skip
LATENT = LatentAttention(key_value_rank=20, plain_dim=10, rotary_dim=6, value_dim=14, query_rank=24)
PLAIN = {family: ModelShape.from_config({**SIZES, "model_type": family}) for family in ("llama", "qwen2", "qwen3")}
SHAPES = [
    *PLAIN.values(),
    ModelShape.from_config({**SIZES, "model_type": "gemma3_text", "sliding_window": 7}),
    replace(PLAIN["llama"], family="deepseek_v3", latent=LATENT),
    replace(PLAIN["llama"], family="deepseek_v3", latent=replace(LATENT, query_rank=0)),
]


@given(st.integers(1, 30), st.integers(0, 40), st.booleans())
def test_every_pair_that_meets_counts(length, window, latent):
    shape = replace(PLAIN["llama"], windows=(0, window, 0), latent=LATENT if latent else None)
    pairs = sum(1 for query in range(length) for key in range(query + 1) if not window or query - key < window)
    dims = 16 + 14 if latent else 2 * 12
    assert product_flops(shape, 1, length) == 2 * 8 * dims * pairs


def test_engines_cache_keys_and_values_or_one_latent_vector():
    assert [cache_width(PLAIN["llama"], tensor) for tensor in (1, 2, 8)] == [2 * 4 * 12, 2 * 2 * 12, 2 * 12]
    assert cache_width(replace(PLAIN["llama"], latent=LATENT), 2) == 20 + 6


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_weigh_what_the_table_holds(shape, tensor):
    sizes = parameter_sizes(shape, Layout(tensor=tensor), 0)
    held = [rows * columns for name, (rows, columns) in sizes.items() if "layers.0." in name]
    assert layer_weights(shape, 0, tensor) == sum(held)


def test_masks_are_as_large_as_the_engine_makes_them():
    from megarl.models.attention import seen_keys

    role = planned_role("actor", SHAPES[3], Layout(), "fp32", trained=True)
    assert mask_bytes(role, 7) == 0
    mask = seen_keys(MASK_ROWS, 16, 7, torch.float32, torch.device("cpu"))
    assert mask_bytes(role, 8) == mask.untyped_storage().nbytes()
