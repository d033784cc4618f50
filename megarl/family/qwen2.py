"""Qwen2 and Qwen2.5: Llama's form with biases on queries, keys and values."""

from functools import partial

from megarl.family.blocks import llama_layer, swiglu
from megarl.family.config import read_decoder
from megarl.family.table import Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=partial(read_decoder, qkv_bias=True),
    layer=lambda shape, layer: llama_layer(shape, swiglu(shape.hidden, shape.ffn)),
)
