"""What an engine rank holds: checked by hand, since nothing here measures vLLM."""

from __future__ import annotations

from dataclasses import replace

from megarl.estimate import engine_memory
from megarl.family import ModelShape
from megarl.reshard.boxes import RolloutLayout
from megarl.reshard.vllm import vllm_segments

QWEN_7B = ModelShape.from_config(
    {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    }
)  # fmt: skip


def test_a_known_model_weighs_what_its_card_says() -> None:
    assert engine_memory(QWEN_7B, 1, "bf16", 0, 1, 2048).weights == 2 * 7_615_616_512


def test_weights_are_those_a_rank_receives() -> None:
    held = (one for one in vllm_segments(QWEN_7B, RolloutLayout(4)) if one.rank == 0)
    received = sum((one.row1 - one.row0) * (one.col1 - one.col0) for one in held)
    assert engine_memory(QWEN_7B, 4, "fp32", 0, 1, 2048).weights == 4 * received


def test_the_cache_is_what_the_recipe_says_and_rows_cost_logits() -> None:
    small, large = (engine_memory(QWEN_7B, 2, "bf16", 10**9, rows, 2048) for rows in (8, 16))
    assert small.engine == large.engine == 10**9
    assert large.logits == 2 * small.logits > 0
    assert large.activations == small.activations


def test_a_key_value_group_is_not_cut() -> None:
    four, eight = (engine_memory(replace(QWEN_7B, heads=32), tensor, "bf16", 0, 1, 2048).weights for tensor in (4, 8))
    assert eight > four / 2
