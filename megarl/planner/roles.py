"""A role as the planner sees it, and how many weights of it one rank holds.

With h = hidden, H heads, d = head_dim, G groups: grouped-query attention has h (2 H d + 2 G d) weights. Latent attention
(DeepSeek-V2, sec. 2.1), with ranks q of queries and c of keys and values, and heads of p plain, r rotary and v value
dimensions:

    down-projections    h (q + c + r)           whole on every tensor rank, as are the two norms, q + c
    up-projections      (q or h) H (p + r) + c H (p + v)
    output              H v h
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import chunk_layers, padded_vocab, stage_layers

if TYPE_CHECKING:  # `megarl.recipe` imports the planner for the sizes that a recipe leaves open
    from megarl.recipe.algorithm_section import DistillationSection
    from megarl.recipe.device_section import DeviceSection
    from megarl.recipe.role_sections import FreezeSection, LoraSection, MemorySection

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class PlannedRole:
    """A Megatron role: its model, its layout, and the recipe sections that change what it holds.

    `trained` roles have gradients and an optimizer. With `lora` only the adapters are trained. A role with `borrows_weights`
    uses another role's weights; a role that `follows_actor` takes the actor's weights during the run. `entropy_bonus` makes
    the gradient of the logits larger. `teacher_widths` are the hidden sizes of teachers whose heads the last stage holds, to
    compare vocabularies. `distillation` is that of the actor and of teachers where it compares more than sampled tokens; a
    teacher judges the `share` of the rollouts. `divergence_alone`: nothing else is in the loss of the actor. `scores`: the
    actor is trained as a reward model. `device` is the recipe's, if it states one.
    """

    name: str
    shape: ModelShape
    layout: Layout
    precision: str
    trained: bool
    memory: MemorySection
    freeze: FreezeSection
    lora: LoraSection | None = None
    entropy_bonus: bool = False
    borrows_weights: bool = False
    follows_actor: bool = False
    teacher_widths: tuple[int, ...] = ()
    distillation: DistillationSection | None = None
    share: float = 1.0
    divergence_alone: bool = False
    on_cpu: bool = False
    scores: bool = False
    device: DeviceSection | None = None

    @property
    def has_value_head(self) -> bool:
        """Whether the head gives one number instead of logits: a critic's and a reward model's does."""
        return self.scores or self.name in ("critic", "reward_model")

    @property
    def supervised(self) -> PlannedRole:
        """The role in a supervised step of a warm-up, which has no terms of teachers and no entropy bonus. Heads of teachers
        stay on the device."""
        return replace(self, distillation=None, divergence_alone=False, entropy_bonus=False)

    @property
    def head_passes(self) -> int:
        """How often the head multiplies a row in a forward phase: not where a teacher's last hidden rows travel, and twice
        for its likeliest tokens (`megatron/divergence.py`)."""
        if self.distillation is None or self.trained:
            return 1
        return 0 if self.distillation.over == "vocabulary" else 2

    @property
    def fuses_layers(self) -> bool:
        """Whether Transformer Engine runs the layers, as `spec_name` of `megatron/model.py` decides on the device."""
        if self.device is not None and not self.device.transformer_engine:
            return False
        return not self.on_cpu and self.precision != "fp32"

    @property
    def fuses_attention(self) -> bool:
        """Whether it also runs rotation and attention; families with windows or latent attention have megarl's."""
        return self.fuses_layers and not self.shape.has_own_attention

    @property
    def fuses_activation(self) -> bool:
        """Whether one kernel computes the gate of a feed-forward network and its product."""
        return self.fuses_layers and self.shape.activation == "silu"

    @property
    def bytes_per_weight(self) -> int:
        return BYTES[self.precision]

    @property
    def vocab_width(self) -> int:
        """Vocabulary rows of one tensor rank, padding included."""
        return padded_vocab(self.shape, self.layout.tensor) // self.layout.tensor

    def has_embedding(self, pipeline_rank: int) -> bool:
        return pipeline_rank == 0

    def has_head(self, pipeline_rank: int) -> bool:
        return pipeline_rank == self.layout.pipeline - 1

    @property
    def trains_embedding(self) -> bool:
        return self.trained and self.lora is None and not self.freeze.embedding

    @property
    def trains_head(self) -> bool:
        """Whether the head is trained; the head of a tied model is its embedding."""
        tied = self.shape.tied and not self.has_value_head
        return self.trained and self.lora is None and not (self.freeze.embedding if tied else self.freeze.head)

    @property
    def shares_embedding(self) -> bool:
        """Whether the head is the embedding itself; under a pipeline the last stage has a copy instead."""
        return self.shape.tied and not self.has_value_head and self.layout.pipeline == 1

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules of each layer that selective recompute runs again."""
        return self.memory.recompute_modules if self.memory.recompute == "selective" else ()

    @property
    def recomputes_whole(self) -> bool:
        """Whether `recompute: full` runs every layer again."""
        return self.memory.recompute == "full"

    def passes_nothing_back(self, layer: int, pipeline_rank: int) -> bool:
        """Whether a layer (from 0) has no backward pass, because it and everything before it is frozen. A stage always needs
        the gradient of what it received, and recompute that of the embedding (`megatron/model.py`)."""
        kept = self.freeze.embedding and self.memory.recompute == "none" and pipeline_rank == 0
        in_first_chunk = layer in chunk_layers(self.shape, self.layout, 0, 0)
        return self.trained and kept and in_first_chunk and layer < self.freeze.layers


def layer_weights(shape: ModelShape, layer: int, tensor: int) -> int:
    """Weights of one decoder layer on one tensor rank, without routed experts."""
    norms = (4 if shape.sandwich_norms else 2) * shape.hidden
    experts = shape.experts if shape.has_experts(layer) else None
    rows = shape.ffn if experts is None else experts.shared_ffn
    router = 0 if experts is None else experts.count * shape.hidden
    return attention_weights(shape, tensor) + norms + 3 * shape.hidden * rows // tensor + router


def expert_weights(shape: ModelShape, layer: int, expert: int, tensor: int) -> int:
    """Weights of one layer's routed experts on one rank: experts spread over `expert` ranks, each sharded over `tensor`."""
    experts = shape.experts if shape.has_experts(layer) else None
    return 0 if experts is None else experts.count // expert * 3 * shape.hidden * experts.ffn // tensor


def stage_weights(role: PlannedRole, pipeline_rank: int, not_frozen: bool = False) -> int:
    """Weights of one pipeline stage on one rank, with routed experts and the padding of the vocabulary; all, or those that a
    trained role does not freeze."""
    shape, layout, weights = role.shape, role.layout, 0
    has_norms = not (not_frozen and role.freeze.norms)
    layer_norms = (4 if shape.sandwich_norms else 2) * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    for layer in stage_layers(shape, layout, pipeline_rank):
        if not_frozen and layer < role.freeze.layers:
            continue
        weights += layer_weights(shape, layer, layout.tensor) - (0 if has_norms else layer_norms)
        weights += expert_weights(shape, layer, layout.expert, layout.expert_tensor_size)
    if role.has_embedding(pipeline_rank) and (role.trains_embedding or not not_frozen):
        weights += role.vocab_width * shape.hidden
    if role.has_head(pipeline_rank):
        weights += shape.hidden if has_norms else 0  # the final norm
        if role.has_value_head:
            weights += shape.hidden
        elif (role.trains_head or not not_frozen) and not role.shares_embedding:
            weights += role.vocab_width * shape.hidden
    return weights


def trained_weights(role: PlannedRole, pipeline_rank: int) -> int:
    """Weights of one pipeline stage on one tensor rank that have gradients and optimizer states."""
    if not role.trained:
        return 0
    return adapter_weights(role, pipeline_rank) if role.lora is not None else stage_weights(role, pipeline_rank, True)


def trained_expert_weights(role: PlannedRole, pipeline_rank: int) -> int:
    """The part of `trained_weights` that belongs to routed experts."""
    if not role.trained or role.lora is not None:
        return 0
    shape, layout = role.shape, role.layout
    layers = [layer for layer in stage_layers(shape, layout, pipeline_rank) if layer >= role.freeze.layers]
    return sum(expert_weights(shape, layer, layout.expert, layout.expert_tensor_size) for layer in layers)


def adapter_weights(role: PlannedRole, pipeline_rank: int) -> int:
    """Weights of the adapters of one pipeline stage on one tensor rank."""
    if role.lora is None:
        return 0
    layers = stage_layers(role.shape, role.layout, pipeline_rank)
    return len(layers) * layer_adapters(role.shape, role.lora, role.layout.tensor)


def attention_weights(shape: ModelShape, tensor: int) -> int:
    """Weights of one layer's attention on one of `tensor` ranks, with its norms and biases."""
    return replicated_weights(shape) + sharded_weights(shape) // tensor


def replicated_weights(shape: ModelShape) -> int:
    """Attention weights of one layer that every tensor rank holds."""
    latent = shape.latent
    if latent is None:
        return 2 * shape.head_dim if shape.qk_norm else 0
    narrow = latent.query_rank + latent.key_value_rank
    return shape.hidden * (narrow + latent.rotary_dim) + narrow


def sharded_weights(shape: ModelShape) -> int:
    """Attention weights of one layer that are sharded over the tensor ranks, on all of them together."""
    latent, heads = shape.latent, shape.heads
    if latent is None:
        qkv = (heads + 2 * shape.groups) * shape.head_dim
        return shape.hidden * (qkv + heads * shape.head_dim) + (qkv if shape.qkv_bias else 0)
    return up_projection_weights(shape) + heads * latent.value_dim * shape.hidden


def up_projection_weights(shape: ModelShape) -> int:
    """Weights of latent attention's up-projections in one layer, on all ranks together; 0 for other attention."""
    latent, heads = shape.latent, shape.heads
    if latent is None:
        return 0
    queries = (latent.query_rank or shape.hidden) * heads * latent.key_dim
    return queries + latent.key_value_rank * heads * (latent.plain_dim + latent.value_dim)


def matrix_weights(shape: ModelShape) -> int:
    """Weights of one layer's attention matrices, which a token is multiplied with: without replicas, norms and biases."""
    latent = shape.latent
    if latent is None:
        return shape.hidden * 2 * (shape.heads + shape.groups) * shape.head_dim
    narrow = latent.query_rank + latent.key_value_rank
    return replicated_weights(shape) - narrow + sharded_weights(shape)


def adapted_sizes(shape: ModelShape, target: str) -> tuple[int, int]:
    """(out, in) of a target's weight over all tensor ranks: "qkv", "proj", "fc1" (gate and up) or "fc2"."""
    queries, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    values = queries if shape.latent is None else shape.heads * shape.latent.value_dim
    return {
        "qkv": (queries + 2 * groups, shape.hidden),
        "proj": (shape.hidden, values),
        "fc1": (2 * shape.ffn, shape.hidden),
        "fc2": (shape.hidden, shape.ffn),
    }[target]


def layer_adapters(shape: ModelShape, lora: LoraSection, tensor: int) -> int:
    """Adapter weights of one decoder layer on one tensor rank."""
    total = 0
    for target in lora.targets:
        rows, columns = adapted_sizes(shape, target)
        if target in ("qkv", "fc1"):  # sharded by rows: B is sharded and A is whole; of the others A is sharded
            rows //= tensor
        else:
            columns //= tensor
        total += lora.rank * (rows + columns)
    return total
