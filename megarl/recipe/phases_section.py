"""`phases`: how each phase divides its batch into mini-batches and micro-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag

from megarl.recipe.layout_section import layout_owner
from megarl.recipe.reward_section import CodeRewardSection
from megarl.recipe.section import BrokenRules, Positive, Seconds, Section
from megarl.recipe.violation import GIVEN, MISSING, Violation, Violations, closest_number
from megarl.schedule.schedule import in_micro_batch, violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


# A tagged union, so that a wrong value is one violation and not one of each kind.
Cap = Annotated[
    Annotated[Positive, Tag("number")] | Annotated[Literal["auto"], Tag("word")],
    Discriminator(lambda value: "word" if isinstance(value, str) else "number"),
]


class MicroBatchSection(Section):
    sequences: Positive | None = None
    """Exactly this many sequences in each micro-batch (fewer in the last)."""
    max_tokens: Cap | None = None
    """As many sequences as fit under this cap with padding, on each data-parallel rank. `auto` takes the largest cap that
    fits `device.memory_gib`; the resolved recipe shows it."""

    def broken_rules(self) -> BrokenRules:
        if (self.sequences is None) == (self.max_tokens is None):
            yield "", "exactly one of sequences and max_tokens", "{max_tokens: ...} or {sequences: ...}"


class RolloutPhaseSection(Section):
    prompts: Positive
    """Prompts of one step."""
    max_concurrent: Annotated[int, Field(ge=1, le=2048)] | None = None
    """Sequences that one engine decodes at a time. null: 64 on CPUs; on GPUs its share of the 1 + `rollout.max_staleness`
    steps that may be under way, up to 256 for each data-parallel rank."""


class RewardPhaseSection(Section):
    sequences: Positive = 32
    """Sequences scored by one task. With `rollout.max_staleness` above 0 a task waits for them 0.1 s at most."""
    timeout_s: Seconds = 60.0
    """Deadline of one task: the running sequence scores 0, the waiting ones are masked; both are counted."""
    workers: Positive = 1
    """Processes that score tasks at the same time, in the Ray cluster."""
    memory_mib: Positive = 4096
    """Most resident memory of a worker's verifiers and their children, in MiB, without the sandbox. A completion that passes
    it scores 0; a function that loads a model needs room for it."""


# An early phase runs on this many equal parts of a step's groups, each as soon as it is sampled.
EARLY_PARTS = 4


class ForwardPhaseSection(Section):
    micro_batch: MicroBatchSection
    """How the batch is divided into forward passes."""
    start: Literal["whole", "early"] = "whole"
    """`early`: run on each quarter of the step's groups as soon as it is sampled, while engines sample the others."""
    share_prompts: bool = False
    """Run a prompt once for the completions of its group in a micro-batch, not once for each. Needs megarl's attention: on
    CPUs, on GPUs before Hopper, in fp32, and for DeepSeek-V3 and Gemma 3."""


class UpdatePhaseSection(Section):
    mini_batch: Positive
    """Rollouts of one optimizer update, over all data-parallel ranks."""
    micro_batch: MicroBatchSection
    """How a mini-batch is divided into forward and backward passes."""
    epochs: Positive = 1
    """How often each sequence is used."""
    share_prompts: bool = False
    """As for a forward phase; gradients stay the same."""


class PhasesSection(Section):
    rollout: RolloutPhaseSection
    """Prompts to engines, completions back."""
    reward: RewardPhaseSection = RewardPhaseSection()
    """Completions to scores."""
    reward_model: ForwardPhaseSection | None = None
    """Scores of the reward model; runs with one."""
    actor_logprob: ForwardPhaseSection | None = None
    """Log-probabilities before the first update; runs with more than one update per batch, a KL term in the reward,
    `rollout.max_staleness` above 0, or pairs (`run.kind: dpo` and `reward_model`, whose scores these are)."""
    reference_logprob: ForwardPhaseSection | None = None
    """Log-probabilities under the reference; runs with a KL term, and with `run.kind: dpo`."""
    teacher_logprob: ForwardPhaseSection | None = None
    """What each teacher gives for the completions that it judges; runs once for each of `teachers` without an `engine`."""
    critic_value: ForwardPhaseSection | None = None
    """Values of every token; runs with a critic."""
    critic_update: UpdatePhaseSection | None = None
    """Updates of the critic; runs with a critic."""
    actor_update: UpdatePhaseSection
    """Updates of the actor."""


# Phases that a Megatron role runs by micro-batches; each has a section under `phases`.
FORWARD_PHASES = ("reward_model", "actor_logprob", "reference_logprob", "teacher_logprob", "critic_value")


UPDATE_PHASES = ("critic_update", "actor_update")


ENGINE_PHASES = (*FORWARD_PHASES, *UPDATE_PHASES)


# Every phase, in the order of a step. A recipe runs `teacher_logprob` once for each teacher, as `teacher_logprob.NAME`.
PHASES = ("rollout", "reward", *FORWARD_PHASES, "advantage", *UPDATE_PHASES, "weight_sync")


def kind_of(phase: str) -> str:
    """The name of a phase's section: `teacher_logprob` for `teacher_logprob.math`."""
    return phase.partition(".")[0]


def role_of(phase: str) -> str:
    """The role that runs an engine phase: `teachers.math` for `teacher_logprob.math`."""
    kind, _, teacher = phase.partition(".")
    if teacher:
        return f"teachers.{teacher}"
    return kind if kind == "reward_model" else kind.rpartition("_")[0]


SANDBOX_S = 1.0  # for each completion; 0.15 s where nothing else runs
# When a phase runs.
REASONS = {
    "reward_model": "it runs with a reward_model",
    "reference_logprob": "it runs with algorithm.kl, which reads the reference, and with run.kind: dpo",
    "actor_logprob": (
        "it runs with run.kind: dpo or reward_model, and for a policy loss with several updates per batch, "
        "rollout.max_staleness > 0 or algorithm.kl.place: reward; without a policy loss for algorithm.early_stop alone"
    ),
    "teacher_logprob": "it runs with algorithm.distillation and teachers without an engine",
    "critic_value": "it runs with algorithm.advantage: gae (PPO)",
    "critic_update": "it runs with algorithm.advantage: gae (PPO)",
}


def phase_rules(recipe: Recipe) -> Violations:
    """Phases without a section, sections of phases that never run, and sizes that `schedule/schedule.py` refuses."""
    for phase in recipe.engine_phases:
        section, key, runs = recipe.phase_section(phase), f"phases.{kind_of(phase)}", recipe.runs(phase)
        if phase == "actor_logprob" and recipe.num_rollouts % recipe.phases.actor_update.mini_batch:
            continue  # whether the phase runs depends on a mini-batch size that is illegal
        if section is None or not runs:
            if runs:
                size = "mini_batch: ..., " if phase in UPDATE_PHASES else ""
                example = f"{kind_of(phase)}: {{{size}micro_batch: {{max_tokens: ...}}}}"
                yield Violation(key, MISSING, f"required: {REASONS[kind_of(phase)]}", example)
            elif section is not None:
                yield Violation(key, GIVEN, f"the phase never runs: {REASONS[kind_of(phase)]}", f"remove {key}")
            continue
        role, cap = role_of(phase), section.micro_batch.max_tokens
        layout, longest = recipe.layout(role), recipe.max_sequence_tokens
        if isinstance(cap, str) and recipe.device is None:
            rule = "needs device.memory_gib, the memory that the cap must fit"
            yield Violation(f"{key}.micro_batch.max_tokens", cap, rule, "device: {memory_gib: 80}")
        schedule = recipe.schedule(phase, automatic_cap=in_micro_batch(longest, layout, recipe.max_segments))
        for fault in violations(schedule, recipe.num_rollouts, layout, longest):
            rule, value = fault.rule, cap if fault.field == "micro_batch.max_tokens" else fault.value
            if fault.field == "micro_batch.max_tokens":
                made_of = f"{recipe.data.max_prompt_tokens} + {recipe.completion_key} {recipe.max_completion_tokens}"
                made_of = f"data.max_prompt_tokens {made_of} = {longest}"
                rule += f" ({made_of})" if not recipe.run.is_supervised else " (data.max_tokens)"
            nearest = fault.nearest
            if fault.field == "mini_batch" and recipe.num_rollouts % layout.data:  # `batch_size` refuses the whole batch
                if recipe.run.is_supervised:
                    continue
                nearest = "a legal phases.rollout.prompts first, which mini_batch must divide"
            if fault.field:  # a batch that does not fit is a fault of phases.rollout.prompts
                yield Violation(f"{key}.{fault.field}", value, f"{rule} (layout of the {role})", nearest)
        if isinstance(section, ForwardPhaseSection) and section.start == "early":
            yield from _early_rules(recipe, phase)
        if section.share_prompts:
            refused = {
                f"{layout_owner(recipe, role)}.layout.context = {layout.context} ranks share each sequence": layout.context
                > 1,
                "a reward model reads each sequence to its end": "reward_model" in (role, recipe.run.kind),
                "actor.router_replay repeats what each sequence's prompt chose": (
                    role == "actor" and recipe.actor.router_replay
                ),
            }
            for rule in (rule for rule, holds in refused.items() if holds):
                yield Violation(f"{key}.share_prompts", True, rule, "false")


def _early_rules(recipe: Recipe, phase: str) -> Violations:
    """A phase may start early where the groups of a step are known before they are sampled, on devices without engines."""
    key, prompts = f"phases.{kind_of(phase)}.start", recipe.phases.rollout.prompts
    layout = recipe.layout(role_of(phase))
    refused = {
        "reward models and teachers take whole batches": kind_of(phase) in ("reward_model", "teacher_logprob"),
        f"run.kind: {recipe.run.kind} samples nothing": recipe.run.is_supervised,
        "rollout.replay has all completions at once": recipe.rollout.replay is not None,
        f"rollout.max_staleness = {recipe.rollout.max_staleness} has whole batches sampled ahead": (
            recipe.rollout.max_staleness > 0
        ),
        "algorithm.dynamic_sampling chooses the groups when all are scored": recipe.algorithm.dynamic_sampling is not None,
        "engines and trainer take turns on the same GPUs (rollout.placement)": (
            recipe.rollout.placement == "colocated" and recipe.device is not None and recipe.device.kind == "gpu"
        ),
        f"phases.rollout.prompts = {prompts} has no {EARLY_PARTS} equal parts": prompts % EARLY_PARTS != 0,
    }
    for rule in (rule for rule, holds in refused.items() if holds):
        yield Violation(key, "early", rule, "whole")
    if not any(refused.values()):
        schedule = recipe.schedule(phase, automatic_cap=in_micro_batch(recipe.max_sequence_tokens, layout))
        rollouts = recipe.num_rollouts // EARLY_PARTS
        for fault in violations(schedule, rollouts, layout, recipe.max_sequence_tokens)[:1]:
            yield Violation(key, "early", f"a part of {rollouts} rollouts {fault.rule}", "whole, or more prompts")


def batch_size(recipe: Recipe) -> Violations:
    """Each data-parallel rank needs equally many rollouts, at least one for each stage of a virtual pipeline."""
    prompts, group, rollouts = recipe.phases.rollout.prompts, recipe.algorithm.group_size, recipe.num_rollouts
    layouts = recipe.layouts

    def is_legal(count: int) -> bool:
        of_step = [(count * group, layout.data, layout.micro_batch_step) for layout in layouts.values()]
        return all(total % data == 0 and total >= data * step for total, data, step in of_step)

    halves_pair = recipe.run.is_supervised and recipe.phases.actor_update.mini_batch % group
    if is_legal(prompts) or halves_pair:
        return
    ranks = ", ".join(f"{role} {layout.data} x {layout.micro_batch_step}" for role, layout in layouts.items())
    rule = f"must divide over the data-parallel ranks of each role, with one for each stage of a virtual pipeline: {ranks}"
    sizes = [layout.data * layout.micro_batch_step for layout in layouts.values()]
    nearest = closest_number(prompts, is_legal, prompts + math.lcm(*sizes))
    if recipe.run.is_supervised:  # its batch is one mini-batch
        nearest = str(int(nearest) * group) if nearest else ""
        yield Violation("phases.actor_update.mini_batch", rollouts, rule, nearest)
        return
    rule = f"{prompts} prompts x group_size {group} = {rollouts} rollouts {rule}"
    yield Violation("phases.rollout.prompts", prompts, rule, nearest)


def rollout_and_reward_phases(recipe: Recipe) -> Violations:
    """Sizes that an engine's data-parallel ranks cannot share, and reward deadlines shorter than the code's limit."""
    count, ranks = recipe.phases.rollout.max_concurrent, recipe.rollout.data
    if count is not None and count % ranks:
        nearest = closest_number(count, lambda size: size % ranks == 0, count + ranks)
        rule = f"must be a multiple of the {ranks} data-parallel ranks of an engine (rollout.data)"
        yield Violation("phases.rollout.max_concurrent", count, rule, nearest)
    # Code that loops scores 0 at its limit; an earlier deadline of the task would mask it.
    limits = [part.timeout_s for part in recipe.reward if isinstance(part, CodeRewardSection)]
    section = recipe.phases.reward
    needed = section.sequences * (sum(limits) + SANDBOX_S)
    if limits and section.timeout_s < needed:
        each = f"{sum(limits):g} s each, and {SANDBOX_S:g} s for the sandbox"
        rule = f"{section.sequences} sequences of a task (phases.reward.sequences) may run for {each}"
        yield Violation("phases.reward.timeout_s", section.timeout_s, rule, f"{needed:g}, or fewer sequences")
