"""Checkpoint mode in a vLLM worker: load whole checkpoint tensors into a live model with vLLM's own loader.

It needs no table of vLLM's parameters, so architectures without a table use it, and the tables are tested against it. The
price: every worker receives the whole model, and a module is applied when its last tensor is there.

vLLM's layerwise reload does the work (`vllm.model_executor.model_loader.reload`, checked with vLLM 0.32): each module gets
parameters in the checkpoint's format, is filled, packed as after a start, and copied over the packed module. Two steps are
missing on CPU and done here: a mixture of experts with a kernel takes the weights for packed weights, and a tied output head
keeps its own packed copy of the embedding.
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
    """Load (checkpoint name, whole tensor) pairs into a live vLLM model; the number of bytes received.

    The pairs are all tensors of the checkpoint that updates move, each once, in any order; module after module needs the
    least memory. A tensor may have another dtype than the model. It must not change until its module is complete, so it must
    not lie in a reused bucket. The caller resets prefix caches.

    Raises SyncError for a tensor that the model does not have, that has another size, comes twice, or is missing. After any
    failure, also of `tensors` itself, complete modules hold the new weights and the others the old weights: the engine must
    answer nothing until a load succeeds. The next load does not depend on this one.
    """
    shape, num_bytes = ModelShape.from_directory(model_config.model), 0
    sizes = checkpoint_sizes(shape)
    missing = set(sizes) - fixed_tensors(shape)

    def incoming() -> Iterator[tuple[str, torch.Tensor]]:
        """Compare the tensors with the checkpoint's names and sizes. vLLM's loader skips names that it does not know, and
        fills missing weights of a module with whatever lies in memory."""
        nonlocal num_bytes
        for name, tensor in tensors:
            if name not in missing:
                known = "came twice, or is one that no update moves" if name in sizes else "is not in the model"
                raise SyncError(f"checkpoint mode: the tensor {name!r} {known}")
            rows, columns = sizes[name]
            if tuple(tensor.shape) != ((rows,) if columns == 1 else (rows, columns)):
                raise SyncError(f"checkpoint mode: {name} is {tuple(tensor.shape)}, expected {rows} x {columns}")
            missing.remove(name)
            num_bytes += tensor.nbytes
            yield name, tensor

    with _reloading(model, model_config):
        model.load_weights(incoming())
        if missing:
            raise SyncError(f"checkpoint mode: {len(missing)} tensors did not come, {sorted(missing)[:5]} among them")
    if shape.tied:
        head = model.get_submodule("lm_head")
        if hasattr(head, "quant_method"):  # a stage before the last has none
            head.quant_method.process_weights_after_loading(head)
    return num_bytes


@contextmanager
def _reloading(model: torch.nn.Module, model_config: ModelConfig) -> Iterator[None]:
    """Run a layerwise reload and finish or undo it: after a failure vLLM alone would continue it with the next load."""
    # On CPU experts lose their kernel, so that they are packed as at the start.
    kernels: dict[FusedMoEMethodBase, object] = {}
    if current_platform.is_cpu():
        methods = [getattr(module, "quant_method", None) for module in model.modules()]
        kernels = {method: method.moe_kernel for method in methods if isinstance(method, FusedMoEMethodBase)}
    for method in kernels:
        method.moe_kernel = None
    try:
        initialize_layerwise_reload(model)
        yield
        finalize_layerwise_reload(model, model_config)
    except BaseException:  # raised again
        for module in model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                _place_kernel_tensors(module, info)
                info.reset()
        for method, kernel in kernels.items():
            method.moe_kernel = method.moe_kernel or kernel
        raise
