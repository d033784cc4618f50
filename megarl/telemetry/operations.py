"""The floating-point operations that each phase of a step needs: what model FLOPs utilisation is measured by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megarl.models import ModelShape
from megarl.planner.flops import forward_flops, update_flops
from megarl.planner.roles import Adapters, Frozen
from megarl.recipe import ROLE_OF, UPDATE_PHASES, Recipe
from megarl.recipe.role_sections import FreezeSection
from megarl.schedule import MiniBatch


def step_flops(
    recipe: Recipe,
    shapes: Mapping[str, ModelShape],
    prompts: Sequence[int],
    completions: Sequence[int],
    ran: Mapping[str, Sequence[MiniBatch]],
) -> dict[str, float]:
    """Operations by phase, over all devices, for sequences of these prompt and completion lengths; `shapes` by role, and by
    engine phase the mini-batches that `ran`: those of all epochs, but for what an early stop has left out.

    The engines pass each token of a sequence once: a prompt that they compute again, or share in a group, changes nothing.
    An engine phase that shares prompts passes each once for the sequences of a micro-batch that have it.
    """
    pairs = list(zip(map(int, prompts), map(int, completions), strict=True))
    flops = {"rollout": sum(forward_flops(shapes["actor"], sum(pair), pair[1]) for pair in pairs)}
    for phase, mini_batches in ran.items():
        operations = _operations(recipe, shapes, phase)
        each = [operations(sum(pair), pair[1]) for pair in pairs]
        passed = sum(each[sample] for mini_batch in mini_batches for sample in mini_batch.samples)
        every = [one for mini_batch in mini_batches for rank in mini_batch.micro_batches for one in rank]
        flops[phase] = passed - sum(operations(length, 0) for one in every for length in one.spared(prompts))
    return flops


def _operations(recipe: Recipe, shapes: Mapping[str, ModelShape], phase: str) -> Callable[[int, int], float]:
    """Those of an engine phase for a sequence's tokens and those of them that pass the head."""
    role = ROLE_OF[phase]
    shape, scalar = shapes[role], role in ("critic", "reward_model")
    if phase not in UPDATE_PHASES:
        return partial(forward_flops, shape, critic=scalar)
    owner = recipe.actor if role == "actor" else recipe.critic
    frozen = (owner.freeze if owner is not None else None) or FreezeSection()
    lora = recipe.actor.lora if role == "actor" else None
    adapters = None if lora is None else Adapters(lora.rank, lora.targets)
    return partial(
        update_flops,
        shape,
        critic=scalar,
        adapters=adapters,
        frozen=Frozen(frozen.embedding, frozen.head, frozen.norms, frozen.layers),
    )
