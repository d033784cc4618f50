"""The order of the rules across sections, of a recipe whose every field is legal; each rule stands in its section's file."""

from __future__ import annotations

from collections.abc import Callable

from megarl.models import FAMILIES
from megarl.recipe.algorithm_section import algorithm_rules
from megarl.recipe.data_section import data_rules
from megarl.recipe.device_section import cpu_engine_args, is_for_cpus, without_gpus
from megarl.recipe.environment_section import environment_rules
from megarl.recipe.evaluation_section import evaluation_rules
from megarl.recipe.layout_section import layout_fits_model, rank_rules, written_layouts
from megarl.recipe.model_section import (
    Fetch,
    ModelNotFound,
    files_fit_model,
    find_model,
    missing_files,
    model_shape,
    positions_fit_model,
    same_tokens,
)
from megarl.recipe.own_code import modules_exist
from megarl.recipe.phases_section import batch_size, phase_rules, rollout_and_reward_phases
from megarl.recipe.recipe import Recipe
from megarl.recipe.reward_section import reward_rules
from megarl.recipe.role_sections import (
    adapters_fit_model,
    freeze_fits_model,
    recompute_fits_model,
    reference_rules,
    reward_model_files,
    reward_model_rules,
    trained_role_rules,
)
from megarl.recipe.rollout_section import engines_fit_model, rollout_rules
from megarl.recipe.telemetry_section import telemetry_rules
from megarl.recipe.trainer_section import fp8_fits_model, trainer_rules
from megarl.recipe.violation import Violation, Violations
from megarl.recipe.watchdog_section import watchdog_rules
from megarl.recipe.weight_sync_section import weight_sync_fits_model, weight_sync_rules

# What `megarl check` says of the GPU path, and docs/results.md until `benchmarks/gpu.py` has recorded a run.
NOT_RUN = "not yet run on a GPU"
# Rules that read neither a model nor a data-parallel size.
RULES: tuple[Callable[[Recipe], Violations], ...] = (
    algorithm_rules,
    trained_role_rules,
    reference_rules,
    reward_model_rules,
    modules_exist,
    reward_rules,
    data_rules,
    rollout_and_reward_phases,
    watchdog_rules,
    trainer_rules,
    rollout_rules,
    weight_sync_rules,
    environment_rules,
    evaluation_rules,
    telemetry_rules,
)


def cross_violations(recipe: Recipe, fetch: Fetch | None = None) -> list[Violation]:
    """Every violation of a rule across sections, and of a rule on a model's shape and files."""
    faults = [fault for rule in RULES for fault in rule(recipe)]
    if is_for_cpus(recipe):
        faults += without_gpus(recipe)
    rank_faults = list(rank_rules(recipe))
    # Batches and buckets are divided over data-parallel ranks, whose number is not known yet.
    faults += rank_faults or [*batch_size(recipe), *phase_rules(recipe)]
    for key, path in recipe.model_paths.items():
        faults += _model_faults(recipe, key, path, fetch, ranks_divide=not rank_faults)
    return faults


def _model_faults(recipe: Recipe, key: str, path: str, fetch: Fetch | None, ranks_divide: bool) -> list[Violation]:
    """The model under `key` exists, megarl knows it, and the sections of its roles fit it."""
    try:
        shape = model_shape(path, fetch)
    except ModelNotFound as error:
        return [Violation(key, path, str(error), error.way_out)]
    except (ValueError, OSError) as error:
        rule = f"cannot be used: {' '.join(str(error).split())}"
        return [Violation(key, path, rule, f"a decoder of one of the families {', '.join(sorted(FAMILIES))}")]
    of_key = key.removesuffix(".path")
    faults = [*files_fit_model(key, path, shape, fetch), *positions_fit_model(recipe, shape, of_key)]
    if of_key == "model":
        roles = [role for role in ("actor", "reference", "critic") if f"{role}.path" not in recipe.model_paths]
    else:
        roles = [of_key]
        faults += same_tokens(recipe, key, path, fetch)
    if of_key == "reward_model":
        faults += reward_model_files(path, find_model(path, fetch))
    written = dict(written_layouts(recipe))
    layout_faults: list[Violation] = []
    for role in roles:
        if role in written or of_key != "model":
            layout_faults += [*layout_fits_model(recipe, shape, role), *fp8_fits_model(recipe, shape, role)]
        if role == "actor" or (role == "critic" and recipe.critic is not None):
            faults += [*freeze_fits_model(recipe, shape, role), *recompute_fits_model(recipe, shape, role)]
    faults += layout_faults
    if of_key == "model":
        engine_faults = list(engines_fit_model(recipe, shape))
        faults += [*engine_faults, *adapters_fit_model(recipe, shape)]
        if ranks_divide and not engine_faults and not layout_faults:
            faults += weight_sync_fits_model(recipe, shape)
        if is_for_cpus(recipe):
            faults += cpu_engine_args(recipe, shape)
    return faults


def not_checked(recipe: Recipe) -> list[str]:
    """What the rules could not look at, a line each: files of the recipe's models, and the path of a GPU."""
    lines = [missing_files(key, path) for key, path in recipe.model_paths.items()]
    if recipe.device is not None and recipe.device.kind == "gpu":
        lines.append(f"megarl's GPU path: {NOT_RUN}; docs/results.md lists what has")
    return [line for line in lines if line is not None]
