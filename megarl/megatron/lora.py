"""Low-rank adapters beside frozen linear layers (Hu et al. 2021, sec. 4.1): y = W x + (alpha / rank) B A x.

Of a column-parallel layer B is cut like the weight's rows and A is replicated; of a row-parallel one A is cut like the
weight's columns and B is replicated. The product A x is only `rank` wide, so the collectives of an adapter move little: the
partial sums of a row-parallel layer, and under sequence parallelism the rows that the tensor group shares.

megatron-core fuses queries, keys and values, and gate and up; their parts share one A and have their own rows of B.
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

# Where a target is in a layer, and whether its weight is cut by rows (column-parallel) or by columns (row-parallel).
MODULES = {
    "qkv": ("self_attention.linear_qkv", True),
    "proj": ("self_attention.linear_proj", False),
    "fc1": ("mlp.linear_fc1", True),
    "fc2": ("mlp.linear_fc2", False),
}
# The adapter is a child of its linear layer under this name.
CHILD = "adapter"
# Of a weight in fp32, which is merged in parts of so many bytes: its intermediates take little beside it.
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
        cut, whole, axis = (self.b, self.a, 0) if self.is_column else (self.a, self.b, 1)
        set_tensor_model_parallel_attributes(cut, True, axis, 1)  # the gradient norm counts it on every tensor rank
        # A tensor rank's gradient of the replicated factor is that of its own rows of the sequence: `finalize_model_grads`
        # sums it over the tensor group. Without sequence parallelism it is whole on every rank, and not summed.
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

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
        # One operation: an adapter's own output, as wide as the layer's, is never held.
        added = torch.addmm(output.flatten(0, -2), narrow.flatten(0, -2), self.b.t(), alpha=self.scale)
        return added.view_as(output)

    @torch.no_grad()
    def merged_into(self, weight: Tensor) -> Tensor:
        """W + (alpha / rank) B A of this rank's shard, computed in fp32, in W's type. A copy: W stays as it is."""
        merged, a = torch.empty_like(weight), self.a.float()
        most = max(1, MERGED_BYTES // (a.itemsize * weight.shape[1]))
        for whole, b, target in zip(weight.split(most), self.b.split(most), merged.split(most), strict=True):
            target.copy_(torch.addmm(whole.float(), b.float(), a, alpha=self.scale))
        return merged


def attach(chunks: Sequence[Any], settings: LoraSection, seed: int, tensor_rank: int, group: Any) -> dict[str, Adapter]:
    """Freeze the weights of this rank's model chunks and put new adapters beside them; returns them by their layers' place
    in the model ("decoder.layers.3.mlp.linear_fc1", counted over all stages).

    A is uniform in +-1 / sqrt(in), the same under every layout, and B is 0: the model is the base model still. To be called
    before gradient buffers and an optimizer are made.
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
    """Forward hook of an adapted layer, which returns its output and a bias that is added later, or None."""
    adapter = linear.get_submodule(CHILD)
    assert isinstance(adapter, Adapter), f"a {type(adapter).__name__} in the adapter's place"
    if not adapter.is_on:
        return None
    return adapter(_normalised(linear, inputs[0]), output[0]), output[1]


def _normalised(linear: Any, x: Tensor) -> Tensor:
    """What the weight multiplies. Transformer Engine's fused layer takes the input of its norm, so the norm is computed here
    once more."""
    if not hasattr(linear, "layer_norm_weight"):
        return x
    weight = linear.layer_norm_weight + 1 if linear.zero_centered_gamma else linear.layer_norm_weight
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + linear.eps)).to(x.dtype)


@torch.no_grad()
def _initialise(adapter: Adapter, seed: int, layer_number: int, tensor_rank: int) -> None:
    """This rank's columns of the whole A, which seed, layer and target alone decide."""
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
    """Inside, the model is the base model."""
    changed = [adapter for adapter in adapters if adapter.is_on]
    for adapter in changed:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in changed:
            adapter.is_on = True


class MergedShards(Mapping[str, Tensor]):
    """A rank's weights by local name with their adapters added, each merged anew whenever it is read.

    None is kept here. Who comes for a weight part by part keeps it that long: several may read at a time, each another one.
    """

    def __init__(self, parameters: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
        """`adapters` by the names of the weights that they belong to."""
        self._parameters, self._adapters = parameters, adapters

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._parameters[name].detach()
        return self._adapters[name].merged_into(parameter) if name in self._adapters else parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def adapter_states(adapters: Mapping[str, Adapter], role: str) -> dict[str, Any]:
    """The factors for megatron-core's distributed checkpoint, by layer and factor; to be called inside the role's place.

    A key says the role and the layer in the whole model, so another layout can load them.
    """
    states: dict[str, Any] = {}
    for place, adapter in adapters.items():
        prefix = f"{role}.{place}.{CHILD}."
        factors = {"a": adapter.a, "b": adapter.b}
        cut = {"b": 0} if adapter.is_column else {"a": 1}
        sharded = make_sharded_tensors_for_checkpoint(factors, prefix, cut)
        if adapter.target == "fc1":  # a rank's rows are some of gate and some of up
            sharded[prefix + "b"] = apply_swiglu_sharded_factory(sharded[prefix + "b"], ())
        states |= {f"{place}.{name}": sharded[prefix + name] for name in factors}
    return states


@torch.no_grad()
def fill_adapters(adapters: Mapping[str, Adapter], states: Mapping[str, Tensor]) -> None:
    """Take the factors that were loaded for `adapter_states`."""
    for place, adapter in adapters.items():
        adapter.a.copy_(states[f"{place}.a"])
        adapter.b.copy_(states[f"{place}.b"])
