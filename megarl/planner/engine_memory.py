"""Bytes that one worker of a vLLM engine holds, the fullest one. Derived from vLLM 0.32's model code, not yet compared with
a measurement.

With t the engine's tensor ranks and b the bytes of its precision:

    weights       the decoder layers of the stage that has most, sharded over t (with fewer key-value groups than ranks each
                  keeps one group), experts sharded over the data-parallel ranks too, or spread over all; the embedding and,
                  where not tied, the head sharded over the vocabulary padded to 64 (on every stage, as some of vLLM's models
                  build them there); under FP8 (`models/quantised_blocks.py`) an element of a quantised parameter has one
                  byte, and each block of 128 x 128 a scale of four
    engine        the KV cache, as the recipe sizes it
    activations   of a prefill step of `batched_tokens` tokens: four hidden states, attention's input and output, and
                  SwiGLU's gate, up and product; with CUDA graphs GRAPH_BYTES for each layer and graph
    logits        a row of the whole vocabulary for each running sequence, or for each token that is scored at once: logits
                  in b and four copies in fp32 (widened, log-probabilities, probabilities, the sampler's noise)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.quantised_blocks import block_bytes, quantised_parameters
from megarl.models.vllm_weights import held_experts, padded_vocab, stage_layers
from megarl.planner.memory_estimate import DeviceMemory
from megarl.planner.roles import BYTES, expert_weights, layer_weights

# What null means for `rollout.kv_cache_bytes` and `phases.rollout.max_concurrent` on CPUs. On GPUs the cache takes what is
# left, and a data-parallel rank runs its share of the sequences that may be under way, up to GPU_CONCURRENT.
CPU_CACHE_BYTES, CPU_CONCURRENT = 256 << 20, 64
GPU_CONCURRENT, MOST_CONCURRENT = 256, 2048
# Tokens of one engine step. CPUs take whole prompts, so the longest sequence must fit, and fewer leave an engine idle.
# GPUs take long prompts in chunks.
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 8192
# vLLM captures 51 graphs of mixed batches and 35 of decode batches. Its log of Llama-3.2-1B (vLLM pull request 11349) says
# 0.21 GiB for 35 graphs of 16 layers.
NUM_GRAPHS, GRAPH_BYTES = 86, 400 << 10
CACHE_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class PlannedEngines:
    """The rollout engines: `count` of them, each sharded by `layout`. `utilization`, `placement` and `quantization` are the
    recipe's. `shared` engines take the host's memory, as the trainer does: on CPUs. `graphs`: they capture CUDA graphs.
    `scored_tokens`: the most tokens of prompts whose log-probabilities are computed at once. A teacher's
    engine has a model of its own, and scores the `share` of the rollouts."""

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
    scored_tokens: int = 0
    share: float = 1.0

    @property
    def memory(self) -> DeviceMemory:
        """What the fullest worker of an engine needs: its weights, its KV cache (in `engine`) and working memory."""
        shape, layout, tensor = self.shape, self.layout, self.layout.tensor
        width = BYTES[self.precision]
        local = replace(shape, groups=max(shape.groups, tensor))
        stages = []
        for stage in range(layout.pipeline):
            layers = stage_layers(shape.num_layers, layout.pipeline, stage)
            stages.append(sum(_layer_weights(local, layer, layout) for layer in layers) * width)
            if self.quantization == "fp8":  # the stage's first worker; no other holds more experts
                quantised = quantised_parameters(shape, layout, layout.worker(0, stage)).values()
                stages[-1] -= sum(rows * columns * width - block_bytes(rows, columns) for rows, columns in quantised)
        ends = shape.hidden + padded_vocab(shape) // tensor * shape.hidden * (1 if shape.tied else 2)
        attention = 2 * (local.heads + local.groups) * shape.head_dim // tensor
        per_token = 4 * shape.hidden + attention + 3 * shape.ffn // tensor
        graphs = NUM_GRAPHS * GRAPH_BYTES * cached_layers(shape, layout) if self.graphs else 0
        return DeviceMemory(
            weights=max(stages) + ends * width,
            activations=graphs + self.batched_tokens * per_token * width,
            logits=max(-(-self.max_concurrent // layout.data), self.scored_tokens) * shape.vocab * (width + 4 * 4),
            engine=self.kv_cache_bytes,
        )

    @property
    def token_bytes(self) -> int:
        """KV cache of one token on the worker with most layers."""
        width = cache_width(self.shape, self.layout.tensor) * BYTES[self.precision]
        return cached_layers(self.shape, self.layout) * width

    @property
    def workers(self) -> int:
        """Workers of all engines."""
        return self.count * self.layout.workers

    @property
    def sleeps(self) -> bool:
        """Whether engines take turns with the trainer on its devices (`megarl/rollout/engine.py`, `sleep`)."""
        return self.placement == "colocated" and not self.shared

    def awake_bytes(self, ranks: int, device_bytes: int | None) -> int:
        """What working engines take of one device: what its worker needs, and at least the stated share, which must be free
        for an engine to start. On CPUs, where vLLM does not look at the share: what all engines take of the machine, for
        each of its `ranks` trainer ranks."""
        if self.shared:
            return -(-self.workers * self.memory.total // ranks)
        share = 0 if self.utilization is None or device_bytes is None else int(self.utilization * device_bytes)
        return max(self.memory.total, share)

    def bytes_during_training(self, ranks: int) -> int:
        """What engines hold of a trainer rank's device while the trainer works: everything on a CPU, where no engine sleeps;
        nothing on a GPU. A sleeping engine (level 2) keeps no weights or cache there and empties its allocator; RESERVE
        covers the context and the collectives' buffers, and CUDA graphs go to the host (vLLM 0.32,
        `CuMemAllocator.sleep`)."""
        return self.awake_bytes(ranks, None) if self.shared else 0


def device_share(needed_bytes: int, device_bytes: int, stated: float | None) -> float:
    """vLLM's `gpu_memory_utilization`, the share of a device that must be free for an engine to start: `stated`, or what a
    worker needs. vLLM's default, 0.92, is never free with a trainer on the device. Raises ValueError where a worker needs
    more than the device."""
    if needed_bytes > device_bytes:
        raise ValueError(
            f"a worker of an engine needs {needed_bytes / 2**30:.3g} GiB, and its device has {device_bytes / 2**30:.3g}: "
            "more rollout.tensor, or a smaller rollout.kv_cache_bytes"
        )
    return stated if stated is not None else needed_bytes / device_bytes


def concurrent_sequences(on_gpu: bool, num_sequences: int, engines: int, data: int) -> int:
    """What null means for `phases.rollout.max_concurrent`, a multiple of the engine's `data` ranks."""
    each = min(GPU_CONCURRENT, -(-num_sequences // (engines * data))) if on_gpu else -(-CPU_CONCURRENT // data)
    return min(each, MOST_CONCURRENT // data) * data


def cached_layers(shape: ModelShape, layout: RolloutLayout) -> int:
    """Layers whose keys and values one worker caches: those of the stage that has most."""
    return max(len(stage_layers(shape.num_layers, layout.pipeline, stage)) for stage in range(layout.pipeline))


def cache_width(shape: ModelShape, tensor: int) -> int:
    """Elements that one of `tensor` ranks of a rollout engine caches of a token in one layer: keys and values of its groups,
    or the latent vector and the rotary key, which every rank keeps whole."""
    latent = shape.latent
    if latent is not None:
        return latent.key_value_rank + latent.rotary_dim
    return 2 * -(-shape.groups // tensor) * shape.head_dim


def _layer_weights(shape: ModelShape, layer: int, layout: RolloutLayout) -> int:
    """Weights of one layer on the worker with most of its experts."""
    dense, ranks = layer_weights(shape, layer, layout.tensor), layout.tensor * layout.data
    if shape.experts is None or not shape.has_experts(layer):
        return dense
    if not layout.expert_parallel:
        return dense + expert_weights(shape, layer, 1, ranks)
    expert, shared = 3 * shape.hidden * shape.experts.ffn, 3 * shape.hidden * shape.experts.shared_ffn
    whole_shared = shared - shared // layout.tensor if layout.cuts_tokens else 0
    return dense + len(held_experts(shape.experts.count, ranks, 0)) * expert + whole_shared
