"""Rules on what a run writes of itself; `rules.py` runs them with its own."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import NamedTuple

from megarl.recipe.recipe import Recipe
from megarl.recipe.telemetry_sections import MlflowSinkSection
from megarl.recipe.violation import Violation

Violations = Iterator[Violation]


class Package(NamedTuple):
    """What a sink's writer imports, and what pip calls it."""

    module: str
    name: str


PACKAGES = {
    "tensorboard": Package("tensorboard", "tensorboard"),
    "wandb": Package("wandb", "wandb"),
    "mlflow": Package("mlflow", "mlflow-skinny"),
}
# Stores of MLflow that need nothing besides mlflow-skinny; a database needs SQLAlchemy, which comes with mlflow alone.
MLFLOW_STORES = ("", "file", "http", "https")


def sinks(recipe: Recipe) -> Violations:
    """Each kind once, and what it needs is installed here: it is imported when the run has begun."""
    kinds = [sink.kind for sink in recipe.telemetry.sinks]
    for number, sink in enumerate(recipe.telemetry.sinks):
        key = f"telemetry.sinks.{number}"
        if sink.kind in kinds[:number]:
            yield Violation(f"{key}.kind", sink.kind, "each kind of sink can be given once", "leave it out")
        package = PACKAGES[sink.kind]
        if not _is_installed(package.module):
            rule = f"the package {package.name} is not installed; it is in megarl's extra `sinks`"
            yield Violation(f"{key}.kind", sink.kind, rule, f"pip install {package.name}")
        if isinstance(sink, MlflowSinkSection) and sink.uri is not None:
            yield from _mlflow_store(f"{key}.uri", sink.uri)


def _is_installed(module: str) -> bool:
    # A folder wandb/ or mlflow/ in the working directory is found as well, but has no file of its own.
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def _mlflow_store(key: str, uri: str) -> Violations:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*@", uri):
        rule = "holds a user or a password, and the recipe is kept beside every run and sent to its sinks"
        yield Violation(
            key, re.sub(r"//[^/]*@", "//***@", uri), rule, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", uri)
    scheme = found[1].lower() if found else ""
    if scheme not in MLFLOW_STORES and not _is_installed("sqlalchemy"):
        rule = f"a store of the kind {scheme} needs SQLAlchemy, which mlflow-skinny comes without"
        yield Violation(key, uri, rule, "a directory, http://host:5000, or pip install mlflow")


def samples(recipe: Recipe) -> Violations:
    """There are no more samples than the step has."""
    asked, most = recipe.telemetry.samples_per_step, recipe.num_sequences
    if asked > most:
        rule = f"a step has {most} sequences (phases.rollout.prompts x algorithm.group_size)"
        yield Violation("telemetry.samples_per_step", asked, rule, str(most))


def profile(recipe: Recipe) -> Violations:
    """The steps and ranks to profile are those of the run."""
    section = recipe.telemetry.profile
    if section is None:
        return
    for number, step in enumerate(section.steps):
        if step > recipe.run.steps:
            rule = f"the run has {recipe.run.steps} steps (run.steps)"
            yield Violation(f"telemetry.profile.steps.{number}", step, rule, str(recipe.run.steps))
    for number, rank in enumerate(section.ranks):
        if rank >= recipe.trainer.ranks:
            rule = f"the run has {recipe.trainer.ranks} ranks (trainer.ranks), and the first is 0"
            yield Violation(f"telemetry.profile.ranks.{number}", rank, rule, str(recipe.trainer.ranks - 1))
