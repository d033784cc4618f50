"""Which weights engines hold in blocks of FP8, and whether a plan leaves those blocks whole. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megarl.models import ModelShape, Weight
from megarl.models.layout import RolloutLayout, Segment
from megarl.models.vllm_weights import held, parameter_sizes, stage_weights

# DeepSeek-V3's format of FP8 weights (technical report, sec. 3.3.2): e4m3 and one scale for each 128 x 128 block.
BLOCK = 128
SCALE_BYTES = 4
ROUTER = "mlp.router.weight"
# vLLM 0.32 hands its quantisation to the router of these models (`GateLinear` with a `quant_config`), and to no other's.
QUANTISED_ROUTERS = ("qwen3_moe",)


def quantised_tensors(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the checkpoint tensors that vLLM's `fp8_per_block` quantises: the linear weights of the layers,
    each expert's too. Embedding, output head, norms and biases keep their format, and routers but those of some families."""
    found = {}
    for prefix, weight in stage_weights(shape, RolloutLayout(), 0):
        if _is_quantised(shape, prefix, weight):
            for expert in range(weight.experts or 1):
                found[prefix + weight.name.format(expert=expert)] = (weight.rows, weight.columns)
    return found


def quantised_parameters(shape: ModelShape, rollout: RolloutLayout, worker: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the parameters that one worker of an engine holds in blocks, as `parameter_sizes` has them."""
    stage, sizes = rollout.coordinates(worker)[1], parameter_sizes(shape, rollout, worker)
    rows = stage_weights(shape, rollout, stage)
    names = {prefix + held(weight).parameter for prefix, weight in rows if _is_quantised(shape, prefix, weight)}
    return {name: size for name, size in sizes.items() if name in names}


def _is_quantised(shape: ModelShape, prefix: str, weight: Weight) -> bool:
    """Of a row of the weight table; `prefix` is that of its layer, empty outside of the layers."""
    routes = weight.megatron.parameter == ROUTER and shape.family not in QUANTISED_ROUTERS
    return bool(prefix) and weight.columns > 1 and not routes


def block_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix in blocks: its scales, and one byte an element."""
    return scale_bytes(rows, columns) + rows * columns


def scale_bytes(rows: int, columns: int) -> int:
    return SCALE_BYTES * -(-rows // BLOCK) * -(-columns // BLOCK)


def check_blocks(sources: Iterable[Segment], destinations: Iterable[Segment], sizes: Mapping[str, tuple[int, int]]) -> None:
    """Every FP8 block must lie in one box of a trainer rank, which quantises it, and in one box of a worker, where it must
    be a block of the worker's parameter too.

    `sizes` are (rows, columns) of the checkpoint tensors to be quantised; boxes of others are passed over. Raises ValueError
    naming the first box that cuts a block, and how many there are.
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


def _cuts(box: Segment, sizes: Mapping[str, tuple[int, int]]) -> bool:
    if box.name not in sizes:
        return False
    rows, columns = sizes[box.name]
    ends = ((box.row1, rows), (box.col1, columns))
    return bool(box.row0 % BLOCK or box.col0 % BLOCK) or any(end % BLOCK and end != last for end, last in ends)


def _place(owner: str, box: Segment) -> str:
    return f"{owner} {box.rank}'s part [{box.row0}:{box.row1}, {box.col0}:{box.col1}] of {box.name}"
