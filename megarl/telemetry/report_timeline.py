"""The last steps of a run, rank by rank: phases above, and where they were kept the spans below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from megarl.telemetry.clock import WAIT as WAITS
from megarl.telemetry.report_charts import PHASES, WAIT, Chart, color
from megarl.telemetry.report_reading import Run
from megarl.telemetry.trace import SCALE, RankSteps

MOST_SLICES = 6000  # of all ranks together: a browser draws each as a shape
SPAN, PHASE_HIGH, SPAN_HIGH = "span", 0.42, 0.34


def timeline(run: Run) -> list[Chart]:
    """None where the run kept no trace. Of a step that a rank has not finished nothing is known yet."""
    ranks = [rank for rank in run.ranks if rank.steps]
    if not ranks:
        return []
    start = min(step["start"] for rank in ranks for step in rank.steps)
    end = max(step["start"] + step["seconds"] for rank in ranks for step in rank.steps)
    slices = [one for lane, rank in enumerate(ranks) for one in _slices(lane, rank, start)]
    # What is thinner than a pixel of a wide screen is not seen; the shortest go first where that is not enough.
    slices = [one for one in slices if one[4] > (end - start) / 4000]
    dropped = max(0, len(slices) - MOST_SLICES)
    slices = sorted(slices, key=lambda one: -one[4])[:MOST_SLICES]
    steps = sorted({step["step"] for rank in ranks for step in rank.steps})
    has_spans = any(kind != "phase" for kind, *_ in slices)
    layout = {
        "barmode": "overlay",
        "bargap": 0,
        "xaxis": {"title": {"text": "seconds"}, "range": [0, round(end - start, 4)]},
        "yaxis": {"tickvals": list(range(len(ranks))), "ticktext": [f"rank {rank.rank}" for rank in ranks],
                  "range": [len(ranks) - 0.4, -0.6], "fixedrange": True},
        "shapes": _borders(ranks[0], start),
        "annotations": _names(ranks[0], start),
    }  # fmt: skip
    note = f"Steps {steps[0]} to {steps[-1]}. " if len(steps) > 1 else f"Step {steps[0]}. "
    note += (
        "Above, the phases of a rank; below, what it did: in its phase's colour where it worked, grey where it only waited."
        if has_spans
        else "`run.trace: spans` also shows what ranks do inside of a phase, and where they wait."
    )
    if run.num_traced > len(ranks):
        note += f" {len(ranks)} of {run.num_traced} ranks; `megarl trace` has all."
    if dropped:
        note += f" {dropped} of the shortest spans are left out."
    return [Chart("timeline", "The last steps, rank by rank", _bars(slices), layout, note, 110 + 62 * len(ranks))]


# kind (phase, span or wait), name, lane, start in seconds, seconds, phase
Slice = tuple[str, str, int, float, float, str]


def _slices(lane: int, rank: RankSteps, start: float) -> list[Slice]:
    found: list[Slice] = []
    for step in rank.steps:
        begun = step["start"] - start
        phases = [(at, at + lasted, name) for name, depth, at, lasted in step["events"] if depth == 0]
        for name, depth, at, lasted in step["events"]:
            phase = name if depth == 0 else next((of for first, last, of in phases if first <= at <= last), "")
            kind = "phase" if depth == 0 else "wait" if name.startswith(WAITS) else SPAN
            found.append((kind, name, lane, begun + at / SCALE, lasted / SCALE, phase))
    # A span that holds others is drawn first, under them.
    return found


def _bars(slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """A trace for each colour: phases by name, then spans by phase, then all waits, which lie over the spans around them."""
    traces: dict[tuple[str, str], list[Slice]] = {}
    for one in slices:
        key = (one[0], "" if one[0] == "wait" else one[5])
        traces.setdefault(key, []).append(one)
    kinds, phases = ["phase", SPAN, "wait"], list(PHASES)
    data = []
    for (kind, phase), members in sorted(
        traces.items(), key=lambda item: (kinds.index(item[0][0]), phases.index(item[0][1]) if item[0][1] in PHASES else 99)
    ):
        high = PHASE_HIGH if kind == "phase" else SPAN_HIGH
        shift = -0.24 if kind == "phase" else 0.16
        data.append({
            "type": "bar", "orientation": "h", "name": escape(phase) or "waiting", "legendgroup": phase or "waiting",
            "showlegend": kind != SPAN, "base": [round(one[3], 5) for one in members],
            "x": [round(one[4], 6) for one in members], "y": [one[2] + shift for one in members], "width": high,
            "marker": {"color": WAIT if kind == "wait" else color(phase), "line": {"width": 0}},
            "opacity": 0.75 if kind == SPAN else 1,
            "customdata": [escape(f"{one[1]}, in {one[5]}" if kind != "phase" else one[1]) for one in members],
            "hovertemplate": "%{customdata}: %{x:.4g} s from %{base:.4g} s<extra></extra>",
        })  # fmt: skip
    return data


def _borders(rank: RankSteps, start: float) -> list[dict[str, Any]]:
    """A line where each step of the first rank begins."""
    return [
        {"type": "line", "xref": "x", "yref": "paper", "x0": round(step["start"] - start, 4), "y0": 0, "y1": 1,
         "x1": round(step["start"] - start, 4), "line": {"color": "rgba(128,128,128,0.6)", "width": 1, "dash": "dot"}}
        for step in rank.steps
    ]  # fmt: skip


def _names(rank: RankSteps, start: float) -> list[dict[str, Any]]:
    return [
        {"x": round(step["start"] - start, 4), "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom",
         "text": f"step {step['step']}", "showarrow": False}
        for step in rank.steps
    ]  # fmt: skip
