"""Llama 2 and 3, and models of the same form (SmolLM2, TinyLlama)."""

from megarl.models.shape import read_decoder
from megarl.models.weight_table import Family, llama_layer

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=read_decoder,
    layer=llama_layer,
)
