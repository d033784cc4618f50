"""The floating-point operations that each phase of a step needs: what model FLOPs utilisation is measured by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.estimate import Adapters, forward_flops, update_flops
from megarl.family import ModelShape
from megarl.recipe import ENGINE_PHASES, ROLE_OF, UPDATE_PHASES, Recipe
from megarl.recipe.sections import FreezeSection, UpdatePhaseSection


def step_flops(
    recipe: Recipe, shapes: Mapping[str, ModelShape], prompts: Sequence[int], completions: Sequence[int]
) -> dict[str, float]:
    """Operations by phase, over all devices, for sequences of these prompt and completion lengths; `shapes` by role.

    The engines pass each token of a sequence once: a prompt that they compute again, or share in a group, changes nothing.
    """
    pairs = list(zip(map(int, prompts), map(int, completions), strict=True))
    flops = {"rollout": sum(forward_flops(shapes["actor"], sum(pair), pair[1]) for pair in pairs)}
    for phase in ENGINE_PHASES:
        role = ROLE_OF[phase]
        if not recipe.runs(phase):
            continue
        shape, scalar = shapes[role], role in ("critic", "reward_model")
        if phase not in UPDATE_PHASES:
            flops[phase] = sum(forward_flops(shape, sum(pair), pair[1], scalar) for pair in pairs)
            continue
        section = recipe.phase_section(phase)
        assert isinstance(section, UpdatePhaseSection)
        owner = recipe.actor if role == "actor" else recipe.critic
        frozen = (owner.freeze if owner is not None else None) or FreezeSection()
        lora = recipe.actor.lora if role == "actor" else None
        adapters = None if lora is None else Adapters(lora.rank, lora.targets)
        flops[phase] = section.epochs * sum(
            update_flops(shape, sum(pair), pair[1], scalar, adapters, frozen.layers, frozen.head) for pair in pairs
        )
    return flops
