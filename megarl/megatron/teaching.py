"""What teachers give to the actor's update: the sequences that each judges, the rows that travel, the divergence.

Over sampled tokens a teacher gives log-probabilities, which are replicated as all forward phases' results are. Rows are too
large for that: the teacher's last hidden row of each token (`over: vocabulary`), or its likeliest tokens (`over: top_k`).
They go from the rank that has them to the ranks of the actor's last stage that train on the sequence, and wait on the host.
A teacher that an engine serves (`teachers.NAME.engine`) has no role; rank 0 asks its engine and broadcasts the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithm.divergence import HALF, over_likeliest
from megarl.megatron.batch import Batch, PackedMicroBatch
from megarl.megatron.divergence import Divergence, likeliest_tokens, log_probabilities_of
from megarl.megatron.logprobs import LogProbabilities
from megarl.megatron.parallel import Place, broadcast_from_first
from megarl.megatron.role import Role
from megarl.megatron.weights import load_shards
from megarl.models import ModelShape
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
    `rows` to the ranks that run the actor's `update`. Collective."""
    teacher, actor = roles[role_of(plan.phase)], roles["actor"].place
    judged = np.flatnonzero(batch.teachers == teacher.role.removeprefix(TEACHERS)).tolist()
    if teacher.reads_head is not None:
        moved = move_rows(rows, judged, plan, update, teacher, actor, batch)
        return batch.with_teacher_rows(moved)
    return _with_logprobs(batch, {sample: results[sample] for sample in judged})


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


def move_rows(
    rows: Mapping[int, Tensor], judged: Iterable[int], plan: Plan, update: Plan, teacher: Role, actor: Place, batch: Batch
) -> dict[int, Tensor]:
    """Send the rows of the samples that a teacher judges to the ranks whose update reads them; returns those of this rank.

    `rows` are on this rank where it is the source of a data-parallel rank of the teacher's. All ranks go through the samples
    in the same order, so that none waits for one that waits for it. Collective.
    """
    (mini_batch,), place, width = plan.mini_batches, teacher.place, teacher.row_width
    source = {
        sample: place.source_of(data_rank)
        for data_rank, micro_batches in enumerate(mini_batch.micro_batches)
        for micro in micro_batches
        for sample in micro.samples
    }
    readers: dict[int, set[int]] = defaultdict(set)
    for mini in update.mini_batches:
        for data_rank, micro_batches in enumerate(mini.micro_batches):
            ranks = last_stage(actor.layout, data_rank)
            for micro in micro_batches:
                for sample in micro.samples:
                    readers[sample] |= ranks
    moved: dict[int, Tensor] = {}
    with span("wait_ranks"):
        for sample in judged:
            if place.rank in readers[sample]:
                moved[sample] = rows.get(sample, torch.empty(0))
            if place.rank == source[sample]:
                on_device = rows[sample].to(place.device)
                for reader in sorted(readers[sample] - {place.rank}):
                    dist.send(on_device, reader)
            elif place.rank in readers[sample]:
                size = int(batch.own_lengths[sample]), width
                received = torch.empty(size, dtype=teacher.row_dtype, device=place.device)
                dist.recv(received, source[sample])
                moved[sample] = received.cpu()
    return moved


def last_stage(layout: Layout, data_rank: int) -> set[int]:
    """Return the ranks of a data-parallel rank's last pipeline stage."""
    ranks = ((tensor, context) for tensor in range(layout.tensor) for context in range(layout.context))
    return {layout.rank(tensor, layout.pipeline - 1, data_rank, context) for tensor, context in ranks}


# Both ends ----------------------------------------------------------------------------------------------------------------


def connect(section: DistillationSection, roles: Mapping[str, Role], directories: Mapping[str, Path], compile: bool) -> None:
    """Let teachers give the rows that `algorithm.distillation` reads, and the actor compare itself with them.

    `directories` are the teachers' models by role.
    """
    if section.over == "sampled":
        return
    actor = roles["actor"]
    mixture = HALF if section.mixture is None else section.mixture
    divergence = Divergence(section.divergence, mixture, actor.head, compile)
    compare = FromTeachers(divergence, section.top_k, actor.place)
    for name, directory in directories.items():
        teacher = roles[name]
        if section.top_k is not None:
            teacher.reads_head = partial(_give_likeliest, section.top_k)
            teacher.row_width, teacher.row_dtype = 2 * section.top_k, torch.float32
        else:
            teacher.reads_head = _give_hidden
            teacher.row_width = teacher.shape.hidden
            compare.load_head(name.removeprefix(TEACHERS), teacher.shape, directory, teacher.row_dtype)
    actor.distillation = compare


def _give_hidden(hidden: Tensor, weight: Tensor, head: LogProbabilities) -> dict[str, Tensor]:
    return {"rows": hidden, "logprobs": hidden.float().square().mean(-1)}  # NaN where a row is broken


def _give_likeliest(count: int, hidden: Tensor, weight: Tensor, head: LogProbabilities) -> dict[str, Tensor]:
    rows = likeliest_tokens(hidden, weight, head, count)
    return {"rows": rows, "logprobs": rows[:, 0]}


class FromTeachers:
    """Computes the divergence of the actor's own tokens from the teachers that judge them, on the actor's last stage. The
    heads of teachers stay on the device, cut as the actor's."""

    def __init__(self, divergence: Divergence, top_k: int | None, place: Place) -> None:
        self._divergence, self._top_k, self._place = divergence, top_k, place
        self._heads: dict[str, Tensor] = {}

    def load_head(self, name: str, shape: ModelShape, directory: Path, dtype: torch.dtype) -> None:
        """Read this tensor rank's part of a teacher's head."""
        place, layout = self._place, self._place.layout
        if place.pipeline_rank != layout.pipeline - 1:
            return
        weight = torch.empty(padded_vocab(shape, layout.tensor) // layout.tensor, shape.hidden, dtype=dtype)
        boxes = weight_boxes(layout, place.rank, "", "", head(shape))
        load_shards(directory, shape, boxes, {head(shape).megatron.parameter: weight})
        self._heads[name] = weight.to(place.device)

    def __call__(self, batch: Batch, micro: PackedMicroBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the divergence at this context rank's own tokens, from their hidden rows and the actor's head."""
        own = np.repeat(batch.teachers[list(micro.samples)], micro.own_lengths)  # [own tokens]
        row_of = torch.full((len(own),), -1, device=hidden.device)
        row_of[micro.heads] = torch.arange(len(hidden), device=hidden.device)
        parts, places = [], []
        for name in dict.fromkeys(own.tolist()):
            rows = torch.cat([_rows(batch, sample) for sample in micro.samples if batch.teachers[sample] == name])
            at = row_of[torch.from_numpy(np.flatnonzero(own == name)).to(hidden.device)]
            here = at >= 0  # not a row of another context rank
            rows, at = rows.to(hidden.device)[here], at[here]
            parts.append(self._compare(name, hidden[at], weight, rows))
            places.append(at)
        if not parts:
            return hidden.sum(-1).float() * 0.0
        return torch.zeros_like(row_of[: len(hidden)], dtype=parts[0].dtype).index_copy(
            0, torch.cat(places), torch.cat(parts)
        )

    def _compare(self, name: str, hidden: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        if self._top_k is None:
            return self._divergence(hidden, weight, rows, self._heads[name])
        logprobs, numbers = rows.split(self._top_k, -1)
        chosen = log_probabilities_of(hidden, weight, numbers.long(), self._divergence.head)
        return over_likeliest(chosen, logprobs, self._divergence.kind, self._divergence.mixture)


def _rows(batch: Batch, sample: int) -> Tensor:
    """A teacher's rows; zeros for a masked sample, whose rows may be NaN."""
    rows = batch.teacher_rows[sample]
    return torch.zeros_like(rows) if sample in batch.masked else rows
