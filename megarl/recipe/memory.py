"""What a recipe puts on one device, and the largest caps that leave room for it (`max_tokens: auto`)."""

from __future__ import annotations

from megarl.estimate import RESERVE, Role, engine_memory, largest_cap
from megarl.recipe.checkpoint import Fetch, model_shape
from megarl.recipe.recipe import ENGINE_PHASES, ROLE_OF, UPDATE_PHASES, Recipe
from megarl.recipe.sections import UpdatePhaseSection
from megarl.recipe.violation import Violation
from megarl.reshard.boxes import ModelShape

GIB = 2**30


def memory_roles(recipe: Recipe, fetch: Fetch | None = None) -> dict[str, Role]:
    """The roles that are resident on the trainer ranks, by name. Raises what `model_shape` raises."""
    trained = {ROLE_OF[phase] for phase in UPDATE_PHASES if recipe.runs(phase)}
    bonus = recipe.algorithm.entropy_coefficient > 0
    return {
        role: Role(
            role,
            _shape(recipe, role, fetch),
            recipe.layout(role),
            recipe.trainer.precision,
            trained=role in trained,
            entropy_bonus=bonus and role == "actor",
        )
        for role in recipe.roles
    }


def _shape(recipe: Recipe, role: str, fetch: Fetch | None) -> ModelShape:
    return model_shape(recipe.critic_path if role == "critic" else recipe.model.path, fetch)


def engine_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes that rollout engines take of one trainer device: weights, key-value cache and working memory of each engine rank
    there, or the share that `rollout.memory_utilization` asks to be free. 0 where rollouts are replayed."""
    rollout = recipe.rollout
    if rollout.replay is not None:
        return 0
    on_one_device = -(-rollout.engines * rollout.tensor // recipe.trainer.ranks)
    if rollout.memory_utilization is not None and recipe.device is not None:
        return int(on_one_device * rollout.memory_utilization * int(recipe.device.memory_gib * GIB))
    rank = engine_memory(
        shape,
        rollout.tensor,
        recipe.rollout_precision,
        rollout.kv_cache_bytes,
        recipe.phases.rollout.max_concurrent,
        recipe.batched_tokens,
    )
    return on_one_device * rank.total


def phase_cap(recipe: Recipe, phase: str, roles: dict[str, Role]) -> int | None:
    """The largest `max_tokens` of a phase that fits the stated device beside everything that is resident there and the
    engines; None where not even the longest sequence fits. Read it only with `device`."""
    assert recipe.device is not None, "the cap of a recipe without a device"
    section = recipe.phase_section(phase)
    update = isinstance(section, UpdatePhaseSection)
    budget = int(recipe.device.memory_gib * GIB * (1 - RESERVE)) - engine_bytes(recipe, roles["actor"].shape)
    return largest_cap(
        list(roles.values()),
        roles[ROLE_OF[phase]],
        budget,
        update=update,
        longest=recipe.max_sequence_tokens,
        num_sequences=section.mini_batch if isinstance(section, UpdatePhaseSection) else recipe.num_sequences,
        max_in_flight=section.max_micro_batches_in_flight if isinstance(section, UpdatePhaseSection) else None,
    )


def resolve_caps(recipe: Recipe, fetch: Fetch | None = None) -> tuple[Recipe, list[Violation]]:
    """The recipe with a number for every `max_tokens: auto`, or what keeps a phase from having one."""
    automatic = [phase for phase in ENGINE_PHASES if _is_automatic(recipe, phase)]
    if not automatic:
        return recipe, []
    roles = memory_roles(recipe, fetch)
    phases, violations = recipe.phases, []
    for phase in automatic:
        cap = phase_cap(recipe, phase, roles)
        if cap is None:
            violations.append(_does_not_fit(recipe, phase))
            continue
        section = recipe.phase_section(phase)
        assert section is not None
        micro_batch = section.micro_batch.model_copy(update={"max_tokens": cap})
        phases = phases.model_copy(update={phase: section.model_copy(update={"micro_batch": micro_batch})})
    return recipe.model_copy(update={"phases": phases}), violations


def _is_automatic(recipe: Recipe, phase: str) -> bool:
    section = recipe.phase_section(phase)
    return recipe.runs(phase) and section is not None and section.micro_batch.max_tokens == "auto"


def _does_not_fit(recipe: Recipe, phase: str) -> Violation:
    assert recipe.device is not None
    role = ROLE_OF[phase]
    rule = (
        f"one sequence of {recipe.max_sequence_tokens} tokens, with everything else on the device, does not fit "
        f"device.memory_gib = {recipe.device.memory_gib:g}"
    )
    way_out = f"more {role}.layout.tensor or pipeline, a shorter rollout.max_new_tokens, or more trainer.ranks"
    return Violation(f"phases.{phase}.micro_batch.max_tokens", "auto", rule, way_out)
