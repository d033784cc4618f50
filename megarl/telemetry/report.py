"""`megarl report RUN`: the reward curve in the terminal, and one HTML page of the run that needs no network.

`megarl report A B` compares two runs: which learns better, which is faster and by which phase, how their recipes differ.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape
from rich.console import Console
from rich.text import Text

from megarl.telemetry import report_charts as charts
from megarl.telemetry.disk import write_whole
from megarl.telemetry.metrics_file import duration, is_number
from megarl.telemetry.report_charts import LINES, Chart, line
from megarl.telemetry.report_findings import Answer, answers, capitalized, find, plural, totals, variance
from megarl.telemetry.report_run import Run, read_run, smooth, thin
from megarl.telemetry.run_directory import dotted
from megarl.telemetry.samples import conversations

MOST_SAMPLES = 6  # best and worst
MOST_TEXT = 6000  # characters of a conversation
ENDS = 3  # steps at each end of the curve that the summary in the terminal compares
PLOT_WIDTH = 72
BLOCKS = " ▁▂▃▄▅▆▇█"
# Recipe keys that only name a run.
NAMES = ("run.name", "run.dir")
MISSING = "–"
EXTENTS = ("steps", "samples", "seconds")
# Extents and mean rewards of a run: steps, samples or seconds of training by the end of each step, ascending.
Curve = tuple[list[float], list[float]]


def report(run_dir: str | Path, output: Path | None = None, console: Console | None = None) -> Path:
    """Show the curve of a run, write its page and return the path. Raises ValueError without a step, or without plotly
    after showing the curve."""
    console = console or Console()
    run = read_run(run_dir)
    show_curve(run, console)
    return write_page(output or run.path / "report.html", run_page(run), console)


def show_curve(run: Run, console: Console) -> None:
    """Print the mean reward of a run, or minus its loss, as a row of bars, and its totals. Raises ValueError without any."""
    steps, rewards = run.rewards()
    if not rewards:
        raise ValueError(f"{run.path / 'metrics.jsonl'} has no {run.goal} yet; a run has one after its first step")
    ends = min(ENDS, len(rewards))
    first, last = fmean(rewards[:ends]), fmean(rewards[-ends:])
    summary = f"first {ends} steps {first:.3f}, last {ends} steps {last:.3f}, change {last - first:+.3f}"
    _, columns = thin(steps, rewards, PLOT_WIDTH)
    low, high = min(0.0, *columns), max(columns)  # from 0 where no value is negative, so that heights compare like rewards
    curve = "".join(BLOCKS[round((column - low) / ((high - low) or 1.0) * 8)] for column in columns)
    curve = f"{low:.3f} ... {high:.3f}  {curve}  steps {steps[0]} to {steps[-1]}"
    for text in (f"{run.goal} of {run.name}", curve, summary, *totals(run), *run.starts):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class PageSection:
    """A heading with charts, a table, and texts that unfold at a click. Cells and the note show `code` for backticks;
    columns in `numbers` are right-aligned."""

    title: str
    charts: Sequence[Chart] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: Sequence[int] = ()
    note: str = ""
    folded: Mapping[str, str] = field(default_factory=dict)


def run_page(run: Run) -> str:
    """Return the page as HTML. Raises ValueError where plotly is not installed."""
    findings = find(run)
    tag = Markup('<span class="tag {0}">{0}</span>')
    warnings = [(tag.format(item.kind), capitalized(item.says), item.do, f"`{item.metric}`") for item in findings]
    details = {"Every metric of the last step": json.dumps(run.steps[-1], indent=1)}
    if run.recipe:
        details = {"The resolved recipe": yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)} | details
    times = [*charts.ranks_time(run), *charts.lanes(run), *charts.phase_times(run)]
    times += charts.curves((run.name, run), plots=charts.TIME_CURVES)
    sections = [
        PageSection("Is it learning?", [*charts.reward(run), *charts.evaluation(run), *charts.curves((run.name, run))]),
        PageSection("Where the time goes", times, note=_transport(run)),
        PageSection("Warnings, and what to change", heads=("", "what", "what to change", "metric"), rows=warnings),
        _samples(run),
        PageSection("More", folded=details),
    ]
    return page(run.name, subtitle(run), answers(run, findings), sections)


def subtitle(run: Run) -> str:
    """Return how far the run is and what it trains."""
    done = run.steps[-1]["step"]
    parts = [f"{done} of {run.at('run.steps') or done} steps"]
    if isinstance(model := run.at("model.path"), str):
        parts.append(Path(model).name)
    if run.at("trainer.ranks"):
        parts.append(f"{run.at('algorithm.advantage')} on {run.at('trainer.ranks')} ranks, {run.at('trainer.precision')}")
    return " · ".join(parts)


def _transport(run: Run) -> str:
    """Say how weights travel and why."""
    if run.transport.startswith("mapped") and run.recent().get("sync/mapped") == 0:
        return f"Transport: group, because shared memory was too small at the first sync (before: {run.transport})."
    return f"Transport: {run.transport}." if run.transport else ""


def _samples(run: Run) -> PageSection:
    """Show the conversations of the best and the worst rollouts of the last step with samples."""
    rewards = {row["rollout"]: row["reward"] for row in run.samples}  # the last segment's reward
    scored = [rollout for rollout, reward in rewards.items() if reward is not None]
    ranked = sorted(scored, key=lambda rollout: -rewards[rollout])
    half = MOST_SAMPLES // 2
    chosen = ranked if len(ranked) <= MOST_SAMPLES else ranked[:half] + ranked[-half:]
    chosen += [rollout for rollout, reward in rewards.items() if reward is None][:1]
    shown = [conversations([row for row in run.samples if row["rollout"] == rollout]) for rollout in chosen]
    texts = [Text.from_markup(text).plain for texts in shown for text in texts]
    folded = {text.partition("\n")[0]: text[:MOST_TEXT] for text in texts}
    note = f"The best and the worst of {len(rewards)} that step {run.samples[0]['step']} kept." if rewards else ""
    return PageSection("Completions", note=note, folded=folded)


# Two runs ------------------------------------------------------------------------------------------------------------------


def compare(a: str | Path, b: str | Path, output: Path | None = None, console: Console | None = None) -> Path:
    """Write the page of two runs, by default into B's directory, and return its path. Raises ValueError as `report`."""
    first, second = read_run(a), read_run(b)
    path = output or second.path / f"report-vs-{first.name}.html"
    return write_page(path, compare_page(first, second), console or Console())


def compare_page(a: Run, b: Run) -> str:
    """Return the page as HTML. Raises ValueError where plotly is not installed."""
    names = (a.name, b.name) if a.name != b.name else (f"A: {a.name}", f"B: {b.name}")
    changed = differences(a.recipe, b.recipe) if a.recipe and b.recipe else []
    rows = [(f"`{key}`", str(before), str(after)) for key, before, after in changed]
    sections = [
        PageSection("Mean reward", _reward_charts(a, b, names)),
        PageSection("Other curves", charts.curves((names[0], a), (names[1], b))),
        PageSection("How the recipes differ", heads=("key", *names), rows=rows),
        _metrics(a, b, names),
    ]
    subtitle = f"A is {a.path}, {len(a.steps)} steps; B is {b.path}, {len(b.steps)} steps"
    keys = plural(len(changed), "key") if a.recipe and b.recipe else "Unknown"
    differs = Answer("What did I change?", keys, ["All are below, with both values."] if changed else [], "open")
    return page(f"{names[0]} against {names[1]}", subtitle, [better(a, b, names), faster(a, b, names), differs], sections)


def reward_curve(run: Run, over: str) -> Curve | None:
    """Return the mean reward over one of EXTENTS; None where the run does not record it. Seconds exclude starts."""
    steps, rewards = run.rewards()
    times = [line.get("time/step") for line in run.steps]
    ends: dict[int, Any] | None = {step: step for step in steps}
    if over == "samples":
        ends = run.sampled()
    elif over == "seconds":
        numbers = [line["step"] for line in run.steps]
        ends = dict(zip(numbers, accumulate(times), strict=True)) if all(map(is_number, times)) else None
    return None if ends is None or not rewards else ([float(ends[step]) for step in steps], rewards)


def better(a: Run, b: Run, names: tuple[str, str]) -> Answer:
    """Judge which run has the higher reward after equal steps, samples and seconds, beyond the noise of both."""
    question, says, winners = "Which learns better?", [], []
    for over in EXTENTS:
        curves = [curve for run in (a, b) if (curve := reward_curve(run, over)) is not None]
        if len(curves) < 2:
            continue
        extent = min(extents[-1] for extents, _ in curves)
        ends, noise = [], 0.0
        for extents, rewards in curves:
            reached = [reward for at, reward in zip(extents, rewards, strict=True) if at <= extent * (1 + 1e-9)]
            if reached:
                count = max(1, len(reached) // 5)
                ends.append(fmean(reached[-count:]))
                noise += 4 * variance(reached) / count  # twice the standard error, squared
        if len(ends) < 2:
            continue
        is_apart = abs(ends[1] - ends[0]) > noise**0.5
        winners.append((0 if ends[0] > ends[1] else 1) if is_apart else None)
        end = "." if is_apart else ", within the noise."
        says.append(f"After {extent:,.0f} {over}: {ends[0]:.3f} against {ends[1]:.3f}{end}")
    if not says:
        return Answer(question, "Unknown", ["The runs have no steps that can be compared."], "open")
    decided = {winner for winner in winners if winner is not None}
    if not decided:
        return Answer(question, "Neither, so far", says, "open")
    if len(decided) == 1:
        return Answer(question, names[decided.pop()], says, "good")
    return Answer(question, "It depends on what is equal", says, "open")


def faster(a: Run, b: Run, names: tuple[str, str]) -> Answer:
    """Compare seconds per step and tokens per second, and name the phase with most of the difference."""
    question, first, second = "Which is faster?", a.recent(), b.recent()
    if "time/step" not in first or "time/step" not in second:
        return Answer(question, "Unknown", ["A run has no time of its steps."], "open")
    step_a, step_b = first["time/step"], second["time/step"]
    says = [f"A step takes {duration(step_a)} against {duration(step_b)}."]
    if step_a != step_b:
        phases = sorted({key for key in (*first, *second) if key.startswith("time/") and key != "time/step"})
        main = max(phases, key=lambda key: (second.get(key, 0) - first.get(key, 0)) * (step_b - step_a))
        before, after = (duration(metrics.get(main, 0.0)) for metrics in (first, second))
        says.append(f"Most of the difference is {main.removeprefix('time/')}: {before} against {after}.")
    ratio = step_a / step_b
    rates = [metrics.get("tokens/per_s") for metrics in (first, second)]
    if rates[0] and rates[1]:
        says.append(f"{rates[0]:,.0f} against {rates[1]:,.0f} tokens a second.")
        ratio = rates[1] / rates[0]
    if 0.97 < ratio < 1.03:
        return Answer(question, "Both alike", says, "open")
    winner, times = (names[1], ratio) if ratio > 1 else (names[0], 1 / ratio)
    return Answer(question, f"{winner}, {times:.2f} ×", says, "good")


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return dotted keys with different values, in A's order; MISSING stands for an absent value."""
    first, second = dotted(a), dotted(b)
    rows = [(key, first.get(key, MISSING), second.get(key, MISSING)) for key in dict.fromkeys([*first, *second])]
    return [(key, before, after) for key, before, after in rows if before != after and key not in NAMES]


def _reward_charts(a: Run, b: Run, names: tuple[str, str]) -> list[Chart]:
    """Draw the mean rewards, smoothed over a tenth of each run's steps."""
    charts = []
    for over in EXTENTS:
        data = []
        for run, name, color in zip((a, b), names, LINES, strict=False):
            if (curve := reward_curve(run, over)) is not None:
                extents, rewards = curve
                data.append(line(name, extents, smooth(rewards, max(1, len(rewards) // 10)), color))
        if len(data) == 2:
            charts.append(Chart(f"reward-{over}", f"Mean reward, over {over}", data, height=280, wide=over == "steps"))
    return charts


def _metrics(a: Run, b: Run, names: tuple[str, str]) -> PageSection:
    """Show the common metrics as means over the last steps."""
    first, second = a.recent(), b.recent()
    rows = []
    for key in (key for key in first if key in second):
        ratio = f"{second[key] / first[key]:.2f} ×" if first[key] > 0 and second[key] >= 0 else MISSING
        rows.append((f"`{key}`", f"{first[key]:.4g}", f"{second[key]:.4g}", ratio))
    note = "Means over the last steps of each run."
    return PageSection("Metrics side by side", (), ("metric", *names, "ratio"), rows, (1, 2, 3), note)


# HTML -------------------------------------------------------------------------------------------------------------------


def page(title: str, subtitle: str, answers: Sequence[Answer], sections: Sequence[PageSection]) -> str:
    """Return one HTML file, `page.html` filled in. Raises ValueError where plotly is not installed."""
    drawn = [
        {"name": chart.name, "data": chart.data, "layout": {"height": chart.height} | chart.layout}
        for section in sections for chart in section.charts
    ]  # fmt: skip
    assets = importlib.resources.files("megarl.telemetry")
    try:
        plotly = importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise ValueError(
            "the page needs plotly, which is not installed: it is in megarl's extras cpu and gpu, or pip install plotly"
        ) from None
    scripts = [plotly.replace("</script", "<\\/script"), assets.joinpath("page.js").read_text(encoding="utf-8")]
    # Only these two scripts may run, and nothing may be fetched, whatever a completion contains.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["coded"] = coded
    return environment.from_string(assets.joinpath("page.html").read_text(encoding="utf-8")).render(
        title=title,
        subtitle=subtitle,
        answers=answers,
        sections=sections,
        charts=json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        style=assets.joinpath("page.css").read_text(encoding="utf-8"),
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:",
        scripts=scripts,
        number=Markup(' class="number"'),
    )


def coded(text: str) -> Markup:
    """Return text as HTML, with `code` for backticks; HTML stays as it is."""
    return text if isinstance(text, Markup) else Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def write_page(path: Path, html: str, console: Console) -> Path:
    """Write a page whole, so that a reload never shows half of it; print and return its path."""
    write_whole(path, html)
    console.print(f"page: {path}", highlight=False, markup=False, soft_wrap=True)
    return path
