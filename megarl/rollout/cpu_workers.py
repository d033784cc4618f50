"""What vLLM 0.32 leaves out on CPUs where an engine has several workers; each worker makes up for it after its start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform


def complete(worker: Any) -> None:
    """To be called once in each worker of an engine; does nothing on a GPU."""
    if not current_platform.is_cpu():
        return
    if not get_pp_group().is_first_rank:
        _make_stage_input(worker.model_runner)
    if worker.parallel_config.enable_expert_parallel:
        _skip_experts_of_others()
    if worker.parallel_config.data_parallel_size > 1:
        CpuCommunicator.all_gatherv = all_gatherv
        CpuCommunicator.reduce_scatterv = reduce_scatterv


def _make_stage_input(runner: Any) -> None:
    """What a stage receives lies in a buffer that vLLM makes in a warm-up, and an eager engine on a CPU has none."""
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _skip_experts_of_others() -> None:
    """The kernel for CPUs is given no map of the experts that are dealt over ranks: it would look for every expert among
    its own, far behind the last one. Here what another rank's expert adds is the first one's, times zero."""
    apply = CPUUnquantizedExperts.apply

    def apply_to_own(
        self: CPUUnquantizedExperts,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        **more: Any,
    ) -> None:
        # topk_weights, topk_ids [tokens, experts of a token]; expert_map [all experts], -1 where it is another rank's
        if expert_map is not None:
            own = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(own < 0, 0.0)
            topk_ids = own.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **more)

    CPUUnquantizedExperts.apply = apply_to_own  # type: ignore[method-assign]


# Data-parallel ranks send the tokens of a layer with experts to all others, and add up what comes back. vLLM has neither for
# CPUs. Both are over the first dimension alone, of which the ranks have `sizes` parts.


def all_gatherv(
    self: CpuCommunicator, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """The parts of all ranks, one behind the other; of each tensor where there are several."""
    if isinstance(input_, list):
        return [_gathered(self, tensor, sizes) for tensor in input_]
    return _gathered(self, input_, sizes)


def _gathered(communicator: CpuCommunicator, part: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
    sizes = sizes or [len(part)] * communicator.world_size
    padded = part.new_zeros((max(sizes), *part.shape[1:]))  # gloo gathers even parts alone
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([one[:size] for one, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's part of the sum over all ranks."""
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group].clone()
