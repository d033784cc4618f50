"""A trained or frozen model as the planner sees it, and how many weights of it a rank holds.

With h = hidden, H heads, d = head_dim, G groups: grouped-query attention has h (2 H d + 2 G d) weights. Latent attention
(DeepSeek-V2, sec. 2.1), with ranks q of queries and c of keys and values, and heads of p plain, r rotary and v value
dimensions:

    down-projections    h (q + c + r)           whole on every tensor rank, as are the two norms, q + c
    up-projections      (q or h) H (p + r) + c H (p + v)
    output              H v h
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import chunk_layers, padded_vocab, stage_layers

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Savings:
    """What a recipe's `memory` section says, in its words: `modules`, `method` and `num_layers` are its `recompute_...`."""

    recompute: str = "none"
    offload_activations: bool = False
    offload: str = "none"
    modules: tuple[str, ...] = ("core_attn",)
    method: str = "uniform"
    num_layers: int = 1

    @property
    def recomputes_feed_forward(self) -> bool:
        """Whether a layer's feed-forward part, dense or of experts, is among what selective recompute runs again."""
        return self.recompute == "selective" and not {"mlp", "moe"}.isdisjoint(self.modules)


@dataclass(frozen=True)
class Frozen:
    """What a recipe's `freeze` section says: weights of a trained role that have no gradient."""

    embedding: bool = False
    head: bool = False
    norms: bool = False
    layers: int = 0


@dataclass(frozen=True)
class Adapters:
    """The adapters of every decoder layer: their inner size, and the linear layers that have one."""

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Role:
    """One Megatron engine: `trained` says that it has gradients and an optimizer; `entropy_bonus` that its loss has an
    entropy term, whose gradient takes more memory. With `adapters` they alone are trained; `borrows_weights` says that its
    weights are another role's, and `on_cpu` that it is known to run on a CPU."""

    name: str
    shape: ModelShape
    layout: Layout
    precision: str
    trained: bool
    entropy_bonus: bool = False
    adapters: Adapters | None = None
    borrows_weights: bool = False
    on_cpu: bool = False
    savings: Savings = Savings()
    frozen: Frozen = Frozen()

    def __post_init__(self) -> None:
        if self.name not in ("actor", "reference", "critic", "reward_model"):
            raise ValueError(f"role = {self.name!r}; one of actor, reference, critic and reward_model")
        if self.precision not in BYTES:
            raise ValueError(f"precision = {self.precision!r}; one of {sorted(BYTES)}")

    @property
    def critic(self) -> bool:
        """Its head gives one number, not the vocabulary's logits; a reward model's does too."""
        return self.name in ("critic", "reward_model")

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
        return self.trained and self.adapters is None and not self.frozen.embedding

    @property
    def trains_head(self) -> bool:
        """Of a tied model the head is the embedding."""
        tied = self.shape.tied and not self.critic
        return self.trained and self.adapters is None and not (self.frozen.embedding if tied else self.frozen.head)

    def recomputes_whole(self, layer: int) -> bool:
        """`recompute: full` runs a layer (counted from 0) again: each under `uniform`, and under `block` the first of each
        chunk of a stage (megatron-core's `TransformerBlock._checkpointed_forward`)."""
        if self.savings.recompute != "full" or self.savings.method == "uniform":
            return self.savings.recompute == "full"
        layout = self.layout
        places = [(stage, chunk) for stage in range(layout.pipeline) for chunk in range(layout.virtual_pipeline)]
        return any(layer in chunk_layers(self.shape, layout, *place)[: self.savings.num_layers] for place in places)

    def passes_nothing_back(self, layer: int, pipeline_rank: int) -> bool:
        """No gradient is asked for of a layer (counted from 0): all before it is frozen, and it is. A stage asks for that
        of what it receives in any case, and with recompute for that of the embedding (`megatron/model.py`)."""
        kept = self.frozen.embedding and self.savings.recompute == "none" and pipeline_rank == 0
        in_first_chunk = layer in chunk_layers(self.shape, self.layout, 0, 0)
        return self.trained and kept and in_first_chunk and layer < self.frozen.layers

    @property
    def shares_embedding(self) -> bool:
        """The head is the embedding itself; under a pipeline the last stage has a copy instead."""
        return self.shape.tied and not self.critic and self.layout.pipeline == 1


def layer_weights(shape: ModelShape, layer: int, tensor: int) -> int:
    """Weights of one decoder layer on one tensor rank, routed experts left out."""
    norms = (4 if shape.sandwich_norms else 2) * shape.hidden
    experts = shape.experts if shape.has_experts(layer) else None
    rows = shape.ffn if experts is None else experts.shared_ffn
    router = 0 if experts is None else experts.count * shape.hidden
    feed_forward = 3 * shape.hidden * rows // tensor + router
    return attention_weights(shape, tensor) + norms + feed_forward


def expert_weights(shape: ModelShape, layer: int, expert: int, tensor: int) -> int:
    """Weights of one layer's routed experts on one rank, dealt over `expert` ranks and each cut over `tensor`."""
    experts = shape.experts if shape.has_experts(layer) else None
    return 0 if experts is None else experts.count // expert * 3 * shape.hidden * experts.ffn // tensor


def stage_expert_weights(role: Role, pipeline_rank: int) -> int:
    """Weights of the routed experts of one pipeline stage on one rank."""
    layout = role.layout
    layers = stage_layers(role.shape, layout, pipeline_rank)
    return sum(expert_weights(role.shape, layer, layout.expert, layout.expert_tensor_size) for layer in layers)


def stage_weights(role: Role, pipeline_rank: int) -> int:
    """Weights of one pipeline stage on one rank, routed experts and padding of the vocabulary included."""
    shape, layout = role.shape, role.layout
    layers = stage_layers(shape, layout, pipeline_rank)
    weights = sum(layer_weights(shape, layer, layout.tensor) for layer in layers) + stage_expert_weights(role, pipeline_rank)
    if role.has_embedding(pipeline_rank):
        weights += role.vocab_width * shape.hidden
    if role.has_head(pipeline_rank):
        weights += shape.hidden  # the final norm
        if role.critic:
            weights += shape.hidden
        elif not role.shares_embedding:
            weights += role.vocab_width * shape.hidden
    return weights


def trained_weights(role: Role, pipeline_rank: int) -> int:
    """Weights of one pipeline stage on one tensor rank that have gradients and optimizer states."""
    if not role.trained:
        return 0
    if role.adapters is not None:
        return adapter_weights(role, pipeline_rank)
    shape, layout, frozen = role.shape, role.layout, role.frozen
    own = [layer for layer in stage_layers(shape, layout, pipeline_rank) if layer >= frozen.layers]
    norms = layer_norm_weights(shape) if frozen.norms else 0
    weights = sum(layer_weights(shape, layer, layout.tensor) - norms for layer in own)
    weights += trained_expert_weights(role, pipeline_rank)
    table = role.vocab_width * shape.hidden
    if role.has_embedding(pipeline_rank) and role.trains_embedding:
        weights += table
    if role.has_head(pipeline_rank):
        weights += 0 if frozen.norms else shape.hidden
        if role.critic:
            weights += shape.hidden
        elif role.trains_head and not role.shares_embedding:
            weights += table
    return weights


def layer_norm_weights(shape: ModelShape) -> int:
    """Weights of one layer's norms."""
    return (4 if shape.sandwich_norms else 2) * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)


def adapter_weights(role: Role, pipeline_rank: int) -> int:
    """Weights of the adapters of one pipeline stage on one tensor rank."""
    if role.adapters is None:
        return 0
    layers = stage_layers(role.shape, role.layout, pipeline_rank)
    return len(layers) * layer_adapters(role.shape, role.adapters, role.layout.tensor)


def trained_expert_weights(role: Role, pipeline_rank: int) -> int:
    """Those of them that are routed experts'."""
    if not role.trained or role.adapters is not None:
        return 0
    shape, layout = role.shape, role.layout
    own = [layer for layer in stage_layers(shape, layout, pipeline_rank) if layer >= role.frozen.layers]
    return sum(expert_weights(shape, layer, layout.expert, layout.expert_tensor_size) for layer in own)


def attention_weights(shape: ModelShape, tensor: int) -> int:
    """Weights of one layer's attention on one of `tensor` ranks, its norms and biases included."""
    return replicated_weights(shape) + cut_weights(shape) // tensor


def replicated_weights(shape: ModelShape) -> int:
    """Those that every tensor rank holds."""
    latent = shape.latent
    if latent is None:
        return 2 * shape.head_dim if shape.qk_norm else 0
    narrow = latent.query_rank + latent.key_value_rank
    return shape.hidden * (narrow + latent.rotary_dim) + narrow


def cut_weights(shape: ModelShape) -> int:
    """Those that are cut over the tensor ranks, on all of them."""
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
    """Weights of one layer's attention matrices on all ranks together, without replicas, norms and biases: what a token is
    multiplied with."""
    latent = shape.latent
    if latent is None:
        return shape.hidden * 2 * (shape.heads + shape.groups) * shape.head_dim
    narrow = latent.query_rank + latent.key_value_rank
    return replicated_weights(shape) - narrow + cut_weights(shape)


# Targets whose weight is cut by rows over the tensor ranks, so that B is cut and A is whole; of the others A is cut.
_COLUMN_PARALLEL = ("qkv", "fc1")


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


def layer_adapters(shape: ModelShape, adapters: Adapters, tensor: int) -> int:
    """Adapter weights of one decoder layer on one tensor rank."""
    total = 0
    for target in adapters.targets:
        rows, columns = adapted_sizes(shape, target)
        rows, columns = (rows // tensor, columns) if target in _COLUMN_PARALLEL else (rows, columns // tensor)
        total += adapters.rank * (rows + columns)
    return total
