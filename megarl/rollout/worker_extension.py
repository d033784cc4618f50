"""What an engine can ask of each of its vLLM workers, and what vLLM 0.32 lacks on CPUs, added after their start.

- Engines with several workers: the input buffer of pipeline stages, expert parallelism, uneven collectives.
- Recording which experts the tokens of a request chose. vLLM's own recording (`enable_return_routed_experts`) needs its
  second model runner, which needs Triton. `RoutingRecorder` serves the first model runner. Prompts must not come from the
  prefix cache, whose tokens pass no router.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.platforms import current_platform

import megarl.weight_sync.copies  # noqa: F401  # it needs `torch.set_num_threads`, which the worker replaces at its start
from megarl.rollout.plugin import UNRECORDED


def _skip_experts_of_other_ranks() -> None:
    """Give weight 0 to experts of other expert-parallel ranks. vLLM's CPU kernel ignores the expert map: it would look for
    every expert among the local ones, past their end."""
    apply = CPUUnquantizedExperts.apply

    def apply_local_experts(
        self: CPUUnquantizedExperts,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        **more: Any,
    ) -> None:
        # topk_weights, topk_ids [tokens, experts of a token]; expert_map [all experts], -1 for an expert of another rank
        if expert_map is not None:
            local_ids = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local_ids < 0, 0.0)
            topk_ids = local_ids.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **more)

    CPUUnquantizedExperts.apply = apply_local_experts  # type: ignore[method-assign]


def all_gatherv(
    self: CpuCommunicator, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """All-gather tensors whose first dimension differs between ranks."""

    def gather(part: torch.Tensor) -> torch.Tensor:
        lengths = sizes or [len(part)] * self.world_size
        padded = part.new_zeros((max(lengths), *part.shape[1:]))  # gloo gathers only equal shapes
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([received[:length] for received, length in zip(parts, lengths, strict=True)])

    return [gather(tensor) for tensor in input_] if isinstance(input_, list) else gather(input_)


def reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group].clone()


class RoutingRecorder:
    """Wraps a worker's model runner: routers report the experts they chose, and the scheduler's output says which rows of a
    forward pass belong to which request."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._execute = runner, runner.execute_model
        self._chosen: dict[int, torch.Tensor] = {}  # layer -> [rows, experts a token], of the current forward pass
        self._requests: dict[str, list[tuple[int, np.ndarray]]] = {}  # first token, [tokens, layers, experts a token]
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                assert isinstance(module.router, BaseRouter), f"{type(module.router).__name__} has no capture function"
                module.router.set_capture_fn(partial(self._chosen.__setitem__, module.layer_id))
                num_experts = module.router.global_num_experts
                self._dtype = np.dtype(np.uint8 if num_experts <= 256 else np.int16)
        runner.execute_model = self._run

    def take(self, request: str) -> tuple[bytes, tuple[int, ...]]:
        """Return the experts of a request's tokens as bytes, which vLLM's processes exchange unchanged, and their shape
        [tokens, layers, experts a token]. `request` is the name without vLLM's suffix."""
        parts = self._requests.pop(request)
        covered = 0
        for start, part in parts:
            assert start <= covered, f"tokens {covered} to {start} of request {request} passed no router"
            covered = start + len(part)
        whole = np.empty((covered, *parts[0][1].shape[1:]), self._dtype)
        for start, part in parts:  # a preempted request starts again, and its last pass is the one that sampled
            whole[start : start + len(part)] = part[: covered - start]
        return whole.tobytes(), whole.shape

    def drop(self, request: str) -> None:
        """Forget a request that was aborted."""
        self._requests.pop(request, None)

    def _run(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._chosen.clear()
        result = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        return result

    def _keep(self, scheduled: Any) -> None:
        layers = [self._chosen[layer] for layer in sorted(self._chosen)]
        rows = torch.stack(layers, 1).cpu().numpy().astype(self._dtype)  # [rows, layers, experts a token]
        cached = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        first_row = 0
        for request in self._runner.input_batch.req_ids:  # the order of the rows
            count = scheduled.num_scheduled_tokens[request]
            name = request.rsplit("-", 1)[0]  # without vLLM's random suffix
            if not name.startswith(UNRECORDED):
                self._requests.setdefault(name, []).append((starts[request], rows[first_row : first_row + count]))
            first_row += count
        assert first_row == len(rows), f"{first_row} tokens scheduled, {len(rows)} routed"


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`): what `collective_rpc` can call."""

    def megarl_complete(self) -> None:
        """Add what vLLM lacks on CPUs to a worker of an engine with several; call it once in each."""
        if not current_platform.is_cpu():
            return
        worker: Any = self
        if not get_pp_group().is_first_rank:
            # A stage receives its input in a buffer that vLLM makes in a warm-up, which an eager engine on a CPU skips.
            runner = worker.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        if worker.parallel_config.enable_expert_parallel:
            _skip_experts_of_other_ranks()
        if worker.parallel_config.data_parallel_size > 1:
            # Data-parallel ranks all-gather the tokens of a layer with experts and reduce-scatter the results. vLLM has
            # neither collective for CPUs. Both split the first dimension, of which the ranks have `sizes` rows.
            CpuCommunicator.all_gatherv = all_gatherv
            CpuCommunicator.reduce_scatterv = reduce_scatterv

    def megarl_other_formats(self) -> list[str]:
        """Describe quantised parameters that no sync could write."""
        worker: Any = self
        return worker.weight_transfer_engine.other_formats()

    def megarl_take_weights(self, manifest: dict[str, Any], engine: int) -> dict[str, float] | tuple[bool, str, bool]:
        """Take a version in one call: vLLM's three calls would each ask all of an engine's processes. Returns the version
        and the report; or after a failure whether another process caused it, the message, and whether a deadline passed."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"manifest": manifest, "engine": engine})
        worker.finish_weight_update()
        return worker.weight_transfer_engine.report

    def megarl_record_routing(self) -> None:
        """Record the experts that tokens choose, until they are taken."""
        self.megarl_routing = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]

    def megarl_take_routing(self, requests: list[str], aborted: list[str]) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return the experts of finished requests (`RoutingRecorder.take`), and forget those of aborted ones."""
        for request in aborted:
            self.megarl_routing.drop(request)
        return [self.megarl_routing.take(request) for request in requests]
