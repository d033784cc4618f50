"""Bytes that one trainer rank holds, from the recipe alone.

What is counted are live bytes of tensors, and in `reserved` what a GPU's caching allocator holds beyond them. Every
micro-batch counts as full as the largest. Activations and logits are derived in `activations.py`. With N the weights of a
rank's stage (tied embeddings count once without a pipeline, on both ends with one; the vocabulary is padded) and b the
bytes of the precision (with adapters they alone have gradients and an optimizer, and a reference that is the actor without
them has no weights of its own):

    weights     N b
    gradients   4 T         megatron-core's gradient buffer is fp32 and covers every local weight that is not frozen: T
    optimizer   8 T / data  two Adam moments in fp32, sharded over the data-parallel ranks; 16 bits add a fp32 copy: 12 T /
                            data; of routed experts, over the ranks that hold the same ones

What `memory.offload` and `memory.offload_activations` move is counted in `host`, outside of the total.

A phase counts its largest moment and the packed inputs of its mini-batch. A forward phase: inside a layer, or at the
logits. An update, on top of the activations of every micro-batch that 1F1B holds on the stage:

    logits              one block of logits, on the last stage
    their weight        what stands for the gradient of an untied head's weight, which has gone into the buffer
    backward            gradients inside the last layer or the final norm
    embedding           its gradient, widened to fp32 before it is added to the buffer, activations gone
    reduction           on CPUs gloo copies the gradient buffer, as NCCL does not: 4 T, activations gone

The optimizer's step, which is fused wherever it runs (`megatron/optimizer.py`), needs nothing on top.

Checked on CPUs by `benchmarks/memory.py`, on a GPU by `benchmarks/gpu.py`, and in `tests/planner/test_estimate_memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megarl.models.layout import Layout
from megarl.models.megatron_weights import stage_layers
from megarl.planner import activations
from megarl.planner.roles import PlannedRole, adapter_weights, stage_weights, trained_expert_weights, trained_weights
from megarl.schedule.phase_plan import most_rows_behind_prompts
from megarl.schedule.schedule import Schedule, in_micro_batch

_FP32 = 4
GIB, MIB = 2**30, 2**20
# Share of the allocator's memory that fragmentation keeps from tensors that come and go: 15 % on average over eight language
# models in training, up to 33 % (GMLake, Guo et al. 2024, arXiv 2401.08156). One run on an H100 corrected the formulas.
FRAGMENTATION = 0.15
# Share of a device that the plan leaves free: the CUDA context and the collectives' buffers (each a few hundred MiB to a few
# GiB of an 80 GiB device), and the error of the estimate.
RESERVE = 0.1


def gib(num_bytes: float) -> str:
    """Bytes as GiB, small ones as MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def usable_bytes(device_bytes: int) -> int:
    """A device without the reserve."""
    return int(device_bytes * (1 - RESERVE))


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device by what they hold. `reserved` is what the allocator holds beyond tensors; `host` is what was moved
    off the device, which counts in no total."""

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

    def __add__(self, other: DeviceMemory) -> DeviceMemory:
        return DeviceMemory(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def resident(role: PlannedRole, pipeline_rank: int, during: str = "update") -> DeviceMemory:
    """What a rank holds for a role from its first update on, during an "update" or a "forward" phase of the role, or
    "between" its phases."""
    if role.borrows_weights:
        return DeviceMemory()
    weights = (stage_weights(role, pipeline_rank) + adapter_weights(role, pipeline_rank)) * role.bytes_per_weight
    heads = role.vocab_width * sum(role.teacher_widths) if role.has_head(pipeline_rank) else 0  # they stay on the device
    copies = 2 if role.precision == "fp32" else 3
    gradients = _FP32 * trained_weights(role, pipeline_rank)
    optimizer = _FP32 * copies * optimizer_share(role, pipeline_rank)
    host, offload = 0, role.memory.offload
    if during != "update" and offload != "none":
        host, gradients, optimizer = optimizer, 0, 0  # gradients are dropped
    if during == "between" and offload == "all":
        host, weights = host + weights, 0
    weights += heads * role.bytes_per_weight
    return DeviceMemory(weights=weights, gradients=gradients, optimizer=optimizer, host=host)


@dataclass(frozen=True)
class Load:
    """What a phase runs on one data-parallel rank in one mini-batch.

    `slots` are the tokens of the largest micro-batch with padding, `head_tokens` those that predict a completion token,
    `longest` the longest sequence, for which the rotary table is made. With shared prompts, `copied_rows` are the rows of
    keys and values that attention copies in a micro-batch (`MicroBatch.rows_behind_prompts`, or its bound
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
    """What a recipe allows: rollouts of a step, rollouts of a group, tokens of a prompt and of a completion, and segments of
    a rollout. The prompt of a later segment has its rollout's history, so that it may have nearly the longest length."""

    num_sequences: int
    group_size: int
    max_prompt: int
    max_completion: int
    segments: int = 1

    @property
    def longest(self) -> int:
        return self.max_prompt + self.max_completion


def micro_batches_held(role: PlannedRole, pipeline_rank: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once.

    1F1B: its current one and one for every later stage (Narayanan et al. 2021, sec. 2.2). Interleaved (same, fig. 4): it
    starts 2 (later stages) + (chunks - 1) pipeline + 1 chunks, each a share of a micro-batch.
    """
    layout = role.layout
    later, chunks = layout.pipeline - 1 - pipeline_rank, layout.virtual_pipeline
    if chunks == 1:
        return min(num_micro_batches, later + 1)
    return min(num_micro_batches, (2 * later + (chunks - 1) * layout.pipeline + 1) / chunks)


def most_held(layout: Layout) -> int:
    """Most micro-batches whose activations or results a rank holds: those of the pipeline, of which interleaving starts up
    to twice as many, and without a pipeline the next one's with the results of the last."""
    return max(2, layout.pipeline * (2 if layout.virtual_pipeline > 1 else 1))


def worst_load(role: PlannedRole, schedule: Schedule, limits: BatchLimits) -> Load:
    """What a phase runs when every micro-batch is as full as the schedule allows and the pipeline is full."""
    longest_slots, segments = in_micro_batch(limits.longest, role.layout), limits.segments
    size = (schedule.mini_batch or limits.num_sequences) * segments
    if schedule.sequences is not None:
        size = min(schedule.sequences, -(-size // role.layout.data))
        slots, head_tokens = size * longest_slots, size * limits.max_completion
    else:
        assert schedule.max_tokens is not None, "a schedule has one of sequences and max_tokens"
        slots = head_tokens = min(schedule.max_tokens, size * longest_slots)
    copied_rows = 0
    if schedule.share_prompts:
        longest_prompt = limits.max_prompt if segments == 1 else limits.longest - 1
        copied_rows = most_rows_behind_prompts(slots, size, limits.longest, limits.group_size * segments, longest_prompt)
    return Load(schedule.is_update, slots, head_tokens, limits.longest, most_held(role.layout), copied_rows)


def largest_cap(
    roles: Sequence[PlannedRole], running: PlannedRole, schedule: Schedule, limits: BatchLimits, budget_bytes: int
) -> int | None:
    """The largest `max_tokens` under which the worst case of the schedule's phase, in which `running` works, takes at most
    `budget_bytes`; None where not even one longest sequence fits.

    The schedule's cap does not count, and no cap is above all sequences of a mini-batch at full length on one data-parallel
    rank.
    """

    def fits(cap: int) -> bool:
        load = worst_load(running, replace(schedule, sequences=None, max_tokens=cap), limits)
        return peak(roles, running, load).total <= budget_bytes

    low = in_micro_batch(limits.longest, running.layout, schedule.together)
    high = low * (schedule.mini_batch or limits.num_sequences) * limits.segments
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low // running.layout.micro_batch_multiple * running.layout.micro_batch_multiple


def working(role: PlannedRole, pipeline_rank: int, load: Load) -> DeviceMemory:
    """What a phase holds on top of what is resident, at its peak."""
    tokens = -(-load.slots // role.layout.context)
    head_tokens = min(load.head_tokens, tokens)  # a context rank's chunks may be all completion
    moments = (_update_moments if load.update else _forward_moments)(role, pipeline_rank, tokens, head_tokens, load)
    # int64 tokens and positions, head positions and targets of the whole mini-batch, and two fp32 results.
    inputs = load.num_micro_batches * (2 * 8 * tokens + (2 * 8 + 2 * _FP32) * head_tokens)
    # One rotary table; two where layers with a window have a different base.
    angles = _FP32 * load.longest * role.shape.head_dim * (1 if role.shape.local_rope_theta is None else 2)
    shared = angles + activations.mask_bytes(role, load.longest, load.copied_rows > 0)
    fullest = max(moments, key=lambda memory: memory.total) + DeviceMemory(activations=inputs + shared)
    # A CPU's allocator returns memory piece by piece.
    reserved = 0 if role.on_cpu else int(fullest.total * FRAGMENTATION / (1 - FRAGMENTATION))
    # The host may hold most at another moment.
    return replace(fullest, reserved=reserved, host=max(memory.host for memory in moments))


def _forward_moments(role: PlannedRole, pipeline_rank: int, tokens: int, head_tokens: int, load: Load) -> list[DeviceMemory]:
    saved_rows, moments = 0, []
    if role.has_head(pipeline_rank) and not role.has_value_head:
        rows = activations.head_rows(role, head_tokens)
        saved_rows = rows if load.num_micro_batches > 1 else 0
        hidden = tokens * role.shape.hidden * role.bytes_per_weight
        logits = activations.logits_forward(role, head_tokens, entropy=False)
        moments.append(DeviceMemory(activations=saved_rows + hidden + rows, logits=logits))
    layer = activations.attention_forward(role, tokens, load.copied_rows)
    return [DeviceMemory(activations=layer + tokens * activations.gathered_per_token(role) + saved_rows), *moments]


def _update_moments(role: PlannedRole, pipeline_rank: int, tokens: int, head_tokens: int, load: Load) -> list[DeviceMemory]:
    width, offloads, copied_rows = role.bytes_per_weight, role.memory.offload_activations, load.copied_rows
    hidden = activations.hidden_width(role)
    held = micro_batches_held(role, pipeline_rank, load.num_micro_batches)
    stage_per_token = activations.saved_by_stage(role, pipeline_rank)
    per_token = (0 if offloads else stage_per_token) + activations.passed_per_token(role, pipeline_rank)
    # A stage still sends back the input and its gradient of the micro-batch before.
    sent_back = 2 * hidden * width if pipeline_rank > 0 and load.num_micro_batches > 1 else 0
    saved = int(held * tokens * per_token) + tokens * (activations.gathered_per_token(role) + sent_back)
    host = int(held * tokens * stage_per_token) if offloads else 0
    saved += 0 if role.on_cpu else min(activations.PREFETCH_BYTES, host)
    copies = int(held * copied_rows * activations.copied_by_stage(role, pipeline_rank))
    saved, host = (saved, host + copies) if offloads else (saved + copies, host)
    # The backward pass of the last layer. With shared prompts and selective recompute this is an upper bound: attention's
    # copies are made when those of SwiGLU are gone.
    backward = tokens * activations.backward_per_token(role, pipeline_rank)
    if activations.attends_again(role, stage_layers(role.shape, role.layout, pipeline_rank)[-1]):
        backward += copied_rows * activations.copied_per_row(role)
    elif offloads:
        backward = max(backward, activations.attention_forward(role, tokens, copied_rows))
    # With adapters the head and the embedding have no gradient.
    vocabulary = 0 if role.lora is not None else role.vocab_width * role.shape.hidden
    widened = _FP32 if width != _FP32 else 0
    embeds = role.has_embedding(pipeline_rank) and role.trains_embedding
    moments = [
        DeviceMemory(activations=saved + backward, host=host),
        DeviceMemory(gradients=vocabulary * (width + widened) if embeds else 0),
    ]
    if role.on_cpu:  # dense weights and experts are reduced one after the other
        weights, routed = trained_weights(role, pipeline_rank), trained_expert_weights(role, pipeline_rank)
        moments.append(DeviceMemory(gradients=_FP32 * max(weights - routed, routed)))
    if role.has_head(pipeline_rank) and not role.has_value_head:
        rows = activations.head_rows(role, head_tokens)
        saved += head_tokens * max(role.teacher_widths, default=0) * width  # the teacher's rows
        # The final norm keeps its input in fp32 and its normalised input; Transformer Engine's keeps its input.
        final_norm = (width if role.fuses_layers else _FP32 + (width if role.lora is None else 0)) * hidden
        saved += rows if offloads else tokens * final_norm + rows
        forward = activations.logits_forward(role, head_tokens, entropy=True)
        untied = role.trains_head and not role.shares_embedding
        moments += [
            DeviceMemory(activations=saved, logits=max(forward, activations.logits_backward(role, head_tokens))),
            DeviceMemory(activations=saved + rows, gradients=vocabulary * width if untied else 0),
        ]
    return moments


def peak(roles: Sequence[PlannedRole], running: PlannedRole, load: Load) -> DeviceMemory:
    """Memory of the trainer rank that holds most while `running` works and the other `roles` are between their phases."""
    at_work = [working(running, pipeline_rank, load) for pipeline_rank in range(running.layout.pipeline)]
    position = list(roles).index(running)
    totals = []
    for stages in _stages(roles):
        held = at_work[stages[position]]
        for role, pipeline_rank in zip(roles, stages, strict=True):
            lends = running.borrows_weights and role.name == "actor"
            during = "update" if load.update and role is running else "forward" if role is running or lends else "between"
            held += resident(role, pipeline_rank, during)
        totals.append(held)
    return max(totals, key=lambda memory: memory.total)


def resting(roles: Sequence[PlannedRole], present: str | None = None) -> DeviceMemory:
    """Memory of the trainer rank that holds most while no role works. The weights of the role that is `present` are on the
    device whatever its `offload` says: a weight sync sends the actor's."""
    totals = []
    for stages in _stages(roles):
        during = ("forward" if role.name == present else "between" for role in roles)
        totals.append(sum(map(resident, roles, stages, during), DeviceMemory()))
    return max(totals, key=lambda memory: memory.total)


def moved_away(roles: Sequence[PlannedRole]) -> int:
    """Bytes that roles between their phases keep in the host's memory, of the trainer rank that keeps most. The copies stay
    there during their phases (`megatron/offload.py`)."""
    return max(
        sum(resident(role, stage, "between").host for role, stage in zip(roles, stages, strict=True))
        for stages in _stages(roles)
    )


def _stages(roles: Sequence[PlannedRole]) -> list[tuple[int, ...]]:
    """Every combination of the roles' pipeline stages on a rank; stages are the slowest coordinate of a rank."""
    ranks = roles[0].layout.ranks
    return sorted({tuple(rank * role.layout.pipeline // ranks for role in roles) for rank in range(ranks)})


def optimizer_share(role: PlannedRole, pipeline_rank: int) -> int:
    """Weights of a stage whose optimizer states one rank holds: data-parallel and context-parallel ranks share them; for
    routed experts, the ranks that hold the same experts."""
    layout, experts = role.layout, trained_expert_weights(role, pipeline_rank)
    dense = trained_weights(role, pipeline_rank) - experts
    return -(-dense // (layout.data * layout.context)) + -(-experts // layout.expert_data)
