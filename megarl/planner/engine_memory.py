"""Bytes that one worker of a vLLM engine holds, the fullest one. Derived from vLLM 0.32's model code, not yet compared with
a measurement.

With t the engine's tensor ranks and b the bytes of its precision:

    weights       the decoder layers of the stage that has most, cut over t (with fewer key-value groups than ranks each rank
                  keeps one group), experts cut over the data-parallel ranks too, or dealt over all of them; the embedding
                  and, where not tied, the head cut over the vocabulary padded to 64 (on every stage, as some of vLLM's
                  models build them there); under FP8 (`models/quantised_blocks.py`) an element of a quantised parameter has
                  one byte, and each block of 128 x 128 a scale of four
    engine        the KV cache, as the recipe sizes it
    activations   of a prefill step of `batched_tokens` tokens: four hidden states, attention's input and output, and
                  SwiGLU's gate, up and product; with CUDA graphs GRAPH_BYTES for each layer and graph
    logits        a row of the whole vocabulary for each running sequence: logits in b and four copies in fp32 (widened,
                  log-probabilities, probabilities, the sampler's noise)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.quantised_blocks import block_bytes, quantised_parameters
from megarl.models.vllm_weights import held_experts, padded_vocab, stage_layers
from megarl.planner.memory import Memory
from megarl.planner.roles import BYTES, expert_weights, layer_weights

# What null means for `rollout.kv_cache_bytes` and `phases.rollout.max_concurrent` on CPUs. On GPUs the cache is what the
# planner leaves, and a data-parallel rank runs an engine's share of a step's sequences, up to GPU_CONCURRENT of them.
CPU_CACHE_BYTES, CPU_CONCURRENT = 256 << 20, 64
GPU_CONCURRENT, MOST_CONCURRENT = 256, 2048
# Tokens of one engine step. On CPUs no prompt is cut, so the longest sequence fits, and fewer tokens leave an engine idle.
# GPUs take long prompts in chunks.
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 8192
# vLLM captures 51 graphs of mixed batches and 35 of decode batches. Its log of Llama-3.2-1B (vLLM pull request 11349) says
# 0.21 GiB for 35 graphs of 16 layers.
NUM_GRAPHS, GRAPH_BYTES = 86, 400 << 10
CACHE_BLOCK_TOKENS, MIB = 16, 2**20


@dataclass(frozen=True)
class Engines:
    """The rollout engines: `count` of them, each cut as `layout`; `utilization` is the recipe's
    `rollout.memory_utilization`, `placement` its `rollout.placement`, and `shared` says that their memory is the host's, as
    the trainer's is: on CPUs. `quantization` is `rollout.quantization`; `graphs` says that they capture CUDA graphs."""

    shape: ModelShape
    count: int
    layout: RolloutLayout
    precision: str
    kv_cache_bytes: int
    max_concurrent: int
    batched_tokens: int
    utilization: float | None
    placement: str = "colocated"
    shared: bool = False
    quantization: str | None = None
    graphs: bool = False

    @property
    def memory(self) -> Memory:
        """What the fullest worker of an engine needs: its weights, its KV cache (in `engine`) and working memory."""
        shape, layout, tensor = self.shape, self.layout, self.layout.tensor
        width = BYTES[self.precision]
        local = replace(shape, groups=max(shape.groups, tensor))
        stages = []
        for stage in range(layout.pipeline):
            layers = stage_layers(shape.num_layers, layout.pipeline, stage)
            stages.append(sum(_layer_weights(local, layer, layout) for layer in layers) * width)
            if self.quantization == "fp8":  # of the stage's first worker, of which none holds more experts
                quantised = quantised_parameters(shape, layout, layout.worker(0, stage)).values()
                stages[-1] -= sum(rows * columns * width - block_bytes(rows, columns) for rows, columns in quantised)
        ends = shape.hidden + padded_vocab(shape) // tensor * shape.hidden * (1 if shape.tied else 2)
        attention = 2 * (local.heads + local.groups) * shape.head_dim // tensor
        per_token = 4 * shape.hidden + attention + 3 * shape.ffn // tensor
        graphs = NUM_GRAPHS * GRAPH_BYTES * cached_layers(shape, layout) if self.graphs else 0
        return Memory(
            weights=max(stages) + ends * width,
            activations=graphs + self.batched_tokens * per_token * width,
            logits=-(-self.max_concurrent // layout.data) * shape.vocab * (width + 4 * 4),
            engine=self.kv_cache_bytes,
        )

    @property
    def token_bytes(self) -> int:
        """KV cache of one token on the worker with most layers."""
        width = cache_width(self.shape, self.layout.tensor) * BYTES[self.precision]
        return cached_layers(self.shape, self.layout) * width

    def cache_within(self, room_bytes: int, longest: int) -> int:
        """The KV cache that `room_bytes` of a device leave beside everything else of a worker, and no more than what its
        sequences need at their longest, in vLLM's blocks and whole MiB. Negative where there is no room."""
        blocks = -(-longest // CACHE_BLOCK_TOKENS) + 1
        most = self.max_concurrent // self.layout.data * blocks * CACHE_BLOCK_TOKENS * self.token_bytes
        return min(-(-most // MIB) * MIB, room_bytes - replace(self, kv_cache_bytes=0).memory.total)

    @property
    def workers(self) -> int:
        """Of all engines together."""
        return self.count * self.layout.workers

    @property
    def rests(self) -> bool:
        """Whether they lie on the trainer's devices and take turns with it (`megarl/rollout/engine.py`, `sleep`)."""
        return self.placement == "colocated" and not self.shared

    def awake_bytes(self, ranks: int, device_bytes: int | None) -> int:
        """What engines that work take of one device, which has one worker (`planner/placement.py`): what it needs, and
        no less than the stated share, which must be free for it to start. On a CPU, what all of them take beside `ranks`
        trainer ranks on one machine, for each rank; nobody looks at the share there. None: the device is not known."""
        if self.shared:
            return -(-self.workers * self.memory.total // ranks)
        share = 0 if self.utilization is None or device_bytes is None else int(self.utilization * device_bytes)
        return max(self.memory.total, share)

    def beside_bytes(self, ranks: int) -> int:
        """What of that a trainer rank finds on its device while it works: all on a CPU, where nobody sleeps; nothing on a
        GPU of its own, nor beside an engine that sleeps. vLLM's level 2 keeps neither weights nor cache on the device and
        empties the allocator behind the working memory; the context and the collectives' buffers, which it keeps, are
        counted in RESERVE, as a trainer's own are, and CUDA graphs go to the host (vLLM 0.32, `CuMemAllocator.sleep`)."""
        return self.awake_bytes(ranks, None) if self.shared else 0


def device_share(needed_bytes: int, device_bytes: int, stated: float | None) -> float:
    """vLLM's `gpu_memory_utilization`: the share of a device that must be free for an engine to start, which is the
    `stated` one, or what a worker needs. vLLM's own default, 0.92, is never free beside a trainer. Raises ValueError where
    a worker needs more than the device."""
    if needed_bytes > device_bytes:
        raise ValueError(
            f"a worker of an engine needs {needed_bytes / 2**30:.3g} GiB, and its device has {device_bytes / 2**30:.3g}: "
            "more rollout.tensor, or a smaller rollout.kv_cache_bytes"
        )
    return stated if stated is not None else needed_bytes / device_bytes


def concurrent_sequences(on_gpu: bool, num_sequences: int, engines: int, data: int) -> int:
    """What null means for `phases.rollout.max_concurrent`, a multiple of the engine's `data` ranks."""
    each = -(-CPU_CONCURRENT // data)
    if on_gpu:
        each = min(GPU_CONCURRENT, -(-num_sequences // (engines * data)))
    return min(each, MOST_CONCURRENT // data) * data


def cached_layers(shape: ModelShape, layout: RolloutLayout) -> int:
    """Layers whose keys and values one worker caches: those of the stage that has most."""
    return max(len(stage_layers(shape.num_layers, layout.pipeline, stage)) for stage in range(layout.pipeline))


def _layer_weights(shape: ModelShape, layer: int, layout: RolloutLayout) -> int:
    """Weights of one layer on the worker with most of its experts."""
    held, ranks = layer_weights(shape, layer, layout.tensor), layout.tensor * layout.data
    if shape.experts is None or not shape.has_experts(layer):
        return held
    if not layout.expert_parallel:
        return held + expert_weights(shape, layer, 1, ranks)
    one, shared = 3 * shape.hidden * shape.experts.ffn, 3 * shape.hidden * shape.experts.shared_ffn
    whole = shared - shared // layout.tensor if layout.cuts_tokens else 0
    return held + len(held_experts(shape.experts.count, ranks, 0)) * one + whole


def cache_width(shape: ModelShape, tensor: int) -> int:
    """Elements that one of `tensor` ranks of a rollout engine caches of a token in one layer: keys and values of its groups,
    or the latent vector and the rotary key, which every rank keeps whole."""
    latent = shape.latent
    if latent is not None:
        return latent.key_value_rank + latent.rotary_dim
    return 2 * -(-shape.groups // tensor) * shape.head_dim
