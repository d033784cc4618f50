"""Layouts that a role may have on the trainer ranks, the simplest first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megarl.models.layout import Layout
from megarl.planner.forecast import Job
from megarl.recipe import role_of
from megarl.recipe.layout_section import divisors, tensor_divides
from megarl.schedule.schedule import in_micro_batch

# Ranks of one machine. A tensor group communicates twice a layer, which only the links inside a machine carry.
NODE_RANKS = 8


def layouts_of(job: Job, role_name: str) -> list[Layout]:
    """Legal layouts of a role: few ranks for a copy of the model first, then few pipeline stages.

    Fewer ranks a copy leave more data-parallel ranks, which do not communicate inside a step; a tensor group waits less than
    a pipeline of the same size, which idles while it fills. Sequence parallelism is always on: it costs nothing and saves
    memory.
    """
    role = next(role for role in job.roles if role.name == role_name)
    total, shape = job.limits.num_sequences, role.shape
    sizes = [schedule.mini_batch or total for schedule in job.schedules if role_of(schedule.phase) == role_name]
    layouts = []
    for tensor in range(1, min(NODE_RANKS, job.ranks) + 1):
        if not tensor_divides(shape, tensor):
            continue
        for pipeline in range(1, job.ranks // tensor + 1):
            if job.ranks % (tensor * pipeline) or shape.num_layers % pipeline:
                continue
            layout = Layout(tensor, pipeline, job.ranks // (tensor * pipeline), tensor > 1)
            if sizes and any(size % layout.data for size in (total, *sizes)):
                continue
            if shape.experts is None or shape.experts.ffn % tensor == 0:
                layouts.append(layout)
            if shape.experts is not None:  # experts that are spread over ranks are whole
                expert_sizes = divisors(math.gcd(shape.experts.count, tensor * layout.data))[1:]
                expert_tensor = None if tensor == 1 else 1
                layouts += [replace(layout, expert=size, expert_tensor=expert_tensor) for size in expert_sizes]
    return sorted(layouts, key=lambda layout: (layout.tensor * layout.pipeline, layout.pipeline, layout.expert))


def with_layouts(job: Job, layouts: Mapping[str, Layout]) -> Job:
    """The job with other layouts, by role."""
    return replace(job, roles=tuple(replace(role, layout=layouts.get(role.name, role.layout)) for role in job.roles))


def layout_values(layout: Layout) -> dict[str, int]:
    """The keys of a layout in a recipe; expert keys only where they are not the default."""
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
