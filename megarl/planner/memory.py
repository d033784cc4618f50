"""Bytes that one trainer rank holds, from the recipe alone.

What is counted are live bytes of tensors, and in `reserved` what a GPU's caching allocator holds beyond them. Every
micro-batch counts as full as the largest. Activations and logits are derived in `activations.py`. With N the weights of a
rank's stage (tied embeddings count once without a pipeline, on both ends with one; the vocabulary is padded) and b the
bytes of the precision (with adapters they alone have gradients and an optimizer, and a reference that is the actor without
them has no weights of its own):

    weights     N b
    gradients   4 T         megatron-core's gradient buffer is fp32 and covers every local weight that is not frozen: T
    optimizer   8 T / data  two Adam moments in fp32, cut over the data-parallel ranks; 16 bits add a fp32 copy: 12 T / data;
                            of routed experts, over the ranks that hold the same ones

What `memory.offload` moves is counted in `host`, outside of the total, and so is what `memory.offload_activations` does.

A phase works at its largest moment, beside the packed inputs of its mini-batch. A forward phase: inside a layer, or at
the logits. An update, beside the activations of every micro-batch that 1F1B holds on the stage:

    logits              one block of logits, on the last stage
    their weight        what stands for the gradient of an untied head's weight, which has gone into the buffer
    backward            gradients inside the last layer or the final norm
    embedding           its gradient, widened to fp32 before it is added to the buffer, activations gone
    reduction           on CPUs gloo copies the gradient buffer, as NCCL does not: 4 T, activations gone

The optimizer's step, which is fused wherever it runs (`megatron/optimizer.py`), needs nothing on top.

Checked on the CPU path: `benchmarks/memory.py`, `tests/planner/test_estimate_memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megarl.models.layout import Layout
from megarl.models.megatron_weights import stage_layers
from megarl.planner import activations
from megarl.planner.roles import Role, adapter_weights, stage_weights, trained_expert_weights, trained_weights
from megarl.schedule.schedule import Schedule, in_micro_batch
from megarl.schedule.share import most_rows_behind_prompts

_FP32 = 4
# Share of the allocator's memory that fragmentation keeps from tensors that come and go: 15 % on average over eight language
# models in training, up to 33 % (GMLake, Guo et al. 2024, arXiv 2401.08156). What is resident is allocated once, in large
# pieces. Not compared with a measurement of megarl's own yet.
FRAGMENTATION = 0.15
# Share of a device that nothing may be planned for: the CUDA context and the collectives' buffers (each a few hundred MiB to
# a few GiB of an 80 GiB device), and the model's own error.
RESERVE = 0.1


def usable_bytes(device_bytes: int) -> int:
    """A device without the reserve."""
    return int(device_bytes * (1 - RESERVE))


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by what they hold; `reserved` is what its allocator holds for no tensor. In `host` are bytes that
    were moved off the device, which count in no total."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    engine: int = 0
    reserved: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)) - self.host

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def resident(role: Role, pipeline_rank: int, during: str = "update") -> Memory:
    """What a rank holds for a role from its first update on, during an "update" or a "forward" phase of it, or "between"
    its phases."""
    if role.borrows_weights:
        return Memory()
    weights = (stage_weights(role, pipeline_rank) + adapter_weights(role, pipeline_rank)) * role.bytes_per_weight
    trained = trained_weights(role, pipeline_rank)
    copies = 2 if role.precision == "fp32" else 3
    gradients, optimizer = _FP32 * trained, _FP32 * copies * optimizer_share(role, pipeline_rank)
    host, offload = 0, role.savings.offload
    if during != "update" and offload != "none":
        host, gradients, optimizer = optimizer, 0, 0  # gradients are dropped
    if during == "between" and offload == "all":
        host, weights = host + weights, 0
    return Memory(weights=weights, gradients=gradients, optimizer=optimizer, host=host)


@dataclass(frozen=True)
class Load:
    """What a phase runs on one data-parallel rank in one mini-batch.

    `slots` are the tokens of its largest micro-batch with padding, `head_tokens` those of them that predict a completion
    token, `longest` the longest sequence, for which the rotary table is made. Where prompts are shared, `copied_rows` are
    rows of keys and values that attention copies with them in a micro-batch (`MicroBatch.rows_behind_prompts`, or its bound
    `most_rows_behind_prompts`).
    """

    update: bool
    slots: int
    head_tokens: int
    longest: int
    num_micro_batches: int
    copied_rows: int = 0


@dataclass(frozen=True)
class BatchLimits:
    """What a recipe allows: sequences of a step, sequences of a group, tokens of a prompt and of a completion."""

    num_sequences: int
    group_size: int
    max_prompt: int
    max_completion: int

    @property
    def longest(self) -> int:
        return self.max_prompt + self.max_completion


def micro_batches_held(role: Role, pipeline_rank: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once.

    1F1B: its own and one for every later stage (Narayanan et al. 2021, sec. 2.2). Interleaved (same, fig. 4): a stage
    starts 2 (later stages) + (chunks - 1) pipeline + 1 chunks, each a share of a micro-batch.
    """
    layout = role.layout
    later, chunks = layout.pipeline - 1 - pipeline_rank, layout.virtual_pipeline
    if chunks == 1:
        return min(num_micro_batches, later + 1)
    return min(num_micro_batches, (2 * later + (chunks - 1) * layout.pipeline + 1) / chunks)


def most_held(layout: Layout) -> int:
    """Micro-batches whose activations or results a rank ever holds: those of the pipeline, of which interleaving starts up
    to twice as many, and without a pipeline the next one's beside the results of the last."""
    return max(2, layout.pipeline * (2 if layout.virtual_pipeline > 1 else 1))


def worst_load(role: Role, schedule: Schedule, limits: BatchLimits) -> Load:
    """What a phase runs when every micro-batch is as full as the schedule allows and the pipeline is full."""
    size, longest_slots = schedule.mini_batch or limits.num_sequences, in_micro_batch(limits.longest, role.layout)
    if schedule.sequences is not None:
        size = min(schedule.sequences, size // role.layout.data)
        slots, head_tokens = size * longest_slots, size * limits.max_completion
    else:
        assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
        slots = head_tokens = min(schedule.max_tokens, size * longest_slots)
    copied_rows = 0
    if schedule.share_prompts:
        copied_rows = most_rows_behind_prompts(slots, size, limits.longest, limits.group_size, limits.max_prompt)
    return Load(schedule.is_update, slots, head_tokens, limits.longest, most_held(role.layout), copied_rows)


def largest_cap(
    roles: Sequence[Role], running: Role, schedule: Schedule, limits: BatchLimits, budget_bytes: int
) -> int | None:
    """The largest `max_tokens` under which the peak of the schedule's phase, in which `running` works, is at most
    `budget_bytes`, in the worst case and in steps of what the layout pads micro-batches to.

    The schedule's own cap does not count, and no cap is above all sequences of a mini-batch at full length on one
    data-parallel rank. None where not even one longest sequence fits. Raises what `peak` raises.
    """
    multiple = running.layout.micro_batch_multiple

    def fits(cap: int) -> bool:
        load = worst_load(running, replace(schedule, sequences=None, max_tokens=cap), limits)
        return peak(roles, running, load).total <= budget_bytes

    low = in_micro_batch(limits.longest, running.layout)
    high = low * (schedule.mini_batch or limits.num_sequences)
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low // multiple * multiple


def working(role: Role, pipeline_rank: int, load: Load) -> Memory:
    """What a phase holds on top of what is resident, at its peak. Raises ValueError for an update of a role that is not
    trained."""
    if load.update and not role.trained:
        raise ValueError(f"the {role.name} is not trained: it has no update")
    tokens = -(-load.slots // role.layout.context)
    head_tokens = min(load.head_tokens, tokens)  # a context rank's chunks may be all completion
    num_micro_batches, copied_rows = load.num_micro_batches, load.copied_rows
    if load.update:
        held = micro_batches_held(role, pipeline_rank, num_micro_batches)
        moments = _update_moments(role, pipeline_rank, tokens, head_tokens, held, num_micro_batches > 1, copied_rows)
    else:
        moments = _forward_moments(role, pipeline_rank, tokens, head_tokens, num_micro_batches, copied_rows)
    # int64 tokens and positions, head positions and targets of the whole mini-batch, and two fp32 results.
    inputs = num_micro_batches * (2 * 8 * tokens + (2 * 8 + 2 * _FP32) * head_tokens)
    # Of the rotary embedding, one table; twice where layers with a window have a base of their own.
    angles = _FP32 * load.longest * role.shape.head_dim * (1 if role.shape.local_rope_theta is None else 2)
    shared = angles + activations.mask_bytes(role, load.longest, copied_rows > 0)
    fullest = max(moments, key=lambda memory: memory.total) + Memory(activations=inputs + shared)
    # A CPU's memory goes back to its allocator piece by piece.
    reserved = 0 if role.on_cpu else int(fullest.total * FRAGMENTATION / (1 - FRAGMENTATION))
    # The host may hold most at another moment.
    return replace(fullest, reserved=reserved, host=max(memory.host for memory in moments))


def _forward_moments(
    role: Role, pipeline_rank: int, tokens: int, head_tokens: int, num_micro_batches: int, copied_rows: int
) -> list[Memory]:
    kept = 0
    moments = []
    if role.has_head(pipeline_rank) and not role.critic:
        rows = activations.head_rows(role, head_tokens)
        kept = rows if num_micro_batches > 1 else 0
        hidden = tokens * role.shape.hidden * role.bytes_per_weight
        logits = activations.logits_forward(role, head_tokens, entropy=False)
        moments.append(Memory(activations=kept + hidden + rows, logits=logits))
    gathered = tokens * activations.gathered_per_token(role) + kept
    return [Memory(activations=_layer_forward(role, tokens, copied_rows) + gathered), *moments]


def _layer_forward(role: Role, tokens: int, copied_rows: int) -> int:
    """Bytes where a layer's forward pass that keeps nothing is largest; among shared prompts that may be its attention."""
    largest = tokens * activations.forward_per_token(role)
    if not copied_rows:
        return largest
    copies = copied_rows * activations.copied_per_row(role)
    return max(largest, tokens * activations.attention_per_token(role) + copies)


def _layer_backward(role: Role, pipeline_rank: int, tokens: int, copied_rows: int) -> int:
    """Bytes on top of what is kept where the backward pass of a stage's last layer is largest. An upper bound among shared
    prompts under selective recompute, which makes attention's copies when those of SwiGLU are gone."""
    largest = tokens * activations.backward_per_token(role, pipeline_rank)
    if activations.attends_again(role, stage_layers(role.shape, role.layout, pipeline_rank)[-1]):
        return largest + copied_rows * activations.copied_per_row(role)
    return max(largest, _layer_forward(role, tokens, copied_rows)) if role.savings.offload_activations else largest


def _update_moments(
    role: Role, pipeline_rank: int, tokens: int, head_tokens: int, held: float, steady: bool, copied_rows: int
) -> list[Memory]:
    """`held` micro-batches at once; `steady`: a rank runs more than one."""
    kept, offloads = activations.saved_by_stage(role, pipeline_rank), role.savings.offload_activations
    per_token = (0 if offloads else kept) + activations.passed_per_token(role, pipeline_rank)
    beside = activations.gathered_per_token(role) + (activations.sent_back_per_token(role, pipeline_rank) if steady else 0)
    saved = int(held * tokens * per_token) + tokens * beside
    host = int(held * tokens * kept) if offloads else 0
    saved += 0 if role.on_cpu else min(activations.PREFETCH_BYTES, host)
    copies = int(held * copied_rows * activations.copied_by_stage(role, pipeline_rank))
    saved, host = (saved, host + copies) if offloads else (saved + copies, host)
    weights, routed = trained_weights(role, pipeline_rank), trained_expert_weights(role, pipeline_rank)
    # Of adapters alone no gradient of the head or the embedding is computed.
    width, vocabulary = role.bytes_per_weight, 0 if role.adapters is not None else role.vocab_width * role.shape.hidden
    widened = _FP32 if width != _FP32 else 0
    embeds = role.has_embedding(pipeline_rank) and role.trains_embedding
    moments = [
        Memory(activations=saved + _layer_backward(role, pipeline_rank, tokens, copied_rows), host=host),
        Memory(gradients=vocabulary * (width + widened) if embeds else 0),
    ]
    if role.on_cpu:
        moments.append(Memory(gradients=_FP32 * max(weights - routed, routed)))  # reduced one after the other
    if role.has_head(pipeline_rank) and not role.critic:
        rows = activations.head_rows(role, head_tokens)
        saved += rows if offloads else tokens * activations.final_norm_per_token(role) + rows
        forward = activations.logits_forward(role, head_tokens, entropy=True)
        own_head = role.trains_head and not role.shares_embedding
        moments += [
            Memory(activations=saved, logits=max(forward, activations.logits_backward(role, head_tokens))),
            Memory(activations=saved + rows, gradients=vocabulary * width if own_head else 0),
        ]
    return moments


def peak(roles: Sequence[Role], running: Role, load: Load) -> Memory:
    """Memory of the trainer rank that holds most while `running` works and the other `roles` are between their phases.

    Raises ValueError where `running` is no member of `roles` or the roles lie on different numbers of ranks.
    """
    if running not in roles:
        raise ValueError(f"the running role {running.name} is not one of {[role.name for role in roles]}")
    counts = {role.name: role.layout.ranks for role in roles}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the roles' layouts must have the same number of ranks, not {counts}")
    at_work = [working(running, pipeline_rank, load) for pipeline_rank in range(running.layout.pipeline)]
    position = list(roles).index(running)
    totals = []
    for stage in _stages(roles):
        held = at_work[stage[position]]
        for role, pipeline_rank in zip(roles, stage, strict=True):
            lends = running.borrows_weights and role.name == "actor"
            during = "update" if load.update and role is running else "forward" if role is running or lends else "between"
            held += resident(role, pipeline_rank, during)
        totals.append(held)
    return max(totals, key=lambda memory: memory.total)


def resting(roles: Sequence[Role], present: str | None = None) -> Memory:
    """Memory of the trainer rank that holds most while none of the `roles` works. The weights of the one that is `present`
    are on the device whatever is moved away between its phases: a weight sync sends the actor's."""
    totals = []
    for stage in _stages(roles):
        held = Memory()
        for role, pipeline_rank in zip(roles, stage, strict=True):
            held += resident(role, pipeline_rank, "forward" if role.name == present else "between")
        totals.append(held)
    return max(totals, key=lambda memory: memory.total)


def moved_away(roles: Sequence[Role]) -> int:
    """Bytes that roles between their phases keep in the host's memory, of the trainer rank that keeps most. The copies stay
    there during their phases (`megatron/offload.py`)."""
    kept = [[resident(*pair, during="between").host for pair in zip(roles, stage, strict=True)] for stage in _stages(roles)]
    return max(map(sum, kept))


def _stages(roles: Sequence[Role]) -> list[tuple[int, ...]]:
    """Every combination of the roles' pipeline stages that lies on some rank: ranks with the same one hold the same."""
    return sorted({tuple(_stage(role, rank) for role in roles) for rank in range(roles[0].layout.ranks)})


def _stage(role: Role, rank: int) -> int:
    """Pipeline rank of a trainer rank: stages are the slowest coordinate."""
    return rank // (role.layout.ranks // role.layout.pipeline)


def optimizer_share(role: Role, pipeline_rank: int) -> int:
    """Weights of a stage whose optimizer states one rank holds: data-parallel and context-parallel ranks share them, and
    of routed experts those that hold the same ones."""
    layout, experts = role.layout, trained_expert_weights(role, pipeline_rank)
    dense = trained_weights(role, pipeline_rank) - experts
    return -(-dense // (layout.data * layout.context)) + -(-experts // layout.expert_data)
