"""How many weights low-rank adapters have. Pure functions, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models import ModelShape

# Targets whose weight is cut by rows over the tensor ranks, so that B is cut and A is whole; of the others A is cut.
_COLUMN_PARALLEL = ("qkv", "fc1")


@dataclass(frozen=True)
class Adapters:
    """The adapters of every decoder layer: their inner size, and the linear layers that have one."""

    rank: int
    targets: tuple[str, ...]


def adapted_sizes(shape: ModelShape, target: str) -> tuple[int, int]:
    """(out, in) of a target's weight over all tensor ranks: "qkv", "proj", "fc1" (gate and up) or "fc2"."""
    queries, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    values = queries if shape.latent is None else shape.heads * shape.latent.value_dim
    return {
        "qkv": (queries + 2 * groups, shape.hidden),
        "proj": (shape.hidden, values),
        "fc1": (2 * shape.ffn, shape.hidden),
        "fc2": (shape.hidden, shape.ffn),
    }[target]


def layer_adapters(shape: ModelShape, adapters: Adapters, tensor: int) -> int:
    """Adapter weights of one decoder layer on one tensor rank."""
    total = 0
    for target in adapters.targets:
        rows, columns = adapted_sizes(shape, target)
        rows, columns = (rows // tensor, columns) if target in _COLUMN_PARALLEL else (rows, columns // tensor)
        total += adapters.rank * (rows + columns)
    return total
