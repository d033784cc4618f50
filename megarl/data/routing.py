"""What distillation draws for a prompt: the teacher that judges its completions, by `algorithm.distillation.route` or by the
teachers' weights, and whether the completions are the data's (`data_share`)."""

from __future__ import annotations

import random
from collections.abc import Iterable

from megarl.data.sample import Prompt
from megarl.recipe import Recipe


def teachers_of(recipe: Recipe, prompts: Iterable[Prompt]) -> dict[int, str]:
    """Return the name of the teacher of each prompt by the prompt's index, which is the id of its group; empty without
    `algorithm.distillation`. Raises ValueError for a row that names no teacher."""
    distillation, teachers = recipe.algorithm.distillation, recipe.teachers
    if distillation is None:
        return {}
    if distillation.route is None:
        names, weights = list(teachers), [section.weight for section in teachers.values()]
        # Drawn from the index alone, so that a resume, a replay and every order of completion choose the same teacher.
        return {prompt.index: random.Random(prompt.index).choices(names, weights)[0] for prompt in prompts}
    routes: dict[int, str] = {}
    for prompt in prompts:
        name = prompt.row.get(distillation.route)
        if not isinstance(name, str) or name not in teachers:
            row = prompt.where or f"the row of prompt {prompt.index}"
            raise ValueError(
                f"{row}: {distillation.route} = {name!r} names no teacher (algorithm.distillation.route); give each row one "
                f"of {', '.join(teachers)}"
            )
        routes[prompt.index] = name
    return routes


def takes_answer(recipe: Recipe, index: int) -> bool:
    """Say whether the completions of the prompt with an index are the data's answer, not the policy's samples."""
    distillation = recipe.algorithm.distillation
    # Drawn as teachers are; the text keeps this draw apart from theirs.
    return distillation is not None and random.Random(f"{recipe.run.seed} {index}").random() < distillation.data_share
