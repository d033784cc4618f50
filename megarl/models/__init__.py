"""The model families: how to read a decoder's `config.json`, and where each side holds each weight. No torch.

A family is a file with a `FAMILY`, listed below.
"""

from megarl.models import deepseek_v3, gemma3, llama, mixtral, qwen2, qwen3, qwen3_moe
from megarl.models.shape import Experts, LatentAttention, ModelShape
from megarl.models.weight_table import Family, Held, Weight

# By `model_type`.
FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (deepseek_v3, gemma3, llama, mixtral, qwen2, qwen3, qwen3_moe)
}

__all__ = ["FAMILIES", "Experts", "Family", "Held", "LatentAttention", "ModelShape", "Weight"]
