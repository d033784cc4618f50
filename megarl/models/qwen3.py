"""Qwen3: Llama's form with norms on queries and keys, head by head."""

from functools import partial

from megarl.models.shape import read_decoder
from megarl.models.weight_table import Family, llama_layer

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False}
FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=partial(read_decoder, qk_norm=True, defaults=DEFAULTS),
    layer=llama_layer,
)
