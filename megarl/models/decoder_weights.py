"""The weights of the parts that decoders are made of, as rows of a weight table. A family's file puts them together.

Megatron's names are those of megatron-core's local layer spec, vLLM's those of its fused parameters (0.32).
"""

from __future__ import annotations

from megarl.models.shape import ModelShape
from megarl.models.table import Columns, FusedHeads, Held, InterleavedRows, PaddedRows, Replicated, Rows, Sharding, Weight

# The vocabulary is padded so that every tensor rank holds the same number of rows: megarl chooses how far in Megatron, vLLM
# pads to a multiple of 64 before it shards.
MEGATRON_VOCABULARY = PaddedRows(8, each_rank=True)
VLLM_VOCABULARY = PaddedRows(64, each_rank=False)


def whole(name: str, rows: int, megatron: str, columns: int = 1, vllm: str = "") -> Weight:
    """A tensor that every tensor rank holds; a vector where `columns` is not given."""
    return Weight(name, rows, columns, Held(megatron, Replicated()), Held(vllm or name, Replicated()))


def matrix(name: str, rows: int, columns: int, sharding: Sharding, megatron: str, vllm: str = "") -> Weight:
    """A tensor that both sides hold in a parameter of its own, sharded alike."""
    return Weight(name, rows, columns, Held(megatron, sharding), Held(vllm or name, sharding))


def attention(shape: ModelShape) -> list[Weight]:
    """Grouped-query attention with one fused projection of queries, keys and values."""
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
    """A gated feed-forward network [gate | up], down; `name` and `megatron` are what stands before its parts."""
    return [
        *(
            Weight(
                f"{name}.{part}_proj.weight",
                ffn,
                hidden,
                Held(f"{megatron}.linear_fc1.weight", Rows(before, 2 * ffn)),
                Held(f"{name}.gate_up_proj.weight", Rows(before, 2 * ffn)),
            )
            for part, before in (("gate", 0), ("up", ffn))
        ),
        matrix(f"{name}.down_proj.weight", hidden, ffn, Columns(), f"{megatron}.linear_fc2.weight"),
    ]


def router(name: str, count: int, hidden: int) -> Weight:
    """The scores of the experts; `name` is that of the checkpoint and of vLLM."""
    return whole(name, count, "mlp.router.weight", hidden)


def experts(
    name: str, count: int, hidden: int, ffn: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Weight]:
    """Experts that are gated feed-forward networks; `parts` are the checkpoint's names of gate, up and down, `name` what
    stands before them there (`mlp.experts`) and in vLLM."""
    gate, up, down = (f"{name}.{{expert}}.{part}.weight" for part in parts)
    megatron, vllm = "mlp.experts.local_experts.{expert}.", f"{name}.routed_experts."
    return [
        *(
            Weight(
                part,
                ffn,
                hidden,
                Held(megatron + "linear_fc1.weight", Rows(before, 2 * ffn)),
                Held(vllm + "w13_weight", Rows(before, 2 * ffn)),
                count,
            )
            for part, before in ((gate, 0), (up, ffn))
        ),
        Weight(
            down,
            hidden,
            ffn,
            Held(megatron + "linear_fc2.weight", Columns()),
            Held(vllm + "w2_weight", Columns()),
            count,
        ),
    ]


def llama_layer(shape: ModelShape, feed_forward: list[Weight]) -> list[Weight]:
    """A layer that normalises before attention and before its feed-forward network, and nowhere else."""
    return [
        whole("input_layernorm.weight", shape.hidden, "input_layernorm.weight"),
        *attention(shape),
        whole("post_attention_layernorm.weight", shape.hidden, "pre_mlp_layernorm.weight"),
        *feed_forward,
    ]


def embedding(shape: ModelShape) -> Weight:
    """The input embedding; a tied one is the head too."""
    return _vocabulary(shape, "model.embed_tokens.weight", "embedding.word_embeddings.weight")


def final_norm(shape: ModelShape) -> Weight:
    return whole("model.norm.weight", shape.hidden, "decoder.final_layernorm.weight")


def head(shape: ModelShape) -> Weight:
    """The output head, which of a tied model reads the embedding."""
    name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    return _vocabulary(shape, name, "output_layer.weight")


def _vocabulary(shape: ModelShape, name: str, megatron: str) -> Weight:
    return Weight(name, shape.vocab, shape.hidden, Held(megatron, MEGATRON_VOCABULARY), Held(name, VLLM_VOCABULARY))
