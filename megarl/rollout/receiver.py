"""The vLLM side of a weight sync, in every worker process. All that touches vLLM's model objects is in this file.

Checked with vLLM 0.32. On CPU every linear weight is packed into a oneDNN object after load and the parameter is left
with shape (0,). So a live parameter of the full shape is written in place, and a packed one is built anew and packed
again; both by `quant_method.process_weights_after_loading`, which vLLM itself calls after load. Experts are packed on CPU
too, under the parameter's own name and with room for padding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from megarl.family import ModelShape
from megarl.reshard.boxes import RolloutLayout
from megarl.reshard.vllm import parameter_sizes
from megarl.rollout.routing import Recorded, RoutingRecorder
from megarl.sync.manifest import DTYPES, SyncError, WeightManifest
from megarl.sync.read import ShardReader


@dataclass
class NoInit(WeightTransferInitInfo):
    """Everything a receiver must know comes with each version."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """`WeightManifest.as_dict()`."""

    manifest: dict[str, Any]


class WeightReceiver(WeightTransferEngine[NoInit, Update]):
    """Takes this worker's shards of one version out of shared memory. A version that fails its checksums changes
    nothing; a failure after that leaves a mixture, so the engine must answer nothing until a version went through.
    """

    init_info_cls = NoInit
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shape = ModelShape.from_directory(self.model_config.model)
        self._sizes = parameter_sizes(self._shape, RolloutLayout(self.parallel_config.tensor_parallel_size), 0)
        self._reader: ShardReader | None = None
        self.report: dict[str, float] = {}

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: `update_weights` does all, so that no half-open session can outlive a failure."""

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base method synchronizes torch.accelerator, which raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: Update) -> None:
        manifest = WeightManifest.from_dict(update_info.manifest)
        tensor = self.parallel_config.tensor_parallel_size
        if manifest.rollout_tensor != tensor:
            raise SyncError(f"manifest for {manifest.rollout_tensor} tensor ranks; this engine has {tensor}")
        if self._reader is None:
            self._reader = ShardReader(self._shape, self._tensor_rank())
            self._check_names()
        started = time.perf_counter()
        num_bytes = self._reader.verify(manifest)
        verified = time.perf_counter()
        self._load(manifest)
        loaded = time.perf_counter()
        self.report = {
            "received_bytes": float(num_bytes),
            "verify_s": verified - started,
            "load_s": loaded - verified,
        }

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _tensor_rank(self) -> int:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()

    def _check_names(self) -> None:
        """The table of `vllm_segments` and the model must know the same parameters."""
        live = {name for name, _ in self.model.named_parameters()}  # a tied head is listed once, as the embedding
        odd = sorted((live - self._derived_names()) ^ self._sizes.keys())
        if odd:
            raise SyncError(f"vLLM's model and megarl's table of it differ in the parameters {odd[:5]}")

    def _latent_attentions(self) -> list[tuple[str, MLAAttention]]:
        return [(name, module) for name, module in self.model.named_modules() if isinstance(module, MLAAttention)]

    def _derived_names(self) -> set[str]:
        """Parameters that no checkpoint has: vLLM's latent attention owns no weight, and registers as parameters of its own
        what it makes of `kv_b_proj` after load (`W_UK_T`, `W_UV`)."""
        return {
            f"{owner}.{name}"
            for owner, attention in self._latent_attentions()
            for name, _ in attention.named_parameters(recurse=False)
        }

    def _load(self, manifest: WeightManifest) -> None:
        dtype = DTYPES[manifest.precision]
        assert self._reader is not None
        module_name: str | None = None
        targets: dict[str, torch.Tensor] = {}
        for box in self._reader.boxes(manifest):
            owner, _, name = box.parameter.rpartition(".")
            if owner != module_name:  # boxes come module by module
                self._process(module_name)
                module_name, targets = owner, {}
            if name not in targets:
                targets[name] = self._target(owner, name, dtype)
            target, (rows, cols) = targets[name], box.content.shape
            # A vector is one column; experts stand one below the other.
            matrix = target.unsqueeze(1) if target.dim() == 1 else target.view(-1, target.shape[-1])
            matrix[box.row : box.row + rows, box.col : box.col + cols].copy_(box.content)
        self._process(module_name)
        if self._shape.tied:
            # The output head shares the embedding's parameter but has a packed copy of its own.
            self._process("lm_head")
        for _, attention in self._latent_attentions():
            # Made of the old `kv_b_proj`: views of it where it is kept as it is, copies of their own where vLLM packs it.
            attention.process_weights_after_loading(self.model_config.dtype)

    def _target(self, owner: str, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Where to write a parameter: the live one, or a new one where only the packed form lives."""
        module = self.model.get_submodule(owner)
        live = getattr(module, name)
        if live.dtype != dtype:
            raise SyncError(f"{owner}.{name} is {live.dtype} in the engine but {dtype} in the manifest")
        rows, cols = self._sizes[f"{owner}.{name}"]
        packed = live.numel() == 0 or (live.dim() == 3 and self.device.type == "cpu")
        if not packed and live.numel() == rows * cols:
            return live.data
        if not packed:
            raise SyncError(f"{owner}.{name} has {tuple(live.shape)} elements; megarl's table says {rows} x {cols}")
        size = (live.shape[0], rows // live.shape[0], cols) if live.dim() == 3 else (rows, cols)
        target = torch.zeros(size, dtype=dtype, device=self.device)
        setattr(module, name, torch.nn.Parameter(target, requires_grad=False))
        return target

    def _process(self, owner: str | None) -> None:
        """Let vLLM pack what was written, as it does after load."""
        if owner is None:
            return
        module = self.model.get_submodule(owner)
        quant_method = getattr(module, "quant_method", None)
        if self.device.type == "cpu" and isinstance(quant_method, FusedMoEMethodBase):
            # With a kernel of an earlier load it takes the weights for packed ones.
            quant_method.moe_kernel = None
        if quant_method is not None:
            quant_method.process_weights_after_loading(module)


class WorkerReport:
    """Mixed into vLLM's worker (`worker_extension_cls`), so that `collective_rpc` reaches what a receiver did and
    what routers chose."""

    def megarl_weight_report(self) -> dict[str, float]:
        return self.weight_transfer_engine.report  # type: ignore[attr-defined]

    def megarl_record_routing(self) -> None:
        """From here on the experts that tokens choose are kept until they are taken."""
        self.megarl_routing = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]

    def megarl_take_routing(self, requests: list[str]) -> list[Recorded]:
        return [self.megarl_routing.take(request) for request in requests]
