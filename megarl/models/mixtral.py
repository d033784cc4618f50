"""Mixtral: Llama's form with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.models.shape import Experts, ModelShape, read_decoder, read_expert_counts, refuse, whole_number
from megarl.models.weight_table import Family, llama_layer

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def read(config: Mapping[str, Any], origin: str) -> ModelShape:
    refuse(config, origin, "router_jitter_noise")
    count, chosen = read_expert_counts(config, origin, "num_local_experts")
    # A softmax over the chosen experts equals a softmax over all experts that is then normalised over the chosen experts.
    shape_of_experts = Experts(count, chosen, whole_number(config, origin, "intermediate_size"), normalise=True)
    return read_decoder(config, origin, experts=shape_of_experts, defaults=DEFAULTS)


LAYER = partial(llama_layer, name="block_sparse_moe", parts=("w1", "w3", "w2"))
FAMILY = Family("mixtral", "MixtralForCausalLM", read, LAYER)
