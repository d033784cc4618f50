"""The model families: what a Hugging Face `config.json` says of a decoder. Pure functions, no torch."""

from megarl.family.shape import Experts, LatentAttention, ModelShape

__all__ = ["Experts", "LatentAttention", "ModelShape"]
