"""`megarl check` with a forecast: several recipes, one after the other, as tables or as one document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from megarl.planner import nodes, plan_report
from megarl.planner.advice import advise, fit
from megarl.planner.forecast import DEFAULT_LENGTHS, Job, forecast, job_of
from megarl.planner.lengths import LengthsError, ReadMetrics
from megarl.planner.measured import MeasuredError, measured
from megarl.planner.placement import PlacementError
from megarl.planner.suggest import NoDevice, NothingFits, suggest
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.load import load_unfitted
from megarl.recipe.model_section import fetch_config
from megarl.recipe.rules import not_checked

# Exit statuses: an answer of "nothing fits" is none of bad input.
NOTHING_FITS, BAD_INPUT = 1, 2


@dataclass(frozen=True)
class CheckRequest:
    """What was asked; `lengths` as `find_lengths` takes them, `tflops` in place of the recipe's, nodes as `find_placement`
    takes them; `run` is a directory to take seconds from, as `measured` does."""

    plan: bool
    suggest: bool
    as_json: bool
    lengths: str | None
    seed: int
    tflops: float | None
    read_metrics: ReadMetrics
    devices_per_node: int | None = None
    ranks_per_node: int | None = None
    run: str | None = None


def check_recipes(
    paths: list[str],
    overrides: list[str],
    request: CheckRequest,
    console: Console,
    print_violations: Callable[[str, RecipeError], None],
) -> tuple[int, dict[str, Any]]:
    """Exit status and document of all recipes; an illegal one stops none of the others."""
    status, entries = 0, []
    for path in paths:
        try:
            recipe = load_recipe(path, overrides, fetch_config)
        except RecipeError as error:
            if not request.as_json:
                print_violations(path, error)
            entry = plan_report.illegal(path, error.violations) | _way_out(path, overrides, request, console)
            recipe_status = BAD_INPUT
        else:
            recipe_status, entry = _check(path, recipe, request, console)
        status = max(status, recipe_status)
        entries.append(entry)
    return status, {"recipes": entries}


def _check(path: str, recipe: Recipe, request: CheckRequest, console: Console) -> tuple[int, dict[str, Any]]:
    """Exit status and document entry of one legal recipe; prints unless JSON was asked for."""
    try:
        job = _job(recipe, request)
        earlier = None if request.run is None else measured(request.run, recipe, request.seed, request.read_metrics)
    except (LengthsError, MeasuredError) as error:
        _print_error(path, error)
        return BAD_INPUT, {"recipe": path, "legal": True, "error": str(error)}
    if earlier is not None:
        job = replace(job, rates=earlier.rates)
    found = forecast(job)
    advice = [*fit(found), *advise(found)]
    _print_name(path, recipe, request, console)
    unseen = not_checked(recipe)
    for line in [] if request.as_json else unseen:
        console.print(line, markup=False, soft_wrap=True)
    status, placement = _placement(path, recipe, request, console)
    if request.plan and not request.as_json:
        plan_report.show_forecast(console, recipe, found, earlier)
        plan_report.show_advice(console, advice)
    entry = plan_report.planned(path, recipe, found, advice, earlier) | {"not_checked": unseen} | placement
    if not request.suggest:
        return status, entry
    answer, suggested = _suggestions(path, job, request, console)
    return max(status, answer), entry | suggested


def _placement(path: str, recipe: Recipe, request: CheckRequest, console: Console) -> tuple[int, dict[str, Any]]:
    """Exit status, and what the document says of nodes; prints it unless JSON was asked for."""
    try:
        placed = nodes.find_placement(recipe, request.devices_per_node, request.ranks_per_node)
    except PlacementError as error:
        _print_error(path, error)
        return BAD_INPUT, {"placement": None, "error": str(error)}
    if not request.as_json:
        for line in nodes.placement_lines(recipe, placed):
            console.print(line, markup=False, soft_wrap=True)
    return 0, {"placement": nodes.document(placed)}


def _way_out(path: str, overrides: list[str], request: CheckRequest, console: Console) -> dict[str, Any]:
    """Suggestions for a recipe whose one fault is that a `max_tokens: auto` does not fit; nothing for any other fault."""
    if not request.suggest:
        return {}
    try:
        recipe = load_unfitted(path, overrides, fetch_config)
        job = _job(recipe, request)
    except RecipeError:
        return {}
    except LengthsError as error:
        _print_error(path, error)
        return {"error": str(error)}
    _print_name(path, recipe, request, console)
    return _suggestions(path, job, request, console)[1]


def _job(recipe: Recipe, request: CheckRequest) -> Job:
    lengths = DEFAULT_LENGTHS if request.lengths is None else request.lengths
    return job_of(recipe, lengths, request.seed, request.tflops, request.read_metrics)


def _suggestions(path: str, job: Job, request: CheckRequest, console: Console) -> tuple[int, dict[str, Any]]:
    """Exit status, and what the document says of suggestions; prints them unless JSON was asked for."""
    try:
        found = suggest(job)
    except NoDevice as error:
        _print_error(path, error)
        return BAD_INPUT, {"suggestions": [], "nothing_fits": None, "error": str(error)}
    except NothingFits as error:
        if not request.as_json:
            console.print(f"no suggestion: {error}", markup=False, soft_wrap=True)
        return NOTHING_FITS, {"suggestions": [], "nothing_fits": str(error)}
    if not request.as_json:
        plan_report.show_suggestions(console, found)
    return 0, {"suggestions": plan_report.suggested(found), "nothing_fits": None}


def _print_name(path: str, recipe: Recipe, request: CheckRequest, console: Console) -> None:
    if not request.as_json:
        console.print(f"[bold]{escape(recipe.run.name)}[/] ({escape(path)})")


def _print_error(path: str, error: ValueError) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{escape(path)}[/]: {escape(str(error))}")
