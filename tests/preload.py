"""Imported once in the fork server of `ranks.py`: what every rank would import."""

import numpy  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo  # the first optimizer imports it

import megarl.megatron.checkpoint  # noqa: F401
import tests.engine_cases  # noqa: F401

torch.set_num_threads(1)
