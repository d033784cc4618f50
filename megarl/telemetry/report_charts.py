"""A run's curves and bars, as what plotly.js draws: plain dictionaries, made without plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megarl.telemetry.report_answers import IDLE, phase_shares
from megarl.telemetry.report_findings import SYNC_PARTS
from megarl.telemetry.report_reading import Run, smooth

MOST_POINTS = 400  # of a curve
MOST_BARS = 120  # of steps side by side
# One colour a phase, in every chart; all can be told apart on white and on near black.
PHASES = {
    "rollout": "#4c8dd6", "reward": "#8f6fd8", "reward_model": "#b884dd", "actor_logprob": "#23a699",
    "reference_logprob": "#76c4b7", "critic_value": "#d8a93a", "advantage": "#a3ad55", "critic_update": "#e58a3c",
    "actor_update": "#db5461", "weight_sync": "#57ad5b", "plan": "#c48bb0", "agree": "#7f8fa6", "metrics": "#a08c7d",
    "checkpoint": "#6d7f5c", "evaluation": "#5f9ea0",
}  # fmt: skip
REST = "#9aa0a8"
WAIT = "#c3c8cf"
BUSY = "#23a699"
CAUSES = dict(zip(IDLE, ("#4c8dd6", "#8f6fd8", "#76c4b7", "#d8a93a", "#e58a3c", "#db5461", "#7f8fa6"), strict=True))
LINES = ("#4c8dd6", "#e58a3c", "#57ad5b", "#8f6fd8")
SECONDS: dict[str, Any] = {"title": {"text": "seconds"}}
# Curves beside the reward, where a run has them: figures of one plot, and its title.
CURVES = (
    (("actor/loss", "actor/policy_loss"), "actor loss"),
    (("critic/loss",), "critic loss"),
    (("actor/grad_norm", "critic/grad_norm"), "gradient norm"),
    (("actor/entropy",), "entropy, nats a token"),
    (("actor/kl", "actor/drift"), "KL, nats a token"),
    (("actor/clip_fraction", "critic/clip_fraction"), "clipped share of tokens"),
    (("rollout/completion_length_mean", "rollout/completion_length_max"), "completion length, tokens"),
    (("rollout/truncated_share",), "truncated share"),
    (("mismatch/logprob_mean",), "engine against trainer, log-probability"),
    (("actor/learning_rate", "critic/learning_rate"), "learning rate"),
)


@dataclass(frozen=True)
class Chart:
    """`data` and `layout` are plotly's; `note` says how to read it."""

    name: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 300
    wide: bool = True

    @property
    def figure(self) -> dict[str, Any]:
        return {"name": self.name, "data": self.data, "layout": {"height": self.height} | self.layout}


def color(phase: str) -> str:
    """Of a phase; grey for what is none."""
    return PHASES.get(phase, REST)


def thin(steps: Sequence[float], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """Means of neighbours, where there are more than `most` points; five digits are more than a screen shows."""
    count = min(most, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else [0]
    pairs = list(zip(edges, edges[1:], strict=False))
    middles = [steps[first] if last - first == 1 else fmean(steps[first:last]) for first, last in pairs]
    return middles, [rounded(fmean(values[first:last])) for first, last in pairs]


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def step_axis(run: Run) -> dict[str, Any]:
    """Whole numbers where there are few."""
    return {"title": {"text": "step"}} | ({"dtick": 1} if len(run.steps) <= 10 else {})


def line(name: str, steps: Sequence[float], values: Sequence[float], color: str, **style: Any) -> dict[str, Any]:
    """A curve."""
    x, y = thin(steps, values)
    form = {"type": "scatter", "mode": "lines+markers" if len(x) < 40 else "lines", "name": name, "x": x, "y": y}
    return form | {"line": {"color": color, "width": 2}, "marker": {"size": 5}} | style


def reward(run: Run) -> list[Chart]:
    """The mean reward of each step, and its mean over the last tenth of the steps so far made."""
    steps, values = run.rewards()
    if not values:
        return []
    over = max(3, len(values) // 10)
    data = [line("a step", steps, values, "#4c8dd6", opacity=0.45 if len(values) > 3 else 1)]
    if len(values) > 3:
        even = line(f"mean of {over} steps", steps, smooth(values, over), "#4c8dd6", mode="lines")
        data.append(even | {"line": {"color": "#4c8dd6", "width": 3}})
    return [Chart("reward", "Mean reward", data, {"xaxis": step_axis(run)}, height=320)]


def evaluation(run: Run) -> list[Chart]:
    """What the run is worth on held-out prompts, before the first step and from then on, with 95 % confidence intervals."""
    names = dict.fromkeys(key.removesuffix("_error") for line in run.evaluations for key in line if key.endswith("_error"))
    data = []
    for at, name in enumerate(names):
        known = [one for one in run.evaluations if one.get(name) is not None]
        errors = [one.get(f"{name}_error") or 0.0 for one in known]
        label = name.removeprefix("evaluation/").replace("_at_", "@")
        points = line(label, [one["step"] for one in known], [one[name] for one in known], LINES[at % len(LINES)])
        data.append(points | {"error_y": {"type": "data", "array": errors, "thickness": 1}})
    return [Chart("evaluation", "Held-out prompts", data, {"xaxis": step_axis(run)}, height=320)] if data else []


def curves(run: Run) -> list[Chart]:
    """Losses and what else moves while a policy learns, a small plot each. A figure that never moves, or says
    the same as its neighbour, is left out."""
    charts = []
    for keys, title in CURVES:
        known: list[tuple[str, list[int], list[float]]] = []
        for key in keys:
            steps, values = run.points(key)
            if len(set(values)) > (len(values) > 1) and all(values != other for _, _, other in known):
                known.append((key, steps, values))
        data = [line(key, steps, values, LINES[at]) for at, (key, steps, values) in enumerate(known)]
        if data:
            name = "curve-" + keys[0].replace("/", "-")
            layout = {"xaxis": step_axis(run) | {"title": {}}, "showlegend": len(data) > 1}
            charts.append(Chart(name, title, data, layout, height=220, wide=False))
    return charts


def phase_times(run: Run) -> list[Chart]:
    """Seconds of each phase, step by step."""
    recent = run.recent()
    if "time/step" not in recent:
        return []
    names = sorted(phase_shares(recent), key=lambda name: list(PHASES).index(name) if name in PHASES else len(PHASES))
    data = []
    for name in names:
        steps, values = run.points(f"time/{name}")
        x, y = thin(steps, values, MOST_BARS)
        data.append({"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color(name)},
                     "hovertemplate": f"{name}: %{{y:.3g}} s<extra>step %{{x}}</extra>"})  # fmt: skip
    layout = {"barmode": "stack", "bargap": 0.15, "xaxis": step_axis(run), "yaxis": SECONDS}
    note = "The first step also warms engines and kernels up; the answers above leave it out."
    return [Chart("phase-times", "Seconds of a step, by phase", data, layout, note if len(run.steps) > 3 else "", 340)]


def ranks_time(run: Run) -> list[Chart]:
    """One bar: in which part of their time ranks were busy, and for whom they waited."""
    recent = run.recent()
    if "idle/share" not in recent:
        return []
    rest = recent.get("idle/unaccounted_share", 0.0)
    moves = recent.get("offload/share", 0.0)
    parts = [("busy", 1 - recent["idle/share"] - rest - moves, BUSY), ("moving memory", moves, REST)]
    parts += [(f"waiting for {name}", recent[key], CAUSES[key]) for key, name in IDLE.items() if key in recent]
    others = recent["idle/share"] - sum(recent[key] for key in IDLE if key in recent)
    parts.append(("waiting otherwise", others if others > 1e-3 else 0.0, WAIT))
    parts.append(("in no span", rest, REST))
    data = [
        {"type": "bar", "orientation": "h", "name": name, "x": [rounded(100 * share)], "y": [""], "marker": {"color": shade},
         "text": [f"{share:.0%}" if share > 0.04 else ""], "textposition": "inside", "insidetextanchor": "middle",
         "hovertemplate": f"{name}: %{{x:.1f}} %<extra></extra>"}
        for name, share, shade in parts if share > 0
    ]  # fmt: skip
    layout = {"barmode": "stack", "xaxis": {"ticksuffix": " %", "range": [0, 100]}, "yaxis": {"visible": False}}
    return [Chart("ranks-time", "What all ranks did with their time", data, layout, height=170)]


def useful_shares(run: Run) -> list[Chart]:
    """Of the slots that went through a model, those that were tokens; and what the plans lose otherwise."""
    keys = [key for key in run.keys if key.startswith("schedule/") and key.endswith("/useful_share")]
    data = []
    for key in keys:
        steps, values = run.points(key)
        phase = key.split("/")[1]
        if values:
            data.append(line(phase, steps, [100 * value for value in values], color(phase)))
    layout = {"xaxis": step_axis(run), "yaxis": {"ticksuffix": " %", "rangemode": "tozero"}}
    return [Chart("useful-share", "Useful tokens of the batches", data, layout, height=220)] if data else []


def sync_split(run: Run) -> list[Chart]:
    """The parts of a weight sync as means over the last steps."""
    recent = run.recent()
    parts = [(name, recent[key]) for key, name, _ in SYNC_PARTS if key in recent]
    if not parts:
        return []
    total = recent.get("sync/total_s")
    names, values = [name for name, _ in parts], [rounded(value) for _, value in parts]
    data = [{"type": "bar", "orientation": "h", "x": values, "y": names, "marker": {"color": PHASES["weight_sync"]},
             "text": [_short(value) for value in values], "textposition": "auto",
             "hovertemplate": "%{y}: %{x:.3g} s<extra></extra>"}]  # fmt: skip
    layout = {"xaxis": SECONDS, "yaxis": {"autorange": "reversed"}, "showlegend": False}
    note = "Parts overlap: transfer is all of the receiving, apply in it; ranks pack one bucket while workers apply another."
    if total:
        note += f" From begin to end a sync takes {_short(total)}."
    return [Chart("sync-split", "Parts of a weight sync", data, layout, note, 280)]


def _short(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"
