"""Qwen3-MoE: Qwen3 with experts, some layers without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.shape import Experts, ModelShape, read_decoder, read_expert_counts, whole_number
from megarl.models.weight_table import Family, llama_layer


def read(config: Mapping[str, Any], origin: str) -> ModelShape:
    # transformers 5 writes num_local_experts; transformers 4 wrote num_experts.
    count, chosen = read_expert_counts(config, origin, "num_experts", "num_local_experts")
    dense = sorted(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ValueError(
            f"{origin}: mlp_only_layers = {dense} is not supported; the first layers of the model are, [0, 1, …]"
        )
    every = whole_number(config, origin, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    return read_decoder(
        config,
        origin,
        qk_norm=True,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "use_sliding_window": False},
        experts=Experts(
            count,
            chosen,
            whole_number(config, origin, "moe_intermediate_size"),
            normalise=bool(config.get("norm_topk_prob", False)),
            first_dense=len(dense),
            every=every,
        ),
    )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, llama_layer)
