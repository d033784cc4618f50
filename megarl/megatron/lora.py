"""Low-rank adapters of frozen linear layers (Hu et al. 2021, sec. 4.1): y = W x + (alpha / rank) B A x.

In a column-parallel layer B is sharded like the weight's rows and A is replicated; in a row-parallel layer A is sharded like
the weight's columns and B is replicated. The product A x is only `rank` wide, so the collectives of an adapter move little.

megatron-core fuses queries, keys and values, and gate and up; the fused parts share one A and have their own rows of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl import platform  # noqa: F401  # before megatron.core: on a machine without CUDA it makes it importable
from megarl.recipe.role_sections import LoraSection

from megatron.core.tensor_parallel import (  # isort: skip
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # isort: skip
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip

# Each target's module in a layer, and whether it is column-parallel.
MODULES = {
    "qkv": ("self_attention.linear_qkv", True),
    "proj": ("self_attention.linear_proj", False),
    "fc1": ("mlp.linear_fc1", True),
    "fc2": ("mlp.linear_fc2", False),
}
# The name of the adapter, a child module of its linear layer.
CHILD = "adapter"
# A weight is merged in fp32 in parts of this size, which keeps intermediates small.
MERGED_BYTES = 4 << 20


class Adapter(nn.Module):
    """The factors A [rank, in] and B [out, rank] of one linear layer on this tensor rank."""

    def __init__(self, weight: Tensor, target: str, settings: LoraSection, sequence_parallel: bool, group: Any) -> None:
        """`weight` gives the sizes on this rank, the type and the device."""
        super().__init__()
        rows, columns = weight.shape
        self.target, self.sequence_parallel, self.group = target, sequence_parallel, group
        self.is_column = MODULES[target][1]
        self.scale = settings.alpha / settings.rank
        self.is_on = True
        self.a = nn.Parameter(weight.new_empty(settings.rank, columns))
        self.b = nn.Parameter(weight.new_zeros(rows, settings.rank))
        sharded, replicated, axis = (self.b, self.a, 0) if self.is_column else (self.a, self.b, 1)
        set_tensor_model_parallel_attributes(sharded, True, axis, 1)  # the gradient norm counts it on every tensor rank
        # Under sequence parallelism a rank's gradient of the replicated factor covers only its rows of the sequence, and
        # `finalize_model_grads` sums it over the tensor group.
        replicated.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        # column-parallel: x [slots / s, 1, in], output [slots, 1, out / tensor]; row-parallel: x [slots, 1, in / tensor],
        # output [slots / s, 1, out]; s is the tensor size under sequence parallelism, else 1
        narrow = F.linear(x, self.a)
        if self.is_column:
            if self.sequence_parallel:
                narrow = gather_from_sequence_parallel_region(narrow, group=self.group)
            else:
                narrow = copy_to_tensor_model_parallel_region(narrow, group=self.group)
        elif self.sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self.group)
        # One operation, so that the adapter's output, as wide as the layer's, is never stored.
        added = torch.addmm(output.flatten(0, -2), narrow.flatten(0, -2), self.b.t(), alpha=self.scale)
        return added.view_as(output)

    @torch.no_grad()
    def merged_into(self, weight: Tensor) -> Tensor:
        """Return a copy of this rank's shard W with (alpha / rank) B A added in fp32, in W's type."""
        merged, a = torch.empty_like(weight), self.a.float()
        most = max(1, MERGED_BYTES // (a.itemsize * weight.shape[1]))
        for whole, b, target in zip(weight.split(most), self.b.split(most), merged.split(most), strict=True):
            target.copy_(torch.addmm(whole.float(), b.float(), a, alpha=self.scale))
        return merged


def attach(chunks: Sequence[Any], settings: LoraSection, seed: int, tensor_rank: int, group: Any) -> dict[str, Adapter]:
    """Freeze the weights of this rank's model chunks and attach new adapters; returns them by module name
    ("decoder.layers.3.mlp.linear_fc1", with layers counted over all stages).

    A is uniform in +-1 / sqrt(in), the same under every layout, and B is 0, so that the model's output does not change. Call
    this before gradient buffers and an optimizer are made.
    """
    adapters: dict[str, Adapter] = {}
    for chunk in chunks:
        chunk.requires_grad_(False)
        for layer in chunk.decoder.layers:
            for target in settings.targets:
                path = MODULES[target][0]
                linear = layer.get_submodule(path)
                adapter = Adapter(linear.weight, target, settings, chunk.config.sequence_parallel, group)
                _initialise(adapter, seed, layer.layer_number, tensor_rank)
                linear.add_module(CHILD, adapter)
                linear.register_forward_hook(_add)
                adapters[f"decoder.layers.{layer.layer_number - 1}.{path}"] = adapter
    return adapters


def _add(linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    """Forward hook of an adapted layer, whose output is a tensor and a bias (or None) that is added later."""
    adapter: Any = linear.get_submodule(CHILD)
    if not adapter.is_on:
        return None
    x = inputs[0]
    if hasattr(linear, "layer_norm_weight"):
        # Transformer Engine's fused layer takes the input of its norm, so the norm is computed here once more.
        fused: Any = linear
        weight = fused.layer_norm_weight + 1 if fused.zero_centered_gamma else fused.layer_norm_weight
        wide = x.float()
        x = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + fused.eps)).to(x.dtype)
    return adapter(x, output[0]), output[1]


@torch.no_grad()
def _initialise(adapter: Adapter, seed: int, layer_number: int, tensor_rank: int) -> None:
    """Draw the whole A from seed, layer and target, and keep this rank's columns."""
    rank, columns = adapter.a.shape
    parts = 1 if adapter.is_column else adapter.group.size()
    generator = torch.Generator().manual_seed(
        (seed * 1_000_003 + layer_number) * len(MODULES) + list(MODULES).index(adapter.target)
    )
    whole = (2 * torch.rand(rank, columns * parts, generator=generator) - 1) * (columns * parts) ** -0.5
    first = 0 if adapter.is_column else tensor_rank * columns
    adapter.a.copy_(whole[:, first : first + columns])


@contextmanager
def switched_off(adapters: Iterable[Adapter]) -> Iterator[None]:
    """Run the base model inside: adapters are off."""
    changed = [adapter for adapter in adapters if adapter.is_on]
    for adapter in changed:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in changed:
            adapter.is_on = True


class MergedShards(Mapping[str, Tensor]):
    """A rank's weights by local name with adapters merged in, merged again at each read; no merged weight is kept."""

    def __init__(self, parameters: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
        """`adapters` are by the names of their weights."""
        self._parameters, self.adapters = parameters, adapters

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._parameters[name].detach()
        return self.adapters[name].merged_into(parameter) if name in self.adapters else parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def adapter_states(adapters: Mapping[str, Adapter], role: str) -> dict[str, Any]:
    """Return the factors for megatron-core's distributed checkpoint; call this inside the role's place.

    A key has the role and the layer in the whole model, so that another layout can load it.
    """
    states: dict[str, Any] = {}
    for place, adapter in adapters.items():
        prefix = f"{role}.{place}.{CHILD}."
        factors = {"a": adapter.a, "b": adapter.b}
        cut = {"b": 0} if adapter.is_column else {"a": 1}
        sharded = make_sharded_tensors_for_checkpoint(factors, prefix, cut)
        if adapter.target == "fc1":  # a rank has rows of gate and rows of up
            sharded[prefix + "b"] = apply_swiglu_sharded_factory(sharded[prefix + "b"], ())
        states |= {f"{place}.{name}": sharded[prefix + name] for name in factors}
    return states


@torch.no_grad()
def fill_adapters(adapters: Mapping[str, Adapter], states: Mapping[str, Tensor]) -> None:
    """Copy loaded factors, by the names of `adapter_states`."""
    for place, adapter in adapters.items():
        adapter.a.copy_(states[f"{place}.a"])
        adapter.b.copy_(states[f"{place}.b"])
