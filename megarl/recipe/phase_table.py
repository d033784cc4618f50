"""The phase table of `megarl check`: what each phase will do at most, before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models.layout import Layout, RolloutLayout
from megarl.recipe.device_section import is_for_cpus
from megarl.recipe.phases_section import UPDATE_PHASES, role_of
from megarl.recipe.recipe import Recipe
from megarl.recipe.rollout_section import known_engine_args
from megarl.recipe.weight_sync_section import obstacle_to_mapping
from megarl.schedule.schedule import bubble_share, worst_case_micro_batches


@dataclass(frozen=True)
class PhaseRow:
    """One phase; '' where a column does not apply to it.

    `worst_case` counts micro-batches of one data-parallel rank (for an update: of one mini-batch) with every sequence at
    its longest, `bubble_share` is the idle share of the pipeline at that count.
    """

    phase: str
    role: str
    layout: str = ""
    micro_batch: str = ""
    mini_batch: str = ""
    data_parallel: str = ""
    worst_case: str = ""
    bubble_share: str = ""


def phase_table(recipe: Recipe) -> list[PhaseRow]:
    """A row for each phase that runs, in order."""
    return [
        _engine_row(recipe, phase) if phase in recipe.engine_phases else _other_row(recipe, phase)
        for phase in recipe.running_phases
    ]


def _engine_row(recipe: Recipe, phase: str) -> PhaseRow:
    role = role_of(phase)
    schedule, layout = recipe.schedule(phase), recipe.layout(role)
    longest, segments = recipe.max_sequence_tokens, recipe.max_segments
    count = worst_case_micro_batches(schedule, recipe.num_rollouts, layout, longest, segments)
    rule = f"sequences {schedule.sequences}" if schedule.sequences else f"max_tokens {schedule.max_tokens}"
    rule += ", prompts shared" if schedule.share_prompts else ""
    mini_batch = f"{recipe.num_rollouts} (whole batch)"
    if phase in UPDATE_PHASES:
        assert schedule.mini_batch is not None, "an update phase has a mini-batch"
        updates = recipe.num_rollouts // schedule.mini_batch * schedule.epochs
        mini_batch = f"{schedule.mini_batch} ({updates} update{'s' if updates > 1 else ''})"
    return PhaseRow(
        phase=phase,
        role=role,
        layout=layout_name(layout),
        micro_batch=rule,
        mini_batch=mini_batch,
        data_parallel=str(layout.data),
        worst_case=str(count),
        bubble_share=f"{bubble_share(count, layout.pipeline, layout.virtual_pipeline):.0%}",
    )


def concurrency(recipe: Recipe) -> str:
    """How many sequences an engine decodes at a time."""
    count = recipe.phases.rollout.max_concurrent
    return "all that fit" if count is None else f"{count} at a time"


def engine_lines(recipe: Recipe) -> list[str]:
    """The bounds of the stream, the sizes of the engines, and whether `rollout.engine_args` could be checked here."""
    rollout = recipe.rollout
    if not recipe.has_engines:
        return []
    if rollout.kv_cache_bytes is None or recipe.phases.rollout.max_concurrent is None:
        sizes = "a run takes what its GPUs leave; device: {memory_gib: ...} shows it here"
        lines = [f"rollout.kv_cache_bytes, phases.rollout.max_concurrent: null, {sizes}"]
    else:
        cache = f"{rollout.kv_cache_bytes / 2**30:.3g} GiB of KV cache"
        lines = [f"engines: {cache} a worker, {recipe.phases.rollout.max_concurrent} sequences at a time"]
    lines.insert(0, stream_line(recipe))
    if rollout.engine_args and known_engine_args() is None:
        lines.append("rollout.engine_args: not checked, as vLLM is not installed here")
    return lines


def stream_line(recipe: Recipe) -> str:
    """How far engines sample ahead of the trainer, and how far groups may overtake each other."""
    staleness, prompts = recipe.rollout.max_staleness, recipe.phases.rollout.prompts
    ahead = "engines wait while the trainer works" if staleness == 0 else "engines sample while the trainer works"
    return (
        f"stream: rollout.max_staleness = {staleness}, {ahead}: at most {(1 + staleness) * prompts} groups under way; a "
        f"step takes {prompts} of the oldest {recipe.window} (rollout.window)"
    )


def layout_name(layout: Layout) -> str:
    """Name a layout in short, without the data-parallel size: TP2+SP x CP2 x PP2xVP2(1+3+2+2) x EP4xETP1. Sizes of 1 are
    left out, but for tensor and pipeline."""
    context = f" x CP{layout.context}" if layout.context > 1 else ""
    chunks = f"xVP{layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else ""
    layers = f"({'+'.join(map(str, layout.stages))})" if layout.stages else ""
    expert = f" x EP{layout.expert}" if layout.expert > 1 or layout.expert_tensor_size != layout.tensor else ""
    expert += f"xETP{layout.expert_tensor}" if expert and layout.expert_tensor_size != layout.tensor else ""
    tensor = f"TP{layout.tensor}{'+SP' if layout.sequence_parallel else ''}"
    return f"{tensor}{context} x PP{layout.pipeline}{chunks}{layers}{expert}"


def engine_name(layout: RolloutLayout) -> str:
    """Name an engine's layout in short: TP2 x PP2 x DP2 x EP. Sizes of 1 are left out, but for tensor."""
    pipeline = f" x PP{layout.pipeline}" if layout.pipeline > 1 else ""
    data = f" x DP{layout.data}" if layout.data > 1 else ""
    return f"TP{layout.tensor}{pipeline}{data}{' x EP' if layout.expert_parallel else ''}"


def _other_row(recipe: Recipe, phase: str) -> PhaseRow:
    rollout = recipe.rollout
    engines = f"{rollout.engines} engine{'s' if rollout.engines > 1 else ''} x {engine_name(rollout.layout)}"
    if phase == "rollout":
        source = "replay" if rollout.replay else "rollout engines"
        section = recipe.phases.rollout
        batch = f"{section.prompts} prompts x {recipe.algorithm.group_size}"
        if recipe.algorithm.dynamic_sampling is not None:
            batch += f", up to {recipe.algorithm.dynamic_sampling.max_rounds} times"
        return PhaseRow(phase, source, engines, concurrency(recipe), batch)
    if phase == "reward":
        tasks, batch = f"{recipe.phases.reward.sequences} a task", f"{recipe.num_rollouts} (whole batch)"
        return PhaseRow(phase, "reward workers", "", tasks, batch)
    if phase == "weight_sync":
        transport: str = recipe.weight_sync.transport
        obstacle = obstacle_to_mapping(recipe, is_for_cpus(recipe))
        if recipe.sent_adapter is not None:
            transport = "adapters alone"
        elif transport == "auto":
            transport = "mapped on one host, else group" if obstacle is None else f"group: {obstacle}"
        canary, batch = recipe.weight_sync.canary, ""
        if canary is not None and recipe.has_engines:
            batch = f"canary: {canary.sequences} x {canary.length(recipe.max_sequence_tokens)} tokens"
        return PhaseRow(phase, "actor to engines", engines, transport, batch)
    if phase.startswith("teacher_logprob."):
        engine = recipe.served[phase.removeprefix("teacher_logprob.")]
        rule, batch = f"max_tokens {engine.max_tokens}", f"{recipe.num_rollouts} (whole batch)"
        return PhaseRow(phase, "an engine of its own", engine_name(engine.layout), rule, batch)
    return PhaseRow(phase, "", "", "", f"{recipe.num_rollouts} (whole batch)")
