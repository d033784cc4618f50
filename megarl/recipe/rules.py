"""Rules over several fields, over the model's shape and over files: everything pydantic cannot see.

Each rule is a generator of violations over the recipe. On a recipe that is only partly legal a rule ends where it
reads a field without a legal value (`UnknownField`), so the rules are small and one fault hides little of the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.models import FAMILIES
from megarl.recipe.algorithm_section import (
    adaptive_kl,
    advantage,
    dynamic_sampling,
    early_stop,
    gae_section,
    overlong,
    policy_loss,
    remax,
    value_loss,
)
from megarl.recipe.data_section import (
    answer_is_not_asked,
    curriculum,
    formats,
    sources,
    system_prompt,
    template,
    template_options,
)
from megarl.recipe.device_section import _without_gpus, cpu_engine_args, is_for_cpus
from megarl.recipe.environment_section import deadline, tokens
from megarl.recipe.evaluation_section import evaluation
from megarl.recipe.layout_section import (
    _ranks,
    _sequence_parallel,
    _tensor,
    _virtual_pipeline,
    cuts,
    expert_ranks,
    experts,
    pipeline,
    uneven_stages,
)
from megarl.recipe.model_section import Fetch, ModelNotFound, _files, _positions, _tokens, missing_files, model_shape
from megarl.recipe.own_code import _modules
from megarl.recipe.phases_section import (
    ENGINE_PHASES,
    _batch,
    _cap,
    _in_flight,
    _mini_batch,
    _section_fits_run,
    _share_prompts,
    _virtual_pipeline_batch,
    _virtual_pipeline_counts,
    code_has_time,
    concurrent,
)
from megarl.recipe.recipe import Recipe
from megarl.recipe.reward_section import functions_have_figures, given, texts
from megarl.recipe.role_sections import (
    _lora,
    _lora_targets,
    _reference,
    _warmup,
    adapters,
    critic_warmup,
    frozen,
    frozen_head,
    learning_rate,
    overlap,
    recompute,
    recomputed,
    reference_refresh,
    reward_model_files,
    reward_model_is_read,
    router_replay,
)
from megarl.recipe.rollout_section import _replay, cut, dealt_over_one, engine_args, kv_cache, quantization, routed_experts
from megarl.recipe.section import UnknownField
from megarl.recipe.telemetry_section import profile, samples, sinks
from megarl.recipe.trainer_section import _compile_deadline, fp8, fp8_sizes, options, read_by_nothing
from megarl.recipe.violation import Violation, Violations
from megarl.recipe.watchdog_section import deadlines
from megarl.recipe.weight_sync_section import blocks, bucket, delta, mapped, own_devices, reload, sampled_weights

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
    on_layout = (_tensor, pipeline, experts, fp8_sizes)
    checks = [rule(recipe, shape, role) for role in roles for rule in on_layout]
    on_trained = (frozen, recomputed)
    checks += [rule(recipe, shape, role) for role in _trained_from(recipe, key) for rule in on_trained]
    checks.append(_positions(recipe, shape, "" if role == "model" else f"{role}'s "))
    if key == "model.path":
        on_actor = (
            mapped,
            cut,
            kv_cache,
            bucket,
            blocks,
            _lora,
            router_replay,
        )
        checks += [rule(recipe, shape) for rule in on_actor]
        if is_for_cpus(recipe):
            checks.append(cpu_engine_args(recipe, shape))
    found: list[Violation] = []
    for check in checks:
        _collect(found, check)
    yield from found


def not_checked(recipe: Recipe) -> list[str]:
    """What the rules could not look at, a line each: parts of the recipe's models, and the path of a GPU."""
    named = {role: recipe.path(role) for role in ("model", "reference", "critic", "reward_model")}
    own = {role: path for role, path in named.items() if role == "model" or path != recipe.model.path}
    lines = [missing_files(f"{role}.path", path) for role, path in own.items()]
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


RULES: tuple[Callable[[Recipe], Violations], ...] = (
    advantage,
    gae_section,
    value_loss,
    policy_loss,
    adaptive_kl,
    overlong,
    dynamic_sampling,
    remax,
    early_stop,
    critic_warmup,
    reference_refresh,
    learning_rate,
    _reference,
    _lora_targets,
    reward_model_is_read,
    _modules,
    given,
    texts,
    functions_have_figures,
    code_has_time,
    _ranks,
    _sequence_parallel,
    _virtual_pipeline,
    expert_ranks,
    uneven_stages,
    _batch,
    _virtual_pipeline_batch,
    sources,
    template,
    system_prompt,
    template_options,
    answer_is_not_asked,
    formats,
    curriculum,
    _replay,
    _warmup,
    _compile_deadline,
    deadlines,
    fp8,
    sampled_weights,
    read_by_nothing,
    overlap,
    frozen_head,
    adapters,
    options,
    recompute,
    delta,
    concurrent,
    engine_args,
    routed_experts,
    dealt_over_one,
    own_devices,
    reload,
    _without_gpus,
    quantization,
    tokens,
    deadline,
    evaluation,
    sinks,
    samples,
    profile,
)


PHASE_RULES: tuple[Callable[[Recipe, str], Violations], ...] = (
    _section_fits_run,
    _cap,
    _mini_batch,
    _in_flight,
    _share_prompts,
    _virtual_pipeline_counts,
)
