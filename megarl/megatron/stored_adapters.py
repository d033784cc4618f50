"""The adapters of a checkpoint, whole, and the model that they make of their base, without building either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megarl.megatron.checkpoint import load_adapters
from megarl.megatron.lora import MODULES, Adapter
from megarl.megatron.parallel import Place
from megarl.megatron.weights import load_shards
from megarl.models import ModelShape
from megarl.models.layout import Layout, Segment
from megarl.models.megatron_weights import rank_segments
from megarl.planner.roles import adapted_sizes
from megarl.recipe.role_sections import LoraSection


def stored_adapters(
    checkpoint: Path, shape: ModelShape, lora: LoraSection, dtype: torch.dtype, place: Place
) -> dict[str, Adapter]:
    """The actor's adapters by the names of their weights; to be called inside `place`, which has one rank."""
    adapters = {}
    for layer in range(shape.num_layers):
        for target in lora.targets:
            weight = torch.empty(adapted_sizes(shape, target), dtype=dtype)
            adapters[f"decoder.layers.{layer}.{MODULES[target][0]}"] = Adapter(
                weight, target, lora, False, place.tensor_group
            )
    load_adapters(checkpoint, "actor", adapters)
    return {f"{name}.weight": adapter for name, adapter in adapters.items()}


class MergedRole:
    """The weights of a model directory with adapters added, to be read parameter by parameter; as `StoredRole`."""

    def __init__(
        self, directory: str | Path, shape: ModelShape, parameters: Mapping[str, Tensor], adapters: Mapping[str, Adapter]
    ) -> None:
        """`parameters` are of one rank that holds the whole model, by local name, and may be without content."""
        self._directory, self._shape, self._parameters, self._adapters = directory, shape, parameters, adapters
        self._segments: dict[str, list[Segment]] = defaultdict(list)
        for segment in rank_segments(shape, Layout(), 0, 0):
            self._segments[segment.parameter].append(segment)

    def dtype(self, parameter: str) -> torch.dtype:
        return self._parameters[parameter].dtype

    def read(self, parameter: str) -> Tensor:
        """One parameter by its local name, with its padding. Raises what `load_shards` raises."""
        like = self._parameters[parameter]
        content = torch.empty(like.shape, dtype=like.dtype)
        load_shards(self._directory, self._shape, self._segments[parameter], {parameter: content})
        return self._adapters[parameter].merged_into(content) if parameter in self._adapters else content
