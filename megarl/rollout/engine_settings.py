"""What a vLLM engine is started with: its settings, and vLLM's arguments and sampling parameters on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster.cores import NodeLoad
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import fixed_parameters
from megarl.planner.engine_memory import PlannedEngines, device_share
from megarl.planner.placement import EnginePlace
from megarl.recipe.device_section import engine_choices, refused_engine_args
from megarl.recipe.role_sections import VLLM_LORA_RANKS, LoraSection
from megarl.rollout import RolloutError
from megarl.rollout.plugin import BACKEND

# vLLM's name for each `rollout.quantization`: formats that vLLM makes itself from a checkpoint's weights, and a sync sends.
QUANTIZATIONS = {"fp8": "fp8_per_block"}
# vLLM's module of each target of `actor.lora`, the same in all families.
VLLM_MODULES = {"qkv": "qkv_proj", "proj": "o_proj", "fc1": "gate_up_proj", "fc2": "down_proj"}


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with: its model, layout, precision and sizes as `planned`, and the rest."""

    index: int
    model_path: str
    planned: PlannedEngines
    kv_cache_bytes: int
    max_model_len: int  # tokens
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    memory_utilization: float | None = None
    record_routing: bool = False
    place: EnginePlace = EnginePlace(0, ())
    device_variable: str | None = None  # the environment variable that selects the place's devices; None on a CPU
    takes_turns: bool = False  # whether the engine sleeps while the trainer uses its GPU
    load: NodeLoad | None = None  # of its node; None if processes are not bound to cores
    adapter: LoraSection | None = None  # adapters that a sync sends and vLLM applies; None if it sends weights
    position: int = 0  # among the engines of its node
    times_requests: bool = False  # whether it records the times of each request, and counts preemptions
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # the recipe's, under vLLM's names
    teacher: str = ""  # the name of the teacher that it serves

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return f"the engine of teachers.{self.teacher}" if self.teacher else f"rollout engine {self.index}"

    @property
    def layout(self) -> RolloutLayout:
        """How the engine is sharded over its workers."""
        return self.planned.layout


def engine_arguments(settings: EngineSettings, device_bytes: int | None) -> dict[str, Any]:
    """Return vLLM's arguments for an engine on devices of `device_bytes` each, or on CPUs for None. The recipe's
    `rollout.engine_args` override what is chosen for the device. Raises RolloutError for a worker that is larger than its
    device, and for an argument that breaks an engine on CPUs."""
    planned, layout = settings.planned, settings.layout
    shape = planned.shape
    if device_bytes is None:
        chosen, needed = engine_choices(shape, settings.record_routing)
        if refused := next(refused_engine_args(settings.engine_args, needed), None):
            raise RolloutError(str(refused))
    else:
        # CUDA graphs and chunked prefill stay vLLM's defaults. Other kernels for experts pad or shuffle the weights, some
        # only on Blackwell; a sync writes weights as a checkpoint holds them.
        chosen = {} if shape.experts is None else {"moe_backend": "triton"}
        try:
            share = device_share(planned.memory.total, device_bytes, settings.memory_utilization)
        except ValueError as error:
            raise RolloutError(str(error)) from error
        needed = {"gpu_memory_utilization": share}
        if settings.takes_turns:
            # Sleep drops every parameter, and a sync sends all but the fixed ones. Captured graphs move to the host.
            needed |= {
                "enable_sleep_mode": True,
                "sleep_mode_offload_cudagraph": True,
                "sleep_preserve_parameter_names": fixed_parameters(shape),
            }
        if settings.record_routing:
            needed["enable_return_routed_experts"] = True
    chosen["max_num_batched_tokens"] = planned.batched_tokens
    if settings.adapter is not None:
        needed |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= settings.adapter.rank),
            "lora_target_modules": [VLLM_MODULES[target] for target in settings.adapter.targets],
        }
    return chosen | dict(settings.engine_args) | needed | dict(
        model=settings.model_path,
        dtype={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[planned.precision],
        quantization=None if planned.quantization is None else QUANTIZATIONS[planned.quantization],
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        data_parallel_size=layout.data,
        enable_expert_parallel=layout.expert_parallel,
        distributed_executor_backend="mp" if layout.workers > 1 else "uni",
        max_model_len=settings.max_model_len,
        max_num_seqs=planned.max_concurrent // layout.data,  # vLLM counts per data-parallel rank
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",  # ignore the checkpoint's sampling defaults
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled: temperature applied
        disable_log_stats=not settings.times_requests,
        seed=settings.seed % 2**32,
        weight_transfer_config={"backend": BACKEND},
        worker_extension_cls="megarl.rollout.worker_extension.WorkerExtension",
    )  # fmt: skip


def sampling_parameters(settings: EngineSettings, seed: int, temperature: float | None, max_new_tokens: int | None) -> Any:
    """Return vLLM's `SamplingParams` of one request; None takes the engine's value."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=settings.temperature if temperature is None else temperature,
        top_p=1.0,
        max_tokens=settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
        stop_token_ids=list(settings.stop_token_ids),
        ignore_eos=True,  # the checkpoint's end tokens count only if they are among the stop tokens
        seed=seed,
        logprobs=0,  # only the sampled token's
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters() -> Any:
    """Return vLLM's `SamplingParams` that give the log-probabilities of a prompt's tokens, at temperature 1. vLLM computes
    them without reading its prefix cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=kind)


def refuse_other_formats(quantization: str, formats: Sequence[Sequence[str]]) -> None:
    """Raise RolloutError for quantized weights that a worker holds in a format that no sync writes, so that a run fails
    before its first step. `formats` has `WeightReceiver.other_formats` of each worker."""
    others = [text for worker in formats for text in worker]
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise RolloutError(
            f"rollout.quantization = {quantization}: the kernel that vLLM has chosen for these devices has a number format "
            f"of its own, which weight syncs do not write: {others[0]}{more}; set it to null, or take other GPUs"
        )
