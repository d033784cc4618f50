"""The page of two runs: which learns better, which is faster and by which phase, and what differs between their recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, takewhile
from statistics import fmean
from typing import Any

from megarl.telemetry.report_answers import Answer, seconds
from megarl.telemetry.report_charts import CURVES, Chart, line
from megarl.telemetry.report_page import page, plots, table
from megarl.telemetry.report_reading import Run, smooth

A, B = "#4c8dd6", "#e58a3c"
# Recipe keys that name a run and do not make it another one.
NAMES = ("run.name", "run.dir")
MISSING = "–"
EXTENTS = {"steps": "steps", "samples": "samples", "seconds": "seconds"}


@dataclass(frozen=True)
class Curve:
    """The mean reward over steps, samples or seconds of training, which are ascending. Samples are all that were sampled, as
    the rewards are of all of them."""

    over: list[float]
    rewards: list[float]

    def until(self, extent: float) -> list[float]:
        """Rewards of the steps that were over by then."""
        return self.rewards[: sum(1 for _ in takewhile(lambda at: at <= extent * (1 + 1e-9), self.over))]


def compare_page(a: Run, b: Run) -> str:
    """The page as HTML. Raises ValueError where plotly is not installed."""
    names = _labels(a, b)
    reward = reward_charts(a, b, names)
    others = curve_charts(a, b, names)
    phases = phase_chart(a, b, names)
    sections = [
        ("Mean reward", plots(reward)),
        ("Other curves", plots(others)),
        ("Where the time goes", plots(phases)),
        ("What the recipes say unlike", recipe_table(a, b, names)),
        ("Figures side by side", figure_table(a, b, names)),
    ]
    subtitle = f"A is {a.path}, {len(a.steps)} steps; B is {b.path}, {len(b.steps)} steps"
    title = f"{names[0]} against {names[1]}"
    answers = [better(a, b, names), faster(a, b, names), differs(a, b)]
    return page(title, subtitle, answers, sections, [*reward, *others, *phases])


def _labels(a: Run, b: Run) -> tuple[str, str]:
    return (a.name, b.name) if a.name != b.name else (f"A: {a.name}", f"B: {b.name}")


def reward_curve(run: Run, over: str) -> Curve | None:
    """`over` one of EXTENTS; None where the run does not say it. Seconds are those of the steps, without starts."""
    steps, rewards = run.rewards()
    if not rewards:
        return None
    if over == "steps":
        return Curve([float(step) for step in steps], rewards)
    if over == "samples":
        sampled = run.sampled()
        return None if sampled is None else Curve([float(sampled[step]) for step in steps], rewards)
    if not all(isinstance(line.get("time/step"), int | float) for line in run.steps):
        return None
    ends = dict(zip((line["step"] for line in run.steps), accumulate(line["time/step"] for line in run.steps), strict=True))
    return Curve([ends[step] for step in steps], rewards)


def better(a: Run, b: Run, names: tuple[str, str]) -> Answer:
    """Which has the higher reward after as many steps, samples and seconds, against the noise of each."""
    question, says, won = "Which learns better?", [], []
    for over, unit in EXTENTS.items():
        of_a, of_b = reward_curve(a, over), reward_curve(b, over)
        if of_a is None or of_b is None:
            continue
        extent = min(of_a.over[-1], of_b.over[-1])
        rewards = [curve.until(extent) for curve in (of_a, of_b)]
        if not all(rewards):
            continue
        (first, noise_a), (second, noise_b) = map(_end, rewards)
        noise = (noise_a**2 + noise_b**2) ** 0.5
        apart = abs(second - first) > noise
        won.append((0 if first > second else 1) if apart else None)
        end = "." if apart else ", within the noise."
        says.append(f"After {extent:,.0f} {unit}: {first:.3f} against {second:.3f}{end}")
    if not says:
        return Answer(question, "Unknown", ["The runs have no steps that can be compared."], "open")
    if all(one is None for one in won):
        return Answer(question, "Neither, so far", says, "open")
    decided = {one for one in won if one is not None}
    if len(decided) == 1:
        return Answer(question, names[decided.pop()], says, "good")
    return Answer(question, "It depends on what is equal", says, "open")


def _end(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean of the last fifth, and twice its standard error, from differences of neighbours."""
    count = max(1, len(rewards) // 5)
    pairs = list(zip(rewards, rewards[1:], strict=False))
    variance = fmean((after - before) ** 2 for before, after in pairs) / 2 if pairs else 0.0
    return fmean(rewards[-count:]), 2 * (variance / count) ** 0.5


def faster(a: Run, b: Run, names: tuple[str, str]) -> Answer:
    """By seconds a step and by tokens a second, with the phase that makes most of the difference."""
    question, first, second = "Which is faster?", a.recent(), b.recent()
    if "time/step" not in first or "time/step" not in second:
        return Answer(question, "Unknown", ["A run has no time of its steps."], "open")
    step_a, step_b = first["time/step"], second["time/step"]
    says = [f"A step takes {seconds(step_a)} against {seconds(step_b)}."]
    if step_a != step_b:
        phases = {key for key in (*first, *second) if key.startswith("time/") and key != "time/step"}
        gains = {key: second.get(key, 0.0) - first.get(key, 0.0) for key in sorted(phases)}
        main = max(gains, key=lambda key: gains[key] * (1 if step_b > step_a else -1))
        before, after = (seconds(figures.get(main, 0.0)) for figures in (first, second))
        says.append(f"Most of the difference is {main.removeprefix('time/')}: {before} against {after}.")
    rates = [_tokens(figures) for figures in (first, second)]
    if rates[0] and rates[1]:
        says.append(f"{rates[0]:,.0f} against {rates[1]:,.0f} tokens a second.")
        ratio = rates[1] / rates[0]
    else:
        ratio = step_a / step_b
    if 0.97 < ratio < 1.03:
        return Answer(question, "Both alike", says, "open")
    winner, times = (names[1], ratio) if ratio > 1 else (names[0], 1 / ratio)
    return Answer(question, f"{winner}, {times:.2f} ×", says, "good")


def _tokens(figures: dict[str, float]) -> float:
    return (figures.get("tokens/completion", 0.0) + figures.get("tokens/prompt", 0.0)) / figures["time/step"]


def differs(a: Run, b: Run) -> Answer:
    """How many keys of the recipes are unlike, and the first of them."""
    question = "What did I change?"
    if not a.recipe or not b.recipe:
        return Answer(question, "Unknown", ["A run directory has no recipe.yaml."], "open")
    found = differences(a.recipe, b.recipe)
    if not found:
        return Answer(question, "Nothing", ["Their recipes are the same but for the run's name."], "open")
    says = [f"`{key}`: {_short(before)} against {_short(after)}." for key, before, after in found[:4]]
    if len(found) > 4:
        says.append(f"{len(found) - 4} more below.")
    return Answer(question, f"{len(found)} key{'s' * (len(found) > 1)}", says, "open")


def differences(a: Any, b: Any, under: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted keys with unlike values, in A's order; MISSING where one has none."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b or under in NAMES else [(under, a, b)]
    found = []
    for key in dict.fromkeys([*a, *b]):
        found += differences(a.get(key, MISSING), b.get(key, MISSING), f"{under}.{key}" if under else str(key))
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def reward_charts(a: Run, b: Run, names: tuple[str, str]) -> list[Chart]:
    """Smoothed over a tenth of each run's steps."""
    charts = []
    for over, unit in EXTENTS.items():
        curves = [reward_curve(run, over) for run in (a, b)]
        data = []
        for curve, name, color in zip(curves, names, (A, B), strict=True):
            if curve is not None:
                even = smooth(curve.rewards, max(1, len(curve.rewards) // 10))
                data.append(line(escape(name), curve.over, even, color))
        if len(data) == 2:
            charts.append(Chart(f"reward-{over}", f"Mean reward, over {unit}", data, height=280, wide=over == "steps"))
    return charts


def curve_charts(a: Run, b: Run, names: tuple[str, str]) -> list[Chart]:
    """The first figure of each plot of one run's page, of both runs."""
    charts = []
    for (key, *_), title in CURVES:
        data = []
        for run, name, color in zip((a, b), names, (A, B), strict=True):
            steps, values = run.points(key)
            if len(set(values)) > 1:
                data.append(line(escape(name), steps, values, color))
        if data:
            charts.append(Chart("curve-" + key.replace("/", "-"), title, data, {"showlegend": True}, height=230, wide=False))
    return charts


def phase_chart(a: Run, b: Run, names: tuple[str, str]) -> list[Chart]:
    """Seconds of each phase of both, longest first."""
    first, second = a.recent(), b.recent()
    keys = {key for key in (*first, *second) if key.startswith("time/") and key != "time/step"}
    longest = sorted(keys, key=lambda key: -max(first.get(key, 0.0), second.get(key, 0.0)))
    if not longest:
        return []
    data: list[dict[str, Any]] = [
        {"type": "bar", "name": escape(name), "x": [escape(key.removeprefix("time/")) for key in longest],
         "y": [figures.get(key, 0.0) for key in longest], "marker": {"color": color},
         "hovertemplate": "%{x}: %{y:.3g} s<extra></extra>"}
        for name, figures, color in zip(names, (first, second), (A, B), strict=True)
    ]  # fmt: skip
    layout = {"barmode": "group", "yaxis": {"title": {"text": "seconds"}}}
    return [Chart("phases", "Seconds of each phase, mean of the last steps", data, layout, height=360)]


def recipe_table(a: Run, b: Run, names: tuple[str, str]) -> str:
    rows = [
        (f"<code>{escape(key)}</code>", escape(str(before)), escape(str(after)))
        for key, before, after in differences(a.recipe, b.recipe)
    ]
    return table(("key", escape(names[0]), escape(names[1])), rows) if a.recipe and b.recipe else ""


def figure_table(a: Run, b: Run, names: tuple[str, str]) -> str:
    """Figures that both have, as means over the last steps; those that are alike within 2 % are folded away."""
    first, second = a.recent(), b.recent()
    both = [key for key in first if key in second]
    heads = ("figure", escape(names[0]), escape(names[1]), "ratio")

    def rows(wanted: Callable[[str], bool]) -> list[tuple[str, ...]]:
        return [
            (f"<code>{escape(key)}</code>", f"{first[key]:.4g}", f"{second[key]:.4g}", _ratio(first[key], second[key]))
            for key in both if wanted(key)
        ]  # fmt: skip

    def alike(key: str) -> bool:
        return abs(second[key] - first[key]) <= 0.02 * max(abs(first[key]), abs(second[key]))

    same = table(heads, rows(alike), (1, 2, 3))
    folded = f"<details><summary>Figures that are alike within 2 %</summary>{same}</details>" if same else ""
    note = "Means over the last steps of each run."
    return table(heads, rows(lambda key: not alike(key)), (1, 2, 3), note) + folded


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.2f} ×" if first > 0 and second >= 0 else MISSING
