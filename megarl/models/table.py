"""The rows of a family's weight table, and what a family is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.models.cut import Cut
from megarl.models.shape import ModelShape


class Held(NamedTuple):
    """The parameter of one side that holds a checkpoint tensor, and its cut."""

    parameter: str
    cut: Cut


class Weight(NamedTuple):
    """One checkpoint tensor and where Megatron and vLLM hold it.

    Names of a layer's weights are those below the layer (`self_attn.o_proj.weight`). With `experts` it stands for so many
    tensors: `{expert}` in `name` is the expert's number, in Megatron's parameter its number on the rank; vLLM stacks all of
    them, in this order, in one parameter. Without a `vllm` side versions can only travel whole, for vLLM's own loader
    (`weight_sync.mode: checkpoint`). A `fixed` one no update moves: engines keep what they loaded, in whatever number
    format, and no weight sync sends it. A `shared` one is of an expert that every token passes.
    """

    name: str
    rows: int
    columns: int  # 1 of a vector
    megatron: Held
    vllm: Held | None
    experts: int = 0
    fixed: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Family:
    """One kind of decoder.

    `read` makes a ModelShape of a `config.json` and the name of the file for its errors; it raises ValueError for what
    megarl does not support. `layer` gives the weights of a layer by its number, those of one vLLM module together and the
    modules in the order of the forward pass.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any], str], ModelShape]
    layer: Callable[[ModelShape, int], list[Weight]]
    # Regular expressions of checkpoint names that megarl may leave aside; NUM_LAYERS stands for the number of layers.
    harmless: tuple[str, ...] = ()
