"""The rows of a family's weight table: a checkpoint tensor, and how Megatron and vLLM shard the tensor over their ranks.

A tensor is a matrix of `rows` x `columns`; a vector of n elements is an [n, 1] matrix. A parameter with more dimensions is a
matrix whose columns are the last dimension. In a fused parameter of `total` rows before sharding, `before` rows precede the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megarl.models.layout import Box
from megarl.models.shape import ModelShape


class Rectangle(NamedTuple):
    """A rectangle of the tensor (half-open) and where it starts in the rank's parameter."""

    row0: int
    row1: int
    col0: int
    col1: int
    local_row: int
    local_col: int


class Sharding(Protocol):
    """A way to shard a tensor over `ranks`."""

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Rectangle]:
        """Yield the rectangles of the tensor that `rank` holds, without padding."""

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        """Return (rows, columns) of the parameter on a rank, with padding and the other parts of a fused parameter."""


@dataclass(frozen=True)
class Rows:
    """Equal intervals of rows. The parts of a fused parameter are sharded before they are stacked."""

    before: int = 0
    total: int = 0

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Rectangle]:
        share = rows // ranks
        yield Rectangle(rank * share, (rank + 1) * share, 0, columns, self.before // ranks, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return (self.total or rows) // ranks, columns


@dataclass(frozen=True)
class Replicated(Rows):
    """Every rank holds the whole tensor."""

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Rectangle]:
        return super().pieces(rows, columns, 1, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return super().extent(rows, columns, 1)


@dataclass(frozen=True)
class Columns:
    """Equal intervals of columns."""

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Rectangle]:
        share = columns // ranks
        yield Rectangle(0, rows, rank * share, (rank + 1) * share, 0, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return rows, columns // ranks


@dataclass(frozen=True)
class PaddedRows:
    """Equal intervals of rows, padded to a multiple of `unit` in total or, with `each_rank`, on each rank."""

    unit: int
    each_rank: bool

    def padded(self, rows: int, ranks: int) -> int:
        unit = self.unit * ranks if self.each_rank else self.unit
        return -(-rows // unit) * unit

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Rectangle]:
        share = self.padded(rows, ranks) // ranks
        start, stop = rank * share, min((rank + 1) * share, rows)
        if start < stop:
            yield Rectangle(start, stop, 0, columns, 0, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return self.padded(rows, ranks) // ranks, columns


@dataclass(frozen=True)
class InterleavedRows:
    """A fused parameter that is sharded as a whole. Blocks of `height` rows of the tensor are `stride` rows apart, the first
    block after `before` rows. A rank holds an equal interval of all `total` rows.

    With more ranks than blocks, a block spans several ranks. Megatron fuses queries, keys and values in this way, group by
    group: [queries of the group | key | value].
    """

    height: int
    stride: int
    before: int
    total: int

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Rectangle]:
        share = self.total // ranks
        start, stop = rank * share, (rank + 1) * share
        for block in range(max(0, (start - self.before) // self.stride), rows // self.height):
            fused = block * self.stride + self.before
            if fused >= stop:
                return
            low, high = max(fused, start), min(fused + self.height, stop)
            if low < high:
                row = block * self.height + low - fused
                yield Rectangle(row, row + high - low, 0, columns, low - start, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return self.total // ranks, columns


@dataclass(frozen=True)
class FusedHeads:
    """vLLM's fused [queries | keys | values] of a rank. With more ranks than key-value heads, ranks hold copies of these
    heads. `part` is 0, 1 or 2."""

    part: int
    heads: int
    groups: int
    size: int  # rows of a head

    def pieces(self, rows: int, columns: int, ranks: int, rank: int) -> Iterator[Rectangle]:
        queries, keys = self.heads // ranks, max(1, self.groups // ranks)
        first = rank * queries if self.part == 0 else rank // max(1, ranks // self.groups) * keys
        count = queries if self.part == 0 else keys
        before = (0, queries, queries + keys)[self.part]
        yield Rectangle(first * self.size, (first + count) * self.size, 0, columns, before * self.size, 0)

    def extent(self, rows: int, columns: int, ranks: int) -> tuple[int, int]:
        return (self.heads // ranks + 2 * max(1, self.groups // ranks)) * self.size, columns


class Held(NamedTuple):
    """The parameter of one side (Megatron or vLLM) that holds a checkpoint tensor, and its sharding."""

    parameter: str
    sharding: Sharding


class Weight(NamedTuple):
    """A checkpoint tensor and the places where Megatron and vLLM hold the tensor.

    Names of a layer's weights are relative to the layer (`self_attn.o_proj.weight`). With `experts` the row stands for that
    many tensors: `{expert}` is the expert's global number in `name`, and the expert's number on the rank in Megatron's
    parameter; vLLM stacks the experts in one parameter. Without `vllm`, whole tensors go to vLLM's own loader
    (`weight_sync.mode: checkpoint`). No update changes a `fixed` tensor, and no weight sync sends it. A `shared` tensor
    belongs to an expert that every token passes.
    """

    name: str
    rows: int
    columns: int  # 1 of a vector
    megatron: Held
    vllm: Held | None
    experts: int = 0
    fixed: bool = False
    shared: bool = False


class Share(NamedTuple):
    """A rank's share of a weight: shard `rank` of `ranks` of each of `experts` (one for other weights)."""

    ranks: int
    rank: int
    experts: range


def boxes_of(weight: Weight, held: Held, share: Share, owner: int, prefix: str, parameter_prefix: str) -> Iterator[Box]:
    """Yield the boxes of a weight that the rank `owner` holds, with the prefixes of its two names. Experts that share a
    parameter are stacked there."""
    pieces = list(held.sharding.pieces(weight.rows, weight.columns, share.ranks, share.rank))
    height, _ = held.sharding.extent(weight.rows, weight.columns, share.ranks)
    stride = 0 if "{expert}" in held.parameter else height
    for local, expert in enumerate(share.experts):
        name = prefix + weight.name.format(expert=expert)
        parameter = parameter_prefix + held.parameter.format(expert=local)
        for row0, row1, col0, col1, local_row, local_col in pieces:
            yield Box(name, row0, row1, col0, col1, owner, parameter, local_row + local * stride, local_col)


@dataclass(frozen=True)
class Family:
    """One kind of decoder.

    `read` makes a ModelShape from a `config.json` and the file's name for errors; it raises ValueError for unsupported
    features. `layer` returns the weights of a layer by its number, grouped by vLLM module, in the order of the forward pass.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any], str], ModelShape]
    layer: Callable[[ModelShape, int], list[Weight]]
    # Regular expressions of checkpoint names to ignore; NUM_LAYERS stands for the number of layers.
    harmless: tuple[str, ...] = ()

    def weights(
        self, shape: ModelShape, layers: Iterable[int], first: bool, last: bool, critic: bool = False
    ) -> Iterator[tuple[int | None, Weight]]:
        """Yield the weights of these layers with the layer's number, and those before the first and after the last layer
        with None, in the order of the forward pass. `critic` leaves out the language-model head."""
        if first:
            yield None, embedding(shape)
        for number in layers:
            for weight in self.layer(shape, number):
                yield number, weight
        if last:
            yield None, final_norm(shape)
        # A tied head is the embedding; under a pipeline the last stage has a copy of the embedding.
        if last and not critic and not (shape.tied and first):
            yield None, head(shape)


# The weights of the parts of decoders, which families combine. Megatron's names come from megatron-core's local layer spec,
# vLLM's names from vLLM's fused parameters (0.32). Both pad the vocabulary, so that tensor ranks hold the same number of
# rows.
MEGATRON_VOCABULARY = PaddedRows(8, each_rank=True)
VLLM_VOCABULARY = PaddedRows(64, each_rank=False)
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")  # the usual names of gate, up and down
ROUTER = "mlp.router.weight"  # scores the experts; by Megatron's name


def whole(name: str, rows: int, megatron: str, columns: int = 1, vllm: str = "") -> Weight:
    """Return a tensor that every tensor rank holds whole; by default a vector."""
    return Weight(name, rows, columns, Held(megatron, Replicated()), Held(vllm or name, Replicated()))


def matrix(name: str, rows: int, columns: int, sharding: Sharding, megatron: str, vllm: str = "") -> Weight:
    """Return a tensor that is a separate parameter on both sides, sharded in the same way."""
    return Weight(name, rows, columns, Held(megatron, sharding), Held(vllm or name, sharding))


def attention(shape: ModelShape) -> list[Weight]:
    """Return the weights of grouped-query attention with one fused projection of queries, keys and values."""
    columns = shape.heads * shape.head_dim
    weights = _fused(shape, "weight", shape.hidden)
    if shape.qkv_bias:
        weights += _fused(shape, "bias", 1)
    if shape.qk_norm:
        for which in "qk":
            parameter = f"self_attention.{which}_layernorm.weight"
            weights.append(whole(f"self_attn.{which}_norm.weight", shape.head_dim, parameter))
    projection = "self_attention.linear_proj.weight"
    return [*weights, matrix("self_attn.o_proj.weight", shape.hidden, columns, Columns(), projection)]


def _fused(shape: ModelShape, kind: str, columns: int) -> list[Weight]:
    size, queries = shape.head_dim, shape.heads // shape.groups
    stride, total = (queries + 2) * size, (shape.heads + 2 * shape.groups) * size
    weights = []
    # (part, heads a group, heads of the group before it)
    for number, (part, heads, before) in enumerate((("q", queries, 0), ("k", 1, queries), ("v", 1, queries + 1))):
        weights.append(
            Weight(
                f"self_attn.{part}_proj.{kind}",
                shape.groups * heads * size,
                columns,
                Held(f"self_attention.linear_qkv.{kind}", InterleavedRows(heads * size, stride, before * size, total)),
                Held(f"self_attn.qkv_proj.{kind}", FusedHeads(number, shape.heads, shape.groups, size)),
            )
        )
    return weights


def swiglu(hidden: int, ffn: int, name: str = "mlp", megatron: str = "mlp") -> list[Weight]:
    """Return the weights of a gated feed-forward network, [gate | up] and down; `name` and `megatron` are prefixes."""
    names = [f"{name}.{part}.weight" for part in EXPERT_PARTS]
    return _gated(names, megatron, (f"{name}.gate_up_proj.weight", names[-1]), hidden, ffn)


def _gated(
    names: Sequence[str], megatron: str, vllm: tuple[str, str], hidden: int, ffn: int, experts: int = 0
) -> list[Weight]:
    """`names` are those of gate, up and down in the checkpoint, and `vllm` the parameters of [gate | up] and down."""
    fused, down = vllm
    weights = []
    for name, before in zip(names, (0, ffn), strict=False):
        rows = Rows(before, 2 * ffn)
        weights.append(Weight(name, ffn, hidden, Held(f"{megatron}.linear_fc1.weight", rows), Held(fused, rows), experts))
    columns = Columns()
    held = Held(f"{megatron}.linear_fc2.weight", columns), Held(down, columns)
    return [*weights, Weight(names[-1], hidden, ffn, *held, experts)]


def feed_forward(shape: ModelShape, number: int, name: str = "mlp", parts: Sequence[str] = EXPERT_PARTS) -> list[Weight]:
    """Return the weights of a layer's feed-forward network, or the router and the experts of a layer that has experts.

    In a layer with experts `name` is the prefix in the checkpoint and in vLLM, and `parts` are the checkpoint's names of an
    expert's gate, up and down."""
    hidden, experts = shape.hidden, shape.experts
    if experts is None or not shape.has_experts(number):
        return swiglu(hidden, shape.ffn)
    names = [f"{name}.experts.{{expert}}.{part}.weight" for part in parts]
    vllm = f"{name}.experts.routed_experts.w13_weight", f"{name}.experts.routed_experts.w2_weight"
    megatron = "mlp.experts.local_experts.{expert}"
    return [
        whole(f"{name}.gate.weight", experts.count, ROUTER, hidden),
        *_gated(names, megatron, vllm, hidden, experts.ffn, experts.count),
    ]


def pre_norm_layer(shape: ModelShape, attention: list[Weight], feed_forward: list[Weight]) -> list[Weight]:
    """Return the weights of a layer with norms only before attention and before the feed-forward network."""
    return [
        whole("input_layernorm.weight", shape.hidden, "input_layernorm.weight"),
        *attention,
        whole("post_attention_layernorm.weight", shape.hidden, "pre_mlp_layernorm.weight"),
        *feed_forward,
    ]


def llama_layer(shape: ModelShape, number: int, name: str = "mlp", parts: Sequence[str] = EXPERT_PARTS) -> list[Weight]:
    """Return the weights of a layer of Llama's form, with experts if it has some; `name` and `parts` as `feed_forward`."""
    return pre_norm_layer(shape, attention(shape), feed_forward(shape, number, name, parts))


def embedding(shape: ModelShape) -> Weight:
    """Return the input embedding, which is also the head of a tied model."""
    return _vocabulary(shape, "model.embed_tokens.weight", "embedding.word_embeddings.weight")


def final_norm(shape: ModelShape) -> Weight:
    return whole("model.norm.weight", shape.hidden, "decoder.final_layernorm.weight")


def head(shape: ModelShape) -> Weight:
    """Return the output head, which in a tied model is the embedding's tensor."""
    name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    return _vocabulary(shape, name, "output_layer.weight")


def _vocabulary(shape: ModelShape, name: str, megatron: str) -> Weight:
    return Weight(name, shape.vocab, shape.hidden, Held(megatron, MEGATRON_VOCABULARY), Held(name, VLLM_VOCABULARY))
