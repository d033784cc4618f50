"""Bytes that one worker of a vLLM engine holds, the fullest one. Derived from vLLM 0.32's model code, not yet compared with
a measurement.

With t the engine's tensor ranks and b the bytes of its precision:

    weights       the decoder layers of the stage that has most, cut over t (with fewer key-value groups than ranks each rank
                  keeps one group), experts cut over the data-parallel ranks too, or dealt over all of them; the embedding
                  and, where not tied, the head cut over the vocabulary padded to 64 (on every stage, as some of vLLM's
                  models build them there)
    engine        the KV cache, as the recipe sizes it
    activations   of a prefill step of `batched_tokens` tokens: four hidden states, attention's input and output, and
                  SwiGLU's gate, up and product
    logits        a row of the whole vocabulary for each running sequence: logits in b and four copies in fp32 (widened,
                  log-probabilities, probabilities, the sampler's noise)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.estimate.memory import Memory
from megarl.estimate.roles import BYTES, expert_weights, layer_weights
from megarl.family import ModelShape
from megarl.reshard.boxes import RolloutLayout
from megarl.reshard.vllm import held_experts, padded_vocab, stage_layers


@dataclass(frozen=True)
class Engines:
    """The rollout engines: `count` of them, each cut as `layout`; `utilization` is the recipe's
    `rollout.memory_utilization`."""

    shape: ModelShape
    count: int
    layout: RolloutLayout
    precision: str
    kv_cache_bytes: int
    max_concurrent: int
    batched_tokens: int
    utilization: float | None

    @property
    def memory(self) -> Memory:
        """What the fullest worker of an engine needs: its weights, its KV cache (in `engine`) and working memory."""
        return engine_memory(
            self.shape, self.layout, self.precision, self.kv_cache_bytes, self.max_concurrent, self.batched_tokens
        )

    def per_device(self, devices: int) -> int:
        """Workers on the fullest of `devices` devices."""
        return -(-self.count * self.layout.workers // devices)

    def bytes_on_device(self, devices: int, device_bytes: int | None) -> int:
        """What engine ranks take of the fullest of `devices` devices, which they share with the trainer: what they need,
        and no less than the stated share, which must be free for them to start. None: the device is not known."""
        share = 0 if self.utilization is None or device_bytes is None else int(self.utilization * device_bytes)
        return self.per_device(devices) * max(self.memory.total, share)


def engine_memory(
    shape: ModelShape, layout: RolloutLayout, precision: str, kv_cache_bytes: int, max_concurrent: int, batched_tokens: int
) -> Memory:
    """The fullest worker of an engine that runs up to `max_concurrent` sequences at once and takes up to `batched_tokens`
    prompt tokens a step (`Recipe.batched_tokens`)."""
    width, tensor = BYTES[precision], layout.tensor
    local = replace(shape, groups=max(shape.groups, tensor))
    vocabulary = padded_vocab(shape) // tensor * shape.hidden
    stages = [stage_layers(shape.num_layers, layout.pipeline, stage) for stage in range(layout.pipeline)]
    layers = max(sum(_layer_weights(local, n, layout) for n in stage) for stage in stages)
    weights = layers + shape.hidden + vocabulary * (1 if shape.tied else 2)
    attention = 2 * (local.heads + local.groups) * shape.head_dim // tensor
    per_token = 4 * shape.hidden + attention + 3 * shape.ffn // tensor
    return Memory(
        weights=weights * width,
        activations=batched_tokens * per_token * width,
        logits=-(-max_concurrent // layout.data) * shape.vocab * (width + 4 * 4),
        engine=kv_cache_bytes,
    )


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
