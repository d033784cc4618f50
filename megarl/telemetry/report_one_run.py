"""The page of one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from megarl.telemetry import report_charts as charts
from megarl.telemetry.report_answers import head
from megarl.telemetry.report_findings import Finding, find
from megarl.telemetry.report_page import coded, page, plots, table
from megarl.telemetry.report_reading import Run
from megarl.telemetry.report_timeline import timeline

FILE = "report.html"
MOST_SAMPLES = 6  # best and worst
MOST_TEXT = 1500  # characters of a prompt or completion
SHAPES = (("micro_batches", "micro-batches"), ("tokens", "tokens"), ("slots", "slots"), ("max_tokens", "largest"))


def run_page(run: Run) -> str:
    """The page as HTML. Raises ValueError where plotly is not installed."""
    findings = find(run)
    learning = [*charts.reward(run), *charts.evaluation(run), *charts.curves(run)]
    where = [*charts.ranks_time(run), *charts.phase_times(run)]
    last = timeline(run)
    useful, sync = charts.useful_shares(run), charts.sync_split(run)
    sections = [
        ("Is it learning?", plots(learning)),
        ("Where the time goes", plots(where)),
        ("The last steps", plots(last) if last else _no_trace(run)),
        ("Batches", plots(useful) + planned_and_executed(run)),
        ("Weight sync", plots(sync) + sync_bytes(run)),
        ("Warnings, and what to change", warnings(findings)),
        ("Completions", samples(run)),
        ("More", details(run)),
    ]
    return page(run.name, subtitle(run), head(run, findings), sections, [*learning, *where, *last, *useful, *sync])


def subtitle(run: Run) -> str:
    """How far the run is, and what it trains."""
    done = run.steps[-1]["step"]
    parts = [f"{done} of {run.planned_steps} steps"]
    if isinstance(model := run.at("model.path"), str):
        parts.append(Path(model).name)
    if run.at("algorithm.advantage"):
        parts.append(str(run.at("algorithm.advantage")))
    if run.at("trainer.ranks"):
        parts.append(f"{run.at('trainer.ranks')} trainer ranks, {run.at('trainer.precision')}")
    if run.at("rollout.engines") and not run.at("rollout.replay"):
        parts.append(f"{run.at('rollout.engines')} rollout engines")
    return " · ".join(parts)


def warnings(findings: Sequence[Finding]) -> str:
    """All findings, worst first."""
    rows = [
        (f'<span class="tag {one.kind}">{one.kind}</span>', coded(one.says[:1].upper() + one.says[1:]), coded(one.do),
         f"<code>{escape(one.figure)}</code>")
        for one in findings
    ]  # fmt: skip
    return table(("", "what", "what to change", "figure"), rows)


def _no_trace(run: Run) -> str:
    was_off = run.at("run.trace") == "none"
    why = "`run.trace: phases`, the default, keeps one" if was_off else "it has none of a finished step yet"
    return f'<div class="card soft">{coded(f"No trace of the ranks: {why}.")}</div>'


def planned_and_executed(run: Run) -> str:
    """A phase a row: what its plans held in the last step, and in how many steps all ranks executed just that."""
    rows: list[tuple[str, ...]] = []
    last = run.steps[-1]
    phases = dict.fromkeys(key.split("/")[1] for key in run.keys if key.startswith("schedule/") and "/planned_" in key)
    for phase in phases:
        keys = [(f"schedule/{phase}/planned_{name}", f"schedule/{phase}/{name}") for name, _ in SHAPES]
        lines = [line for line in run.steps if keys[0][0] in line]
        alike = sum(all(line.get(planned) == line.get(ran) for planned, ran in keys) for line in lines)
        cells = [_pair(last.get(planned), last.get(ran)) for planned, ran in keys]
        rows.append((escape(phase), *cells, _verdict(alike, len(lines))))
    rows += _fixed_sizes(run)
    note = "Of the last step, what every rank executed; where it is not what was planned, both: planned / executed."
    return table(("phase", *(name for _, name in SHAPES), ""), rows, (1, 2, 3, 4), note)


def _fixed_sizes(run: Run) -> list[tuple[str, ...]]:
    """Phases that have no plan, but a size in the recipe."""
    rows: list[tuple[str, ...]] = []
    prompts, ran = run.at("phases.rollout.prompts"), run.steps[-1].get("schedule/rollout/prompts")
    if prompts is not None and ran is not None:
        alike = sum(line.get("schedule/rollout/prompts") == prompts for line in run.steps)
        rows.append(("rollout", "", "", "", "", f"{_verdict(alike, len(run.steps))}: {_pair(prompts, ran)} prompts"))
    return rows


def _verdict(alike: int, steps: int) -> str:
    if alike == steps:
        return f'<span class="good-text">as planned</span> in all {steps} steps'
    return f'<span class="bad-text">NOT as planned</span> in {steps - alike} of {steps} steps'


def _pair(planned: Any, ran: Any) -> str:
    if planned == ran:
        return _number(ran)
    return f'<span class="bad-text">{_number(planned)} / {_number(ran)}</span>'


def sync_bytes(run: Run) -> str:
    """Bytes against what the workers need at least, and the rate against that of a copy in memory."""
    recent = run.recent()
    rows = []
    received, bound = recent.get("sync/received_bytes"), recent.get("sync/bound_bytes")
    if received and bound:
        rows.append(("received by workers", _bytes(received), f"{received / bound:.2f} × what they need ({_bytes(bound)})"))
    if (sent := recent.get("sync/sent_bytes")) and received:
        rows.append(("sent by ranks", _bytes(sent), f"{sent / received:.2f} × what was received"))
    rate, memory = recent.get("sync/bytes_per_s"), recent.get("sync/memcpy_bytes_per_s")
    if rate:
        against = f"{rate / memory:.0%} of a copy in memory ({_bytes(memory)}/s)" if memory else ""
        rows.append(("rate", f"{_bytes(rate)}/s", against))
    if "sync/changed_share" in recent:
        rows.append(("changed bytes", f"{recent['sync/changed_share']:.1%}", ""))
    return table((), rows, (1,))


def samples(run: Run) -> str:
    """The best and the worst completions of the last step that kept any."""
    kept = [one for one in run.samples if isinstance(one.get("reward"), int | float)]
    kept.sort(key=lambda one: -one["reward"])
    half = MOST_SAMPLES // 2
    chosen = kept if len(kept) <= MOST_SAMPLES else kept[:half] + kept[-half:]
    rows = [
        (f"{one['reward']:.3g}", _text(one.get("prompt")), _text(one.get("completion")))
        for one in chosen
    ]  # fmt: skip
    step = run.samples[0].get("step") if run.samples else None
    note = f"Step {step}: the best and the worst of {len(kept)} that were kept." if step is not None else ""
    return table(("reward", "prompt", "completion"), rows, (0,), note)


def _text(value: Any) -> str:
    text = str(value or "")
    cut = escape(text[:MOST_TEXT]) + ("…" if len(text) > MOST_TEXT else "")
    return f'<div class="text">{cut}</div>'


def details(run: Run) -> str:
    """What nobody asks first: how often it was started, the recipe, and every figure of the last step."""
    html = ""
    if run.starts:
        html += f"<details><summary>Starts</summary><pre>{escape(chr(10).join(run.starts))}</pre></details>"
    if run.recipe:
        text = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
        html += f"<details><summary>The resolved recipe</summary><pre>{escape(text)}</pre></details>"
    text = json.dumps(run.steps[-1], indent=1)
    return html + f"<details><summary>Every figure of the last step</summary><pre>{escape(text)}</pre></details>"


def _number(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else "–"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
