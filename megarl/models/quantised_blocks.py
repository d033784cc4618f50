"""Find the weights that engines hold in FP8 blocks, and check that a plan cuts no block. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from megarl.models import ModelShape, Weight
from megarl.models.layout import Box, RolloutLayout
from megarl.models.vllm_weights import held, parameter_sizes, stage_weights
from megarl.models.weight_table import ROUTER

if TYPE_CHECKING:
    import numpy as np

Count = TypeVar("Count", int, "np.ndarray")
# DeepSeek-V3's format of FP8 weights (technical report, sec. 3.3.2): e4m3 and one scale for each 128 x 128 block.
BLOCK = 128
SCALE_BYTES = 4
# vLLM 0.32 quantises the routers of these models only (`GateLinear` with a `quant_config`).
QUANTISED_ROUTERS = ("qwen3_moe",)


def quantised_tensors(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of the checkpoint tensors that vLLM's `fp8_per_block` quantises: the linear weights of layers
    and experts. Embedding, output head, norms, biases and most families' routers keep their format."""
    sizes = {}
    for prefix, weight in stage_weights(shape, RolloutLayout(), 0):
        if _is_quantised(shape, prefix, weight):
            for expert in range(weight.experts or 1):
                sizes[prefix + weight.name.format(expert=expert)] = (weight.rows, weight.columns)
    return sizes


def quantised_parameters(shape: ModelShape, rollout: RolloutLayout, worker: int) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of the parameters that a worker holds in blocks, as in `parameter_sizes`."""
    stage, sizes = rollout.coordinates(worker)[1], parameter_sizes(shape, rollout, worker)
    rows = stage_weights(shape, rollout, stage)
    names = {prefix + held(weight).parameter for prefix, weight in rows if _is_quantised(shape, prefix, weight)}
    return {name: size for name, size in sizes.items() if name in names}


def _is_quantised(shape: ModelShape, prefix: str, weight: Weight) -> bool:
    # prefix: of the layer, empty outside of layers
    routes = weight.megatron.parameter == ROUTER and shape.family not in QUANTISED_ROUTERS
    return bool(prefix) and weight.columns > 1 and not routes


def block_bytes(rows: Count, columns: Count) -> Count:
    """Return the bytes of a matrix, or of many, in blocks: the scales, and one byte per element."""
    return scale_bytes(rows, columns) + rows * columns


def scale_bytes(rows: Count, columns: Count) -> Count:
    return SCALE_BYTES * -(-rows // BLOCK) * -(-columns // BLOCK)


def check_blocks(sources: Iterable[Box], destinations: Iterable[Box], sizes: Mapping[str, tuple[int, int]]) -> None:
    """Check that every FP8 block lies in one box of a trainer rank, which quantises the block, and is a block of one
    worker's parameter.

    `sizes` are (rows, columns) of the quantised checkpoint tensors; boxes of other tensors are ignored. Raises ValueError
    that names the first box that cuts a block, and the number of such boxes.
    """
    cuts = [f"{_place('trainer rank', box)} cuts a block" for box in sources if _cuts(box, sizes)]
    for box in destinations:
        if _cuts(box, sizes):
            cuts.append(f"{_place('worker', box)} cuts a block")
        elif box.name in sizes and (box.local_row % BLOCK or box.local_col % BLOCK):
            cuts.append(f"{_place('worker', box)} starts inside a block of {box.parameter}")
    if cuts:
        more = f" (and {len(cuts) - 1} more boxes)" if len(cuts) > 1 else ""
        raise ValueError(
            f"FP8 weights have one scale for each {BLOCK} x {BLOCK} elements, but {cuts[0]}{more}; "
            "choose tensor sizes that cut at multiples of it, or send bf16"
        )


def _cuts(box: Box, sizes: Mapping[str, tuple[int, int]]) -> bool:
    if box.name not in sizes:
        return False
    rows, columns = sizes[box.name]
    ends = ((box.row1, rows), (box.col1, columns))
    return bool(box.row0 % BLOCK or box.col0 % BLOCK) or any(end % BLOCK and end != last for end, last in ends)


def _place(owner: str, box: Box) -> str:
    return f"{owner} {box.rank}'s part [{box.row0}:{box.row1}, {box.col0}:{box.col1}] of {box.name}"
