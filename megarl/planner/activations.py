"""Bytes of activations and logits of one micro-batch on one rank, term by term.

Derived from megarl's local layer spec: megatron-core's layers with the unfused norm and attention of `models/layers.py` (the
CPU path), where autograd keeps what each operation below needs, and from Transformer Engine's modules (GPUs in 16 bits),
which keep less.

With b the bytes of the precision, t the tensor ranks, s = t under sequence parallelism and 1 otherwise, h = hidden,
d = head_dim, a = heads d / t, k = groups d / t, f = ffn / t, a layer keeps for its backward pass, a token:

    two norms           2 (4 + 2 b) h / s   input in fp32, normalised input, output; in fp32 the input is the residual itself
    qkv                 (a + 2 k) b         the fused output, of which values (and keys, queries) are views
    q/k norms           (a + k) (4 + b)     input in fp32 and normalised input; in fp32 the keys' input is the qkv view, and
                                            so is the queries' where the rank has one group
    rotary embedding    (a + k + 4 d) b     rotated queries and keys, and two tables each for queries and keys
    attention           2 a b + 4 heads / t output, its copy that joins the sequences, log of the softmax's sums
    context parallelism 2 k c b             keys and values of all c context ranks
    SwiGLU              5 f b               gate and up, silu(gate), a copy of up (its offset of 0 is added), the product
    adapters            rank b each         A x

Transformer Engine keeps instead

    two norms           4 b h / s           input and output (the linear layer's input)
    q/k norms           (a + k) b           their inputs
    rotary embedding    (a + k) b           rotated queries and keys; one table for all layers
    attention           a b + 4 heads / t   output, log of the softmax's sums
    SwiGLU              3 f b               gate and up, the product
    adapters            4 h / s             of qkv and of fc1, which compute the norm again

An update and the log-probabilities of a 1.5B model reserved within 7 % of this on an H100 (`benchmarks/measured/gpu.json`).

Where prompts are shared, each completion's keys and values stand behind a copy of its prompt's (`models/attention.py`): a
layer keeps 2 k b for each row of those copies and of the completions, as many as the sequences' lengths add up to. In the
backward pass their gradients take their place, one sequence after the other.

Gemma's norms keep the normalised input in fp32, and it has four a layer; latent attention is counted with values as wide as
its keys. Both are upper estimates, not compared with a measurement.

Experts are derived from megatron-core's modules without Transformer Engine. Routing is taken as balanced: every
rank's experts get the same number of tokens. With b the bytes of the precision, h = hidden, E experts of which a token takes
k, f the feed-forward rows of an expert on a rank and x the ranks that share an expert's tensors, a rank with 1 / s of the
micro-batch's tokens (s as above) has c = k x / s rows of expert input for each of them, and keeps

    router              (9 + 4 + 5) E / s   probabilities and their transpose in fp32, the map and its transpose, masks
    expert input        c h b               a token's hidden state for each of its experts, where it was sent
    expert              c (6 f b + 4)       SwiGLU as in a dense layer, its product by the token's weight, and the weight
    order               8 c                 which token each row is
    shared experts      5 f b               as a dense layer of their rows

Attention works in blocks: nothing grows with the square of a length. Under a pipeline a stage also keeps what it received
(h b / s; in fp32 that is the first norm's input), and under a virtual one what each chunk sent (h b / s).
"""

from __future__ import annotations

from megarl.models.megatron_weights import stage_layers
from megarl.planner.roles import PlannedRole
from megarl.schedule.logit_blocks import bytes_of, largest_block

_FP32 = 4
# `BLOCK` and `ALIGNED` of `models/attention.py`, whose imports are too heavy for the planner; a test keeps them equal.
MASK_ROWS, MASK_ALIGNED = 256, 16
# On a GPU, offloaded activations that are fetched before the backward pass asks for them (`megatron/offload.py`) take at
# most this much; one tensor may be larger.
PREFETCH_BYTES = 256 << 20


def saved_by_stage(role: PlannedRole, pipeline_rank: int) -> int:
    """Bytes of each token that a stage's layers keep until their backward pass, on the device or, with
    `offload_activations`, on the host."""
    return sum(_saved_by(role, layer, pipeline_rank) for layer in stage_layers(role.shape, role.layout, pipeline_rank))


def _saved_by(role: PlannedRole, layer: int, pipeline_rank: int) -> int:
    hidden, width, modules = hidden_width(role), role.bytes_per_weight, role.recomputed_modules
    if role.passes_nothing_back(layer, pipeline_rank):
        return 0
    if role.recomputes_whole:
        return hidden * width
    kept = saved_per_token(role, layer) - sum(recomputed_per_token(role, layer))
    if layer < role.freeze.layers:
        # Inputs of weights that have no gradient: both norms' factors and outputs, attention's output and SwiGLU's product.
        queries = 0 if role.fuses_attention else _heads_width(role)[0]  # attention keeps its output, too
        again = not {"mlp", "moe"}.isdisjoint(modules)
        product = 0 if again or role.shape.has_experts(layer) else role.shape.ffn // role.layout.tensor
        if role.fuses_layers:
            norms = (1 if again else 2) * hidden
        else:
            norms = 0 if "layernorm" in modules else (2 if again else 4) * hidden
        kept -= (norms + queries + product) * width
    elif role.freeze.norms and "layernorm" not in modules and not role.fuses_layers:
        kept -= 2 * hidden * width
    return kept


def copied_by_stage(role: PlannedRole, pipeline_rank: int) -> int:
    """Bytes of each row of keys and values behind a shared prompt that a stage's layers keep until their backward pass, on
    the device or on the host. Layers that compute attention again keep none."""
    layers = stage_layers(role.shape, role.layout, pipeline_rank)
    keep = (layer for layer in layers if not attends_again(role, layer))
    return sum(copied_per_row(role) for layer in keep if not role.passes_nothing_back(layer, pipeline_rank))


def attends_again(role: PlannedRole, layer: int) -> bool:
    """Whether the backward pass runs a layer's attention again."""
    return "core_attn" in role.recomputed_modules or role.recomputes_whole


def copied_per_row(role: PlannedRole) -> int:
    """Bytes of one row of a layer's keys and values."""
    return 2 * _heads_width(role)[1] * role.bytes_per_weight


def recomputed_per_token(role: PlannedRole, layer: int) -> tuple[int, int]:
    """Bytes of each token of a layer that selective recompute does not keep: of attention and norms, and of the feed-forward
    part.

    By module: attention's first output and sums; the up-projected queries, keys and values with their rotation; both norms
    except the residual; all of SwiGLU, of the experts or of the shared ones; of the experts' activation all but its input,
    gate and up. Transformer Engine keeps attention's output for the layer after it, and its norms are parts of the layers.
    """
    modules, shape, tensor, width = role.recomputed_modules, role.shape, role.layout.tensor, role.bytes_per_weight
    queries, keys = _heads_width(role)
    attention = {
        "core_attn": (0 if role.fuses_attention else queries * width) + _FP32 * shape.heads // tensor,
        "mla_up_proj": (2 * queries + 3 * keys) * width if shape.latent is not None else 0,
        "layernorm": 0 if role.fuses_layers else 2 * (_FP32 + _normalised_width(role)) * hidden_width(role),
    }
    if not shape.has_experts(layer):
        norm = hidden_width(role) * width if role.fuses_layers else 0
        feed_forward = {"mlp": _gated(role) * (shape.ffn // tensor) * width + norm}
    elif "moe" in modules:
        feed_forward = {"moe": experts_saved_per_token(role)}
    else:
        assert shape.experts is not None, "a layer with experts"
        rows = shape.experts.ffn // role.layout.expert_tensor_size
        activation = int(expert_rows_per_token(role) * (1 if role.fuses_activation else 4) * rows * width)
        feed_forward = {"moe_act": activation, "shared_experts": shared_experts_per_token(role)}
    return sum(attention.get(module, 0) for module in modules), sum(feed_forward.get(module, 0) for module in modules)


def _normalised_width(role: PlannedRole) -> int:
    """Bytes of an element of a norm's normalised input, which the gradient of its weight needs; with adapters the norms are
    frozen."""
    return (_FP32 if role.shape.norm_offset else role.bytes_per_weight) if role.lora is None else 0


def saved_per_token(role: PlannedRole, layer: int) -> int:
    """Bytes that one layer keeps of each token until its backward pass, without recompute."""
    shape, layout, width = role.shape, role.layout, role.bytes_per_weight
    queries, keys = _heads_width(role)
    normalised = _normalised_width(role)
    if role.fuses_layers:
        saved = (6 if shape.sandwich_norms else 4) * width * hidden_width(role)  # norms behind a layer keep only their input
    else:
        saved = (4 if shape.sandwich_norms else 2) * (_FP32 + width + normalised) * hidden_width(role)
    saved += (queries + 2 * keys) * width  # qkv
    if shape.qk_norm and role.fuses_layers:
        saved += (queries + keys) * width
    elif shape.qk_norm:
        saved += (queries + keys) * (_FP32 + normalised)
        if width == _FP32:
            saved -= (keys + (queries if keys == shape.head_dim else 0)) * _FP32
    saved += (queries + keys + (0 if role.fuses_attention else 4 * shape.head_dim)) * width  # rotary embedding
    saved += (1 if role.fuses_attention else 2) * queries * width + _FP32 * shape.heads // layout.tensor  # attention
    saved += 2 * keys * layout.context * width if layout.context > 1 and not role.fuses_attention else 0
    if role.lora is not None:
        saved += role.lora.rank * len(role.lora.targets) * width
        saved += _FP32 * hidden_width(role) * len({"qkv", "fc1"} & {*role.lora.targets}) if role.fuses_layers else 0
    if (latent := shape.latent) is not None:
        # The compressed queries, keys and values with their norms, and the values widened to the size of the keys.
        narrow = latent.query_rank + latent.key_value_rank
        saved += (_FP32 + 2 * width) * narrow // _token_shards(role) + keys * width
    if shape.has_experts(layer):
        return saved + experts_saved_per_token(role)
    return saved + _gated(role) * (shape.ffn // layout.tensor) * width


def _gated(role: PlannedRole) -> int:
    """How many times its feed-forward rows a gated network keeps of a token."""
    return 3 if role.fuses_activation else 5


def mask_bytes(role: PlannedRole, longest: int, continues: bool = False) -> int:
    """Bytes of the masks that all layers share (`models/attention.py`): of sequences under context parallelism, of windows
    where a sequence is longer, and, where it `continues`, of sequences behind a shared prompt."""
    window = max(role.shape.windows, default=0)
    keys = 1 << (longest - 1).bit_length() if role.layout.context > 1 or continues else 0
    if window and (longest > window or keys):
        keys += -(-(window + MASK_ROWS) // MASK_ALIGNED) * MASK_ALIGNED + MASK_ALIGNED
    return MASK_ROWS * keys * role.bytes_per_weight


def passed_per_token(role: PlannedRole, pipeline_rank: int) -> int:
    """Bytes of each token that a stage keeps, until its backward pass, of what it received, and in a virtual pipeline of
    what it sent; other pipelines free what they sent."""
    width, layout = role.bytes_per_weight, role.layout
    kept_by_layer = width == _FP32 or role.recomputes_whole
    # The schedule keeps the input on the device even where activations are offloaded.
    received = pipeline_rank > 0 and (role.memory.offload_activations or not kept_by_layer)
    last = pipeline_rank == layout.pipeline - 1
    sent = layout.virtual_pipeline - last if layout.virtual_pipeline > 1 else 0
    return (received + sent) * hidden_width(role) * width


def gathered_per_token(role: PlannedRole) -> int:
    """Bytes of each token in the buffer of sequence parallelism's all-gather."""
    return role.shape.hidden * role.bytes_per_weight if role.layout.sequence_parallel else 0


def backward_per_token(role: PlannedRole, pipeline_rank: int) -> int:
    """Bytes of each token on top of what is saved, where the backward pass of a stage is largest.

    The last stage starts with its final norm: its input in fp32 and five gradients of that size. Every stage then comes to
    the SwiGLU of its last layer: the gradients of the product and of both factors (the product is gone by then) and of the
    residual. Where SwiGLU is narrow the norm before it may need more: five gradients in fp32, while what SwiGLU kept, the
    norm's output and the normalised input are gone. Experts: gradients of the rows that they returned, before and after
    these are sent. A norm of Transformer Engine needs its input and two gradients in the model's precision.
    """
    width, hidden, ffn = role.bytes_per_weight, hidden_width(role), role.shape.ffn // role.layout.tensor
    feed_forward, freed = (2 * ffn + hidden) * width, _gated(role) * ffn * width
    last = stage_layers(role.shape, role.layout, pipeline_rank)[-1]
    if role.shape.has_experts(last):
        rows = 2 * expert_rows_per_token(role) * role.shape.hidden
        feed_forward = int(rows * width + role.shape.hidden // _token_shards(role) * width)
        freed = experts_saved_per_token(role)
    norm = (3 * width if role.fuses_layers else 5 * _FP32 - width) * hidden - freed
    final_norm = (3 * width if role.fuses_layers else 6 * _FP32) * hidden if role.has_head(pipeline_rank) else 0
    # What recompute did not keep of the last layer, or of a part of it, is there again by then.
    again = saved_per_token(role, last) if role.recomputes_whole else max(recomputed_per_token(role, last))
    if not role.memory.offload_activations:
        return max(again + feed_forward, again + norm, final_norm)
    # With offloaded activations a layer's forward pass needs more than its backward pass, whose operations fetch their
    # tensors one by one.
    wide = 0 if width == _FP32 else _FP32 * hidden
    final_norm += hidden * width if wide and final_norm else 0
    # The stage's input counts as received already, and of the micro-batch before only the gradient is still being sent.
    counted = 2 * hidden * width if pipeline_rank > 0 else 0
    return max(forward_per_token(role) + wide - counted, again + feed_forward if again else 0, final_norm)


def forward_per_token(role: PlannedRole) -> int:
    """Bytes of each token where a forward pass that keeps nothing is largest: four hidden states (input of the stage and
    of the layer, the residual, the norm's output) and the largest of SwiGLU (as above), the experts (rows before and after
    they are sent, and outputs) and the rotary embedding (qkv, its parts and five products)."""
    shape, width, (queries, keys) = role.shape, role.bytes_per_weight, _heads_width(role)
    with_experts = {shape.has_experts(layer) for layer in range(shape.num_layers)}
    swiglu = _gated(role) * (shape.ffn // role.layout.tensor) * width if False in with_experts else 0
    routed = int(3 * expert_rows_per_token(role) * shape.hidden * width) if True in with_experts else 0
    return 4 * hidden_width(role) * width + max(swiglu, routed, (7 * queries + 3 * keys) * width)


def attention_forward(role: PlannedRole, tokens: int, copied_rows: int) -> int:
    """Bytes where a layer's forward pass that keeps nothing is largest. With shared prompts that may be its attention: four
    hidden states as above, qkv, rotated queries and keys, the output with its copy that joins the sequences, and the
    `copied_rows` behind prompts."""
    largest = tokens * forward_per_token(role)
    if not copied_rows:
        return largest
    queries, keys = _heads_width(role)
    attention = (4 * hidden_width(role) + 4 * queries + 3 * keys) * role.bytes_per_weight
    return max(largest, tokens * attention + copied_rows * copied_per_row(role))


def head_rows(role: PlannedRole, head_tokens: int) -> int:
    """Bytes of the hidden rows that the head reads. A forward phase keeps those of the last micro-batch, too."""
    return head_tokens * role.shape.hidden * role.bytes_per_weight


def logits_forward(role: PlannedRole, head_tokens: int, entropy: bool) -> int:
    """Bytes of the largest block of logits that `megatron/logprobs.py` makes, with what it computes from it."""
    return bytes_of(*_block(role, head_tokens), role.bytes_per_weight, entropy)


def logits_backward(role: PlannedRole, head_tokens: int) -> int:
    """Bytes of a block at the backward peak, with the gradient of the hidden rows in fp32.

    The peak is where the block's gradient is computed, which an entropy bonus makes larger, or where it is multiplied: in
    any precision but fp32 the product, a part of the weight's gradient or the rows', is widened to fp32 before it is added.
    """
    (rows, columns), width = _block(role, head_tokens), role.bytes_per_weight
    computed = bytes_of(rows, columns, width, role.entropy_bonus)
    products = max(rows, columns) if role.trains_head else rows  # a frozen head's weight has no gradient
    product = products * role.shape.hidden * (width + _FP32) if width != _FP32 else 0
    return head_tokens * role.shape.hidden * _FP32 + max(computed, rows * columns * width + product)


def _block(role: PlannedRole, head_tokens: int) -> tuple[int, int]:
    return largest_block(head_tokens, min(role.vocab_width, role.shape.vocab), role.on_cpu)


def hidden_width(role: PlannedRole) -> int:
    """Elements of a token's hidden state on one rank; sequence parallelism shards the tokens over the tensor ranks."""
    return role.shape.hidden // _token_shards(role)


def _heads_width(role: PlannedRole) -> tuple[int, int]:
    """Elements of the queries and of the keys of a token on one tensor rank."""
    shape, tensor = role.shape, role.layout.tensor
    if shape.latent is not None:
        return (shape.heads * shape.latent.key_dim // tensor,) * 2
    return shape.heads * shape.head_dim // tensor, shape.groups * shape.head_dim // tensor


def expert_rows_per_token(role: PlannedRole) -> float:
    """Rows of expert input on a rank for each token of its micro-batch."""
    assert role.shape.experts is not None, "a layer with experts"
    return role.shape.experts.per_token * role.layout.expert_tensor_size / _token_shards(role)


def experts_saved_per_token(role: PlannedRole) -> int:
    """Bytes that the experts of one layer keep of each token until their backward pass."""
    experts, width = role.shape.experts, role.bytes_per_weight
    assert experts is not None, "a layer with experts"
    ffn, rows = experts.ffn // role.layout.expert_tensor_size, expert_rows_per_token(role)
    router = (2 * _FP32 + 2 * _FP32 + 2) * experts.count / _token_shards(role)
    routed = rows * (role.shape.hidden * width + (3 if role.fuses_activation else 6) * ffn * width + _FP32 + 8)
    return int(router + routed) + shared_experts_per_token(role)


def shared_experts_per_token(role: PlannedRole) -> int:
    """Bytes that the shared experts of one layer keep of each token: as a dense layer of their rows."""
    assert role.shape.experts is not None, "a layer with experts"
    return _gated(role) * (role.shape.experts.shared_ffn // role.layout.tensor) * role.bytes_per_weight


def _token_shards(role: PlannedRole) -> int:
    """Ranks that the tokens of a micro-batch are sharded over, context parallelism aside."""
    return role.layout.tensor if role.layout.sequence_parallel else 1
