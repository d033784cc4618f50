"""`megarl check` with a forecast: several recipes, one after the other, as tables or as one document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from megarl.planner import document, show
from megarl.planner.advice import advise
from megarl.planner.fit import fit
from megarl.planner.forecast import forecast
from megarl.planner.job import DEFAULT_LENGTHS, Job, job_of
from megarl.planner.suggest import NothingFits, Suggestion, suggest
from megarl.recipe import Recipe, RecipeError, load_recipe

# Exit statuses: an answer of "nothing fits" is none of bad input.
NOTHING_FITS, BAD_INPUT = 1, 2


@dataclass(frozen=True)
class Question:
    """What was asked; `lengths` as `find_lengths` takes them, `tflops` in place of the recipe's."""

    plan: bool
    suggest: bool
    as_json: bool
    lengths: str | None
    seed: int
    tflops: float | None


def check_recipes(
    paths: list[str],
    overrides: list[str],
    question: Question,
    console: Console,
    print_violations: Callable[[str, RecipeError], None],
) -> tuple[int, dict[str, Any]]:
    """Exit status and document of all recipes; an illegal one stops none of the others."""
    status, entries = 0, []
    for path in paths:
        try:
            recipe = load_recipe(path, overrides)
        except RecipeError as error:
            entries.append(document.illegal(path, error.violations))
            status = BAD_INPUT
            if not question.as_json:
                print_violations(path, error)
            continue
        found, entry = _check(path, recipe, question, console)
        status = max(status, found)
        entries.append(entry)
    return status, {"recipes": entries}


def _check(path: str, recipe: Recipe, question: Question, console: Console) -> tuple[int, dict[str, Any]]:
    """Exit status and document entry of one legal recipe; prints unless JSON was asked for."""
    to_terminal = not question.as_json
    try:
        job = job_of(recipe, question.lengths or DEFAULT_LENGTHS, question.seed, question.tflops)
        status, suggestions, reason = _suggestions(job) if question.suggest else (0, [], "")
    except ValueError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{escape(path)}[/]: {escape(str(error))}")
        return BAD_INPUT, {"recipe": path, "legal": True, "error": str(error)}
    found = forecast(job)
    advice = [*fit(found), *advise(found)]
    if to_terminal:
        console.print(f"[bold]{escape(recipe.run.name)}[/] ({escape(path)})")
    if question.plan and to_terminal:
        show.show_forecast(console, recipe, found)
        show.show_advice(console, advice)
    if question.suggest and to_terminal:
        if reason:
            console.print(f"no suggestion: {reason}", markup=False, soft_wrap=True)
        else:
            show.show_suggestions(console, suggestions)
    entry = document.planned(path, recipe, found, advice)
    if question.suggest:
        entry |= {"suggestions": document.suggested(suggestions), "nothing_fits": reason or None}
    return status, entry


def _suggestions(job: Job) -> tuple[int, list[Suggestion], str]:
    """Exit status, suggestions, and why there are none."""
    try:
        return 0, suggest(job), ""
    except NothingFits as error:
        return NOTHING_FITS, [], str(error)
