"""Cases for schedules: layouts, schedules and batches to plan, drawn wide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from megarl.models.layout import Layout
from megarl.schedule import Cost, Plan, Schedule, plan_phase


@dataclass(frozen=True)
class Case:
    """A batch and what it is planned for; `longest` is what the recipe would promise about its lengths."""

    schedule: Schedule
    lengths: Sequence[int]
    layout: Layout
    seed: int
    longest: int
    cost: Cost
    groups: list[int] | None
    prompts: list[int] | None = None

    def plan(self) -> Plan:
        return plan_phase(self.schedule, self.lengths, self.layout, self.seed, self.cost, self.groups, self.prompts)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=draw(st.integers(1, 5)),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        virtual_pipeline=draw(st.integers(1, 3)) if pipeline > 1 else 1,
        context=draw(st.integers(1, 3)),
    )


@st.composite
def cases(draw: st.DrawFn, capped: bool) -> Case:
    """Mostly legal: sizes divide, the cap holds the longest sequence; the pipeline may still refuse the count."""
    layout = draw(layouts())
    update, group_size = draw(st.booleans()), draw(st.integers(1, 3))
    size = layout.data * draw(st.integers(1, 7)) * group_size
    count = size * (draw(st.integers(1, 2)) if update else 1)
    longest = draw(st.integers(1, 80))
    generator = random.Random(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.3, 1.0, 3.0]))  # few long sequences, all alike, mostly long
    lengths = [max(1, round(longest * generator.random() ** (1 / spread))) for _ in range(count)]
    groups = [sample // group_size for sample in range(count)]
    generator.shuffle(groups)
    step = layout.micro_batch_multiple * layout.sequence_multiple
    shortest = [min(length for length, own in zip(lengths, groups, strict=True) if own == group) for group in groups]
    prompts = [random.Random(group).randint(1, most) for group, most in zip(groups, shortest, strict=True)]
    shared = layout.context == 1 and draw(st.booleans())
    schedule = Schedule(
        phase=draw(st.sampled_from(["actor_update", "critic_update"])) if update else "critic_value",
        sequences=None if capped else draw(st.integers(1, 12)),
        max_tokens=longest + step + draw(st.integers(0, 5 * longest)) if capped else None,
        mini_batch=size if update else None,
        epochs=draw(st.integers(1, 2)) if update else 1,
        share_prompts=shared,
    )
    cost = Cost(draw(st.sampled_from([0.0, 1e-3, 0.1])), draw(st.sampled_from([0.0, 1.0, 30.0])))
    known = groups if shared or draw(st.booleans()) else None
    return Case(schedule, lengths, layout, draw(st.integers(0, 2**31)), longest, cost, known, prompts if shared else None)
