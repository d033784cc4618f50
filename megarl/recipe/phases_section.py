"""`phases`: how each phase divides its batch into mini-batches and micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from megarl.models.layout import Layout
from megarl.recipe.layout_section import cut_by
from megarl.recipe.reward_section import CodeRewardSection
from megarl.recipe.section import Positive, Seconds, Section, UnknownField
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations, closest_number
from megarl.schedule.legal import violations
from megarl.schedule.schedule import Schedule, in_micro_batch, padded

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# A tagged union, so that a wrong value is one violation and not one of each kind.
Cap = Annotated[
    Annotated[Positive, Tag("number")] | Annotated[Literal["auto"], Tag("word")],
    Discriminator(lambda value: "word" if isinstance(value, str) else "number"),
]


class MicroBatchSection(Section):
    sequences: Positive | None = None
    """Exactly that many sequences in each micro-batch (fewer in the last)."""
    max_tokens: Cap | None = None
    """As many sequences as fit under this cap, padding included, on each data-parallel rank. `auto` takes the largest cap
    that fits `device.memory_gib`, and the resolved recipe shows the number."""

    @model_validator(mode="after")
    def _one_rule(self) -> MicroBatchSection:
        if (self.sequences is None) == (self.max_tokens is None):
            raise ValueError("exactly one of sequences and max_tokens")
        return self


class RolloutPhaseSection(Section):
    prompts: Positive
    """Prompts of one step."""
    max_concurrent: Annotated[int, Field(ge=1, le=2048)] | None = None
    """Sequences one engine decodes at a time. null: 64 on CPUs; on GPUs an engine's share of a step's sequences, up to 256
    for each data-parallel rank."""


class RewardPhaseSection(Section):
    sequences: Positive = 32
    """Sequences scored by one task."""
    timeout_s: Seconds = 60.0
    """Deadline of one task; a sequence at work then scores 0, and those behind it are masked; both are counted."""
    workers: Positive = 1
    """Processes that score tasks at the same time, in the Ray cluster."""
    memory_mib: Positive = 4096
    """Resident memory of a worker's verifiers and all that they start, in MiB, beside that of a sandbox. A completion on
    which they pass it scores 0; a function that loads a model needs room for it."""


class ForwardPhaseSection(Section):
    micro_batch: MicroBatchSection
    """How the batch is cut into forward passes."""
    share_prompts: bool = False
    """Run a prompt once for the completions of its group that lie in one micro-batch, not once for each. On engines of
    megarl's own attention: on CPUs, on GPUs before Hopper, in fp32, and for DeepSeek-V3 and Gemma 3."""


class UpdatePhaseSection(Section):
    mini_batch: Positive
    """Sequences of one optimizer update, over all data-parallel ranks."""
    micro_batch: MicroBatchSection
    """How a mini-batch is cut into forward and backward passes."""
    epochs: Positive = 1
    """How often each sequence is used."""
    max_micro_batches_in_flight: Positive | None = None
    """Drain the pipeline after that many micro-batches, so that no stage holds the activations of more; null lets the first
    stage hold one for each stage. Less memory, a longer bubble."""
    share_prompts: bool = False
    """As of a forward phase. Gradients are those of prompts that each completion has for itself."""


class PhasesSection(Section):
    rollout: RolloutPhaseSection
    """Prompts to engines, completions back."""
    reward: RewardPhaseSection = RewardPhaseSection()
    """Completions to scores."""
    reward_model: ForwardPhaseSection | None = None
    """Scores of the reward model; runs with one."""
    actor_logprob: ForwardPhaseSection | None = None
    """Log-probabilities before the first update; runs with more than one update per batch or a KL term in the reward."""
    reference_logprob: ForwardPhaseSection | None = None
    """Log-probabilities under the reference; runs with a KL term."""
    critic_value: ForwardPhaseSection | None = None
    """Values of every token; runs with a critic."""
    critic_update: UpdatePhaseSection | None = None
    """Updates of the critic; runs with a critic."""
    actor_update: UpdatePhaseSection
    """Updates of the actor."""


# Every phase, in the order of a step.
PHASES = (
    "rollout",
    "reward",
    "reward_model",
    "actor_logprob",
    "reference_logprob",
    "critic_value",
    "advantage",
    "critic_update",
    "actor_update",
    "weight_sync",
)


# Phases an engine runs by micro-batches; each has a section of its own under `phases`.
FORWARD_PHASES = ("reward_model", "actor_logprob", "reference_logprob", "critic_value")


UPDATE_PHASES = ("critic_update", "actor_update")


ENGINE_PHASES = (*FORWARD_PHASES, *UPDATE_PHASES)


# Which role runs an engine phase.
ROLE_OF = {
    "reward_model": "reward_model",
    "actor_logprob": "actor",
    "reference_logprob": "reference",
    "critic_value": "critic",
    "critic_update": "critic",
    "actor_update": "actor",
}


def concurrent(recipe: Recipe) -> Violations:
    """Data-parallel ranks decode side by side, each as many sequences."""
    count, ranks = recipe.phases.rollout.max_concurrent, recipe.rollout.data
    if count is not None and count % ranks:
        nearest = closest_number(count, lambda size: size % ranks == 0, count + ranks)
        rule = f"must be a multiple of the {ranks} data-parallel ranks of an engine (rollout.data)"
        yield Violation("phases.rollout.max_concurrent", count, rule, nearest)


def code_has_time(recipe: Recipe) -> Violations:
    """Code that loops runs into its own limit, and scores 0; a deadline of the task that comes before would mask it."""
    parts = [part.timeout_s for part in recipe.reward if isinstance(part, CodeRewardSection)]
    section = recipe.phases.reward
    needed = section.sequences * (sum(parts) + SANDBOX_S)
    if parts and section.timeout_s < needed:
        each = f"{sum(parts):g} s each, and {SANDBOX_S:g} s for the sandbox"
        rule = f"{section.sequences} sequences of a task (phases.reward.sequences) may run for {each}"
        yield Violation("phases.reward.timeout_s", section.timeout_s, rule, f"{needed:g}, or fewer sequences")


SANDBOX_S = 1.0  # for a completion, with room: 0.15 s where nothing else runs


def _batch(recipe: Recipe) -> Violations:
    prompts, sequences = recipe.phases.rollout.prompts, recipe.num_sequences
    sizes = {role: _layout(recipe, role).data for role in recipe.roles}
    if all(sequences % size == 0 for size in sizes.values()):
        return
    group = recipe.algorithm.group_size
    ranks = " and ".join(f"{size} ({role})" for role, size in sizes.items() if sequences % size)
    rule = f"{prompts} prompts x group_size {group} = {sequences} sequences must divide over {ranks} data-parallel ranks"
    nearest = closest_number(
        prompts,
        lambda count: all(count * group % size == 0 for size in sizes.values()),
        prompts + math.lcm(*sizes.values()),
    )
    yield Violation("phases.rollout.prompts", prompts, rule, nearest)


def _virtual_pipeline_batch(recipe: Recipe) -> Violations:
    """A batch has a sequence for each micro-batch of the smallest group that a virtual pipeline runs."""
    layouts = {role: _layout(recipe, role) for role in recipe.roles}
    prompts, group = recipe.phases.rollout.prompts, recipe.algorithm.group_size
    role, most = max(layouts.items(), key=lambda item: item[1].data * item[1].micro_batch_step)
    sequences, step = recipe.num_sequences, most.micro_batch_step
    if any(sequences % one.data for one in layouts.values()) or sequences >= most.data * step:
        return
    rule = (
        f"{prompts} prompts x group_size {group} = {sequences} sequences give each of {most.data} data-parallel ranks "
        f"{sequences // most.data}, and the {role}'s virtual pipeline runs micro-batches by its {step} stages"
    )
    needed = most.data * step
    multiple = math.lcm(*(one.data for one in layouts.values()))
    nearest = closest_number(
        prompts, lambda count: count * group >= needed and count * group % multiple == 0, needed + multiple
    )
    yield Violation("phases.rollout.prompts", prompts, rule, nearest)


def _layout(recipe: Recipe, role: str) -> Layout:
    """A role's layout; unknown while it does not divide the ranks."""
    section = recipe.layout_section(role)
    if recipe.trainer.ranks % section.ranks:
        raise UnknownField("data_parallel")
    return recipe.layout(role)


def _section_fits_run(recipe: Recipe, phase: str) -> Violations:
    """A running phase has its own section; a section of a phase that never runs is read by nothing."""
    section = recipe.phase_section(phase)
    key = f"phases.{phase}"
    if phase == "actor_logprob" and recipe.num_sequences % recipe.phases.actor_update.mini_batch:
        return  # how many updates a batch gives is not known yet
    if recipe.runs(phase) and section is None:
        example = (
            "{mini_batch: ..., micro_batch: {max_tokens: ...}}"
            if phase.endswith("update")
            else "{micro_batch: {max_tokens: ...}}"
        )
        yield Violation(key, MISSING, f"required: {_reason(phase, True)}", f"{phase}: {example}")
    if not recipe.runs(phase) and section is not None:
        yield Violation(key, GIVEN, f"the phase never runs: {_reason(phase, False)}", f"remove {key}")


def _reason(phase: str, runs: bool) -> str:
    if phase == "reward_model":
        return "the recipe has a reward_model" if runs else "the recipe has no reward_model"
    if phase == "reference_logprob":
        return "algorithm.kl reads the reference" if runs else "without algorithm.kl nothing reads the reference"
    if phase == "actor_logprob":
        if runs:
            return "with several updates per batch, or algorithm.kl.place: reward, the phase runs"
        return "with one update per batch the training forward gives the same numbers"
    return "with algorithm.advantage: gae the phase runs" if runs else "it needs algorithm.advantage: gae (PPO)"


def _cap(recipe: Recipe, phase: str) -> Violations:
    """A hard cap must hold the longest possible sequence, with the layout's padding."""
    section = recipe.phase_section(phase)
    if section is None or section.micro_batch.max_tokens is None:
        return
    key, cap = f"phases.{phase}.micro_batch.max_tokens", section.micro_batch.max_tokens
    if isinstance(cap, str):
        if recipe.device is None:
            yield Violation(
                key, cap, "needs device.memory_gib, the memory that the cap must fit", "device: {memory_gib: 80}"
            )
        return
    longest = recipe.max_sequence_tokens
    slots = in_micro_batch(longest, recipe.layout(ROLE_OF[phase]))
    if cap < slots:
        padded = f", padded to {slots}" if slots != longest else ""
        rule = (
            f"the cap is under the longest possible sequence: data.max_prompt_tokens {recipe.data.max_prompt_tokens} + "
            f"{recipe.completion_key} {recipe.max_completion_tokens} = {longest}{padded}"
        )
        yield Violation(key, cap, rule, str(slots))


def _mini_batch(recipe: Recipe, phase: str) -> Violations:
    section = recipe.phase_section(phase)
    if not isinstance(section, UpdatePhaseSection):
        return
    size, sequences, role = section.mini_batch, recipe.num_sequences, ROLE_OF[phase]
    try:
        data = _layout(recipe, role).data
    except UnknownField:
        data = 1  # the ranks have a violation of their own; the batch is still checked
    nearest = closest_number(size, lambda count: count % data == 0 and sequences % count == 0, sequences)
    key = f"phases.{phase}.mini_batch"
    if sequences % size:
        group = recipe.algorithm.group_size
        rule = (
            f"must divide the {sequences} sequences of a step (prompts {recipe.phases.rollout.prompts} x group_size {group})"
        )
        yield Violation(key, size, rule, nearest)
    elif size % data:
        yield Violation(key, size, f"must be a multiple of the {role}'s data-parallel size {data}", nearest)


def _in_flight(recipe: Recipe, phase: str) -> Violations:
    """A pipeline of P stages never holds more than P micro-batches; draining it later than that only costs time."""
    section = recipe.phase_section(phase)
    if not isinstance(section, UpdatePhaseSection) or section.max_micro_batches_in_flight is None:
        return
    key, count = f"phases.{phase}.max_micro_batches_in_flight", section.max_micro_batches_in_flight
    role = ROLE_OF[phase]
    stages, chunks = recipe.layout_section(role).pipeline, recipe.layout_section(role).virtual_pipeline
    if chunks > 1:
        rule = f"a pipeline of {cut_by(recipe, role)}.layout.virtual_pipeline = {chunks} chunks a stage is not drained"
        yield Violation(key, count, rule, f"remove {key}")
    elif count >= stages:
        rule = f"the {role}'s {stages} pipeline stage{'s hold' if stages > 1 else ' holds'} {stages} at most anyway"
        yield Violation(key, count, rule, str(stages - 1) if stages > 1 else f"remove {key}")


def _share_prompts(recipe: Recipe, phase: str) -> Violations:
    """Where a prompt's rows cannot serve the completions of its group."""
    section, role = recipe.phase_section(phase), ROLE_OF[phase]
    if section is None or not section.share_prompts:
        return
    context = recipe.layout_section(role).context
    reasons = {
        f"{cut_by(recipe, role)}.layout.context = {context} ranks share each sequence": context > 1,
        "a reward model reads each sequence to its end": role == "reward_model",
        "actor.router_replay repeats what each sequence's prompt chose": role == "actor" and recipe.actor.router_replay,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield Violation(f"phases.{phase}.share_prompts", True, reason, "false")


def _virtual_pipeline_counts(recipe: Recipe, phase: str) -> Violations:
    """A virtual pipeline runs micro-batches by its stages; every batch must come out as a multiple of them."""
    section, role = recipe.phase_section(phase), ROLE_OF[phase]
    if section is None or recipe.layout_section(role).virtual_pipeline == 1:
        return
    layout = _layout(recipe, role)
    sequences, longest = recipe.num_sequences, recipe.max_sequence_tokens
    sequences_each, cap = section.micro_batch.sequences, section.micro_batch.max_tokens
    # The number that `auto` will be is not known yet: it may be as small as the longest sequence.
    number = in_micro_batch(longest, layout) if isinstance(cap, str) else cap
    size = section.mini_batch if isinstance(section, UpdatePhaseSection) else sequences
    schedule = Schedule(phase, sequences_each, number, size)
    share, step = size // layout.data, layout.micro_batch_step

    def runs(changed: Schedule, layout: Layout = layout) -> bool:
        return not violations(changed, sequences, layout, longest)

    # What stands against it without a virtual pipeline, or against every mini-batch, has a violation of its own.
    if runs(schedule) or not runs(schedule, replace(layout, virtual_pipeline=1)) or sequences // layout.data < step:
        return
    by = f"the {role}'s virtual pipeline runs micro-batches by its {step} stages"
    if share < step:
        rule = f"gives each of {layout.data} data-parallel ranks {share}, and {by}"
        least, data = layout.data * step, layout.data
        nearest = closest_number(
            size, lambda count: count >= least and count % data == 0 and sequences % count == 0, sequences
        )
        yield Violation(f"phases.{phase}.mini_batch", size, rule, nearest)
    elif sequences_each is not None:
        rule = f"cuts {share} sequences a rank into {-(-share // sequences_each)}, and {by}"
        nearest = closest_number(sequences_each, lambda count: runs(replace(schedule, sequences=count)), share)
        yield Violation(f"phases.{phase}.micro_batch.sequences", sequences_each, rule, nearest or "max_tokens in its place")
    else:
        most = share // step * step
        rule = f"{share} sequences a rank of up to {longest} tokens can need more than {most} micro-batches, and {by}"
        caps = (in_micro_batch(count * padded([longest], layout)[0], layout) for count in range(1, share + 1))
        nearest = next((str(one) for one in caps if runs(replace(schedule, max_tokens=one))), "")
        yield Violation(f"phases.{phase}.micro_batch.max_tokens", cap, rule, nearest)
