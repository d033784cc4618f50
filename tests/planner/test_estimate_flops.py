"""The weights and operations that `megarl check` counts are those of the weight tables and of a real engine, and pairs of
tokens are counted one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megarl.models import LatentAttention, ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import parameter_sizes
from megarl.models.shape import Experts
from megarl.planner.activations import MASK_ROWS, mask_bytes
from megarl.planner.engine_memory import cache_width
from megarl.planner.flops import executed_flops, forward_flops, product_flops, update_flops
from megarl.planner.roles import layer_weights
from megarl.recipe.role_sections import FreezeSection, LoraSection, MemorySection
from tests.engine_cases import engine, objective_of, planned, random_batch, start
from tests.memory_cases import HEADS, MODELS, write_model
from tests.planner_cases import planned_role
from tests.ranks import run_ranks

LENGTHS = [(5, 40), (70, 10), (3, 1), (100, 60)]
SHAPE = ModelShape.from_config({**MODELS["qwen3"], **HEADS})


def in_place(target: Sequence[int], left: Sequence[int], right: Sequence[int], **_: object) -> int:
    """Of a product [rows, inner] [inner, columns] that is added to its target: torch's counter knows none."""
    return 2 * left[0] * left[1] * right[1]


IN_PLACE = {torch.ops.aten.addmm_: in_place}  # the head's gradients


def selective(modules: Any) -> MemorySection:
    return MemorySection(recompute="selective", recompute_modules=modules)


LAYERS = SHAPE.num_layers
# A role, its settings, and how many passes of a layer an update makes.
UPDATES = (
    ("actor", MemorySection(), FreezeSection(), None, 3 * LAYERS),
    ("critic", MemorySection(), FreezeSection(), None, 3 * LAYERS),
    ("actor", MemorySection(recompute="full"), FreezeSection(), None, 4 * LAYERS),
    ("actor", selective(("core_attn", "mlp")), FreezeSection(), None, 4 * LAYERS),
    ("actor", MemorySection(), FreezeSection(embedding=True, layers=2), None, 3 * LAYERS - 2 * 2),
    ("actor", MemorySection(recompute="full"), FreezeSection(), LoraSection(rank=8, alpha=8.0), 4 * LAYERS),
)


def count(directory: str) -> list[tuple[int, int]]:
    """Operations of a forward phase and of an update by torch's counter, under each of UPDATES."""
    place, counts = start(Layout()), []
    for role, savings, frozen, lora, _ in UPDATES:
        trained = engine(directory, place, role, lr=1e-3, memory=savings, frozen=frozen, lora=lora)
        batch = random_batch(trained.shape.vocab, LENGTHS)
        mini_batch = planned(batch, Layout(), max_tokens=200)
        # The counter knows no operator of the CPU's fused attention; its plain form multiplies the masked half too.
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as forward:
                trained.forward(batch, mini_batch)
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as update:
                trained.update(batch, mini_batch, objective_of(role, 1))
        counts.append((forward.get_total_flops(), update.get_total_flops()))
    return counts


def test_operations_are_those_of_the_engine(tmp_path: Path) -> None:
    """Also what recompute, adapters and frozen layers make of an update."""
    write_model({**MODELS["qwen3"], **HEADS}, tmp_path)
    (counted,) = run_ranks(count, 1, str(tmp_path))
    queries = SHAPE.heads * SHAPE.head_dim
    masked = sum(2 * queries * total * (total - 1) for total in map(sum, LENGTHS))  # of a layer's forward pass, in torch
    for (name, savings, frozen, lora, times), (forward, update) in zip(UPDATES, counted, strict=True):
        if lora is None:
            needed = sum(forward_flops(SHAPE, sum(pair), pair[1], name == "critic") for pair in LENGTHS)
            assert forward == pytest.approx(needed + LAYERS * masked, rel=0.01), name
        role = planned_role(name, SHAPE, Layout(), "fp32", True, memory=savings, freeze=frozen, lora=lora)
        expected = sum(executed_flops(role, sum(pair), pair[1]) for pair in LENGTHS) + times * masked
        assert update == pytest.approx(expected, rel=0.01), (name, savings, frozen, lora)


def rotary_tables(directory: str) -> int:
    """Tables that Megatron keeps after forward passes of many lengths."""
    role = engine(directory, start(Layout()), max_sequence_tokens=200)
    for longest in range(20, 24):
        batch = random_batch(role.shape.vocab, [(3, longest - 3)])
        role.forward(batch, planned(batch, Layout(), sequences=1))
    tables: int = type(role.models[0].rotary_pos_emb).forward.cache_info().currsize
    return tables


def test_one_rotary_table_is_kept_for_sequences_of_every_length(tmp_path: Path) -> None:
    write_model({**MODELS["qwen3"], **HEADS}, tmp_path)
    assert run_ranks(rotary_tables, 1, str(tmp_path)) == [1]


def test_experts_that_a_token_does_not_take_cost_nothing() -> None:
    experts = Experts(count=64, per_token=2, ffn=16)
    shape = replace(SHAPE, experts=experts)
    more = replace(SHAPE, experts=replace(experts, count=128))
    router = 2 * 10 * shape.num_layers * shape.hidden * 64  # scores of 64 experts more
    assert update_flops(more, 10, 1) - update_flops(shape, 10, 1) == 3 * router


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
