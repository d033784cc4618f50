"""Bytes that one trainer rank holds, from the recipe alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megarl.estimate.roles import Role, stage_weights
from megarl.reshard.megatron import stage_layers


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by what they hold."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    engine: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def resident(role: Role, pipeline_rank: int) -> Memory:
    """What a rank holds for a role between phases."""
    weights = stage_weights(role, pipeline_rank)
    if not role.trained:
        return Memory(weights=weights * role.bytes_per_weight)
    share = -(-weights // (role.layout.data * role.layout.context))
    copies = 3 if role.precision == "bf16" else 2
    return Memory(weights=weights * role.bytes_per_weight, gradients=4 * weights, optimizer=4 * copies * share)


def micro_batches_held(role: Role, pipeline_rank: int, num_micro_batches: int, max_in_flight: int | None) -> int:
    """Micro-batches whose activations a stage holds at once: 1F1B starts one a later stage and its own."""
    limit = num_micro_batches if max_in_flight is None else min(num_micro_batches, max_in_flight)
    return min(limit, role.layout.pipeline - pipeline_rank)


def working(
    role: Role,
    pipeline_rank: int,
    *,
    update: bool,
    slots: int,
    head_tokens: int,
    longest: int,
    num_micro_batches: int,
    max_in_flight: int | None,
) -> Memory:
    """What a phase holds on top of what is resident, at its peak."""
    shape, layout = role.shape, role.layout
    layers = len(stage_layers(shape, layout, pipeline_rank))
    tokens = slots // layout.context
    per_token = (
        10 * shape.hidden + (6 * shape.heads * shape.head_dim + 6 * shape.ffn) // layout.tensor
    ) * role.bytes_per_weight
    held = micro_batches_held(role, pipeline_rank, num_micro_batches, max_in_flight) * layers if update else 2
    logits = 0
    if role.has_head(pipeline_rank) and not role.critic:
        logits = head_tokens * role.vocab_width * (20 if role.precision == "fp32" else 18)
    return Memory(activations=tokens * per_token * held, logits=logits)


def peak(
    roles: Sequence[Role],
    running: Role,
    *,
    update: bool,
    slots: int,
    head_tokens: int,
    longest: int,
    num_micro_batches: int,
    max_in_flight: int | None,
) -> Memory:
    """Memory of the trainer rank that holds most while `running` works and every role of `roles` is resident.

    Raises ValueError where `running` is no member of `roles` or the roles lie on different numbers of ranks.
    """
    if running not in roles:
        raise ValueError(f"the running role {running.name} is not one of {[role.name for role in roles]}")
    counts = {role.name: role.layout.ranks for role in roles}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the roles' layouts must have the same number of ranks, not {counts}")
    stages = {tuple(_stage(role, rank) for role in roles) for rank in range(running.layout.ranks)}
    best = Memory()
    for stage in sorted(stages):
        found = Memory()
        for role, pipeline_rank in zip(roles, stage, strict=True):
            found += resident(role, pipeline_rank)
        found += working(
            running,
            stage[list(roles).index(running)],
            update=update,
            slots=slots,
            head_tokens=head_tokens,
            longest=longest,
            num_micro_batches=num_micro_batches,
            max_in_flight=max_in_flight,
        )
        best = max(best, found, key=lambda memory: memory.total)
    return best


def _stage(role: Role, rank: int) -> int:
    return rank // (role.layout.ranks // role.layout.pipeline)
