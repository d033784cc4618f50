"""Imported once in the fork server of all tests: what every rank, trainer and agent would import."""

import numpy  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo  # the first optimizer imports it

from megarl import build  # noqa: F401
from megarl.cluster import node_agent  # noqa: F401
from megarl.megatron import checkpoint  # noqa: F401
from tests import engine_cases  # noqa: F401

torch.set_num_threads(1)
