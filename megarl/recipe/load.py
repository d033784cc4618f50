"""From a YAML file and overrides to a recipe, or to every violation at once.

pydantic finds the faults of single fields and sections; `_violation` adds the dotted key and the nearest legal value. Rules
across sections need a recipe whose every field is legal; each rule stands in its section's file, and RULES is their order.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import operator
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megarl.models import FAMILIES
from megarl.recipe.algorithm_section import algorithm_rules
from megarl.recipe.data_section import data_rules
from megarl.recipe.device_section import cpu_engine_args, is_for_cpus, with_gpus, without_gpus
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
    teacher_fits_model,
    teacher_rules,
    trained_role_rules,
)
from megarl.recipe.rollout_section import engine_divides_model, engines_fit_model, rollout_rules
from megarl.recipe.run_section import watchdog_rules
from megarl.recipe.section import Section
from megarl.recipe.sizes import resolve_caps, size_engines, with_least_caps
from megarl.recipe.supervised_section import named_as_warmup, supervised_rules
from megarl.recipe.telemetry_section import telemetry_rules
from megarl.recipe.trainer_section import fp8_fits_model, trainer_rules
from megarl.recipe.violation import MISSING, RecipeError, Violation, Violations, closest_text
from megarl.recipe.weight_sync_section import weight_sync_fits_model, weight_sync_rules
from megarl.recipe.yaml_text import apply_overrides, dump_yaml, read_yaml

# What `megarl check` says of the GPU path, and docs/results.md until `benchmarks/gpu.py` has recorded a run.
NOT_RUN = "not yet run on a GPU"
# Rules that read neither a model nor a data-parallel size.
RULES: tuple[Callable[[Recipe], Violations], ...] = (
    supervised_rules,
    algorithm_rules,
    trained_role_rules,
    reference_rules,
    teacher_rules,
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


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = (), fetch: Fetch | None = None) -> Recipe:
    """Read and check a recipe; `overrides` are `dotted.key=value` with YAML values, later ones win.

    `fetch` gets models that are hub names and neither on disk nor in the hub cache; without it such a model is a
    violation. Raises RecipeError with every violation.
    """
    return _sized(_read(path, overrides, fetch), fetch)


def load_unfitted(path: str | Path, overrides: list[str] | tuple[str, ...] = (), fetch: Fetch | None = None) -> Recipe:
    """As `load_recipe`, whether or not the recipe fits the device: every `max_tokens: auto` is the smallest legal cap.

    For a search of a layout that fits, never for a run. Raises RecipeError with every other violation.
    """
    return with_least_caps(size_engines(_read(path, overrides, fetch), fetch)[0])


def parse_recipe(data: dict[str, Any], fetch: Fetch | None = None) -> Recipe:
    """As `load_recipe`, from plain data."""
    return _sized(_check(copy.deepcopy(data), [], fetch), fetch)


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out; `load_recipe` reads it back to an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _read(path: str | Path, overrides: list[str] | tuple[str, ...], fetch: Fetch | None) -> Recipe:
    data, violations = read_yaml(path)
    violations += apply_overrides({} if data is None else data, list(overrides))
    if data is None:
        raise RecipeError(violations)
    return _check(data, violations, fetch)


def _check(data: dict[str, Any], violations: list[Violation], fetch: Fetch | None) -> Recipe:
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors(include_url=False)]
        # pydantic counts only the legal items of a list, so it also calls a list of one illegal item too short.
        details = [detail for detail in details if detail["type"] != "too_short" or not detail["input"]]
        violations = [*violations, *(_violation(detail, data) for detail in details)]
    if recipe is None or violations:
        raise RecipeError(violations)
    if faults := cross_violations(recipe, fetch):
        raise RecipeError(faults)
    return recipe


def _sized(recipe: Recipe, fetch: Fetch | None) -> Recipe:
    """The recipe with numbers for the sizes that it leaves open."""
    sized, engine_faults = size_engines(recipe, fetch)
    resolved, cap_faults = resolve_caps(sized, fetch)
    if engine_faults or cap_faults:
        raise RecipeError([*engine_faults, *cap_faults])
    return resolved


def cross_violations(recipe: Recipe, fetch: Fetch | None = None) -> list[Violation]:
    """Every violation of a rule across sections, and of a rule on a model's shape and files."""
    faults = [fault for rule in RULES for fault in rule(recipe)]
    if is_for_cpus(recipe):
        faults += without_gpus(recipe)
    elif recipe.device is not None:
        faults += with_gpus(recipe)
    rank_faults = list(rank_rules(recipe))
    # Batches and buckets are divided over data-parallel ranks, whose number is not known yet.
    faults += rank_faults or [*batch_size(recipe), *phase_rules(recipe)]
    for key, path in recipe.model_paths.items():
        faults += _model_faults(recipe, key, path, fetch, ranks_divide=not rank_faults)
    if recipe.supervised is not None:
        faults += named_as_warmup(cross_violations(recipe.supervised, fetch))
    return list({str(fault): fault for fault in faults}.values())  # teachers share the section of their phase


def _model_faults(recipe: Recipe, key: str, path: str, fetch: Fetch | None, ranks_divide: bool) -> list[Violation]:
    """Faults of the model under `key`, and of the sections of its roles."""
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
        if of_key.startswith("teachers."):
            with suppress(ValueError, OSError):  # the rule of model.path reports it
                faults += teacher_fits_model(recipe, key, path, shape, fetch)
            if (engine := recipe.served.get(of_key.removeprefix("teachers."))) is not None:
                return [*faults, *engine_divides_model(f"{of_key}.engine", engine.layout, shape)]
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
    """What the rules could not check, a line each: files of the recipe's models, and the GPU path."""
    lines = [missing_files(key, path) for key, path in recipe.model_paths.items()]
    if recipe.device is not None and recipe.device.kind == "gpu":
        lines.append(f"megarl's GPU path: much of it is {NOT_RUN}; docs/results.md lists what has")
    return [line for line in lines if line is not None]


def sections_of(annotation: Any) -> list[type[Section]]:
    """The section classes inside a field's annotation: none for a plain value, several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in typing.get_args(annotation) for section in sections_of(argument)]


def kinds(section: type[Section]) -> tuple[str, ...]:
    """What `kind` may be in this section; () for a section without one."""
    field = section.model_fields.get("kind")
    return typing.get_args(field.annotation) if field else ()


def _violation(detail: dict[str, Any], data: Any) -> Violation:
    """Translate one of pydantic's error details."""
    path, owners, field = _locate(detail["loc"])
    key = ".".join(str(part) for part in path)
    value = MISSING if detail["type"] == "missing" else detail["input"]
    if detail["type"] == "extra_forbidden":
        siblings = functools.reduce(operator.getitem, path[:-1], data)
        return Violation(key, value, "unknown key", _meant_key(path, owners, siblings))
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        options = [kind for owner in sections_of(field.annotation if field else None) for kind in kinds(owner)]
        given = value.get("kind", MISSING) if isinstance(value, dict) else value
        rule = "required: one of " if given is MISSING else "must be one of "
        return Violation(f"{key}.kind", given, rule + ", ".join(options), closest_text(given, options))
    rule, nearest = _rule_and_nearest(detail, value, field)
    return Violation(key, value, rule, nearest)


def _locate(loc: tuple[Any, ...]) -> tuple[list[Any], list[type[Section]], FieldInfo | None]:
    """Follow pydantic's location through the sections: the path without union tags, the section and the field there."""
    path: list[Any] = []
    here: list[type[Section]] = [Recipe]
    owners: list[type[Section]] = []
    field: FieldInfo | None = None
    depth = 0  # of `field` in the path
    for part in loc:
        chosen = [section for section in here if len(here) > 1 and part in kinds(section)]
        if chosen:
            here = chosen
            continue
        if field is not None and not here and not isinstance(part, int):
            continue  # the tag of a union of plain values
        if part != "[key]":  # an illegal name, which pydantic gives before
            path.append(part)
        is_name = field is not None and typing.get_origin(field.annotation) is dict and len(path) - 1 == depth
        if isinstance(part, int) or is_name:
            continue
        depth = len(path)
        owners = here
        field = next((section.model_fields[part] for section in here if part in section.model_fields), None)
        here = sections_of(field.annotation) if field else []
    return path, owners, field


def _meant_key(path: list[Any], owners: list[type[Section]], given: dict[str, Any]) -> str:
    """The key that was probably meant: a sibling that is not given yet, else the same name elsewhere in the recipe."""
    name, above = str(path[-1]), ".".join(str(part) for part in path[:-1])
    siblings = [field for owner in owners for field in owner.model_fields]
    absent = [sibling for sibling in siblings if sibling not in given]
    near = ((siblings, 0.95), (absent, 0.6), (siblings, 0.6))  # a letter off, if not one that is given otherwise
    close = next(filter(None, (difflib.get_close_matches(name, names, 1, cutoff) for names, cutoff in near)), [])
    if close:
        return f"{above}.{close[0]}" if above else close[0]
    elsewhere = {key.rsplit(".", 1)[-1]: key for key in reversed(list(_dotted_keys(Recipe)))}
    close = difflib.get_close_matches(name, elsewhere, 1, 0.8)
    return elsewhere[close[0]] if close else "one of " + ", ".join(siblings)


def _dotted_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_of(field.annotation):
            yield from _dotted_keys(inner, f"{prefix}{name}.")


def _rule_and_nearest(detail: dict[str, Any], value: Any, field: FieldInfo | None) -> tuple[str, str]:
    """The rule that a value breaks, in pydantic's words, and the nearest legal value."""
    kind, context = detail["type"], detail.get("ctx", {})
    options = _options(field.annotation) if field else []
    rule = re.sub(r"^\w+ should ", "must ", detail["msg"]).replace("tuple", "list")
    if kind == "broken_rule":
        return context["rule"], context["nearest"]
    if kind == "value_error":
        return str(context["error"]), ""
    if kind == "missing":
        about = f": {field.description.rstrip('.')}" if field and field.description else ""
        return f"required{about}", " | ".join(options)
    if kind in ("model_type", "model_attributes_type"):
        return "must be a section, a mapping of keys to values", ""
    if kind == "string_pattern_mismatch":
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")
        if re.search(context["pattern"], cleaned):
            return rule, cleaned
        return rule, "module:function" if ":" in context["pattern"] else "a letter, then letters, digits, _ or -"
    if kind == "literal_error" and field is not None and _takes_numbers(field.annotation):
        return f"must be a whole number or {options[0]}", str(value) if str(value).isdecimal() else options[0]
    if kind == "literal_error":
        return rule, closest_text(value, options)
    if kind in ("greater_than_equal", "less_than_equal"):
        return rule, str(next(iter(context.values())))
    if kind in ("greater_than", "less_than") and field is not None and isinstance(field.default, (int, float)):
        return rule, str(field.default)  # an open bound has no nearest value
    return rule, _converted(value, field)


def _converted(value: Any, field: FieldInfo | None) -> str:
    """What a value of another type probably meant: what pydantic makes of it when it may convert; else ''."""
    if field is None:
        return ""
    config = ConfigDict(strict=False, coerce_numbers_to_str=True, allow_inf_nan=False)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field], config=config)  # type: ignore[arg-type]
        return json.dumps(adapter.validate_python(value))
    except (ValueError, TypeError, PydanticUserError):
        return ""


def _options(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(option) for option in typing.get_args(annotation)]
    return [option for argument in typing.get_args(annotation) for option in _options(argument)]


def _takes_numbers(annotation: Any) -> bool:
    return annotation is int or any(_takes_numbers(argument) for argument in typing.get_args(annotation))
