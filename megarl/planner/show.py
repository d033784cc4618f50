"""A forecast, advice and suggestions as tables and lines in a terminal."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.planner.advice import MIB, Advice, gib
from megarl.planner.cap import RESERVE
from megarl.planner.engine_memory import Engines
from megarl.planner.forecast import Forecast, PhaseForecast
from megarl.planner.measured import Measured
from megarl.planner.memory import Memory
from megarl.planner.suggest import Suggestion
from megarl.recipe import Recipe
from megarl.recipe.memory import GIB
from megarl.recipe.table import concurrency, engine_name, layout_name

PHASE_COLUMNS = ("phase", "layout", "micro-batch")
NUMBER_COLUMNS = (
    "mini-\nbatches",
    "micro-\nbatches",
    "useful",
    "imbal-\nance",
    "bubble",
    "effi-\nciency",
    "{unit}\nplanned",
    "{unit}\nat worst",
    "TFLOP",
    "seconds",
)
NOTES = (
    "max_tokens and micro-batches are per data-parallel rank; useful: tokens / slots, alignment padding included; "
    "imbalance: costliest rank / mean; bubble: pipeline idle; efficiency: what padding, imbalance, bubble and the fixed "
    "cost of micro-batches leave of 1; planned, at worst: memory of the fullest trainer rank without engines, with these "
    "lengths and with every micro-batch as full as its rule allows"
)


def show_forecast(console: Console, recipe: Recipe, found: Forecast, earlier: Measured | None = None) -> None:
    """The phases of one step and the memory of one device; seconds are by what an `earlier` run measured."""
    totals = found.job.lengths.totals
    console.print(
        escape(
            f"lengths: {found.job.lengths.origin}; {len(totals)} sequences of {min(totals)} ... {max(totals)} tokens, "
            f"mean {sum(totals) / len(totals):.0f}"
        ),
        soft_wrap=True,
    )
    console.print(_phase_table(recipe, found, earlier))
    if earlier is not None:
        console.print(escape(earlier.text), soft_wrap=True)
    if recipe.critic_warmup_steps:
        first = f"the first {recipe.critic_warmup_steps} steps (critic.warmup_steps): {', '.join(recipe.warmup_phases)}"
        console.print(escape(first), soft_wrap=True)
    console.print(escape(NOTES), style="dim", soft_wrap=True)
    console.print(_memory_table(found))
    for line in memory_lines(found):
        console.print(escape(line), soft_wrap=True)


def show_advice(console: Console, advice: list[Advice]) -> None:
    """Every piece of advice on a line of its own."""
    for one in advice:
        console.print(f"[yellow]warning[/] [bold]{escape(one.phase)}[/] {escape(one.text)}", soft_wrap=True)
    if not advice:
        console.print("no warnings: no legal change that the planner tries does better", soft_wrap=True)


def show_suggestions(console: Console, suggestions: list[Suggestion]) -> None:
    """Recipe keys to paste, each with its reason as a comment."""
    console.print("suggested:")
    # Not through markup or wrapping: this is YAML.
    for line in suggestion_lines(suggestions):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def suggestion_lines(suggestions: list[Suggestion]) -> list[str]:
    """The suggestions as YAML, sections nested, one comment a key."""
    tree: dict[str, Any] = {}
    for one in suggestions:
        *above, last = one.key.split(".")
        here = tree
        for part in above:
            here = here.setdefault(part, {})
        here[last] = one
    return _yaml_lines(tree, 0)


def memory_lines(found: Forecast) -> list[str]:
    """The device, the engines on it, and whether all fits."""
    job, lines = found.job, []
    if job.engines is not None:
        engines, memory = job.engines, job.engines.memory
        share = "" if job.engine_share is None else f"; rollout.memory_utilization {job.engine_share:.3f} of a device"
        lines.append(
            f"engines: {engines.count} x {engine_name(engines.layout)}, {_beside(engines)}; "
            f"a worker takes {gib(memory.total)}: weights {gib(memory.weights)}, KV cache {gib(memory.engine)}, "
            f"working memory {gib(memory.activations + memory.logits)}{share}"
        )
    if job.device_bytes is None:
        return [
            *lines,
            "device: not stated; with device: {memory_gib: ..., tflops: ...} the plan says what fits and how long",
        ]
    verdict = "fits" if found.fits else "DOES NOT FIT"
    usable = f"{gib(job.usable_bytes or 0)} usable, {RESERVE:.0%} in reserve"
    peak = f"{gib(found.device_peak)} at worst in {found.fullest}, engines included"
    lines.append(f"device: {gib(job.device_bytes)} ({usable}); {peak}: {verdict}")
    if found.safe_utilization is not None:
        lines.append(f"largest safe rollout.memory_utilization: {found.safe_utilization:.3f}")
    caps = ", ".join(f"{one.phase} {one.largest_cap or 'none'}" for one in found.phases)
    return [*lines, f"largest max_tokens that fits: {caps}"]


def _beside(engines: Engines) -> str:
    """How engines and trainer share memory."""
    if engines.shared:
        return "in the same memory as the trainer"
    return "asleep while the trainer works" if engines.rests else "on devices of their own"


def _phase_table(recipe: Recipe, found: Forecast, earlier: Measured | None) -> Table:
    table, unit = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)), _unit(found)
    for title in PHASE_COLUMNS:
        table.add_column(title, no_wrap=True)
    for title in NUMBER_COLUMNS:
        table.add_column(title.format(unit=unit), justify="right", no_wrap=True)
    phases = {phase.phase: phase for phase in found.phases}
    for name in recipe.running_phases:
        cells = _engine_cells(phases[name], unit) if name in phases else _other_cells(recipe, found, name, earlier)
        table.add_row(*cells)
    return table


def _engine_cells(phase: PhaseForecast, unit: str) -> list[str]:
    schedule, layout, quality = phase.schedule, phase.role.layout, phase.quality
    rule = f"sequences {schedule.sequences}" if schedule.sequences else f"max_tokens {schedule.max_tokens}"
    return [
        phase.phase,
        f"{layout_name(layout)} x DP{layout.data}",
        rule,
        str(phase.num_mini_batches) if schedule.mini_batch is not None else "",
        str(quality.num_micro_batches),
        f"{quality.useful_share:.3f}",
        f"{quality.imbalance:.3f}",
        f"{quality.bubble_share:.1%}",
        f"{quality.efficiency:.3f}",
        _size(phase.memory.total, unit),
        _size(phase.worst_memory.total, unit),
        _short(phase.flops / 1e12),
        "" if phase.seconds is None else _short(phase.seconds),
    ]


def _other_cells(recipe: Recipe, found: Forecast, phase: str, earlier: Measured | None) -> list[str]:
    """What is known of a phase that no Megatron engine runs; its time only from an `earlier` run."""
    engines, section = found.job.engines, recipe.phases
    cells = dict.fromkeys((*PHASE_COLUMNS, *NUMBER_COLUMNS), "")
    cells["phase"] = phase
    seconds = None if earlier is None else earlier.other_seconds(found, phase)
    cells["seconds"] = "" if seconds is None else _short(seconds)
    if phase == "rollout":
        cells["layout"] = "replay" if engines is None else f"{engines.count} x {engine_name(engines.layout)} engines"
        cells["micro-batch"] = concurrency(recipe)
        cells["TFLOP"] = _short(found.rollout_flops / 1e12)
    if phase == "reward":
        cells["micro-batch"] = f"{section.reward.sequences} a task"
    if phase == "weight_sync" and engines is not None:
        cells["layout"] = "actor to engines"
        cells["micro-batch"] = gib(engines.count * engines.layout.workers * engines.memory.weights)
    return list(cells.values())


def _memory_table(found: Forecast) -> Table:
    unit = _unit(found)
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"{unit} of one device at worst", title_justify="left", title_style=""
    )
    kinds = [field.name for field in fields(Memory)]
    for title in ("phase", *kinds, "total"):
        table.add_column(title, justify="left" if title == "phase" else "right")
    for phase, held in found.worst_memory.items():
        table.add_row(phase, *(_size(getattr(held, kind), unit) for kind in (*kinds, "total")))
    return table


def _unit(found: Forecast) -> str:
    """GiB, or MiB where all of the trainer is small."""
    return "GiB" if found.trainer_peak >= GIB else "MiB"


def _size(num_bytes: int, unit: str) -> str:
    return _short(num_bytes / (GIB if unit == "GiB" else MIB))


def _short(number: float) -> str:
    """Three digits, without an exponent where a reader needs none."""
    return (
        f"{number:.3g}" if 1e-3 <= abs(number) < 1000 or number == 0 else f"{number:.2e}" if number < 1 else f"{number:.0f}"
    )


def _yaml_lines(tree: dict[str, Any], depth: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, Suggestion):
            text = (
                yaml.safe_dump(value.value, default_flow_style=True, sort_keys=False, width=200)
                .removesuffix("...\n")
                .strip()
            )
            lines.append(f"{'  ' * depth}{key}: {text}  # {value.reason}")
        else:
            lines += [f"{'  ' * depth}{key}:", *_yaml_lines(value, depth + 1)]
    return lines
