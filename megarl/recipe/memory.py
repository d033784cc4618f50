"""What a recipe puts on one device, and the largest caps that leave room for it (`max_tokens: auto`)."""

from __future__ import annotations

from megarl.models import ModelShape
from megarl.planner.engine_memory import (
    CPU_BATCHED_TOKENS,
    CPU_CACHE_BYTES,
    GPU_BATCHED_TOKENS,
    Engines,
    concurrent_sequences,
)
from megarl.planner.memory import BatchLimits, largest_cap, usable_bytes
from megarl.planner.roles import Adapters, Frozen, Role, Savings
from megarl.recipe.checkpoint import Fetch, model_shape
from megarl.recipe.cpu_rules import is_for_cpus
from megarl.recipe.recipe import ENGINE_PHASES, ROLE_OF, UPDATE_PHASES, Recipe
from megarl.recipe.violation import Violation
from megarl.schedule.schedule import in_micro_batch

GIB = 2**30


def memory_roles(recipe: Recipe, fetch: Fetch | None = None) -> dict[str, Role]:
    """The roles that are resident on the trainer ranks, by name. Raises what `model_shape` raises."""
    trained = {ROLE_OF[phase] for phase in UPDATE_PHASES if recipe.runs(phase)}
    bonus = recipe.algorithm.entropy_coefficient > 0
    lora = recipe.actor.lora
    return {
        role: Role(
            role,
            _shape(recipe, role, fetch),
            recipe.layout(role),
            recipe.trainer.precision,
            trained=role in trained,
            entropy_bonus=bonus and role == "actor",
            adapters=Adapters(lora.rank, lora.targets) if lora is not None and role == "actor" else None,
            borrows_weights=role == "reference" and recipe.reference_is_base,
            on_cpu=is_for_cpus(recipe),
            savings=_savings(recipe, role),
            frozen=_frozen(recipe, role),
        )
        for role in recipe.roles
    }


def _savings(recipe: Recipe, role: str) -> Savings:
    if role == "reference":
        return Savings() if recipe.reference is None else Savings(offload=recipe.reference.memory.offload)
    owner = {"actor": recipe.actor, "critic": recipe.critic}.get(role)
    if owner is None:  # a reward model has no memory section
        return Savings()
    memory = owner.memory
    modules, method, count = memory.recompute_modules, memory.recompute_method, memory.recompute_num_layers
    return Savings(memory.recompute, memory.offload_activations, memory.offload, modules, method, count)


def _frozen(recipe: Recipe, role: str) -> Frozen:
    owner = {"actor": recipe.actor, "critic": recipe.critic}.get(role)
    if owner is None:
        return Frozen()
    return Frozen(owner.freeze.embedding, owner.freeze.head, owner.freeze.norms, owner.freeze.layers)


def _shape(recipe: Recipe, role: str, fetch: Fetch | None) -> ModelShape:
    return model_shape(recipe.path(role), fetch)


def engines_of(recipe: Recipe, shape: ModelShape, on_gpu: bool | None = None) -> Engines | None:
    """The recipe's rollout engines for the actor's `shape`; None where rollouts are replayed. `on_gpu` is the recipe's
    `device.kind` where it is not given. Sizes that nobody has settled (`engine_sizes.py`) are those of CPUs."""
    rollout, given = recipe.rollout, recipe.rollout.engine_args
    if rollout.replay is not None:
        return None
    if on_gpu is None:
        on_gpu = recipe.device is not None and recipe.device.kind == "gpu"
    least = GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS
    cuts_prompts = on_gpu and given.get("enable_chunked_prefill") is not False
    return Engines(
        shape,
        rollout.engines,
        rollout.layout,
        recipe.rollout_precision,
        rollout.kv_cache_bytes or CPU_CACHE_BYTES,
        recipe.phases.rollout.max_concurrent or concurrent_sequences(False, 1, 1, rollout.data),
        given.get("max_num_batched_tokens") or (least if cuts_prompts else max(recipe.max_sequence_tokens, least)),
        rollout.memory_utilization,
        rollout.placement,
        shared=is_for_cpus(recipe),
        quantization=rollout.quantization,
        graphs=on_gpu and not given.get("enforce_eager"),
    )


def limits_of(recipe: Recipe) -> BatchLimits:
    """What a recipe allows of a step's sequences."""
    data, group_size = recipe.data, recipe.algorithm.group_size
    return BatchLimits(recipe.num_sequences, group_size, data.max_prompt_tokens, recipe.max_completion_tokens)


def with_least_caps(recipe: Recipe) -> Recipe:
    """The recipe with the smallest legal cap for every `max_tokens: auto`; nothing says that it fits."""
    least = {
        phase: in_micro_batch(recipe.max_sequence_tokens, recipe.layout(ROLE_OF[phase]))
        for phase in ENGINE_PHASES
        if _is_automatic(recipe, phase)
    }
    return _with_caps(recipe, least)


def resolve_caps(recipe: Recipe, fetch: Fetch | None = None) -> tuple[Recipe, list[Violation]]:
    """The recipe with the largest cap that fits the device for every `max_tokens: auto`, or what keeps a phase from having
    one."""
    automatic = [phase for phase in ENGINE_PHASES if _is_automatic(recipe, phase)]
    device_bytes = None if recipe.device is None else recipe.device.memory_bytes
    if not automatic or device_bytes is None:  # `auto` without a device is a violation of its own
        return recipe, []
    roles = memory_roles(recipe, fetch)
    engines = engines_of(recipe, roles["actor"].shape)
    engine_bytes = 0 if engines is None else engines.beside_bytes(recipe.trainer.ranks)
    least, caps, violations = with_least_caps(recipe), {}, []
    for phase in automatic:

        def largest(budget: int, phase: str = phase) -> int | None:
            return largest_cap(list(roles.values()), roles[ROLE_OF[phase]], least.schedule(phase), limits_of(recipe), budget)

        cap = largest(usable_bytes(device_bytes) - engine_bytes)
        if cap is not None:
            caps[phase] = cap
        elif engines is not None and largest(usable_bytes(device_bytes)) is not None:
            violations.append(_no_room_beside(recipe, phase, engine_bytes))
        else:
            violations.append(_does_not_fit(recipe, phase))
    return _with_caps(recipe, caps), violations


def _with_caps(recipe: Recipe, caps: dict[str, int]) -> Recipe:
    phases = recipe.phases
    for phase, cap in caps.items():
        section = recipe.phase_section(phase)
        assert section is not None, "only a phase with a section has a cap"
        micro_batch = section.micro_batch.model_copy(update={"max_tokens": cap})
        phases = phases.model_copy(update={phase: section.model_copy(update={"micro_batch": micro_batch})})
    return recipe.model_copy(update={"phases": phases})


def _is_automatic(recipe: Recipe, phase: str) -> bool:
    section = recipe.phase_section(phase)
    return recipe.runs(phase) and section is not None and section.micro_batch.max_tokens == "auto"


def _does_not_fit(recipe: Recipe, phase: str) -> Violation:
    """The trainer alone is too large."""
    assert recipe.device is not None, "`auto` without a device"
    role = ROLE_OF[phase]
    rule = (
        f"one sequence of {recipe.max_sequence_tokens} tokens, with everything else on the device, does not fit "
        f"device.memory_gib = {recipe.device.memory_gib:g}"
    )
    way_out = f"more {role}.layout.tensor or pipeline, a shorter rollout.max_new_tokens, or more trainer.ranks"
    return Violation(f"phases.{phase}.micro_batch.max_tokens", "auto", rule, way_out)


def _no_room_beside(recipe: Recipe, phase: str, engine_bytes: int) -> Violation:
    """The engines take what the trainer would need, of the memory of a CPU's host."""
    assert recipe.device is not None, "`auto` without a device"
    rule = (
        f"one sequence of {recipe.max_sequence_tokens} tokens fits device.memory_gib = {recipe.device.memory_gib:g} without "
        f"rollout engines, and not beside the {engine_bytes / GIB:.3g} GiB that they take for each rank"
    )
    way_out = f"a smaller rollout.kv_cache_bytes, fewer rollout.engines, or more {ROLE_OF[phase]}.layout.tensor or pipeline"
    return Violation(f"phases.{phase}.micro_batch.max_tokens", "auto", rule, way_out)
