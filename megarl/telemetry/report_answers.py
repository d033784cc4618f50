"""The three answers a report begins with: is it learning, where does the time go, what should be changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from megarl.telemetry.report_findings import SYNC_PARTS, Finding
from megarl.telemetry.report_reading import Run, smooth

FEWEST = 4  # steps that can say whether a run learns
IDLE = {
    "idle/engines_share": "rollout engines", "idle/rewards_share": "rewards", "idle/data_share": "the tokens of a step",
    "idle/layers_share": "other ranks inside of layers", "idle/pipeline_share": "other pipeline stages",
    "idle/gradients_share": "reduced gradients", "idle/ranks_share": "other ranks",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """`verdict` is a word or two, `says` sentences with numbers and causes. `tone`: good, bad, or open."""

    question: str
    verdict: str
    says: list[str]
    tone: str


@dataclass(frozen=True)
class Trend:
    """How a figure moved from the first third of its steps to the last; `noise` is twice the standard error of that, from
    the differences of neighbouring steps, in which a trend hardly shows."""

    first: float
    last: float
    ends: int
    noise: float

    @property
    def change(self) -> float:
        """Last less first."""
        return self.last - self.first

    @classmethod
    def of(cls, values: Sequence[float]) -> Trend:
        ends = max(1, len(values) // 3)
        pairs = zip(values, values[1:], strict=False)
        variance = fmean((after - before) ** 2 for before, after in pairs) / 2 if len(values) > 1 else 0.0
        return cls(fmean(values[:ends]), fmean(values[-ends:]), ends, 2 * sqrt(2 * variance / ends))


def head(run: Run, findings: Sequence[Finding]) -> list[Answer]:
    """The three answers, in the order in which they are asked."""
    return [learning(run, findings), time(run), change(findings)]


def learning(run: Run, findings: Sequence[Finding]) -> Answer:
    """From the mean reward, against its noise."""
    question, (_, values) = "Is it learning?", run.rewards()
    if len(values) < FEWEST:
        say = f"{len(values)} steps have a mean reward so far; {FEWEST} or more can say something."
        return Answer(question, "Too early", [say], "open")
    trend = Trend.of(values)
    first, last = ("first step", "last") if trend.ends == 1 else (f"first {trend.ends} steps", f"last {trend.ends}")
    says = (
        f"Mean reward went from {trend.first:.3f} in the {first} to {trend.last:.3f} in the {last}: {trend.change:+.3f}, "
        f"where chance alone gives about ±{trend.noise:.3f}."
    )
    causes = [f"{_sentence(finding.says)}." for finding in findings if finding.kind in ("fault", "learning")][:2]
    if abs(trend.change) <= trend.noise or trend.change == 0.0:
        return Answer(question, "Not so far", [says, *causes], "open")
    if trend.change < 0:
        return Answer(question, "No: it gets worse", [says, *causes], "bad")
    best = max(smooth(values, trend.ends)[trend.ends - 1 :])
    if trend.last < trend.first + 0.5 * (best - trend.first):
        fell = f"It was at {best:.3f} once, and has lost more than half of what it gained."
        return Answer(question, "It did, and fell back", [says, fell, *causes], "bad")
    return Answer(question, "Yes", [says], "good")


def time(run: Run) -> Answer:
    """The longest phases, what ranks wait for, and what the longest is made of where that is known."""
    question, recent = "Where does the time go?", run.recent()
    step = recent.get("time/step")
    if not step:
        return Answer(question, "Unknown", ["No step has its time."], "open")
    shares = sorted(phase_shares(recent).items(), key=lambda part: -part[1])
    (longest, share), rest = shares[0], shares[1:3]
    others = "".join(f", {name} {part:.0%}" for name, part in rest)
    says = [f"A step takes {seconds(step)}: {longest} {share:.0%}{others}."]
    waits = {name: recent[key] for key, name in IDLE.items() if key in recent}
    if "idle/share" in recent and waits:
        whom = max(waits, key=waits.__getitem__)
        cause = f", most of it for {whom} ({waits[whom]:.0%})" if recent["idle/share"] >= 0.01 else ""
        says.append(f"Ranks wait {recent['idle/share']:.0%} of their time{cause}.")
    if longest == "weight_sync":
        parts = {name: recent[key] for key, name, _ in SYNC_PARTS if key in recent}
        if parts:
            part = max(parts, key=parts.__getitem__)
            says.append(f"The longest part of the sync is {part}, {seconds(parts[part])}.")
    rate = recent.get("tokens/per_s", (recent.get("tokens/completion", 0.0) + recent.get("tokens/prompt", 0.0)) / step)
    if rate:
        utilisation = recent.get(f"mfu/{longest}")
        says.append(f"{rate:,.0f} tokens a second." + (f" MFU of {longest}: {utilisation:.0%}." if utilisation else ""))
    return Answer(question, f"{share:.0%} in {longest}", says, "bad" if recent.get("idle/share", 0.0) > 0.4 else "open")


def phase_shares(figures: Mapping[str, float]) -> dict[str, float]:
    """The part of a step that each phase takes, with what is between phases."""
    step = figures["time/step"]
    return {key.removeprefix("time/"): value / step for key, value in figures.items()
            if key.startswith("time/") and key != "time/step"}  # fmt: skip


def change(findings: Sequence[Finding]) -> Answer:
    """What to do about the worst findings."""
    question = "What should I change?"
    if not findings:
        return Answer(question, "Nothing stands out", ["No figure is beyond its limit."], "good")
    says = [f"{_sentence(finding.says)}: {finding.do.split(';')[0]}." for finding in findings[:3]]
    if len(findings) > 3:
        says.append(f"{len(findings) - 3} more below.")
    faults = sum(finding.kind == "fault" for finding in findings)
    verdict = f"{faults} fault{'s' * (faults > 1)} first" if faults else f"{len(findings)} thing{'s' * (len(findings) > 1)}"
    return Answer(question, verdict, says, "bad" if faults else "open")


def seconds(value: float) -> str:
    """A time for a sentence."""
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
