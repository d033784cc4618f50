"""What a phase will take before it runs: bytes and floating-point operations. Pure functions, no torch."""

from megarl.estimate.adapters import Adapters
from megarl.estimate.cap import RESERVE, largest_cap, usable_bytes
from megarl.estimate.flops import executed_flops, forward_flops, sequence_cost, update_flops
from megarl.estimate.memory import Memory, micro_batches_held, most_held, moved_away, peak, resident, resting, working
from megarl.estimate.roles import BYTES, Frozen, Role, Savings, layer_weights, stage_weights
from megarl.estimate.rollout import Engines, engine_memory

__all__ = [
    "BYTES",
    "RESERVE",
    "Adapters",
    "Engines",
    "Frozen",
    "Memory",
    "Role",
    "Savings",
    "engine_memory",
    "executed_flops",
    "forward_flops",
    "largest_cap",
    "layer_weights",
    "micro_batches_held",
    "most_held",
    "moved_away",
    "peak",
    "resident",
    "resting",
    "sequence_cost",
    "stage_weights",
    "update_flops",
    "usable_bytes",
    "working",
]
