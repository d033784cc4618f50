"""What teachers give to the actor's update: the sequences that each judges, the rows that travel, the divergence.

Over sampled tokens a teacher gives log-probabilities, which are replicated as all forward phases' results are. Rows are too
large for that: the teacher's last hidden row of each token (`over: vocabulary`), or its likeliest tokens (`over: top_k`).
They go from the rank that has them to the ranks of the actor's last stage that train on the sequence, and wait on the host.
A teacher that an engine serves (`teachers.NAME.engine`) has no role; rank 0 asks its engine and broadcasts the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithm.divergence import over_likeliest
from megarl.megatron.batch import Batch, PackedMicroBatch
from megarl.megatron.divergence import Divergence, likeliest_tokens
from megarl.megatron.logprobs import LogProbabilities, scaled
from megarl.megatron.parallel import Place, broadcast_from_first
from megarl.megatron.role import Role
from megarl.megatron.weights import load_shards
from megarl.models.layout import Layout
from megarl.models.megatron_weights import padded_vocab, weight_boxes
from megarl.models.weight_table import head
from megarl.recipe.algorithm_section import DistillationSection
from megarl.recipe.phases_section import role_of
from megarl.recipe.role_sections import TeacherEngineSection
from megarl.schedule import Plan, Schedule, violations
from megarl.telemetry.clock import span

if TYPE_CHECKING:
    from megarl.rollout.groups import Payload
    from megarl.rollout.pool import EnginePool

TEACHERS = "teachers."  # before the name in a role's name


def samples_of(role: str, batch: Batch, schedule: Schedule, layout: Layout, longest: int) -> list[int]:
    """Return the samples that a role's phase runs: all, or those of the rollouts that a teacher judges, and of the shortest
    other rollouts up to a number that the layout can run."""
    if not role.startswith(TEACHERS):
        return list(range(len(batch.lengths)))
    judged = (batch.teachers[batch.ends] == role.removeprefix(TEACHERS)).tolist()  # [rollouts]
    tokens = np.bincount(batch.rollouts, batch.lengths)
    first = sorted(range(len(judged)), key=lambda rollout: (not judged[rollout], tokens[rollout], rollout))
    counts = range(sum(judged), len(judged) + 1)
    count = next(count for count in counts if not violations(schedule, count, layout, longest))
    return np.flatnonzero(np.isin(batch.rollouts, first[:count])).tolist()


def take_judgement(
    batch: Batch, roles: Mapping[str, Role], results: list[Tensor], rows: Mapping[int, Tensor], plan: Plan, update: Plan
) -> Batch:
    """Return the batch with what the teacher of a `plan` gave for the samples that it judges: `results` everywhere, or
    `rows` on the ranks of the actor's last stage that train on the sample in the `update`. Collective.

    `rows` are on this rank where it is the source of a data-parallel rank of the teacher's. All ranks go through the samples
    in the same order, so that no two ranks wait for each other.
    """
    teacher = roles[role_of(plan.phase)]
    judged = np.flatnonzero(batch.teachers == teacher.role.removeprefix(TEACHERS)).tolist()
    if teacher.reads_head is None:
        return _with_logprobs(batch, {sample: results[sample] for sample in judged})
    place, layout, moved = teacher.place, update.layout, dict(batch.teacher_rows)
    runs, trains = ([side.samples_of(data) for data in range(side.layout.data)] for side in (plan, update))
    last, parts = layout.pipeline - 1, list(product(range(layout.tensor), range(layout.context)))
    with span("wait_ranks"):
        for sample in judged:
            source = place.source_of(next(data for data, samples in enumerate(runs) if sample in samples))
            data_ranks = [data for data, samples in enumerate(trains) if sample in samples]
            readers = {layout.rank(tensor, last, data, context) for data in data_ranks for tensor, context in parts}
            if place.rank == source:
                # The rows of a masked sample may be NaN.
                on_host = torch.zeros_like(rows[sample]) if sample in batch.masked else rows[sample]
                on_device = on_host.to(place.device)
                for reader in sorted(readers - {source}):
                    dist.send(on_device, reader)
            elif place.rank in readers:
                size = int(batch.own_lengths[sample]), teacher.row_width
                on_device = torch.empty(size, dtype=teacher.row_dtype, device=place.device)
                dist.recv(on_device, source)
                on_host = on_device.cpu()
            if place.rank in readers:
                moved[sample] = on_host
    return replace(batch, teacher_rows=moved)


def _with_logprobs(batch: Batch, judged: Mapping[int, Tensor]) -> Batch:
    """Return the batch with a teacher's log-probabilities of the samples that it judges."""
    known = batch.fields.get("teacher_logprobs") or [torch.zeros(int(length)) for length in batch.own_lengths]
    return batch.with_fields(teacher_logprobs=[judged.get(sample, known[sample]) for sample in range(len(known))])


def ask_engines(
    teachers: Mapping[str, TeacherEngineSection],
    phases: Collection[str],
    batch: Batch,
    payload: Payload,
    pool: EnginePool | None,
    begin: Callable[[str], Any],
) -> tuple[Batch, dict[str, float]]:
    """Return the batch with what the engines of `teachers` give for the samples that these judge, and metrics. `phases` are
    those of the step, and `begin` opens one; the `pool` is on rank 0 only. Collective."""
    metrics: dict[str, float] = {}
    for name, engine in teachers.items():
        phase = f"teacher_logprob.{name}"
        if phase not in phases or not (judged := np.flatnonzero(batch.teachers == name).tolist()):
            continue
        with begin(phase), span("wait_engines"):
            scores = broadcast_from_first(None if pool is None else pool.judge(name, payload, judged))
        batch = _with_logprobs(batch, dict(zip(judged, map(torch.tensor, scores), strict=True)))
        counts = {"sequences": len(judged), "tokens": batch.lengths[judged].sum(), "planned_max_tokens": engine.max_tokens}
        metrics |= {f"schedule/{phase}/{key}": int(count) for key, count in counts.items()}
    return batch, metrics


# Both ends ----------------------------------------------------------------------------------------------------------------


class FromTeachers:
    """Lets teachers give the rows that `algorithm.distillation` reads, and computes the divergence of the actor's own tokens
    from the teachers that judge them, on the actor's last stage. The heads of teachers stay on the device, cut as the
    actor's.

    `section` is of `over: top_k` or `vocabulary`; `directories` are the teachers' models by role.
    """

    def __init__(self, section: DistillationSection, roles: Mapping[str, Role], directories: Mapping[str, Path]) -> None:
        actor = roles["actor"]
        self._divergence = Divergence(section.divergence, section.mixture, actor.head)
        self._top_k, self._heads = section.top_k, dict[str, Tensor]()
        for name, directory in directories.items():
            teacher = roles[name]
            teacher.reads_head = self.teacher_rows
            if self._top_k is None:
                teacher.row_width = teacher.shape.hidden
                self._load_head(teacher, directory, actor.place)
            else:
                teacher.row_width, teacher.row_dtype = 2 * self._top_k, torch.float32

    def _load_head(self, teacher: Role, directory: Path, place: Place) -> None:
        """Read this tensor rank's part of a teacher's head."""
        layout, shape = place.layout, teacher.shape
        if place.pipeline_rank != layout.pipeline - 1:
            return
        weight = torch.empty(padded_vocab(shape, layout.tensor) // layout.tensor, shape.hidden, dtype=teacher.row_dtype)
        boxes = weight_boxes(layout, place.rank, "", "", head(shape))
        load_shards(directory, shape, boxes, {head(shape).megatron.parameter: weight})
        self._heads[teacher.role.removeprefix(TEACHERS)] = weight.to(place.device)

    def teacher_rows(self, hidden: Tensor, weight: Tensor, head: LogProbabilities) -> dict[str, Tensor]:
        """Return a teacher's rows from its last hidden rows, and one number of each that is NaN where the row is broken."""
        if self._top_k is None:
            return {"rows": hidden, "logprobs": hidden.float().square().mean(-1)}
        rows = likeliest_tokens(hidden, weight, head, self._top_k)
        return {"rows": rows, "logprobs": rows[:, 0]}

    def __call__(self, batch: Batch, micro: PackedMicroBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the divergence at this context rank's own tokens, from their hidden rows and the actor's head."""
        teachers = np.repeat(batch.teachers[list(micro.samples)], micro.own_lengths)  # of each own token
        heads = micro.heads.cpu().numpy()  # those of another context rank have no hidden row here
        result = scaled(hidden.new_zeros(len(hidden)), 1.0)
        for name in dict.fromkeys(teachers.tolist()):
            rows = torch.cat([batch.teacher_rows[sample] for sample in micro.samples if batch.teachers[sample] == name])
            judged = np.flatnonzero(teachers[heads] == name)
            rows = rows[np.searchsorted(np.flatnonzero(teachers == name), heads[judged])].to(hidden.device)
            at = torch.from_numpy(judged).to(hidden.device)
            if self._top_k is None:
                divergence = self._divergence(hidden[at], weight, rows, self._heads[name])
            else:
                logprobs, numbers = rows.split(self._top_k, -1)
                chosen = self._divergence.head(hidden[at], weight, numbers.long(), entropy=False)["logprobs"]
                divergence = over_likeliest(chosen, logprobs, self._divergence.kind, self._divergence.mixture)
            result = result.index_add(0, at, divergence)
        return result
