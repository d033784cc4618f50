"""Rules of the parts of a reward: what a pattern, a schema, a name and a time limit must be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.recipe.recipe import Recipe
from megarl.recipe.reward_sections import (
    CodeRewardSection,
    FunctionRewardSection,
    PatternRewardSection,
    SchemaRewardSection,
    part_names,
)
from megarl.recipe.violation import MISSING, Violation

# What may stand behind `reward/` in a key of the metrics, and what does for figures of no part.
NAME = re.compile(r"[a-z0-9]\w*", re.ASCII | re.IGNORECASE)
OWN_FIGURES = frozenset(
    ("busy_s", "deviation", "environment", "greedy_mean", "mean", "model_mean", "num_greedy_masked", "num_masked",
     "num_timeouts", "num_workers", "overlong_masked", "overlong_penalty_mean", "sampled_mean",
     "num_zero_wall_time", "num_zero_memory", "num_zero_processes", "num_zero_crash", "num_zero_error",
     "num_masked_waiting", "num_masked_verifier", "num_masked_service", "num_masked_environment")
)  # fmt: skip
COUNTS = ("code", "http")  # kinds whose reasons are counted, as `reward/<name>_num_<reason>`
SANDBOX_S = 1.0  # for a completion, with room: 0.15 s where nothing else runs
Violations = Iterator[Violation]


def given(recipe: Recipe) -> Violations:
    """Something says how good a completion is."""
    if not recipe.reward and recipe.environment is None:
        rule = "must not be empty: without an environment nothing else gives rewards"
        yield Violation("reward", MISSING, rule, "[{kind: last_number}], or an environment")


def texts(recipe: Recipe) -> Violations:
    """A pattern is a regular expression, and a schema one of JSON."""
    for number, spec in enumerate(recipe.reward):
        if isinstance(spec, PatternRewardSection):
            try:
                re.compile(spec.pattern)
            except re.error as error:
                yield Violation(
                    f"reward.{number}.pattern", spec.pattern, f"no regular expression: {error}", "see Python's re"
                )
        if isinstance(spec, SchemaRewardSection):
            import jsonschema  # takes long, and few recipes have a schema

            try:
                jsonschema.validators.validator_for(spec.json_schema).check_schema(spec.json_schema)
            except jsonschema.SchemaError as error:
                where = "".join(f".{part}" for part in error.absolute_path)
                yield Violation(
                    f"reward.{number}.json_schema{where}", error.instance, error.message, "one of json-schema.org"
                )


def functions_have_figures(recipe: Recipe) -> Violations:
    """A function can be called anything, and its name is that of a figure, which must be one and nobody else's."""
    judges = [(number, part) for number, part in enumerate(recipe.reward) if part.kind != "model"]
    named = list(zip(judges, part_names([part for _, part in judges]), strict=True))
    counting = [f"{name}_num_" for (_, part), name in named if part.kind in COUNTS]
    for (number, part), name in named:
        if not isinstance(part, FunctionRewardSection):
            continue
        figure, counts = f"reward/{name}", [one for one in counting if name.startswith(one)]
        if not NAME.fullmatch(name):
            rule = f"no figure can be called {figure}: letters are of ASCII, and the first is no underscore"
        elif name in OWN_FIGURES:
            rule = f"{figure} is a figure that a run has besides those of the reward's parts"
        elif counts:
            rule = f"reward/{counts[0]}... are counts of another part"
        else:
            continue
        module, _, function = part.target.partition(":")
        yield Violation(f"reward.{number}.target", part.target, rule, f"{module}:score, with score = {function} in {module}")


def code_has_time(recipe: Recipe) -> Violations:
    """Code that loops runs into its own limit, and scores 0; a deadline of the task that comes before would mask it."""
    parts = [part.timeout_s for part in recipe.reward if isinstance(part, CodeRewardSection)]
    section = recipe.phases.reward
    needed = section.sequences * (sum(parts) + SANDBOX_S)
    if parts and section.timeout_s < needed:
        each = f"{sum(parts):g} s each, and {SANDBOX_S:g} s for the sandbox"
        rule = f"{section.sequences} sequences of a task (phases.reward.sequences) may run for {each}"
        yield Violation("phases.reward.timeout_s", section.timeout_s, rule, f"{needed:g}, or fewer sequences")
