"""What a vLLM engine is started with, and the arguments that vLLM gets for it on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster.cores import NodeLoad
from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import fixed_parameters
from megarl.planner.engine_memory import device_share
from megarl.planner.placement import EnginePlace
from megarl.recipe.device_section import engine_choices, refused_engine_args
from megarl.rollout.failure import RolloutError
from megarl.rollout.plugin import BACKEND

# vLLM's names of `rollout.quantization`: what it makes itself of a checkpoint's weights, in the format that a sync brings.
QUANTIZATIONS = {"fp8": "fp8_per_block"}


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with; seconds and bytes as named, tokens otherwise."""

    index: int
    model_path: str
    precision: str
    layout: RolloutLayout
    max_model_len: int
    batched_tokens: int
    max_new_tokens: int
    max_concurrent: int
    kv_cache_bytes: int
    needed_bytes: int  # of its device, by the planner's estimate of a worker
    memory_utilization: float | None
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    record_routing: bool = False
    quantization: str | None = None
    place: EnginePlace = EnginePlace(0, ())
    device_variable: str | None = None  # that the place's devices are set in; None on a CPU
    takes_turns: bool = False  # with the trainer, for the memory of a GPU
    load: NodeLoad | None = None  # of its node, where processes are bound to cores
    position: int = 0  # among the node's engines
    times_requests: bool = False  # keeps when each request came, began and ended
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # the recipe's, under vLLM's names


def engine_arguments(settings: EngineSettings, device_bytes: int | None) -> dict[str, Any]:
    """vLLM's arguments for an engine on devices of `device_bytes` each; None for CPUs. The recipe's own
    `rollout.engine_args` go before what is chosen for the device. Raises RolloutError where a worker is larger than its
    device, or where an argument breaks an engine on CPUs."""
    shape = ModelShape.from_directory(settings.model_path)
    if device_bytes is None:
        chosen, needed = engine_choices(shape, settings.record_routing)
        if refused := next(refused_engine_args(settings.engine_args, needed), None):
            raise RolloutError(str(refused))
    else:
        chosen, needed = _for_gpus(settings, shape, device_bytes)
    chosen["max_num_batched_tokens"] = settings.batched_tokens
    return chosen | dict(settings.engine_args) | needed | dict(
        model=settings.model_path,
        dtype={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[settings.precision],
        quantization=None if settings.quantization is None else QUANTIZATIONS[settings.quantization],
        tensor_parallel_size=settings.layout.tensor,
        pipeline_parallel_size=settings.layout.pipeline,
        data_parallel_size=settings.layout.data,
        enable_expert_parallel=settings.layout.expert_parallel,
        distributed_executor_backend="mp" if settings.layout.workers > 1 else "uni",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_concurrent // settings.layout.data,  # vLLM counts those of a data-parallel rank
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",  # the checkpoint's sampling defaults are not the recipe's
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled: temperature applied
        disable_log_stats=not settings.times_requests,
        seed=settings.seed % 2**32,
        weight_transfer_config={"backend": BACKEND},
        worker_extension_cls="megarl.weight_sync.receiver.WorkerReport",
    )  # fmt: skip


def _for_gpus(settings: EngineSettings, shape: ModelShape, device_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is chosen for engines on GPUs, and what they need. CUDA graphs and chunked prefill are vLLM's defaults there."""
    # Other kernels for experts pad or shuffle the weights, some on Blackwell alone; a sync writes what a checkpoint holds.
    chosen: dict[str, Any] = {} if shape.experts is None else {"moe_backend": "triton"}
    try:
        share = device_share(settings.needed_bytes, device_bytes, settings.memory_utilization)
    except ValueError as error:
        raise RolloutError(str(error)) from error
    needed: dict[str, Any] = {"gpu_memory_utilization": share}
    if settings.takes_turns:
        # Sleep drops every parameter, and a sync brings all but the fixed ones. Captured graphs go to the host.
        needed |= {
            "enable_sleep_mode": True,
            "sleep_mode_offload_cudagraph": True,
            "sleep_preserve_parameter_names": fixed_parameters(shape),
        }
    if settings.record_routing:
        needed["enable_return_routed_experts"] = True
    return chosen, needed
