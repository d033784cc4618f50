"""`megarl report RUN`: the reward curve in the terminal, and one HTML page of the run that needs no network."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from megarl.telemetry import report_charts as charts
from megarl.telemetry.disk import write_whole
from megarl.telemetry.report_charts import Chart
from megarl.telemetry.report_findings import Answer, Finding, answers, capitalized, find
from megarl.telemetry.report_run import Run, read_run, show_curve

MOST_SAMPLES = 6  # best and worst
MOST_TEXT = 1500  # characters of a prompt or completion
# Metrics of a schedule that are planned and executed, and their heads in the table.
SHAPES = (("micro_batches", "micro-batches"), ("tokens", "tokens"), ("slots", "slots"), ("max_tokens", "largest"))


def report(run_dir: str | Path, output: Path | None = None, console: Console | None = None) -> Path:
    """Write the page of a run and return its path. Raises ValueError where the run has made no step yet, or plotly is
    missing (then the curve has been shown)."""
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
    sections: list[tuple[str, Sequence[Chart], str]] = [
        ("Is it learning?", [*charts.reward(run), *charts.evaluation(run), *charts.curves(run)], ""),
        ("Where the time goes", [*charts.ranks_time(run), *charts.phase_times(run)], ""),
        ("The last steps", last := charts.timeline(run), "" if last else no_trace),
        ("Batches", charts.useful_shares(run), planned_and_executed(run)),
        ("Weight sync", charts.sync_split(run), _sync_bytes(run)),
        ("Warnings, and what to change", [], _warnings(findings)),
        ("Completions", [], _samples(run)),
        ("More", [], _details(run)),
    ]
    return page(run.name, subtitle(run), answers(run, findings), sections)


def subtitle(run: Run) -> str:
    """Say how far the run is, and what it trains."""
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


def _warnings(findings: Sequence[Finding]) -> str:
    rows = [
        (f'<span class="tag {finding.kind}">{finding.kind}</span>', coded(capitalized(finding.says)), coded(finding.do),
         f"<code>{escape(finding.metric)}</code>")
        for finding in findings
    ]  # fmt: skip
    return table(("", "what", "what to change", "metric"), rows)


def planned_and_executed(run: Run) -> str:
    """Return a row for each phase: what its plans held in the last step, and in how many steps all ranks executed just
    that."""

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
    """Compare bytes with what the workers need at least, and the rate with that of a copy in memory."""

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
    """Show the best and the worst completions of the last step that kept any."""

    def text(value: Any) -> str:
        full = str(value or "")
        return f'<div class="text">{escape(full[:MOST_TEXT])}{"…" if len(full) > MOST_TEXT else ""}</div>'

    kept = sorted((row for row in run.samples if isinstance(row.get("reward"), int | float)), key=lambda row: -row["reward"])
    half = MOST_SAMPLES // 2
    chosen = kept if len(kept) <= MOST_SAMPLES else kept[:half] + kept[-half:]
    rows = [(f"{row['reward']:.3g}", text(row.get("prompt")), text(row.get("completion"))) for row in chosen]
    note = f"Step {kept[0].get('step')}: the best and the worst of {len(kept)} that were kept." if kept else ""
    return table(("reward", "prompt", "completion"), rows, (0,), note)


def _details(run: Run) -> str:
    parts = {"Every metric of the last step": json.dumps(run.steps[-1], indent=1)}
    if run.recipe:
        parts = {"The resolved recipe": yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)} | parts
    if run.starts:
        parts = {"Starts": "\n".join(run.starts)} | parts
    return "".join(folded(title, f"<pre>{escape(text)}</pre>") for title, text in parts.items())


# HTML -------------------------------------------------------------------------------------------------------------------


def page(title: str, subtitle: str, answers: Sequence[Answer], sections: Sequence[tuple[str, Sequence[Chart], str]]) -> str:
    """Return one HTML file: answers, then sections of a heading, charts and more HTML. `title` and `subtitle` are text.

    Raises ValueError where plotly is not installed.
    """
    drawn = [
        {"name": chart.name, "data": chart.data, "layout": {"height": chart.height} | chart.layout}
        for _, shown, _ in sections for chart in shown
    ]  # fmt: skip
    content = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{html}</section>"
        for heading, shown, more in sections
        if (html := _plots(shown) + more)
    )
    cards = "".join(
        f'<div class="card answer {answer.tone}"><h2>{escape(answer.question)}</h2><div class="verdict">'
        f"{escape(answer.verdict)}</div>{''.join(f'<p>{coded(sentence)}</p>' for sentence in answer.says)}</div>"
        for answer in answers
    )
    scripts = [_plotly_javascript(), _asset("page.js")]
    # Only these two scripts may run and nothing may be fetched, whatever a completion contains.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_asset("page.css")}</style></head>'
        f'<body><main><header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>'
        f'<div class="answers">{cards}</div>{body}</main>'
        f'<script type="application/json" id="charts">{content}</script>'
        + "".join(f"<script>{text}</script>" for text in scripts)
        + "</body></html>\n"
    )


def _plots(shown: Iterable[Chart]) -> str:
    """Return charts as cards, those that are not wide side by side."""
    cards = "".join(
        f'<div class="card{" wide" if chart.wide else ""}"><h3>{escape(chart.title)}</h3>'
        + (f'<p class="soft">{coded(chart.note)}</p>' if chart.note else "")
        + f'<div class="plot" id="{escape(chart.name)}" style="height:{chart.height}px"></div></div>'
        for chart in shown
    )
    return f'<div class="plots">{cards}</div>' if cards else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), note: str = "") -> str:
    """Return a table of cells that are HTML already; columns in `numbers` are right-aligned. Empty without rows."""

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
    """Return HTML that a click unfolds."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def coded(text: str) -> str:
    """Return text with `code` in backticks as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _asset(name: str) -> str:
    return importlib.resources.files("megarl.telemetry").joinpath(name).read_text(encoding="utf-8")


def _plotly_javascript() -> str:
    try:
        script = importlib.resources.files("plotly").joinpath("package_data/plotly.min.js")
    except ModuleNotFoundError:
        raise ValueError(
            "the page needs plotly, which is not installed: it is in megarl's extras cpu and gpu, or pip install plotly"
        ) from None
    return script.read_text(encoding="utf-8").replace("</script", "<\\/script")


def write_page(path: Path, html: str, console: Console) -> Path:
    """Write a page whole, so that a browser that reloads it never shows half of it; print and return its path."""
    write_whole(path, html)
    console.print(f"page: {path}", highlight=False, markup=False, soft_wrap=True)
    return path
