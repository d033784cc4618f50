"""Checkpoint mode's end in a vLLM worker: whole checkpoint tensors through vLLM's own loader, into a live model.

It needs no table of vLLM's parameters, so it is what an architecture without one falls back on, and what the table is
tested against. The price: every worker receives the whole model, and a module is applied when its last tensor is there.

vLLM's layerwise reload does the work (`vllm.model_executor.model_loader.reload`, checked with vLLM 0.32): each module gets
parameters of the checkpoint's format, is filled, packed as after a start, and copied over the packed one. On CPU it leaves
out two things, which are done here: a mixture of experts that has a kernel takes the weights for packed ones, and a tied
output head keeps its own packed copy of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.platforms import current_platform

from megarl.models import ModelShape
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.vllm_weights import fixed_tensors
from megarl.weight_sync.manifest import SyncError


@torch.no_grad()
def load_checkpoint_tensors(model: Any, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Load (checkpoint name, whole tensor) pairs into a live vLLM model; the number of bytes that came.

    All tensors of the checkpoint but those that no update moves, each once, in any order; one module after the other
    needs the least memory. A tensor may have another number format than the model, and must stay as it is until its module
    is complete (so it must not lie in a bucket that is used again). Prefix caches are the caller's to reset.

    Raises SyncError for a tensor that the model does not have, of another size, twice, or missing. After any failure,
    also of `tensors` itself, modules that were complete hold the new weights and the others the old ones: the engine must
    answer nothing until a load went through, and the next load needs nothing of this one.
    """
    shape = ModelShape.from_directory(model_config.model)
    with _reloading(model, model_config):
        incoming = _Incoming(shape, tensors)
        model.load_weights(iter(incoming))
        incoming.check_complete()
    if shape.tied:
        head = model.get_submodule("lm_head")
        if hasattr(head, "quant_method"):  # a stage before the last has none
            head.quant_method.process_weights_after_loading(head)
    return incoming.num_bytes


class _Incoming:
    """The tensors on their way into the loader, held against what the checkpoint has.

    vLLM's loader passes over names that it does not know, and starts a module that lacks a part of its weights with
    whatever lies in memory.
    """

    def __init__(self, shape: ModelShape, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._sizes = checkpoint_sizes(shape)
        self._missing = set(self._sizes) - fixed_tensors(shape)
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            if name not in self._missing:
                known = "came twice, or is one that no update moves" if name in self._sizes else "is not in the model"
                raise SyncError(f"checkpoint mode: the tensor {name!r} {known}")
            rows, columns = self._sizes[name]
            if tuple(tensor.shape) != ((rows,) if columns == 1 else (rows, columns)):
                raise SyncError(f"checkpoint mode: {name} is {tuple(tensor.shape)}, expected {rows} x {columns}")
            self._missing.remove(name)
            self.num_bytes += tensor.nbytes
            yield name, tensor

    def check_complete(self) -> None:
        if self._missing:
            some = sorted(self._missing)[:5]
            raise SyncError(f"checkpoint mode: {len(self._missing)} tensors did not come, {some} among them")


@contextmanager
def _reloading(model: torch.nn.Module, model_config: ModelConfig) -> Iterator[None]:
    """A layerwise reload that is finished, or given up: vLLM itself would count a next one from where this one broke."""
    kernels = _take_expert_kernels(model)
    complete = False
    try:
        initialize_layerwise_reload(model)
        yield
        finalize_layerwise_reload(model, model_config)
        complete = True
    finally:
        if not complete:
            for module in model.modules():
                info = get_layerwise_info(module)
                if info.can_load():
                    _place_kernel_tensors(module, info)
                    info.reset()
            for method, kernel in kernels.items():
                method.moe_kernel = method.moe_kernel or kernel


def _take_expert_kernels(model: torch.nn.Module) -> dict[FusedMoEMethodBase, object]:
    """On CPU, leave experts without a kernel, so that they are packed as at their start; the kernels that they had."""
    if not current_platform.is_cpu():
        return {}
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels: dict[FusedMoEMethodBase, object] = {m: m.moe_kernel for m in methods if isinstance(m, FusedMoEMethodBase)}
    for method in kernels:
        method.moe_kernel = None
    return kernels
