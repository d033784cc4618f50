"""`megarl check`: several recipes, one after the other, as tables for a terminal or as one JSON document.

The document has bytes, seconds and operations as plain numbers and shares between 0 and 1.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.models.layout import Layout, RolloutLayout
from megarl.planner.forecast import DEFAULT_LENGTHS, Forecast, Job, PhaseForecast, forecast, job_of
from megarl.planner.lengths import LengthsError, ReadMetrics
from megarl.planner.memory_estimate import RESERVE, DeviceMemory, gib
from megarl.planner.placement import PlacementError, document, find_placement, placement_lines
from megarl.planner.staleness import balanced_devices, sleeps, staleness_rows
from megarl.planner.suggest import NoDevice, NothingFits, Suggestion, suggest
from megarl.recipe import UPDATE_PHASES, Recipe, RecipeError, load_recipe, role_of
from megarl.recipe.device_section import is_for_cpus
from megarl.recipe.load import load_unfitted, not_checked
from megarl.recipe.model_section import fetch_config
from megarl.recipe.rollout_section import known_engine_args
from megarl.recipe.weight_sync_section import obstacle_to_mapping
from megarl.schedule import bubble_share, worst_case_micro_batches

# Exit statuses.
NOTHING_FITS, BAD_INPUT = 1, 2
PHASE_COLUMNS = ("phase", "layout", "micro-batch")
NUMBER_COLUMNS = (
    "mini-\nbatches", "micro-\nbatches", "useful", "imbal-\nance", "bubble", "effi-\nciency",
    "memory\nplanned", "memory\nat worst", "TFLOP", "seconds",
)  # fmt: skip
NOTES = (
    "max_tokens and micro-batches are per data-parallel rank; useful: tokens / slots, alignment padding included; "
    "imbalance: costliest rank / mean; bubble: pipeline idle; efficiency: what padding, imbalance, bubble and the fixed "
    "cost of micro-batches leave of 1; planned, at worst: memory of the fullest trainer rank without engines, with these "
    "lengths and with every micro-batch as full as its rule allows"
)
STALENESS_NOTES = (
    "by these lengths; engines: their tokens / those with all slots busy; trainer: share of the time at work; without "
    "rewards, environments and the network of a weight sync"
)


@dataclass(frozen=True)
class CheckRequest:
    """The options of `megarl check`: `lengths` as `find_lengths` takes them, `tflops` in place of the recipe's, nodes as
    `find_placement` takes them."""

    plan: bool
    suggest: bool
    as_json: bool
    lengths: str | None
    seed: int
    tflops: float | None
    read_metrics: ReadMetrics
    devices_per_node: int | None = None
    ranks_per_node: int | None = None

    def job(self, recipe: Recipe) -> Job:
        lengths = DEFAULT_LENGTHS if self.lengths is None else self.lengths
        return job_of(recipe, lengths, self.seed, self.tflops, self.read_metrics)


def check_recipes(
    paths: list[str],
    overrides: list[str],
    request: CheckRequest,
    console: Console,
    print_violations: Callable[[str, RecipeError], None],
) -> tuple[int, dict[str, Any]]:
    """Exit status and document of all recipes; an illegal one stops none of the others. Prints nothing where JSON was asked
    for, except errors."""
    status, entries = 0, []
    console = Console(quiet=True) if request.as_json else console
    for path in paths:
        try:
            recipe = load_recipe(path, overrides, fetch_config)
        except RecipeError as error:
            if not request.as_json:
                print_violations(path, error)
            violations = [
                {"key": fault.key, "value": fault.shown_value, "rule": fault.rule, "nearest": fault.nearest}
                for fault in error.violations
            ]
            entry: dict[str, Any] = {"recipe": path, "legal": False, "violations": violations}
            if request.suggest:
                entry |= _suggestions_for_caps(path, overrides, request, console)
            recipe_status = BAD_INPUT
        else:
            recipe_status, entry = _check(path, recipe, request, console)
        status = max(status, recipe_status)
        entries.append(entry)
    return status, {"recipes": entries}


def _check(path: str, recipe: Recipe, request: CheckRequest, console: Console) -> tuple[int, dict[str, Any]]:
    """Exit status and document entry of one legal recipe."""
    status, lines, plan = 0, not_checked(recipe), None
    entry: dict[str, Any] = {"recipe": path, "legal": True}
    if request.plan or request.suggest or request.as_json:
        try:
            plan = forecast(request.job(recipe))
        except LengthsError as error:
            return BAD_INPUT, entry | _failed(path, error)
        entry |= _document(recipe, plan)
        console.print(f"[bold]{escape(recipe.run.name)}[/] ({escape(path)})")
    else:
        _show_phases(console, recipe)
        lines = [*lines, *engine_lines(recipe)]
    entry |= {"not_checked": not_checked(recipe), "placement": None}
    try:
        placed = find_placement(recipe, request.devices_per_node, request.ranks_per_node)
        entry["placement"] = document(placed)
        lines = [*lines, *placement_lines(recipe, placed)]
    except PlacementError as error:
        status, entry = BAD_INPUT, entry | _failed(path, error)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if plan is not None and request.plan:
        _show_plan(console, recipe, plan)
    if plan is None or not request.suggest:
        return status, entry
    suggest_status, suggested = _suggestions(path, plan.job, console)
    return max(status, suggest_status), entry | suggested


def _show_phases(console: Console, recipe: Recipe) -> None:
    """What each phase does at most."""
    console.print(
        f"{recipe.run.name}: {recipe.run.steps} steps, {recipe.num_sequences} sequences a step of at most "
        f"{recipe.max_sequence_tokens} tokens, {recipe.trainer.ranks} trainer ranks",
        markup=False,
    )
    table = Table("phase", "role", "layout", "micro-batch", "mini-batch")
    for title in ("data\nparallel", "worst-case\nmicro-batches", "bubble"):
        table.add_column(title, justify="right")
    for row in phase_table(recipe):
        table.add_row(*astuple(row))
    console.print(table)
    if recipe.critic_warmup_steps:
        console.print(critic_warmup_line(recipe), markup=False, soft_wrap=True)
    if recipe.supervised is not None:
        console.print(f"the first {recipe.sft_steps} steps (warmup.sft):")
        _show_phases(console, recipe.supervised)


def _suggestions_for_caps(path: str, overrides: list[str], request: CheckRequest, console: Console) -> dict[str, Any]:
    """Suggestions for a recipe whose only fault is that a `max_tokens: auto` does not fit; nothing for any other fault."""
    try:
        recipe = load_unfitted(path, overrides, fetch_config)
        job = request.job(recipe)
    except RecipeError:
        return {}
    except LengthsError as error:
        return _failed(path, error)
    console.print(f"[bold]{escape(recipe.run.name)}[/] ({escape(path)})")
    return _suggestions(path, job, console)[1]


def _suggestions(path: str, job: Job, console: Console) -> tuple[int, dict[str, Any]]:
    """Exit status, and the suggestions for the document; prints them."""
    try:
        suggestions = suggest(job)
    except NoDevice as error:
        return BAD_INPUT, {"suggestions": [], "nothing_fits": None} | _failed(path, error)
    except NothingFits as error:
        console.print(f"no suggestion: {error}", markup=False, soft_wrap=True)
        return NOTHING_FITS, {"suggestions": [], "nothing_fits": str(error)}
    for line in ["suggested:", *suggestion_lines(suggestions)]:  # words of a shell
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0, {"suggestions": [asdict(suggestion) for suggestion in suggestions], "nothing_fits": None}


def _failed(path: str, error: ValueError) -> dict[str, str]:
    """Print an error; return it for the document."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{escape(path)}[/]: {escape(str(error))}")
    return {"error": str(error)}


def suggestion_lines(suggestions: list[Suggestion]) -> list[str]:
    """The suggestions as overrides to paste into a shell, each with its reason as a comment."""
    overrides = [shlex.quote(f"{suggestion.key}={json.dumps(suggestion.value)}") for suggestion in suggestions]
    return [f"{override}  # {suggestion.reason}" for override, suggestion in zip(overrides, suggestions, strict=True)]


def _show_plan(console: Console, recipe: Recipe, plan: Forecast) -> None:
    """The phases of one step, and the memory of one device."""

    def show(line: str, **style: str) -> None:
        console.print(escape(line), soft_wrap=True, **style)  # type: ignore[arg-type]

    totals = plan.job.lengths.totals
    tokens = f"{min(totals)} ... {max(totals)} tokens, mean {sum(totals) / len(totals):.0f}"
    show(f"lengths: {plan.job.lengths.origin}; {len(totals)} sequences of {tokens}")
    console.print(_table([*PHASE_COLUMNS, *NUMBER_COLUMNS], _planned_rows(recipe, plan), num_texts=len(PHASE_COLUMNS)))
    if recipe.critic_warmup_steps:
        show(critic_warmup_line(recipe))
    if recipe.supervised is not None and plan.warmup is not None:
        title = f"the first {recipe.sft_steps} steps (warmup.sft), lengths: {plan.warmup.job.lengths.origin}"
        warmup = _planned_rows(recipe.supervised, plan.warmup)
        console.print(_table([*PHASE_COLUMNS, *NUMBER_COLUMNS], warmup, len(PHASE_COLUMNS), title))
    show(NOTES, style="dim")
    kinds = [*(field.name for field in fields(DeviceMemory)), "total"]
    memories = [[phase, *(gib(getattr(memory, kind)) for kind in kinds)] for phase, memory in plan.worst_memory.items()]
    console.print(_table(["phase", *kinds], memories, title="memory of one device at worst"))
    for line in memory_lines(plan):
        show(line)
    if plan.job.engines is None:
        return
    show(stream_line(recipe))
    if rows := staleness_rows(plan, recipe.rollout.window):
        shown = [
            [str(row.max_staleness), _short(row.step_s), f"{row.engines_share:.0%}", f"{row.trainer_share:.0%}"]
            for row in rows
        ]
        heads = ["max_staleness", "seconds a step", "engines", "trainer"]
        console.print(_table(heads, shown, num_texts=0, title="steps by staleness"))
        show(STALENESS_NOTES, style="dim")
    show(_balance(plan))


def critic_warmup_line(recipe: Recipe) -> str:
    """Return the line about the first steps with rollouts, which update the critic alone."""
    after = " with rollouts" if recipe.sft_steps else ""
    phases = ", ".join(recipe.warmup_phases)
    return f"the first {recipe.critic_warmup_steps} steps{after} (critic.warmup_steps): {phases}"


def _balance(plan: Forecast) -> str:
    """The ratio of engine devices to trainer devices that balances both sides, or what the forecast of it needs."""
    engines, balanced = plan.job.engines, balanced_devices(plan)
    if engines is None or balanced is None:
        return "steps by staleness: device.tflops is not stated"
    if sleeps(plan.job):
        return "rollout.max_staleness above 0: needs rollout.placement: separate, as engines on the trainer's GPUs sleep"
    now = engines.workers / plan.job.ranks
    return f"balanced: {balanced:.2g} engine devices for each trainer device; the recipe has {now:.2g}"


def memory_lines(plan: Forecast) -> list[str]:
    """The engines, the device, and whether everything fits."""
    job, lines = plan.job, []
    if job.engines is not None:
        engines, memory = job.engines, job.engines.memory
        where = "asleep while the trainer works" if engines.sleeps else "on devices of their own"
        where = "in the same memory as the trainer" if engines.shared else where
        share = "" if job.engine_share is None else f"; rollout.memory_utilization {job.engine_share:.3f} of a device"
        lines.append(f"engines: {engines.count} x {engine_name(engines.layout)}, {where}; {_of_worker(memory)}{share}")
    for name, teacher in job.teachers.items():
        lines.append(f"the engine of teachers.{name}: {_of_worker(teacher.memory)}")
    if job.device_bytes is None:
        hint = "with device: {memory_gib: ..., tflops: ...} the plan says what fits and how long"
        return [*lines, f"device: not stated; {hint}"]
    usable = f"{gib(job.usable_bytes or 0)} usable, {RESERVE:.0%} in reserve"
    if job.bucket_bytes:
        usable += f" and {gib(job.bucket_bytes)} for the buckets of weight_sync.transport: group"
    peak = f"{gib(plan.device_peak)} at worst in {plan.fullest}, engines included"
    verdict = "fits" if plan.fits else "DOES NOT FIT; --suggest looks for what does"
    lines.append(f"device: {gib(job.device_bytes)} ({usable}); {peak}: {verdict}")
    if plan.safe_utilization is not None:
        lines.append(f"largest safe rollout.memory_utilization: {plan.safe_utilization:.3f}")
    caps = ", ".join(f"{phase.phase} {phase.largest_cap or 'none'}" for phase in plan.phases)
    return [*lines, f"largest max_tokens that fits: {caps}"]


def _of_worker(memory: DeviceMemory) -> str:
    """What a worker of an engine takes, in words."""
    return (
        f"a worker takes {gib(memory.total)}: weights {gib(memory.weights)}, KV cache {gib(memory.engine)}, "
        f"working memory {gib(memory.activations + memory.logits)}"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1, title: str | None = None) -> Table:
    """A table whose first columns are texts; the other columns are numbers."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style=""
    )
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at < num_texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _planned_rows(recipe: Recipe, plan: Forecast) -> Iterator[list[str]]:
    phases = {phase.phase: phase for phase in plan.phases}
    for row in phase_table(recipe):
        layout = f"{row.layout} x DP{row.data_parallel}" if row.data_parallel else row.layout
        numbers = _numbers(phases[row.phase]) if row.phase in phases else [""] * len(NUMBER_COLUMNS)
        if row.phase == "rollout":
            numbers[NUMBER_COLUMNS.index("TFLOP")] = _short(plan.rollout_flops / 1e12)
        name = row.phase.removeprefix("teacher_logprob.")
        if name in plan.job.teachers:  # an engine serves it
            numbers[NUMBER_COLUMNS.index("TFLOP")] = _short(plan.job.teacher_flops(name) / 1e12)
            numbers[NUMBER_COLUMNS.index("seconds")] = "" if (spent := plan.job.teacher_s(name)) is None else _short(spent)
        yield [row.phase, layout, "" if row.phase == "weight_sync" else row.micro_batch, *numbers]


def _numbers(phase: PhaseForecast) -> list[str]:
    quality = phase.quality
    return [
        str(phase.num_mini_batches) if phase.schedule.mini_batch is not None else "",
        str(quality.num_micro_batches),
        f"{quality.useful_share:.3f}",
        f"{quality.imbalance:.3f}",
        f"{quality.bubble_share:.1%}",
        f"{quality.efficiency:.3f}",
        gib(phase.memory.total),
        gib(phase.worst_memory.total),
        _short(phase.flops / 1e12),
        "" if phase.seconds is None else _short(phase.seconds),
    ]


def _short(number: float) -> str:
    """Three digits, without an exponent where a reader needs none."""
    if 1e-3 <= abs(number) < 1000 or number == 0:
        return f"{number:.3g}"
    return f"{number:.2e}" if number < 1 else f"{number:.0f}"


def _document(recipe: Recipe, plan: Forecast) -> dict[str, Any]:
    """The entry of a legal recipe: its phases and its memory."""
    job, lengths = plan.job, plan.job.lengths
    return {
        "name": recipe.run.name,
        "running_phases": list(recipe.running_phases),
        "warmup_phases": list(recipe.warmup_phases) if recipe.critic_warmup_steps else [],
        "supervised_update": None if plan.warmup is None else _phase_document(plan.warmup.job, plan.warmup.phases[0]),
        "lengths": lengths.origin,
        "phases": {phase.phase: _phase_document(job, phase) for phase in plan.phases},
        "rollout_flops": plan.rollout_flops,
        "stream": {"max_staleness": recipe.rollout.max_staleness, "window": recipe.window},
        "by_staleness": [asdict(row) for row in staleness_rows(plan, recipe.rollout.window)],
        "balanced_engine_devices": balanced_devices(plan),
        "device": {
            "memory_bytes": job.device_bytes,
            "usable_bytes": job.usable_bytes,
            "tflops": job.tflops,
            "peak_bytes": plan.device_peak,
            "fits": plan.fits,
            "engine_bytes": job.engine_bytes,
            "worst_memory": {phase: _memory_document(memory) for phase, memory in plan.worst_memory.items()},
            "engine_share": job.engine_share,
            "safe_memory_utilization": plan.safe_utilization,
        },
    }


def _memory_document(memory: DeviceMemory) -> dict[str, int]:
    """Bytes by what they hold, and their sum."""
    return asdict(memory) | {"total": memory.total}


def _phase_document(job: Job, phase: PhaseForecast) -> dict[str, Any]:
    engines = DeviceMemory(engine=job.bytes_during_training)
    return {
        "role": phase.role.name,
        "layout": asdict(phase.role.layout),
        "schedule": asdict(phase.schedule),
        "mini_batches": phase.num_mini_batches,
        **asdict(phase.quality),
        "memory": _memory_document(phase.memory + engines),
        "worst_memory": _memory_document(phase.worst_memory + engines),
        "largest_max_tokens": phase.largest_cap,
        "flops": phase.flops,
        "seconds": phase.seconds,
    }


# The phases of a recipe --------------------------------------------------------------------------------------------------


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
    bubble = f"{bubble_share(count, layout.pipeline, layout.virtual_pipeline):.0%}"
    return PhaseRow(phase, role, layout_name(layout), rule, mini_batch, str(layout.data), str(count), bubble)


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
    # No group starts that no step would take.
    under_way = min(1 + staleness, recipe.rollout_steps) * prompts
    ahead = "engines wait while the trainer works" if staleness == 0 else "engines sample while the trainer works"
    return (
        f"stream: rollout.max_staleness = {staleness}, {ahead}: at most {under_way} groups under way; a "
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
