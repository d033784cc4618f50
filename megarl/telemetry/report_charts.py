"""Curves and bars of a run as dictionaries for plotly.js, made without plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import escape

from megarl.recipe import ENGINE_PHASES
from megarl.telemetry.clock import UNACCOUNTED
from megarl.telemetry.metrics_file import is_number
from megarl.telemetry.report_findings import IDLE, SYNC_PARTS, phase_shares, starving
from megarl.telemetry.report_run import Run, smooth, thin

MOST_POINTS = 400  # of a curve
MOST_BARS = 120  # of steps side by side
# Distinct on white and on near black.
GREY, WAIT_GREY, BUSY = "#9aa0a8", "#c3c8cf", "#23a699"
LINES = ("#4c8dd6", "#e58a3c", "#57ad5b", "#8f6fd8", "#db5461", "#76c4b7", "#d8a93a", "#7f8fa6", "#a08c7d", "#c48bb0")
CAUSES = dict(zip(IDLE, LINES, strict=False))
SECONDS: dict[str, Any] = {"title": {"text": "seconds"}}
# Metrics of held-out rows, which have no confidence interval.
HELD_OUT = ("evaluation/loss", "evaluation/accuracy", "warmup_evaluation/loss")
# Small plots next to the reward, where a run has the metrics: metrics and title.
CURVES = (
    (("actor/loss", "actor/policy_loss"), "actor loss"),
    (("critic/loss",), "critic loss"),
    (("preference/loss",), "loss of pairs"),
    (("actor/teacher_kl",), "divergence from the teacher, nats a token"),
    (("actor/grad_norm", "critic/grad_norm"), "gradient norm"),
    (("actor/entropy",), "entropy, nats a token"),
    (("actor/kl", "actor/drift"), "KL, nats a token"),
    (("actor/clip_fraction", "critic/clip_fraction"), "clipped share of tokens"),
    (("rollout/completion_length_mean", "rollout/completion_length_max"), "completion length, tokens"),
    (("rollout/truncated_share",), "truncated share"),
    (("mismatch/logprob_mean",), "engine against trainer, log-probability"),
    (("staleness/mean", "staleness/max"), "staleness, weight versions"),
    (("mismatch/effective_sample_share",), "effective share of the samples"),
    (("actor/learning_rate", "critic/learning_rate"), "learning rate"),
)
# And next to the times.
TIME_CURVES = (
    (tuple(f"schedule/{phase}/useful_share" for phase in ENGINE_PHASES), "useful share of the batches' tokens"),
    (("sync/total_s", *(key for key, _, _ in SYNC_PARTS)), "a weight sync and its parts, which overlap, seconds"),
)


@dataclass(frozen=True)
class Chart:
    """`data` and `layout` are plotly's; `note` says how to read the chart."""

    name: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 300
    wide: bool = True


def step_axis(run: Run) -> dict[str, Any]:
    """Return the axis of steps, with a tick at each step where there are few."""
    return {"title": {"text": "step"}} | ({"dtick": 1} if len(run.steps) <= 10 else {})


def line(name: str, steps: Sequence[float], values: Sequence[float], color: str, **style: Any) -> dict[str, Any]:
    """Return a curve. plotly shows names as HTML."""
    x, y = thin(steps, values, MOST_POINTS)
    mode = "lines+markers" if len(x) < 40 else "lines"
    form = {"type": "scatter", "mode": mode, "name": str(escape(name)), "x": x, "y": y}
    return form | {"line": {"color": color, "width": 2}, "marker": {"size": 5}} | style


def reward(run: Run) -> list[Chart]:
    """Draw the mean reward of each step and its moving average over a tenth of the steps."""
    steps, values = run.rewards()
    if not values:
        return []
    data = [line("a step", steps, values, LINES[0], opacity=0.45 if len(values) > 3 else 1)]
    if len(values) > 3:
        over = max(3, len(values) // 10)
        style = {"mode": "lines", "line": {"color": LINES[0], "width": 3}}
        data.append(line(f"mean of {over} steps", steps, smooth(values, over), LINES[0], **style))
    return [Chart("reward", run.goal.capitalize(), data, {"xaxis": step_axis(run)}, height=320)]


def evaluation(run: Run) -> list[Chart]:
    """Draw the results on held-out prompts, from before the first step, with 95 % confidence intervals, and the loss on
    held-out rows."""
    names = dict.fromkeys(key.removesuffix("_error") for line in run.evaluations for key in line if key.endswith("_error"))
    names |= dict.fromkeys(name for name in HELD_OUT if any(name in line for line in run.evaluations))
    data = []
    for at, name in enumerate(names):
        known = [metrics for metrics in run.evaluations if metrics.get(name) is not None]
        errors = {"type": "data", "array": [metrics.get(f"{name}_error") or 0.0 for metrics in known], "thickness": 1}
        label = name.removeprefix("evaluation/").replace("_at_", "@")
        steps, values = [metrics["step"] for metrics in known], [metrics[name] for metrics in known]
        data.append(line(label, steps, values, LINES[at % len(LINES)], error_y=errors))
    return [Chart("evaluation", "Held-out prompts", data, {"xaxis": step_axis(run)}, height=320)] if data else []


def curves(*runs: tuple[str, Run], plots: Sequence[tuple[Sequence[str], str]] = CURVES) -> list[Chart]:
    """Draw small plots of named runs; of several runs the first metric of each plot. Leave out a metric that never moves,
    and of one run a metric that equals another one in its plot."""
    charts = []
    for keys, title in plots:
        known: dict[str, tuple[list[int], list[float]]] = {}
        for name, run in runs:
            for key in keys if len(runs) == 1 else keys[:1]:
                steps, values = run.points(key)
                is_repeated = len(runs) == 1 and any(values == other for _, other in known.values())
                if len(set(values)) > (len(values) > 1) and not is_repeated:
                    known[key if len(runs) == 1 else name] = steps, values
        if known:
            data = [line(name, *points, color) for (name, points), color in zip(known.items(), LINES, strict=False)]
            layout = {"xaxis": step_axis(runs[0][1]) | {"title": {}}, "showlegend": len(data) > 1}
            charts.append(Chart("curve-" + keys[0].replace("/", "-"), title, data, layout, height=220, wide=False))
    return charts


def phase_times(run: Run) -> list[Chart]:
    """Draw the seconds of each phase, step by step."""
    data = []
    for at, name in enumerate(phase_shares(run.recent())):  # in the order in which they run
        x, y = thin(*run.points(f"time/{name}"), MOST_BARS)
        color = GREY if name == UNACCOUNTED else LINES[at % len(LINES)]
        data.append({"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color},
                     "hovertemplate": f"{name}: %{{y:.3g}} s<extra>step %{{x}}</extra>"})  # fmt: skip
    layout = {"barmode": "stack", "bargap": 0.15, "xaxis": step_axis(run), "yaxis": SECONDS}
    note = "The first step also warms engines and kernels up; the answers above leave it out."
    return [Chart("phase-times", "Seconds of each phase, step by step", data, layout, note, 340)] if data else []


def ranks_time(run: Run) -> list[Chart]:
    """Draw one bar with the shares of the ranks' time: busy, and waiting by cause."""
    recent = run.recent()
    if "idle/share" not in recent:
        return []
    unaccounted, offload = recent.get("idle/unaccounted_share", 0.0), recent.get("offload/share", 0.0)
    others = recent["idle/share"] - sum(recent.get(key, 0.0) for key in IDLE)
    parts = [
        ("busy", 1 - recent["idle/share"] - unaccounted - offload, BUSY),
        ("moving memory", offload, GREY),
        *((f"waiting for {name}", recent.get(key, 0.0), CAUSES[key]) for key, name in IDLE.items()),
        ("waiting otherwise", others if others > 1e-3 else 0.0, WAIT_GREY),
        ("in no span", unaccounted, GREY),
    ]
    data = [
        {"type": "bar", "orientation": "h", "name": name, "x": [float(f"{100 * share:.5g}")], "y": [""],
         "marker": {"color": shade}, "text": [f"{share:.0%}" if share > 0.04 else ""], "textposition": "inside",
         "insidetextanchor": "middle", "hovertemplate": f"{name}: %{{x:.1f}} %<extra></extra>"}
        for name, share, shade in parts if share > 0
    ]  # fmt: skip
    layout = {"barmode": "stack", "xaxis": {"ticksuffix": " %", "range": [0, 100]}, "yaxis": {"visible": False}}
    return [Chart("ranks-time", "What all ranks did with their time", data, layout, height=170)]


def lanes(run: Run) -> list[Chart]:
    """Draw the busy share of engines and trainer, a lane each, step by step."""
    keys = "idle/share", "idle/engines/busy_share"
    known = [metrics for metrics in run.steps if all(is_number(metrics.get(key)) for key in keys)]
    if not known:
        return []
    steps = [metrics["step"] for metrics in known]
    shares = [[100 * (1 - metrics[keys[0]]) for metrics in known], [100 * metrics[keys[1]] for metrics in known]]
    data = [{"type": "heatmap", "name": "busy", "x": thin(steps, steps, MOST_BARS)[0], "y": ["trainer", "engines"],
             "z": [thin(steps, lane, MOST_BARS)[1] for lane in shares], "zmin": 0, "zmax": 100, "ygap": 6,
             "colorscale": [[0, WAIT_GREY], [1, BUSY]], "colorbar": {"ticksuffix": " %", "thickness": 10},
             "hovertemplate": "%{y} busy: %{z:.0f} %<extra>step %{x}</extra>"}]  # fmt: skip
    return [Chart("lanes", "Engines and trainer", data, {"xaxis": step_axis(run)}, starving(run), 190)]
