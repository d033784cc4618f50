"""Qwen2 and Qwen2.5: Llama's form with biases on queries, keys and values."""

from functools import partial

from megarl.models.shape import read_decoder
from megarl.models.weight_table import Family, llama_layer

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False}
FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=partial(read_decoder, qkv_bias=True, defaults=DEFAULTS),
    layer=llama_layer,
)
