"""Bytes that one vLLM rank holds. Derived from vLLM 0.32's model code, not yet compared with a measurement.

With t the engine's tensor ranks and b the bytes of its precision:

    weights       decoder layers cut over t (with fewer key-value groups than ranks each rank keeps one group), the
                  embedding and, where not tied, the head cut over the vocabulary padded to 64 t
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

_VOCAB_UNIT = 64


@dataclass(frozen=True)
class Engines:
    """The rollout engines: `count` of `tensor` ranks each; `utilization` is the recipe's `rollout.memory_utilization`."""

    shape: ModelShape
    count: int
    tensor: int
    precision: str
    kv_cache_bytes: int
    max_concurrent: int
    batched_tokens: int
    utilization: float | None

    @property
    def memory(self) -> Memory:
        """What one rank of an engine needs: its weights, its KV cache (in `engine`) and working memory."""
        return engine_memory(
            self.shape, self.tensor, self.precision, self.kv_cache_bytes, self.max_concurrent, self.batched_tokens
        )

    def per_device(self, devices: int) -> int:
        """Engine ranks on the fullest of `devices` devices."""
        return -(-self.count * self.tensor // devices)

    def bytes_on_device(self, devices: int, device_bytes: int | None) -> int:
        """What engine ranks take of the fullest of `devices` devices, which they share with the trainer: what they need,
        and no less than the stated share, which must be free for them to start. None: the device is not known."""
        share = 0 if self.utilization is None or device_bytes is None else int(self.utilization * device_bytes)
        return self.per_device(devices) * max(self.memory.total, share)


def engine_memory(
    shape: ModelShape, tensor: int, precision: str, kv_cache_bytes: int, max_concurrent: int, batched_tokens: int
) -> Memory:
    """One rank of an engine with `tensor` ranks that runs up to `max_concurrent` sequences at once and takes up to
    `batched_tokens` prompt tokens a step (`Recipe.batched_tokens`)."""
    width = BYTES[precision]
    local = replace(shape, groups=max(shape.groups, tensor))
    unit = _VOCAB_UNIT * tensor
    vocabulary = -(-shape.vocab // unit) * unit // tensor * shape.hidden
    # vLLM cuts every expert over the tensor ranks.
    layers = sum(layer_weights(local, n, tensor) + expert_weights(local, n, 1, tensor) for n in range(shape.num_layers))
    weights = layers + shape.hidden + vocabulary * (1 if shape.tied else 2)
    attention = 2 * (local.heads + local.groups) * shape.head_dim // tensor
    per_token = 4 * shape.hidden + attention + 3 * shape.ffn // tensor
    return Memory(
        weights=weights * width,
        activations=batched_tokens * per_token * width,
        logits=max_concurrent * shape.vocab * (width + 4 * 4),
        engine=kv_cache_bytes,
    )
