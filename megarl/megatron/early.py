"""Forward phases that start early: they run on parts of a step's groups while engines sample the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
from torch import Tensor

from megarl.megatron.batch import Batch
from megarl.schedule import Executed, Plan
from megarl.schedule.phase_plan import join_plans


@dataclass(frozen=True)
class Forward:
    """What a forward phase gave: the results of every sequence in the order of its batch, and what this rank executed."""

    results: list[Tensor]
    executed: Executed
    rows: dict[int, Tensor] = field(default_factory=dict)  # a teacher's, of the samples that this rank ran (`teaching.py`)


@dataclass(frozen=True)
class EarlyPart:
    """Some groups of a step (`groups` int [samples of the part], as in `Batch`), and what phases gave for them."""

    groups: np.ndarray
    plans: dict[str, Plan] = field(default_factory=dict)
    ran: dict[str, Forward] = field(default_factory=dict)

    def positions(self, batch: Batch) -> list[int]:
        """Return the position of each sample in the whole batch: a group has its samples in the same order in both."""
        firsts = {int(group): position for position, group in reversed(list(enumerate(batch.groups)))}
        return [firsts[int(group)] + i - int(np.argmax(self.groups == group)) for i, group in enumerate(self.groups)]


def join_parts(parts: Sequence[EarlyPart], phase: str, batch: Batch) -> Plan:
    """Return the plan that the parts of a phase ran together."""
    return join_plans([part.plans[phase] for part in parts], [part.positions(batch) for part in parts])


def results_of(parts: Sequence[EarlyPart], phase: str, batch: Batch) -> Forward | None:
    """Return what the parts of a phase gave for the whole batch; None for a phase that did not start early."""
    if not parts or phase not in parts[0].ran:
        return None
    pairs = [
        (position, result)
        for part in parts
        for position, result in zip(part.positions(batch), part.ran[phase].results, strict=True)
    ]
    results = [result for _, result in sorted(pairs, key=lambda pair: pair[0])]
    return Forward(results, reduce(add, [part.ran[phase].executed for part in parts]))
