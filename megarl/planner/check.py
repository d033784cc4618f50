"""`megarl check`: several recipes, one after the other, as tables for a terminal or as one JSON document.

The document has bytes, seconds and operations as plain numbers and shares between 0 and 1.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.planner.forecast import DEFAULT_LENGTHS, Forecast, Job, PhaseForecast, forecast, job_of
from megarl.planner.lengths import LengthsError, ReadMetrics
from megarl.planner.memory_estimate import RESERVE, DeviceMemory, gib
from megarl.planner.placement import PlacementError, document, find_placement, placement_lines
from megarl.planner.staleness import StalenessRow, balanced_devices, sleeps, staleness_rows
from megarl.planner.suggest import NoDevice, NothingFits, Suggestion, suggest
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.load import load_unfitted, not_checked
from megarl.recipe.model_section import fetch_config
from megarl.recipe.phase_table import concurrency, engine_lines, engine_name, layout_name, phase_table, stream_line

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
    "simulated with these lengths; engines: their tokens / those with all slots busy; trainer: share of the time at work; "
    "staleness: mean of a trained token and largest; without rewards, environments and the network of a weight sync"
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

    @property
    def forecasts(self) -> bool:
        """Whether an option asks for more than the table of phases and the placement."""
        return self.plan or self.suggest or self.as_json

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
    """Exit status and document of all recipes; an illegal one stops none of the others."""
    status, entries = 0, []
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
    """Exit status and document entry of one legal recipe; prints unless JSON was asked for."""
    status, unseen, lines = 0, not_checked(recipe), list[str]()
    entry: dict[str, Any] = {"recipe": path, "legal": True}
    if request.forecasts:
        try:
            job = request.job(recipe)
        except LengthsError as error:
            _print_error(path, error)
            return BAD_INPUT, entry | {"error": str(error)}
        plan = forecast(job)
        entry |= _document(recipe, plan)
        _print_name(path, recipe, request, console)
    else:
        _show_phases(console, recipe)
        lines += engine_lines(recipe)
    entry |= {"not_checked": unseen, "placement": None}
    try:
        placed = find_placement(recipe, request.devices_per_node, request.ranks_per_node)
        entry["placement"] = document(placed)
        lines += placement_lines(recipe, placed)
    except PlacementError as error:
        _print_error(path, error)
        status, entry["error"] = BAD_INPUT, str(error)
    if not request.as_json:
        for line in [*unseen, *lines]:
            console.print(line, markup=False, soft_wrap=True)
    if request.plan and not request.as_json:
        _show_plan(console, recipe, plan)
    if not request.suggest:
        return status, entry
    suggest_status, suggested = _suggestions(path, job, request, console)
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


def _suggestions_for_caps(path: str, overrides: list[str], request: CheckRequest, console: Console) -> dict[str, Any]:
    """Suggestions for a recipe whose only fault is that a `max_tokens: auto` does not fit; nothing for any other fault."""
    try:
        recipe = load_unfitted(path, overrides, fetch_config)
        job = request.job(recipe)
    except RecipeError:
        return {}
    except LengthsError as error:
        _print_error(path, error)
        return {"error": str(error)}
    _print_name(path, recipe, request, console)
    return _suggestions(path, job, request, console)[1]


def _suggestions(path: str, job: Job, request: CheckRequest, console: Console) -> tuple[int, dict[str, Any]]:
    """Exit status, and the suggestions for the document; prints them unless JSON was asked for."""
    try:
        suggestions = suggest(job)
    except NoDevice as error:
        _print_error(path, error)
        return BAD_INPUT, {"suggestions": [], "nothing_fits": None, "error": str(error)}
    except NothingFits as error:
        if not request.as_json:
            console.print(f"no suggestion: {error}", markup=False, soft_wrap=True)
        return NOTHING_FITS, {"suggestions": [], "nothing_fits": str(error)}
    if not request.as_json:
        # Not through markup or wrapping: these are words of a shell.
        for line in ["suggested:", *suggestion_lines(suggestions)]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0, {"suggestions": [asdict(suggestion) for suggestion in suggestions], "nothing_fits": None}


def _print_name(path: str, recipe: Recipe, request: CheckRequest, console: Console) -> None:
    if not request.as_json:
        console.print(f"[bold]{escape(recipe.run.name)}[/] ({escape(path)})")


def _print_error(path: str, error: ValueError) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{escape(path)}[/]: {escape(str(error))}")


def suggestion_lines(suggestions: list[Suggestion]) -> list[str]:
    """The suggestions as overrides to paste into a shell, each with its reason as a comment."""
    pairs = [(shlex.quote(f"{one.key}={json.dumps(one.value)}"), one.reason) for one in suggestions]
    return [f"{override}  # {reason}" for override, reason in pairs]


def _show_plan(console: Console, recipe: Recipe, plan: Forecast) -> None:
    """The phases of one step, and the memory of one device."""

    def show(line: str, **style: str) -> None:
        console.print(escape(line), soft_wrap=True, **style)  # type: ignore[arg-type]

    totals = plan.job.lengths.totals
    tokens = f"{min(totals)} ... {max(totals)} tokens, mean {sum(totals) / len(totals):.0f}"
    show(f"lengths: {plan.job.lengths.origin}; {len(totals)} sequences of {tokens}")
    console.print(_phase_table(recipe, plan))
    if recipe.critic_warmup_steps:
        show(f"the first {recipe.critic_warmup_steps} steps (critic.warmup_steps): {', '.join(recipe.warmup_phases)}")
    show(NOTES, style="dim")
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="memory of one device at worst", title_justify="left", title_style=""
    )
    kinds = [field.name for field in fields(DeviceMemory)]
    for title in ("phase", *kinds, "total"):
        table.add_column(title, justify="left" if title == "phase" else "right")
    for phase, memory in plan.worst_memory.items():
        table.add_row(phase, *(gib(getattr(memory, kind)) for kind in (*kinds, "total")))
    console.print(table)
    for line in memory_lines(plan):
        show(line)
    if plan.job.engines is None:
        return
    show(stream_line(recipe))
    if rows := staleness_rows(plan, recipe.rollout.window):
        console.print(_staleness_table(rows))
        show(STALENESS_NOTES, style="dim")
    for line in balance_lines(plan):
        show(line)


def _staleness_table(rows: list[StalenessRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="steps by staleness", title_justify="left", title_style="")
    for title in ("max_staleness", "seconds a step", "engines", "trainer", "staleness of a token", "at most"):
        table.add_column(title, justify="right")
    for row in rows:
        shares = f"{row.engines_share:.0%}", f"{row.trainer_share:.0%}"
        staleness = f"{row.mean_staleness:.2f}", str(row.largest_staleness)
        table.add_row(str(row.max_staleness), _short(row.step_s), *shares, *staleness)
    return table


def balance_lines(plan: Forecast) -> list[str]:
    """The ratio of engine devices to trainer devices that balances both sides, or what the forecast of it needs."""
    engines, balanced = plan.job.engines, balanced_devices(plan)
    if engines is None or balanced is None:
        return ["steps by staleness: device.tflops is not stated"]
    if sleeps(plan.job):
        return ["rollout.max_staleness above 0: needs rollout.placement: separate, as engines on the trainer's GPUs sleep"]
    now = engines.workers / plan.job.ranks
    return [f"balanced: {balanced:.2g} engine devices for each trainer device; the recipe has {now:.2g}"]


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


def _phase_table(recipe: Recipe, plan: Forecast) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in PHASE_COLUMNS:
        table.add_column(title, no_wrap=True)
    for title in NUMBER_COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    phases = {phase.phase: phase for phase in plan.phases}
    for name in recipe.running_phases:
        if name in phases:
            table.add_row(*_role_cells(phases[name]))
        else:
            cells = _other_cells(recipe, plan, name)
            table.add_row(*(cells.get(column, "") for column in (*PHASE_COLUMNS, *NUMBER_COLUMNS)))
    return table


def _role_cells(phase: PhaseForecast) -> list[str]:
    schedule, layout, quality = phase.schedule, phase.role.layout, phase.quality
    return [
        phase.phase,
        f"{layout_name(layout)} x DP{layout.data}",
        f"sequences {schedule.sequences}" if schedule.sequences else f"max_tokens {schedule.max_tokens}",
        str(phase.num_mini_batches) if schedule.mini_batch is not None else "",
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


def _other_cells(recipe: Recipe, plan: Forecast, phase: str) -> dict[str, str]:
    """The cells of a phase that no Megatron role runs."""
    engines, cells = plan.job.engines, {"phase": phase}
    if phase == "rollout":
        cells["layout"] = "replay" if engines is None else f"{engines.count} x {engine_name(engines.layout)} engines"
        cells["micro-batch"] = concurrency(recipe)
        cells["TFLOP"] = _short(plan.rollout_flops / 1e12)
    if phase == "reward":
        cells["micro-batch"] = f"{recipe.phases.reward.sequences} a task"
    name = phase.removeprefix("teacher_logprob.")
    if (teacher := plan.job.teachers.get(name)) is not None:
        cells["layout"] = f"1 x {engine_name(teacher.layout)} engine"
        cells["micro-batch"] = f"max_tokens {teacher.batched_tokens}"
        cells["TFLOP"] = _short(plan.job.teacher_flops(name) / 1e12)
        cells["seconds"] = "" if (spent := plan.job.teacher_s(name)) is None else _short(spent)
    if phase == "weight_sync" and engines is not None:
        cells["layout"] = "actor to engines"
        cells["micro-batch"] = gib(engines.count * engines.layout.workers * engines.memory.weights)
    return cells


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
