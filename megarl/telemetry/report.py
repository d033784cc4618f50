"""`megarl report RUN`: the reward curve in the terminal, and one HTML page of the run that needs no network.

`megarl report A B` compares two runs: which learns better, which is faster and by which phase, how their recipes differ.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console

from megarl.telemetry import report_charts as charts
from megarl.telemetry.disk import write_whole
from megarl.telemetry.metrics_file import duration, is_number, tokens_per_second
from megarl.telemetry.report_charts import CURVES, LINES, SECONDS, Chart, line
from megarl.telemetry.report_findings import Answer, answers, capitalized, find, plural, variance
from megarl.telemetry.report_run import Run, read_run, show_curve, smooth

MOST_SAMPLES = 6  # best and worst
MOST_TEXT = 1500  # characters of a prompt or completion
# Metrics of a schedule that are planned and executed, and their heads in the table.
SHAPES = (("micro_batches", "micro-batches"), ("tokens", "tokens"), ("slots", "slots"), ("max_tokens", "largest"))
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


def run_page(run: Run) -> str:
    """Return the page as HTML. Raises ValueError where plotly is not installed."""
    findings = find(run)
    was_off = run.at("run.trace") == "none"
    reason = "`run.trace: phases`, the default, keeps one" if was_off else "it has none of a finished step yet"
    no_trace = f'<div class="card soft">{coded(f"No trace of the ranks: {reason}.")}</div>'
    warnings = [
        (f'<span class="tag {finding.kind}">{finding.kind}</span>', coded(capitalized(finding.says)), coded(finding.do),
         f"<code>{escape(finding.metric)}</code>")
        for finding in findings
    ]  # fmt: skip
    details = {"Every metric of the last step": json.dumps(run.steps[-1], indent=1)}
    if run.recipe:
        details = {"The resolved recipe": yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)} | details
    if run.starts:
        details = {"Starts": "\n".join(run.starts)} | details
    sections: list[tuple[str, Sequence[Chart], str]] = [
        ("Is it learning?", [*charts.reward(run), *charts.evaluation(run), *charts.curves(run)], ""),
        ("Where the time goes", [*charts.ranks_time(run), *charts.phase_times(run)], ""),
        ("The last steps", last := charts.timeline(run), "" if last else no_trace),
        ("Batches", charts.useful_shares(run), planned_and_executed(run)),
        ("Weight sync", charts.sync_split(run), _sync_bytes(run)),
        ("Warnings, and what to change", [], table(("", "what", "what to change", "metric"), warnings)),
        ("Completions", [], _samples(run)),
        ("More", [], "".join(folded(title, f"<pre>{escape(text)}</pre>") for title, text in details.items())),
    ]
    return page(run.name, subtitle(run), answers(run, findings), sections)


def subtitle(run: Run) -> str:
    """Return how far the run is and what it trains."""
    done = run.steps[-1]["step"]
    parts = [f"{done} of {run.at('run.steps') or done} steps"]
    if isinstance(model := run.at("model.path"), str):
        parts.append(Path(model).name)
    if run.at("algorithm.advantage"):
        parts.append(str(run.at("algorithm.advantage")))
    if run.at("trainer.ranks"):
        parts.append(f"{run.at('trainer.ranks')} trainer ranks, {run.at('trainer.precision')}")
    if run.at("rollout.engines") and not run.at("rollout.replay"):
        parts.append(f"{run.at('rollout.engines')} rollout engines")
    return " · ".join(parts)


def planned_and_executed(run: Run) -> str:
    """Return a row for each phase: its plan in the last step, and in how many steps all ranks executed their plan."""

    def pair(planned: Any, ran: Any) -> str:
        values = [f"{value:,.0f}" if isinstance(value, int | float) else "–" for value in (planned, ran)]
        return values[1] if planned == ran else f'<span class="bad-text">{" / ".join(values)}</span>'

    def verdict(num_alike: int, num_steps: int) -> str:
        if num_alike == num_steps:
            return f'<span class="good-text">as planned</span> in all {num_steps} steps'
        return f'<span class="bad-text">NOT as planned</span> in {num_steps - num_alike} of {num_steps} steps'

    rows: list[tuple[str, ...]] = []
    last = run.steps[-1]
    phases = dict.fromkeys(key.split("/")[1] for key in run.keys if key.startswith("schedule/") and "/planned_" in key)
    for phase in phases:
        keys = [(f"schedule/{phase}/planned_{name}", f"schedule/{phase}/{name}") for name, _ in SHAPES]
        lines = [line for line in run.steps if keys[0][0] in line]
        num_alike = sum(all(line.get(planned) == line.get(ran) for planned, ran in keys) for line in lines)
        cells = [pair(last.get(planned), last.get(ran)) for planned, ran in keys]
        rows.append((escape(phase), *cells, verdict(num_alike, len(lines))))
    prompts, ran = run.at("phases.rollout.prompts"), last.get("schedule/rollout/prompts")
    if prompts is not None and ran is not None:  # the rollout has no plan, but a size in the recipe
        num_alike = sum(line.get("schedule/rollout/prompts") == prompts for line in run.steps)
        rows.append(("rollout", "", "", "", "", f"{verdict(num_alike, len(run.steps))}: {pair(prompts, ran)} prompts"))
    note = "What every rank executed in the last step; where the plan was another, both: planned / executed."
    return table(("phase", *(head for _, head in SHAPES), ""), rows, (1, 2, 3, 4), note)


def _sync_bytes(run: Run) -> str:
    """Compare the bytes with the workers' need, and the rate with that of a copy in memory."""

    def size(value: float) -> str:
        unit, scale = next(
            ((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= scale), ("B", 1)
        )
        return f"{value / scale:.3g} {unit}"

    names = ("received_bytes", "bound_bytes", "sent_bytes", "bytes_per_s", "memcpy_bytes_per_s", "changed_share")
    recent = run.recent()
    received, bound, sent, rate, memory_rate, changed = (recent.get(f"sync/{name}") for name in names)
    rows = []
    if received and bound:
        rows.append(("received by workers", size(received), f"{received / bound:.2f} × what they need ({size(bound)})"))
    if sent and received:
        rows.append(("sent by ranks", size(sent), f"{sent / received:.2f} × what was received"))
    if rate:
        against = f"{rate / memory_rate:.0%} of a copy in memory ({size(memory_rate)}/s)" if memory_rate else ""
        rows.append(("rate", f"{size(rate)}/s", against))
    if changed is not None:
        rows.append(("changed bytes", f"{changed:.1%}", ""))
    return table((), rows, (1,))


def _samples(run: Run) -> str:
    """Show the best and the worst completions of the last step with samples."""

    def text(value: Any) -> str:
        full = str(value or "")
        return f'<div class="text">{escape(full[:MOST_TEXT])}{"…" if len(full) > MOST_TEXT else ""}</div>'

    kept = sorted((row for row in run.samples if isinstance(row.get("reward"), int | float)), key=lambda row: -row["reward"])
    half = MOST_SAMPLES // 2
    chosen = kept if len(kept) <= MOST_SAMPLES else kept[:half] + kept[-half:]
    rows = [(f"{row['reward']:.3g}", text(row.get("prompt")), text(row.get("completion"))) for row in chosen]
    note = f"Step {kept[0].get('step')}: the best and the worst of {len(kept)} that were kept." if kept else ""
    return table(("reward", "prompt", "completion"), rows, (0,), note)


# Two runs ------------------------------------------------------------------------------------------------------------------


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
    """Return the mean reward over one of EXTENTS; None where the run does not record it. Seconds exclude starts."""
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
    """Count the recipe keys that differ, and name the first ones."""
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
    """Draw the first metric of each small plot for both runs."""
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
    """Show the common metrics as means over the last steps; fold those within 2 %."""
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


# HTML -------------------------------------------------------------------------------------------------------------------


def page(title: str, subtitle: str, answers: Sequence[Answer], sections: Sequence[tuple[str, Sequence[Chart], str]]) -> str:
    """Return one HTML file: answers, then sections with a heading, charts and more HTML. `title` and `subtitle` are text.

    Raises ValueError where plotly is not installed.
    """
    drawn = [
        {"name": chart.name, "data": chart.data, "layout": {"height": chart.height} | chart.layout}
        for _, shown, _ in sections for chart in shown
    ]  # fmt: skip
    content = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = ""
    for heading, shown, more in sections:
        plots = "".join(  # charts that are not wide stand side by side
            f'<div class="card{" wide" if chart.wide else ""}"><h3>{escape(chart.title)}</h3>'
            + (f'<p class="soft">{coded(chart.note)}</p>' if chart.note else "")
            + f'<div class="plot" id="{escape(chart.name)}" style="height:{chart.height}px"></div></div>'
            for chart in shown
        )
        if plots or more:
            plots = f'<div class="plots">{plots}</div>' if plots else ""
            body += f"<section><h2>{escape(heading)}</h2>{plots}{more}</section>"
    cards = "".join(
        f'<div class="card answer {answer.tone}"><h2>{escape(answer.question)}</h2><div class="verdict">'
        f"{escape(answer.verdict)}</div>{''.join(f'<p>{coded(sentence)}</p>' for sentence in answer.says)}</div>"
        for answer in answers
    )
    assets = importlib.resources.files("megarl.telemetry")
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    try:
        plotly = importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise ValueError(
            "the page needs plotly, which is not installed: it is in megarl's extras cpu and gpu, or pip install plotly"
        ) from None
    scripts = [plotly.replace("</script", "<\\/script"), assets.joinpath("page.js").read_text(encoding="utf-8")]
    # Only these two scripts may run, and nothing may be fetched, whatever a completion contains.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f'<body><main><header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>'
        f'<div class="answers">{cards}</div>{body}</main>'
        f'<script type="application/json" id="charts">{content}</script>'
        + "".join(f"<script>{text}</script>" for text in scripts)
        + "</body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), note: str = "") -> str:
    """Return a table of HTML cells; columns in `numbers` are right-aligned. Empty without rows."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="number"' if at in numbers else "" for at in range(len(row)))
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    if not lines:
        return ""
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if heads else ""
    text = f'<p class="soft">{coded(note)}</p>' if note else ""
    return f'<div class="card">{text}<div class="scroll"><table>{head}<tbody>{lines}</tbody></table></div></div>'


def folded(title: str, html: str) -> str:
    """Return HTML that unfolds at a click."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def coded(text: str) -> str:
    """Return text as HTML, with `code` for backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def write_page(path: Path, html: str, console: Console) -> Path:
    """Write a page whole, so that a reload never shows half of it; print and return its path."""
    write_whole(path, html)
    console.print(f"page: {path}", highlight=False, markup=False, soft_wrap=True)
    return path
