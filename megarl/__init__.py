"""megarl trains language models by reinforcement learning, Megatron-first."""

__version__ = "0.1.0"
