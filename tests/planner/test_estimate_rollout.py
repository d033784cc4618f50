"""What an engine rank holds: checked by hand, since nothing here measures vLLM."""

from __future__ import annotations

import pytest

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import parameter_sizes
from megarl.planner.engine_memory import PlannedEngines
from megarl.planner.memory_estimate import DeviceMemory

QWEN_7B = ModelShape.from_config(
    {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    }
)  # fmt: skip
EXPERTS = ModelShape.from_config(
    {
        "model_type": "deepseek_v3", "num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    }
)  # fmt: skip


def engine_memory(
    shape: ModelShape,
    layout: RolloutLayout,
    precision: str,
    cache: int,
    rows: int,
    tokens: int,
    quantization: str | None = None,
) -> DeviceMemory:
    return PlannedEngines(shape, 1, layout, precision, cache, rows, tokens, None, quantization=quantization).memory


def test_a_known_model_weighs_what_its_card_says() -> None:
    assert engine_memory(QWEN_7B, RolloutLayout(), "bf16", 0, 1, 2048).weights == 2 * 7_615_616_512


@pytest.mark.parametrize(
    "layout",
    [
        RolloutLayout(2, 1, 3),
        RolloutLayout(2, 1, 3, True),
        RolloutLayout(1, 1, 4, True),
        RolloutLayout(4, 3),
        RolloutLayout(2, 3, 2, True),
    ],
)
def test_the_fullest_worker_holds_what_it_receives_and_both_ends_of_a_pipeline(layout: RolloutLayout) -> None:
    sizes = [parameter_sizes(EXPERTS, layout, worker) for worker in range(layout.workers)]
    # A router's bias counts for nothing.
    received = max(sum(rows * columns for name, (rows, columns) in held.items() if "bias" not in name) for held in sizes)
    weights = engine_memory(EXPERTS, layout, "fp32", 0, 1, 2048).weights
    ends = (2 * EXPERTS.vocab // layout.tensor + 1) * EXPERTS.hidden
    assert 4 * received <= weights <= 4 * (received + (ends if layout.pipeline > 1 else 0))


# Queries of 2 heads and keys and values of one of 128 are 512 rows, the output 256 columns; feed-forward 384.
BLOCKS = ModelShape.from_config(
    {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 384,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 640, "tie_word_embeddings": True,
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "blocks", "others"),
    [
        # qkv 4 x 2 blocks, output 2 x 2, gate and up 6 x 2, down 2 x 3: 30 a layer. The embedding and seven norms.
        (RolloutLayout(), 3 * (8 + 4 + 12 + 6), 640 * 256 + 7 * 256),
        # Two layers of three in the fullest stage.
        (RolloutLayout(1, 2), 2 * (8 + 4 + 12 + 6), 640 * 256 + 5 * 256),
    ],
)
def test_quantised_weights_take_a_byte_an_element_and_a_scale_a_block(
    layout: RolloutLayout, blocks: int, others: int
) -> None:
    memory = engine_memory(BLOCKS, layout, "bf16", 0, 1, 2048, "fp8")
    assert memory.weights == blocks * (128 * 128 + 4) + 2 * others
    plain = engine_memory(BLOCKS, layout, "bf16", 0, 1, 2048)
    assert plain.weights == 2 * (blocks * 128 * 128 + others)
    assert (plain.activations, plain.logits, plain.engine) == (memory.activations, memory.logits, memory.engine)
