"""A stand-in for Transformer Engine on a CPU, under which megatron-core's own wrappers build and run its layer spec.

The modules that layers are made of compute, in plain torch and on one rank; every other name is an empty class.
`python -m tests.transformer_engine_stub DIRECTORY...` prints, as JSON, what models of both layer specs give.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOP = "transformer_engine"
VERSION = "2.20.2"
# Without these megatron-core takes torch's.
ABSENT = tuple(f"{TOP}.pytorch.{name}" for name in ("optimizers", "cpu_offload", "cpu_offload_v1", "cpp_extensions"))


class _Empty(type):
    """A class whose every method does nothing and answers False."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False


def _weight(rows: int, columns: int, more: dict[str, Any]) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, dtype=more["params_dtype"]))


class _Accumulated(torch.autograd.Function):
    """x weight^T, whose backward pass adds the weight's gradient to Megatron's buffer and returns a dummy for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad += gradient.flatten(0, -2).T @ x.flatten(0, -2)
        ctx.weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


def _product(x: Tensor, weight: Tensor, fused: bool) -> Tensor:
    return _Accumulated.apply(x, weight) if fused and weight.requires_grad else F.linear(x, weight)


class _Base(nn.Module):
    fp8 = fp8_calibration = use_bias = False

    def __init__(self, fuse_wgrad_accumulation: bool) -> None:
        super().__init__()
        self.fp8_meta, self.fuse_wgrad_accumulation = {"fp8_checkpoint": False}, fuse_wgrad_accumulation

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...


class Linear(_Base):
    def __init__(self, in_features: int, out_features: int, parallel_mode: str | None = None, **more: Any) -> None:
        super().__init__(more["fuse_wgrad_accumulation"])
        self.parallel_mode = parallel_mode
        self.weight = _weight(out_features, in_features, more)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return _product(x, self.weight, self.fuse_wgrad_accumulation)


class RMSNorm(nn.Module):
    def __init__(self, *, eps: float, zero_centered_gamma: bool, **more: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, float(zero_centered_gamma)
        size = more.get("normalized_shape") or more["hidden_size"]  # of megatron-core 0.19, of 0.16
        self.weight = nn.Parameter(torch.ones(size, dtype=more["params_dtype"]))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.offset + self.weight, self.eps)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, eps: float, zero_centered_gamma: bool, **more: Any) -> None:
        super().__init__(in_features, out_features, **more)
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=more["params_dtype"]))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.offset + self.layer_norm_weight, self.eps))


class GroupedLinear(_Base):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **more: Any) -> None:
        super().__init__(more["fuse_wgrad_accumulation"])
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", _weight(out_features, in_features, more))

    def forward(self, x: Tensor, m_splits: list[int], **_: Any) -> Tensor:
        parts = zip(x.split(m_splits), range(self.num_gemms), strict=True)
        return torch.cat(
            [_product(part, getattr(self, f"weight{number}"), self.fuse_wgrad_accumulation) for part, number in parts]
        )


class DotProductAttention(nn.Module):
    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, cu_seqlens_q: Tensor, **_: Any) -> Tensor:
        sizes = cu_seqlens_q.diff().tolist()
        parts = zip(*(part.transpose(0, 1).split(sizes, 1) for part in (query, key, value)), strict=True)
        how: dict[str, Any] = {"is_causal": True, "scale": self.scale, "enable_gqa": True}
        outputs = [F.scaled_dot_product_attention(q, k, v, **how) for q, k, v in parts]
        return torch.cat(outputs, 1).transpose(0, 1).flatten(1)


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, *, fused: bool, cu_seqlens: Tensor, **_: Any) -> Tensor:
    assert fused
    angles = torch.cat([freqs[:size] for size in cu_seqlens.diff().tolist()])[:, 0]
    half = torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1)
    return t * angles.cos() + half * angles.sin()


class _SplitAlongDim:
    @staticmethod
    def apply(x: Tensor, dim: int, sizes: list[int]) -> tuple[Tensor, ...]:
        return x.split(sizes, dim)


MODULES = (Linear, RMSNorm, LayerNormLinear, GroupedLinear, DotProductAttention, _SplitAlongDim)
COMPUTING = {kind.__name__: kind for kind in MODULES} | {"apply_rotary_pos_emb": apply_rotary_pos_emb}


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if name == "__version__":
            return VERSION
        if name[0].islower() and name not in COMPUTING and f"{self.__name__}.{name}" in sys.modules:
            return sys.modules[f"{self.__name__}.{name}"]
        if self.__name__ == TOP or name in ("common", "recipe"):
            return importlib.import_module(f"{self.__name__}.{name}")
        return COMPUTING.get(name) or _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != TOP or name in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def outputs(directory: str, spec: str) -> dict[str, Any]:
    """Log-probabilities of a model built by a layer spec, the loss and gradient norm of two updates, the names of its
    parameters, and the keys of its weights in a checkpoint."""
    from megarl.megatron import checkpoint, model
    from megarl.megatron.role import share_results
    from megarl.models.layout import Layout
    from tests.engine_cases import engine, objective_of, planned, small_batch, start_parallel

    model.spec_name = lambda precision: spec  # type: ignore[assignment]
    (place,) = start_parallel([Layout()], seed=1, timeout_s=120.0, local_rank=0).values()
    unfused = {"moe_permute_fusion": False, "moe_router_fusion": False}  # the stand-in has none of the experts' kernels
    actor = engine(directory, place, lr=1e-2, megatron=unfused)
    batch = small_batch(actor.shape.vocab)
    mini_batch = planned(batch, Layout(), max_tokens=40)
    results, _ = actor.forward(batch, mini_batch)
    logprobs = torch.cat(share_results(results["logprobs"], mini_batch, batch, place)).tolist()
    updates = [actor.update(batch, mini_batch, objective_of("actor", 100)) for _ in range(2)]
    layers = actor.models[0].decoder.layers
    with place.active():
        keys = checkpoint._chunk_states(actor.models, "actor")["0"].values()
    return {
        "logprobs": logprobs,
        "updates": [(float(update.sums["loss"]), update.grad_norm) for update in updates],
        "parameters": [name for name, _ in actor.models[0].named_parameters()],
        "shards": sorted(actor.shards()),
        "keys": sorted({part.key for part in keys if hasattr(part, "local_shape")}),
        "modules": sorted({type(module).__name__ for layer in layers for module in layer.modules()}),
        "fused": sum(getattr(module, "fuse_wgrad_accumulation", False) for module in actor.models[0].modules()),
    }


def main(directories: list[str]) -> None:
    sys.meta_path.insert(0, _Finder())
    from megarl import platform
    from tests.ports import unused_port

    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
    }
    platform.current.start_process_group(0, 120.0)
    specs = ("local", "transformer_engine")
    print(json.dumps([{spec: outputs(directory, spec) for spec in specs} for directory in directories]))


if __name__ == "__main__":
    main(sys.argv[1:])
