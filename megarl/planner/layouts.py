"""Layouts a role may have on the trainer ranks, the simplest first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.planner.job import Job
from megarl.recipe import ROLE_OF
from megarl.recipe.layout_rules import divisors, tensor_divides
from megarl.schedule import Schedule
from megarl.schedule.schedule import in_micro_batch

# Ranks of one machine. A tensor group talks twice a layer, which only the links inside a machine carry.
NODE_RANKS = 8


def layouts_of(job: Job, role_name: str) -> list[Layout]:
    """Legal layouts of a role: few ranks a copy of the model first, then few pipeline stages.

    Fewer ranks a copy leave more data-parallel ranks, which need no talk inside a step; a tensor group waits less than a
    pipeline of the same size, which idles while it fills. Activations between tensor regions are always cut
    (sequence parallelism): that costs nothing and saves memory.
    """
    role = next(role for role in job.roles if role.name == role_name)
    schedules = [one for one in job.schedules if ROLE_OF[one.phase] == role_name]
    found = [
        cut
        for tensor in range(1, min(NODE_RANKS, job.ranks) + 1)
        if tensor_divides(role.shape, tensor)
        for pipeline in range(1, job.ranks // tensor + 1)
        if job.ranks % (tensor * pipeline) == 0 and role.shape.num_layers % pipeline == 0
        for cut in _expert_cuts(role.shape, Layout(tensor, pipeline, job.ranks // (tensor * pipeline), tensor > 1))
    ]
    legal = [layout for layout in found if all(_runs(job, one, layout) for one in schedules)]
    return sorted(legal, key=lambda layout: (layout.tensor * layout.pipeline, layout.pipeline, layout.expert))


def _expert_cuts(shape: ModelShape, layout: Layout) -> list[Layout]:
    """The layout with its experts cut in every legal way; experts that are dealt over ranks are whole."""
    if shape.experts is None:
        return [layout]
    stage, rows = layout.tensor * layout.data, shape.experts.ffn
    dealt = divisors(math.gcd(shape.experts.count, stage))[1:]
    whole = [layout] if rows % layout.tensor == 0 else []
    return whole + [replace(layout, expert=count, expert_tensor=None if layout.tensor == 1 else 1) for count in dealt]


def with_layouts(job: Job, layouts: Mapping[str, Layout]) -> Job:
    """The job with other layouts, by role."""
    return replace(job, roles=tuple(replace(role, layout=layouts.get(role.name, role.layout)) for role in job.roles))


def layout_text(layout: Layout) -> str:
    """A layout as a recipe writes it."""
    values = layout_values(layout).items()
    return "{" + ", ".join(f"{key}: {str(value).lower()}" for key, value in values) + "}"


def layout_values(layout: Layout) -> dict[str, int]:
    """The keys of a layout in a recipe; of experts only what is cut."""
    values: dict[str, int] = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    values["sequence_parallel"] = layout.sequence_parallel
    if layout.expert > 1:
        values["expert"] = layout.expert
    if layout.expert_tensor is not None:
        values["expert_tensor"] = layout.expert_tensor
    return values


def longest_slots(job: Job, layout: Layout) -> int:
    """Slots of a micro-batch that holds one longest sequence: the least legal cap."""
    return in_micro_batch(job.limits.longest, layout)


def _runs(job: Job, schedule: Schedule, layout: Layout) -> bool:
    """Whether the data-parallel size of a layout divides the batch and the mini-batch of a schedule."""
    sizes = (job.limits.num_sequences, schedule.mini_batch or job.limits.num_sequences)
    return all(size % layout.data == 0 for size in sizes)
