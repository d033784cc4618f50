"""Rules over several fields, over the model's shape and over files: everything pydantic cannot see.

Each rule is a generator of violations over the recipe. On a recipe that is only partly legal a rule ends where it
reads a field without a legal value (`UnknownField`), so the rules are small and one fault hides little of the rest.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from megarl.models import FAMILIES, ModelShape
from megarl.models.layout import Layout
from megarl.models.model_files import check_has_tokenizer
from megarl.models.stored_weights import check_tokenizer, check_weights, has_weights, read_vocabulary
from megarl.planner.adapters import adapted_sizes
from megarl.recipe import (
    algorithm_rules,
    checkpoint,
    cpu_rules,
    data_rules,
    environment_rules,
    evaluation_rules,
    feature_rules,
    layout_rules,
    megatron_rules,
    reward_rules,
    rollout_rules,
    telemetry_rules,
    watchdog_rules,
    wire_rules,
)
from megarl.recipe.checkpoint import Fetch, ModelNotFound, find_model, model_shape
from megarl.recipe.layout_rules import cut_by, cuts
from megarl.recipe.nearest import closest_number
from megarl.recipe.recipe import ENGINE_PHASES, ROLE_OF, Recipe
from megarl.recipe.reward_model_rules import reward_model_files, reward_model_is_read
from megarl.recipe.reward_sections import FunctionRewardSection
from megarl.recipe.sections import UnknownField, UpdatePhaseSection
from megarl.recipe.violation import GIVEN, MISSING, Violation
from megarl.schedule.legal import violations
from megarl.schedule.schedule import Schedule, in_micro_batch, padded

Violations = Iterator[Violation]

# What `megarl check` says of the GPU path, and docs/gpu.md until `benchmarks/gpu.py` has recorded a run.
NOT_RUN = "not yet run on a GPU"


def cross_violations(recipe: Recipe, fetch: Fetch | None = None) -> list[Violation]:
    """Every violation of a rule over several fields, in the order of RULES."""
    found: list[Violation] = []
    for rule in RULES:
        _collect(found, rule(recipe))
    for phase in ENGINE_PHASES:
        for phase_rule in PHASE_RULES:
            _collect(found, phase_rule(recipe, phase))
    for key in ("model.path", "reference.path", "critic.path", "reward_model.path"):
        _collect(found, _model(recipe, key, fetch))
    _collect(found, reward_model_files(recipe, fetch))
    return found


def _collect(found: list[Violation], rule: Violations) -> None:
    """Run one rule, a generator that has not started yet."""
    try:
        for violation in rule:
            found.append(violation)
    except UnknownField:
        return  # the field it needs has a violation of its own


def _reference(recipe: Recipe) -> Violations:
    if recipe.reference is not None and recipe.algorithm.kl is None:
        yield Violation("reference", GIVEN, "without algorithm.kl nothing reads the reference", "remove reference")


def _lora_targets(recipe: Recipe) -> Violations:
    if recipe.actor.lora is not None:
        targets = recipe.actor.lora.targets
        if len(set(targets)) < len(targets):
            yield Violation("actor.lora.targets", list(targets), "names a layer twice", ", ".join(dict.fromkeys(targets)))


def _ranks(recipe: Recipe) -> Violations:
    ranks = recipe.trainer.ranks
    for role, section in cuts(recipe):
        cut = section.ranks
        if ranks % cut == 0:
            continue
        sizes = {"tensor": section.tensor, "context": section.context, "pipeline": section.pipeline}
        sizes = {name: size for name, size in sizes.items() if name != "context" or size > 1}
        if role == "actor":
            rule = f"must be a multiple of actor.layout.{' x '.join(sizes)} = {cut}"
            nearest = closest_number(ranks, set(range(cut, ranks + cut + 1, cut)).__contains__, ranks + cut)
            yield Violation("trainer.ranks", ranks, rule, nearest)
            continue
        others = cut // section.pipeline
        fits = {size for size in range(1, ranks + 1) if ranks % (others * size) == 0}
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
        rule = f"{shown} = {cut} must divide trainer.ranks = {ranks}"
        nearest = closest_number(section.pipeline, fits.__contains__, ranks)
        yield Violation(f"{role}.layout.pipeline", section.pipeline, rule, nearest or "a smaller tensor first")


def _sequence_parallel(recipe: Recipe) -> Violations:
    for role, section in cuts(recipe):
        if section.sequence_parallel and section.tensor == 1:
            rule = f"cuts activations over the tensor ranks, and {role}.layout.tensor is 1"
            yield Violation(f"{role}.layout.sequence_parallel", True, rule, "false")


def _virtual_pipeline(recipe: Recipe) -> Violations:
    for role, section in cuts(recipe):
        if section.virtual_pipeline > 1 and section.pipeline == 1:
            rule = f"cuts the stages of a pipeline, and {role}.layout.pipeline is 1"
            yield Violation(f"{role}.layout.virtual_pipeline", section.virtual_pipeline, rule, "1")


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


def _replay(recipe: Recipe) -> Violations:
    replay = recipe.rollout.replay
    if replay is not None and not Path(replay).is_dir():
        yield Violation(
            "rollout.replay",
            replay,
            "the directory does not exist",
            "the rollouts directory of a run with run.dump_rollouts: true",
        )


def _warmup(recipe: Recipe) -> Violations:
    waits = recipe.critic_warmup_steps
    for role, owner, steps in (
        ("actor", recipe.actor, recipe.run.steps - waits),
        ("critic", recipe.critic, recipe.run.steps),
    ):
        if owner is not None and owner.optimizer.warmup_steps > steps > 0:
            less = f" - critic.warmup_steps = {steps}" if steps < recipe.run.steps else ""
            rule = f"must not pass run.steps = {recipe.run.steps}{less}"
            yield Violation(f"{role}.optimizer.warmup_steps", owner.optimizer.warmup_steps, rule, str(steps))


def _without_gpus(recipe: Recipe) -> Violations:
    if cpu_rules.is_for_cpus(recipe):
        yield from cpu_rules.without_gpus(recipe)


def _model(recipe: Recipe, key: str, fetch: Fetch | None) -> Violations:
    """The model exists, megarl knows it, and the layouts divide it."""
    role = key.split(".")[0]
    owner = {"reference": recipe.reference, "critic": recipe.critic, "reward_model": recipe.reward_model}.get(role)
    if role != "model" and (owner is None or owner.path is None):
        return
    path = recipe.path(role)
    try:
        shape = model_shape(path, fetch)
    except ModelNotFound as error:
        yield Violation(key, path, str(error), error.way_out)
        return
    except (ValueError, OSError) as error:
        yield Violation(
            key,
            path,
            f"cannot be used: {' '.join(str(error).split())}",
            f"a decoder of one of the families {', '.join(sorted(FAMILIES))}",
        )
        return
    yield from _files(key, path, shape, fetch)
    if role != "model":
        yield from _tokens(recipe, key, path, fetch)
    roles = _roles_of_model(recipe) if role == "model" else (role,)
    on_layout = (_tensor, layout_rules.pipeline, layout_rules.experts, feature_rules.fp8_sizes)
    checks = [rule(recipe, shape, role) for role in roles for rule in on_layout]
    on_trained = (feature_rules.frozen, megatron_rules.recomputed)
    checks += [rule(recipe, shape, role) for role in _trained_from(recipe, key) for rule in on_trained]
    checks.append(_positions(recipe, shape, "" if role == "model" else f"{role}'s "))
    if key == "model.path":
        on_actor = (
            rollout_rules.mapped,
            rollout_rules.cut,
            rollout_rules.kv_cache,
            rollout_rules.bucket,
            wire_rules.blocks,
            _lora,
            feature_rules.router_replay,
        )
        checks += [rule(recipe, shape) for rule in on_actor]
        if cpu_rules.is_for_cpus(recipe):
            checks.append(cpu_rules.engine_args(recipe, shape))
    found: list[Violation] = []
    for check in checks:
        _collect(found, check)
    yield from found


def _files(key: str, path: str, shape: ModelShape, fetch: Fetch | None) -> Violations:
    """The weights and the tokenizer are the model's. A directory without weights can still be checked and planned for, and
    of a hub name the cache may lack files that are fetched yet; the start of a run asks for all."""
    directory = find_model(path, fetch)
    try:
        if Path(path).is_dir() and has_weights(directory):
            check_weights(
                directory, shape, critic=key in ("critic.path", "reward_model.path"), score=key == "reward_model.path"
            )
            if key == "model.path":
                check_has_tokenizer(directory)
        check_tokenizer(directory, shape)
    except (ValueError, OSError) as error:
        yield Violation(key, path, f"cannot be loaded: {error}", "the complete directory that save_pretrained wrote")


def not_checked(recipe: Recipe) -> list[str]:
    """What the rules could not look at, a line each: parts of the recipe's models, and the path of a GPU."""
    named = {role: recipe.path(role) for role in ("model", "reference", "critic", "reward_model")}
    own = {role: path for role, path in named.items() if role == "model" or path != recipe.model.path}
    lines = [checkpoint.not_checked(f"{role}.path", path) for role, path in own.items()]
    if recipe.device is not None and recipe.device.kind == "gpu":
        lines.append(f"megarl's GPU path: {NOT_RUN}; docs/gpu.md lists what has")
    return [line for line in lines if line is not None]


def _trained_from(recipe: Recipe, key: str) -> tuple[str, ...]:
    """Roles with an optimizer that start from the path under `key`."""
    if key != "model.path":
        return ("critic",) if key == "critic.path" else ()
    own = recipe.critic is not None and recipe.critic.path is not None
    return ("actor",) if own or recipe.critic is None else ("actor", "critic")


def _roles_of_model(recipe: Recipe) -> tuple[str, ...]:
    """Roles with a layout of their own that start from `model.path`."""
    owners = (("reference", recipe.reference), ("critic", recipe.critic), ("reward_model", recipe.reward_model))
    own = {role for role, owner in owners if owner and owner.path}
    return tuple(role for role, _ in cuts(recipe) if role not in own)


def _tokens(recipe: Recipe, key: str, path: str, fetch: Fetch | None) -> Violations:
    """A role reads the actor's tokens: in its own tokenizer they must mean the same."""
    try:
        own, actors = (read_vocabulary(find_model(one, fetch)).tokens for one in (path, recipe.model.path))
        num_tokens = model_shape(recipe.model.path, fetch).vocab
    except (ModelNotFound, ValueError, OSError):
        return  # each has a violation of its own
    # What the actor has no embedding of is in no prompt and no completion.
    unlike = [token for token, number in actors.items() if own and number < num_tokens and own.get(token) != number]
    if unlike:
        token = unlike[0]
        rule = (
            f"its tokenizer gives {token!r} the number {own.get(token)}, that of model.path gives it {actors[token]}; "
            f"{len(unlike)} of {len(actors)} tokens differ"
        )
        yield Violation(key, path, rule, "a model with the tokenizer of model.path")


def _tensor(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    yield from layout_rules.tensor_size(f"{cut_by(recipe, role)}.layout.tensor", recipe.layout_section(role).tensor, shape)


def _lora(recipe: Recipe, shape: ModelShape) -> Violations:
    """Adapters are narrower than the weights, and lie beside layers that the model has."""
    lora = recipe.actor.lora
    if lora is None:
        return
    has_experts = any(shape.has_experts(layer) for layer in range(shape.num_layers))
    refused = {target: "experts get no adapters" for target in ("fc1", "fc2") if has_experts}
    if shape.latent is not None:
        refused["qkv"] = "multi-latent attention has no such layer"
    legal = [target for target in lora.targets if target not in refused]
    for target in lora.targets:
        if target in refused:
            nearest = ", ".join(legal or (one for one in ("qkv", "proj") if one not in refused))
            yield Violation("actor.lora.targets", target, refused[target], nearest)
    narrowest = min((size for target in legal for size in adapted_sizes(shape, target)), default=lora.rank)
    if lora.rank > narrowest:
        rule = f"must not pass {narrowest}, the narrower side of the smallest weight among actor.lora.targets"
        yield Violation("actor.lora.rank", lora.rank, rule, str(narrowest))


def _positions(recipe: Recipe, shape: ModelShape, whose: str) -> Violations:
    longest = recipe.max_sequence_tokens
    if longest > shape.max_positions:
        room = shape.max_positions - recipe.data.max_prompt_tokens
        prompt = recipe.data.max_prompt_tokens
        has = f"the {whose}model has {shape.max_positions} positions"
        rule = f"with data.max_prompt_tokens {prompt} makes {longest} tokens, {has}"
        nearest = str(room) if room > 0 else "a smaller data.max_prompt_tokens first"
        if recipe.environment is None:
            yield Violation("rollout.max_new_tokens", recipe.rollout.max_new_tokens, rule, nearest)
            return
        section = recipe.environment
        rule = f"{recipe.completion_key} = {recipe.max_completion_tokens} {rule}"
        yield Violation("environment.max_episode_tokens", section.max_episode_tokens, rule, nearest)


def _modules(recipe: Recipe) -> Violations:
    """The modules of a user's functions exist. Only the outermost package is looked for: nothing of it runs here."""
    targets = {
        f"reward.{at}.target": one.target for at, one in enumerate(recipe.reward) if isinstance(one, FunctionRewardSection)
    }
    if recipe.algorithm.policy_loss.kind == "function":
        targets["algorithm.policy_loss.target"] = recipe.algorithm.policy_loss.target
    if ":" in recipe.algorithm.advantage:
        targets["algorithm.advantage"] = recipe.algorithm.advantage
    if recipe.environment is not None:
        targets["environment.target"] = recipe.environment.target
    for key, target in targets.items():
        outermost = target.split(":")[0].split(".")[0]
        # From the working directory, as `python -m megarl.train` finds it.
        if importlib.machinery.PathFinder.find_spec(outermost, [os.getcwd(), *sys.path]) is None:
            rule = f"no module {outermost!r} in the working directory or the environment"
            yield Violation(key, target, rule, "the module's directory on PYTHONPATH")


RULES: tuple[Callable[[Recipe], Violations], ...] = (
    algorithm_rules.advantage,
    algorithm_rules.gae_section,
    algorithm_rules.value_loss,
    algorithm_rules.policy_loss,
    algorithm_rules.adaptive_kl,
    algorithm_rules.overlong,
    algorithm_rules.dynamic_sampling,
    algorithm_rules.remax,
    algorithm_rules.early_stop,
    algorithm_rules.critic_warmup,
    algorithm_rules.reference_refresh,
    algorithm_rules.learning_rate,
    _reference,
    _lora_targets,
    reward_model_is_read,
    _modules,
    reward_rules.given,
    reward_rules.texts,
    reward_rules.functions_have_figures,
    reward_rules.code_has_time,
    _ranks,
    _sequence_parallel,
    _virtual_pipeline,
    layout_rules.expert_ranks,
    layout_rules.uneven_stages,
    _batch,
    _virtual_pipeline_batch,
    data_rules.sources,
    data_rules.template,
    data_rules.system_prompt,
    data_rules.template_options,
    data_rules.answer_is_not_asked,
    data_rules.formats,
    data_rules.curriculum,
    _replay,
    _warmup,
    watchdog_rules.deadlines,
    feature_rules.fp8,
    feature_rules.sampled_weights,
    feature_rules.read_by_nothing,
    feature_rules.overlap,
    feature_rules.frozen_head,
    feature_rules.adapters,
    megatron_rules.options,
    megatron_rules.recompute,
    wire_rules.delta,
    rollout_rules.concurrent,
    rollout_rules.engine_args,
    rollout_rules.routed_experts,
    rollout_rules.dealt_over_one,
    rollout_rules.own_devices,
    rollout_rules.reload,
    _without_gpus,
    wire_rules.quantization,
    environment_rules.tokens,
    environment_rules.deadline,
    evaluation_rules.evaluation,
    telemetry_rules.sinks,
    telemetry_rules.samples,
    telemetry_rules.profile,
)
PHASE_RULES: tuple[Callable[[Recipe, str], Violations], ...] = (
    _section_fits_run,
    _cap,
    _mini_batch,
    _share_prompts,
    _virtual_pipeline_counts,
)
