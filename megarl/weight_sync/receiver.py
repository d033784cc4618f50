"""The vLLM side of a weight sync, in every worker process: the file that touches vLLM's model objects.

Checked with vLLM 0.32. On CPU every linear weight is packed into a oneDNN object after load, and the parameter is left with
shape (0,). So a live parameter of the full shape is written in place, and a packed parameter is built again. For both
`quant_method.process_weights_after_loading` does the rest, which vLLM itself calls after load. Experts are packed on CPU
too, under the parameter's own name and with room for padding.

On GPUs vLLM captures CUDA graphs, which read parameters at the addresses that these had during the capture. If vLLM creates
new tensors from the parameters, such as scales in a kernel's layout, they are copied to those addresses.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm._custom_ops import CPUDNNLGEMMHandler
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod, Fp8PerBlockOnlineMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.quantised_blocks import BLOCK, quantised_parameters
from megarl.models.vllm_weights import idle_parameters, parameter_sizes
from megarl.platform import current as platform
from megarl.weight_sync.buckets import FP8, LocalBox
from megarl.weight_sync.checkpoint_loader import load_checkpoint_tensors
from megarl.weight_sync.codec import SCALES
from megarl.weight_sync.copies import SpareMemory, Works, divide
from megarl.weight_sync.manifest import SyncAborted, SyncError, SyncLate, WeightManifest
from megarl.weight_sync.read import WeightReader, WholeTensors

logger = logging.getLogger(__name__)


@dataclass
class OpenModule:
    """A module that is being written, box after box: where its parameters are written, the spare memory for it, how many
    elements are missing, and whether any parameter is in spare memory."""

    targets: dict[str, torch.Tensor]
    spare: SpareMemory
    missing: int
    in_spare: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`WeightManifest.as_dict()`, and the number of this engine."""

    manifest: dict[str, Any]
    engine: int


class WeightReceiver(WeightTransferEngine[WeightTransferInitInfo, UpdateInfo]):
    """Takes this worker's shards of a version while they arrive. A sync that fails leaves a mixture of two versions, so the
    engine must answer nothing until a sync succeeds.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shape = ModelShape.from_directory(self.model_config.model)
        parallel = self.parallel_config
        self._rollout = RolloutLayout(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.data_parallel_size,
            parallel.enable_expert_parallel,
        )
        self._reader: WeightReader | None = None
        self._sizes: dict[str, tuple[int, int]] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._open: dict[str, OpenModule] = {}
        self._spares: list[SpareMemory] = []  # of modules that are complete
        # By module and parameter: the live tensor of a parameter that is in spare memory. None on CPUs: they have no CUDA
        # graphs.
        self._homes: dict[str, dict[str, torch.Tensor]] | None = None if self.device.type == "cpu" else {}
        self.report: dict[str, float] | tuple[bool, str, bool] = {}

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Nothing to connect: everything that a receiver needs comes with each version."""

    def start_weight_update(self) -> None:
        """Forget the last report. `update_weights` does all the work, so that no half-open session can outlive a failure."""
        self.report = (False, "took no weights", False)

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a version; never raises, `report` has the result. Where one worker's call fails, vLLM's executor leaves the
        answers of later workers unread, and takes them for answers to the next calls (0.32)."""
        try:
            # The base method synchronizes torch.accelerator, which raises where there is none.
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as error:  # a failed call would mix up the answers of other workers; `report` has the error
            if self._reader is not None:
                self._reader.leave()  # so that nobody waits for this worker
            message = str(error)
            if not isinstance(error, SyncError):
                logger.exception("a worker took no weights")
                message = f"{type(error).__name__}: {error}"
            self.report = (isinstance(error, SyncAborted), message, isinstance(error, SyncLate))

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        manifest = WeightManifest.from_dict(update_info.manifest)
        if manifest.rollout != self._rollout:
            raise SyncError(f"manifest for engines cut as {manifest.rollout}; this one is cut as {self._rollout}")
        if self._reader is None:
            self._reader = WeightReader(self._shape, self._worker())
        started = time.perf_counter()
        self._repack_s = 0.0  # in this thread
        self._unpacked: list[str] = []  # modules that were written in place, to pack at the end
        by_tensor = manifest.mode == "checkpoint"
        writer = WholeTensors(checkpoint_sizes(self._shape), self.device) if by_tensor else self
        # Close it even if a failure's traceback still holds it: then the other end stops waiting for this worker.
        with contextlib.closing(self._reader.read(manifest, update_info.engine, writer)) as boxes:
            if isinstance(writer, WholeTensors):
                load_checkpoint_tensors(self.model, self.model_config, writer.complete(boxes))
            else:
                try:
                    for box in boxes:
                        self._arrived(box)
                finally:
                    self._open, self._spares = {}, []
        if not self._reader.is_complete:
            raise SyncError("vLLM's loader stopped before the last tensor, so the version was not verified")
        received_s, times = time.perf_counter() - started, self._reader.times
        repack_s, verify_s = self._repack_s + times.pack_s, times.verify_s + times.verify_wait_s
        transfer_s = received_s - repack_s - verify_s
        self.report = {
            "version": manifest.version,
            "received_bytes": float(times.received_bytes),
            "wait_s": times.wait_s,
            "verify_s": verify_s,
            "apply_s": transfer_s - times.wait_s,
            "repack_s": repack_s,  # in checkpoint mode vLLM's loader does both
            "transfer_s": transfer_s,
        }

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _worker(self) -> int:
        """Return this worker's number in its engine."""
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        data_rank = self.parallel_config.data_parallel_rank
        return self._rollout.worker(get_tensor_model_parallel_rank(), get_pp_group().rank_in_group, data_rank)

    def _latent_attentions(self) -> list[tuple[str, MLAAttention]]:
        return [(name, module) for name, module in self._modules.items() if isinstance(module, MLAAttention)]

    def _index_modules(self) -> None:
        """Look up the modules and the sizes of their parameters, once. Raises SyncError where vLLM's model has other
        parameters than megarl's table of it."""
        if self._sizes:
            return
        self._modules = dict(self.model.named_modules())
        shard = self._shape, self._rollout, self._worker()
        sizes = parameter_sizes(*shard)
        # A tied head is listed once, as the embedding.
        live = {name for name, _ in self.model.named_parameters() if not name.endswith(SCALES)}
        live -= idle_parameters(*shard)
        # vLLM's latent attention has no weights in a checkpoint, but registers what it makes of `kv_b_proj` after load.
        for owner, attention in self._latent_attentions():
            live -= {f"{owner}.{name}" for name, _ in attention.named_parameters(recurse=False)}
        differing = sorted(live ^ sizes.keys())
        if differing:
            raise SyncError(f"vLLM's model and megarl's table of it differ in the parameters {differing[:5]}")
        self._sizes = sizes

    # The writer of boxes (`read.Writer`) ---------------------------------------------------------------------------

    def works(self, boxes: Sequence[LocalBox], bucket_bytes: int) -> Works | None:
        """Have threads write on a CPU. A work is a module, or a box of an embedding or an output head."""
        if self.device.type != "cpu":
            return None
        self._index_modules()
        return divide(
            boxes, self._sizes, lambda owner: isinstance(self._modules[owner], VocabParallelEmbedding), bucket_bytes
        )

    def place(self, box: LocalBox, spare: SpareMemory | None = None) -> torch.Tensor:
        """Return where to write a box; the modules of a thread take turns in its spare memory."""
        if (module := self._open.get(box.owner)) is None:
            self._index_modules()
            assert self._reader is not None  # it gave the box
            spare = spare or (self._spares.pop() if self._spares else SpareMemory())
            module = self._open[box.owner] = OpenModule({}, spare, self._reader.module_elements[box.owner])
        target = module.targets.get(box.parameter)
        if target is None:
            num_lent = module.spare.num_lent
            target = module.targets[box.parameter] = self._target(box.parameter, box.dtype, module.spare)
            module.in_spare |= module.spare.num_lent > num_lent
        return box.within(target)

    def written(self, owner: str) -> None:
        """Pack a module in spare memory at once, so that the next work can use the memory. Other modules are packed at the
        end: trainer ranks compute their checksums meanwhile, and between two buckets packing would take the cache from
        them."""
        module = self._open.pop(owner, None)
        if module is not None and module.in_spare:
            module.targets.clear()  # spare memory is not lent again while it is referred to
            self._process(owner)
        else:
            self._unpacked.append(owner)

    def finish(self) -> None:
        """Have vLLM pack the modules that are packed at the end."""
        begun = time.perf_counter()
        for name in dict.fromkeys(self._unpacked):
            self._process(name)
        for _, attention in self._latent_attentions():
            # vLLM derives its weights from `kv_b_proj`, and they are still the old ones.
            attention.process_weights_after_loading(self.model_config.dtype)
        self._repack_s += time.perf_counter() - begun

    def _arrived(self, box: LocalBox) -> None:
        """Count a box that `place` wrote; the last box completes its module."""
        module = self._open[box.owner]
        module.missing -= box.rows * box.cols
        if not module.missing:
            begun = time.perf_counter()
            self.written(box.owner)
            module.spare.take_back()
            self._repack_s += time.perf_counter() - begun
            self._spares.append(module.spare)

    # vLLM's model -------------------------------------------------------------------------------------------------------

    def other_formats(self) -> list[str]:
        """Describe quantised weights and scales that vLLM keeps in another dtype for its kernel: no sync can write them."""
        descriptions, modules = [], dict(self.model.named_modules())
        for parameter in quantised_parameters(self._shape, self._rollout, self._worker()):
            owner, _, name = parameter.rpartition(".")
            module = modules[owner]
            for part, dtype in ((name, FP8), (name + SCALES, torch.float32)):
                live = getattr(module, part, None)
                if live is None or live.dtype != dtype:
                    held = "missing" if live is None else live.dtype
                    method = getattr(module, "quant_method", None)
                    backend = getattr(method, "fp8_backend", None)  # of experts
                    kernel = backend.value if backend is not None else type(getattr(method, "fp8_linear", method)).__name__
                    descriptions.append(f"{owner}.{part} is {held}, not {dtype}, under {kernel}")
        return descriptions

    def _target(self, parameter: str, dtype: torch.dtype, spare: SpareMemory) -> torch.Tensor:
        """Return where to write a parameter, or the scales of its blocks, [rows, columns]: the live tensor, or spare memory
        if vLLM keeps only the packed form. A vector is one column; experts are stacked along the rows."""
        owner, _, name = parameter.rpartition(".")
        module = self._modules[owner]
        live = getattr(module, name).data  # vLLM's own parameter class is slow to inspect
        # vLLM's kernel for small weights converts loaded biases to fp32.
        widened = name == "bias" and live.dtype == torch.float32 and self.device.type == "cpu" and live.dtype != dtype
        if live.dtype != dtype and not widened:
            raise SyncError(f"{parameter} is {live.dtype} in the engine but {dtype} in the manifest")
        rows, cols = self._sizes[parameter.removesuffix(SCALES)]
        if name.endswith(SCALES):
            rows, cols = -(-rows // BLOCK), -(-cols // BLOCK)
        # Experts in FP8 are laid out for a kernel, scales too, whatever the device.
        stacked = live.dim() >= 3 and (self.device.type == "cpu" or dtype == FP8 or name.endswith(SCALES))
        if not (live.numel() == 0 or stacked or widened):
            if live.numel() == rows * cols:
                return live.view(rows, cols)
            raise SyncError(f"{parameter} has {tuple(live.shape)} elements; megarl's table says {rows} x {cols}")
        shape = (live.shape[0], rows // live.shape[0], cols) if live.dim() >= 3 else (rows, cols)[: 1 if widened else 2]
        # oneDNN packs faster when the rows lie apart; vLLM's kernel for small weights wants contiguous rows. The closure
        # shows which kernel packed the module last time.
        cells = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
        apart = platform.has_avx() and any(isinstance(cell.cell_contents, CPUDNNLGEMMHandler) for cell in cells)
        target = spare.take(shape, dtype, self.device, apart=len(shape) == 2 and apart)
        assert self._reader is not None  # it gave the box
        if not name.endswith(SCALES) and self._reader.elements[parameter] < rows * cols:
            target.zero_()  # padding is never sent
        if self._homes is not None:
            self._homes.setdefault(owner, {}).setdefault(name, live)
        setattr(module, name, torch.nn.Parameter(target, requires_grad=False))
        return target if len(shape) == 2 else target.view(rows, cols)

    def _process(self, owner: str) -> None:
        """Have vLLM pack a module, as after load; on a GPU every parameter keeps its address."""
        module = self._modules[owner]
        if self._homes is None:
            self._repack(module)
            return
        homes = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        homes |= self._homes.get(owner, {})
        self._repack(module)
        for name, home in homes.items():
            new = getattr(module, name)
            if new.shape != home.shape or new.dtype != home.dtype:
                raise SyncError(
                    f"vLLM made {owner}.{name} anew as {new.dtype} of {tuple(new.shape)}, and CUDA graphs read "
                    f"{home.dtype} of {tuple(home.shape)}"
                )
            if new.data_ptr() != home.data_ptr():
                home.copy_(new)
                new.data = home  # kernels that refer to the new parameter read it too
        self._homes.pop(owner, None)

    def _repack(self, module: torch.nn.Module) -> None:
        quant_method = getattr(module, "quant_method", None)
        # These methods quantise a checkpoint, once. The weights arrive quantised: do only the steps after that.
        if isinstance(quant_method, Fp8PerBlockOnlineMoEMethod):
            blocks = [getattr(module, name + end).data for end in ("", SCALES) for name in ("w13_weight", "w2_weight")]
            quant_method._setup_kernel(module, *blocks, module.w13_input_scale, module.w2_input_scale)
        elif isinstance(quant_method, Fp8PerBlockOnlineLinearMethod):
            quant_method.fp8_linear.process_weights_after_loading(module)
        elif isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            # Rows are looked up in the parameter itself. On CPUs vLLM (0.32) packs an embedding like an output head: as
            # large as the parameter and never used. Any user of it gets the parameter's own product.
            if self.device.type == "cpu" and hasattr(module, "cpu_linear"):
                module.cpu_linear = torch.nn.functional.linear
            if self._shape.tied and self._rollout.coordinates(self._worker())[1] == self._rollout.pipeline - 1:
                self._process("lm_head")  # it shares the embedding's parameter but has its own packed copy
        elif quant_method is not None:
            if self.device.type == "cpu" and isinstance(quant_method, FusedMoEMethodBase):
                quant_method.moe_kernel = None  # otherwise it takes the weights for packed weights
            if hasattr(module, "cpu_linear"):
                del module.cpu_linear  # free the old packed form before the new one exists
            quant_method.process_weights_after_loading(module)
