"""`megarl report A B`: which run learns better, which is faster and by which phase, and how their recipes differ."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from megarl.telemetry.metrics import duration, is_number, tokens_per_second
from megarl.telemetry.report import folded, page, table, write_page
from megarl.telemetry.report_charts import CURVES, LINES, SECONDS, Chart, line
from megarl.telemetry.report_findings import Answer, plural, variance
from megarl.telemetry.report_run import Run, read_run, smooth

# Recipe keys that only name a run.
NAMES = ("run.name", "run.dir")
MISSING = "–"
EXTENTS = ("steps", "samples", "seconds")
# Extents and mean rewards of a run: steps, samples or seconds of training by the end of each step, ascending.
Curve = tuple[list[float], list[float]]


def compare(a: str | Path, b: str | Path, output: Path | None = None, console: Console | None = None) -> Path:
    """Write the page of two runs, by default into B's directory, and return its path. Raises ValueError as `report`."""
    first, second = read_run(a), read_run(b)
    path = output or second.path / f"report-vs-{first.name}.html"
    return write_page(path, compare_page(first, second), console or Console())


def compare_page(a: Run, b: Run) -> str:
    """Return the page as HTML. Raises ValueError where plotly is not installed."""
    names = (a.name, b.name) if a.name != b.name else (f"A: {a.name}", f"B: {b.name}")
    rows = [
        (f"<code>{escape(key)}</code>", escape(str(before)), escape(str(after)))
        for key, before, after in differences(a.recipe, b.recipe)
    ]
    recipes = table(("key", *map(escape, names)), rows) if a.recipe and b.recipe else ""
    sections = [
        ("Mean reward", _reward_charts(a, b, names), ""),
        ("Other curves", _curve_charts(a, b, names), ""),
        ("Where the time goes", _phase_chart(a, b, names), ""),
        ("How the recipes differ", [], recipes),
        ("Metrics side by side", [], _metrics_table(a, b, names)),
    ]
    subtitle = f"A is {a.path}, {len(a.steps)} steps; B is {b.path}, {len(b.steps)} steps"
    return page(
        f"{names[0]} against {names[1]}", subtitle, [better(a, b, names), faster(a, b, names), differs(a, b)], sections
    )


def reward_curve(run: Run, over: str) -> Curve | None:
    """Return the mean reward over one of EXTENTS; None where the run does not say it. Seconds do not count starts."""
    steps, rewards = run.rewards()
    if not rewards:
        return None
    if over == "steps":
        return [float(step) for step in steps], rewards
    if over == "samples":
        sampled = run.sampled()
        return None if sampled is None else ([float(sampled[step]) for step in steps], rewards)
    if not all(is_number(line.get("time/step")) for line in run.steps):
        return None
    ends = dict(zip((line["step"] for line in run.steps), accumulate(line["time/step"] for line in run.steps), strict=True))
    return [ends[step] for step in steps], rewards


def better(a: Run, b: Run, names: tuple[str, str]) -> Answer:
    """Say which run has the higher reward after as many steps, samples and seconds, against the noise of both."""
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
    """Compare seconds a step and tokens a second, and name the phase that makes most of the difference."""
    question, first, second = "Which is faster?", a.recent(), b.recent()
    if "time/step" not in first or "time/step" not in second:
        return Answer(question, "Unknown", ["A run has no time of its steps."], "open")
    step_a, step_b = first["time/step"], second["time/step"]
    says = [f"A step takes {duration(step_a)} against {duration(step_b)}."]
    if step_a != step_b:
        main = max(_phases(first, second), key=lambda key: (second.get(key, 0) - first.get(key, 0)) * (step_b - step_a))
        before, after = (duration(metrics.get(main, 0.0)) for metrics in (first, second))
        says.append(f"Most of the difference is {main.removeprefix('time/')}: {before} against {after}.")
    ratio = step_a / step_b
    rates = [tokens_per_second(metrics) for metrics in (first, second)]
    if rates[0] and rates[1]:
        says.append(f"{rates[0]:,.0f} against {rates[1]:,.0f} tokens a second.")
        ratio = rates[1] / rates[0]
    if 0.97 < ratio < 1.03:
        return Answer(question, "Both alike", says, "open")
    winner, times = (names[1], ratio) if ratio > 1 else (names[0], 1 / ratio)
    return Answer(question, f"{winner}, {times:.2f} ×", says, "good")


def _phases(first: dict[str, float], second: dict[str, float]) -> list[str]:
    return sorted({key for key in (*first, *second) if key.startswith("time/") and key != "time/step"})


def differs(a: Run, b: Run) -> Answer:
    """Say how many keys of the recipes differ, and name the first of them."""
    question = "What did I change?"
    if not a.recipe or not b.recipe:
        return Answer(question, "Unknown", ["A run directory has no recipe.yaml."], "open")
    changed = differences(a.recipe, b.recipe)
    if not changed:
        return Answer(question, "Nothing", ["The recipes are the same but for the run's name."], "open")

    def short(value: Any) -> str:
        text = str(value)
        return text if len(text) <= 60 else text[:57] + "…"

    says = [f"`{key}`: {short(before)} against {short(after)}." for key, before, after in changed[:4]]
    if len(changed) > 4:
        says.append(f"{len(changed) - 4} more below.")
    return Answer(question, plural(len(changed), "key"), says, "open")


def differences(a: Any, b: Any, under: str = "") -> list[tuple[str, Any, Any]]:
    """Return dotted keys with different values, in A's order; MISSING stands for an absent value."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b or under in NAMES else [(under, a, b)]
    changed = []
    for key in dict.fromkeys([*a, *b]):
        changed += differences(a.get(key, MISSING), b.get(key, MISSING), f"{under}.{key}" if under else str(key))
    return changed


def _reward_charts(a: Run, b: Run, names: tuple[str, str]) -> list[Chart]:
    """Draw the mean rewards, smoothed over a tenth of each run's steps."""
    charts = []
    for over in EXTENTS:
        data = []
        for run, name, color in zip((a, b), names, LINES, strict=False):
            if (curve := reward_curve(run, over)) is not None:
                extents, rewards = curve
                data.append(line(escape(name), extents, smooth(rewards, max(1, len(rewards) // 10)), color))
        if len(data) == 2:
            charts.append(Chart(f"reward-{over}", f"Mean reward, over {over}", data, height=280, wide=over == "steps"))
    return charts


def _curve_charts(a: Run, b: Run, names: tuple[str, str]) -> list[Chart]:
    """Draw the first metric of each small plot of a run's page, of both runs."""
    charts = []
    for (key, *_), title in CURVES:
        points = [run.points(key) for run in (a, b)]
        data = [
            line(escape(name), steps, values, color)
            for name, (steps, values), color in zip(names, points, LINES, strict=False)
            if len(set(values)) > 1
        ]
        if data:
            charts.append(Chart("curve-" + key.replace("/", "-"), title, data, {"showlegend": True}, height=230, wide=False))
    return charts


def _phase_chart(a: Run, b: Run, names: tuple[str, str]) -> list[Chart]:
    """Draw the seconds of each phase of both runs, longest first."""
    recent = a.recent(), b.recent()
    longest = sorted(_phases(*recent), key=lambda key: -max(metrics.get(key, 0.0) for metrics in recent))
    data: list[dict[str, Any]] = [
        {"type": "bar", "name": escape(name), "x": [escape(key.removeprefix("time/")) for key in longest],
         "y": [metrics.get(key, 0.0) for key in longest], "marker": {"color": color},
         "hovertemplate": "%{x}: %{y:.3g} s<extra></extra>"}
        for name, metrics, color in zip(names, recent, LINES, strict=False)
    ]  # fmt: skip
    layout = {"barmode": "group", "yaxis": SECONDS}
    title = "Seconds of each phase, mean of the last steps"
    return [Chart("phases", title, data, layout, height=360)] if longest else []


def _metrics_table(a: Run, b: Run, names: tuple[str, str]) -> str:
    """Show the metrics that both runs have, as means over the last steps; fold those that are alike within 2 %."""
    first, second = a.recent(), b.recent()

    def is_alike(key: str) -> bool:
        return abs(second[key] - first[key]) <= 0.02 * max(abs(first[key]), abs(second[key]))

    def rows(is_wanted: Callable[[str], bool], note: str = "") -> str:
        lines = []
        for key in (key for key in first if key in second and is_wanted(key)):
            ratio = f"{second[key] / first[key]:.2f} ×" if first[key] > 0 and second[key] >= 0 else MISSING
            lines.append((f"<code>{escape(key)}</code>", f"{first[key]:.4g}", f"{second[key]:.4g}", ratio))
        return table(("metric", *map(escape, names), "ratio"), lines, (1, 2, 3), note)

    alike = rows(is_alike)
    unlike = rows(lambda key: not is_alike(key), "Means over the last steps of each run.")
    return unlike + (folded("Metrics that are alike within 2 %", alike) if alike else "")
