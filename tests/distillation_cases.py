"""An actor's update from teachers on real roles, and the same by Hugging Face's models in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.data.sample import Example, Prompt
from megarl.megatron.batch import Batch
from megarl.megatron.objective import PolicyObjective, token_weights
from megarl.megatron.parallel import reduce_scalars
from megarl.megatron.role import Role, share_results
from megarl.megatron.teaching import FromTeachers, samples_of, take_judgement
from megarl.models.layout import Layout
from megarl.recipe.algorithm_section import AlgorithmSection
from megarl.rollout.groups import GroupResult
from megarl.schedule import Plan, Schedule, plan_phase
from megarl.schedule.phase_plan import join_plans
from tests.divergence_cases import divergence
from tests.engine_cases import engine, small_batch, start_places, total_loss

LONGEST = 20


class Learned(NamedTuple):
    """Of one update: its loss, the norm of its gradient, and the mean divergence of a token."""

    loss: float
    grad_norm: float
    teacher_kl: float


def settings_of(**distillation: Any) -> AlgorithmSection:
    section = {"advantage": "none", "group_size": 1, "distillation": distillation}
    return AlgorithmSection.model_validate(section)


def judged_batch(teachers: Mapping[str, Path], from_data: bool = False, vocab: int = 131) -> Batch:
    """Twelve sequences with zeros for advantages; each second and third goes to the last teacher. `from_data` makes each
    fourth an answer of the data."""
    batch, names = small_batch(vocab), list(teachers)
    for number, sample in list(batch.samples.items())[::4] if from_data else ():
        tokens = np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int32)
        answer = Example(tokens, np.arange(len(tokens)) >= len(sample.prompt_ids))
        prompt = Prompt(number, sample.prompt_ids, "", "", {}, examples=(answer,))
        batch.samples[number] = GroupResult.of_examples(prompt).sample(0)
    judged = np.array([names[-1] if sample % 3 else names[0] for sample in range(len(batch.lengths))])
    zeros = [torch.zeros(int(length)) for length in batch.own_lengths]
    return replace(batch.with_fields(advantages=zeros), teachers=judged, max_staleness=int(from_data))


def learn(
    student: Path,
    teachers: Mapping[str, Path],
    layouts: tuple[Layout, Layout],
    max_tokens: int,
    algorithms: Sequence[AlgorithmSection],
) -> list[Learned]:
    """A first update by each algorithm: the actor under the first layout, every teacher under the second."""
    places = start_places(layouts)
    roles = {
        f"teachers.{name}": engine(str(directory), places[layouts[1]], f"teachers.{name}")
        for name, directory in teachers.items()
    }
    return [
        _learn(engine(str(student), places[layouts[0]], lr=1e-2), roles, teachers, layouts, max_tokens, settings)
        for settings in algorithms
    ]


def _learn(
    actor: Role,
    of_teachers: Mapping[str, Role],
    teachers: Mapping[str, Path],
    layouts: tuple[Layout, Layout],
    max_tokens: int,
    settings: AlgorithmSection,
) -> Learned:
    roles = {"actor": actor, **of_teachers}
    for teacher in of_teachers.values():
        teacher.reads_head = None  # of the algorithm before
    assert settings.distillation is not None
    if settings.distillation.over != "sampled":
        directories = {f"teachers.{name}": path for name, path in teachers.items()}
        actor.distillation = FromTeachers(settings.distillation, roles, directories)
    batch = judged_batch(teachers, settings.distillation.data_share > 0)
    update_plan = _plan("actor_update", batch, layouts[0], max_tokens)
    for name in teachers:
        role = roles[f"teachers.{name}"]
        plan = _plan(f"teacher_logprob.{name}", batch, layouts[1], max_tokens)
        results, _ = role.forward(batch, plan.mini_batches[0])
        shared = share_results(results.get("logprobs", {}), plan.mini_batches[0], batch, role.place)
        batch = take_judgement(batch, roles, shared, results.get("rows", {}), plan, update_plan)
    (mini_batch,) = update_plan.mini_batches
    objective = PolicyObjective(settings, batch, token_weights(batch, mini_batch, settings.aggregation))
    update = actor.update(batch, mini_batch, objective)
    assert all(np.isfinite(float(value)) for value in update.sums.values()), "the data's tokens have no log-probabilities"
    sums = {name: value for name, value in update.sums.items() if name in ("teacher_kl_sum", "tokens")}
    total = reduce_scalars(sums, actor.place, "sum")
    return Learned(total_loss(update, actor.place), update.grad_norm, total["teacher_kl_sum"] / total["tokens"])


def _plan(phase: str, batch: Batch, layout: Layout, max_tokens: int) -> Plan:
    role = phase.replace("teacher_logprob.", "teachers.")
    size = len(batch.lengths) if phase == "actor_update" else None
    schedule = Schedule(phase, max_tokens=max_tokens, mini_batch=size)
    samples = samples_of(role, batch, schedule, layout, LONGEST)
    return join_plans([plan_phase(schedule, batch.lengths[samples].tolist(), layout, 0)], [samples])


def expected(student: Path, teachers: Mapping[str, Path], settings: AlgorithmSection) -> Learned:
    """By Hugging Face's models: one sequence at a time, whole distributions, autograd."""
    import transformers as hf

    models = {
        name: hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
        for name, path in {"": student, **teachers}.items()
    }
    section = settings.distillation
    assert section is not None
    batch = judged_batch(teachers, section.data_share > 0)
    values, policy_losses = [], []
    for number, sample in batch.samples.items():
        tokens = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int64))
        rows = slice(len(sample.prompt_ids) - 1, len(tokens) - 1)
        policy = models[""](tokens[None]).logits[0, rows].log_softmax(-1)
        with torch.no_grad():
            teacher = models[str(batch.teachers[number])](tokens[None]).logits[0, rows].log_softmax(-1)
        targets = tokens[len(sample.prompt_ids) :, None]
        if section.over == "sampled":
            ours, theirs = policy.gather(-1, targets)[:, 0], teacher.gather(-1, targets)[:, 0]
            values.append(ours - theirs if section.place == "advantage" else 0.5 * (ours - theirs).square())
            # The ratio is 1 before the first update.
            policy_losses.append((ours - theirs).detach() * (ours - ours.detach() + 1).exp() / np.e)
            continue
        if section.top_k is not None:
            chosen = teacher.topk(section.top_k).indices
            policy, teacher = (_with_rest(side.exp().gather(-1, chosen)).log() for side in (policy, teacher))
        values.append(divergence(section.divergence, policy.exp(), teacher.exp(), section.mixture))
    mean = torch.cat(values).mean()
    loss = section.coefficient * (mean if section.place == "loss" else torch.cat(policy_losses).mean())
    loss.backward()
    squares = sum(float(weight.grad.square().sum()) for weight in models[""].parameters() if weight.grad is not None)
    return Learned(float(loss), float(np.sqrt(squares)), float(mean))


def _with_rest(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.cat([probabilities, 1 - probabilities.sum(-1, keepdim=True)], -1)
