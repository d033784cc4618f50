"""Problems that a run's metrics show, what to do about them, and the three answers at the top of a report."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Literal

from megarl.telemetry.exit_status import FAILED, NAMES, UNKNOWN
from megarl.telemetry.metrics_file import duration
from megarl.telemetry.report_run import Run, smooth

Kind = Literal["fault", "learning", "time"]
# Faults first: the metrics of a run that computes wrongly say nothing about learning or time.
KINDS: tuple[Kind, ...] = ("fault", "learning", "time")
STARVES = 0.1  # share of the time that engines or trainer wait for the other
LEAST_LOST = 0.03  # no warning for a smaller lost part of a step, however bad the phase
SYNC_LIMIT, STRAGGLER_LIMIT = 0.15, 0.05  # parts of a step
FEWEST_STEPS = 4  # before a report judges whether a run learns
# Placeholders in the table's metrics, and their patterns.
PLACEHOLDERS = {"<phase>": "([a-z_]+)", "<role>": "(actor|critic)"}
# For whom ranks wait, in words.
IDLE = {
    "idle/engines_share": "rollout engines", "idle/rewards_share": "rewards", "idle/data_share": "the tokens of a step",
    "idle/layers_share": "other ranks inside of layers", "idle/pipeline_share": "other pipeline stages",
    "idle/gradients_share": "reduced gradients", "idle/ranks_share": "other ranks",
}  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """A row of the table below, which docs/reading-a-run.md shows too (tests/telemetry/test_report.py).

    `metric` is a key of metrics.jsonl, with `<phase>` or `<role>` as placeholders; `says` may contain `{value}` and
    `{phase}`; `do` is what to change. A value above the limit is a problem, or with `below` a value below it. The value is
    the mean over the last steps, or with `any_step` the largest one. For advice on time, `lost` turns a value into the lost
    part of the phase, or of the step where the metric names no phase; None where the value is that part.
    """

    metric: str
    limit: float
    kind: Kind
    says: str
    do: str
    lost: Callable[[float], float] | None = None
    any_step: bool = False
    below: bool = False
    form: str = ".0%"


ADVICE = (
    Advice("idle/engines_share", 0.15, "time", "ranks wait {value} of their time for rollout engines",
           "more `rollout.engines`, a larger `max_concurrent`, a smaller `max_new_tokens`"),
    Advice("idle/rewards_share", 0.05, "time", "ranks wait {value} of their time for rewards",
           "fewer `phases.reward.sequences` a task: more tasks run at a time"),
    Advice("idle/data_share", 0.05, "time", "ranks wait {value} of their time for the tokens of a step",
           "a faster network between the nodes"),
    Advice("idle/layers_share", 0.20, "time", "ranks wait {value} of their time for each other inside of layers",
           "a smaller `tensor`, `context` or `expert`; on CPUs: not more ranks than cores"),
    Advice("idle/pipeline_share", 0.10, "time", "pipeline stages wait {value} of their time for each other",
           "more micro-batches a mini-batch, a smaller `pipeline`, `virtual_pipeline`; `bubble_share` of the phase is what "
           "the plan expects"),
    Advice("idle/gradients_share", 0.08, "time", "ranks spend {value} of their time on reducing gradients and waiting there",
           "`imbalance` of the phase: a `max_tokens` rule balances work better than `sequences`; `overlap_gradients`"),
    Advice("idle/ranks_share", 0.10, "time", "ranks wait {value} of their time for other ranks outside the pipeline",
           "`idle/straggler_rank` says which: always one is a slow device or link, another each time uneven work"),
    Advice("idle/unaccounted_share", 0.10, "time", "{value} of the ranks' time is in no span",
           "`run.trace: spans`, and look at the phase that is longer than its spans"),
    Advice("schedule/<phase>/useful_share", 0.10, "time", "{value} of the slots of {phase} are padding",
           "a `max_tokens` micro-batch in place of `sequences`, and one that the lengths fill: `megarl check --plan`",
           lambda share: 1 - share),
    Advice("schedule/<phase>/imbalance", 0.10, "time", "ranks idle {value} of {phase} for the one with the most work",
           "a `max_tokens` micro-batch: the balancer needs smaller pieces", lambda ratio: 1 - 1 / ratio),
    Advice("rollout/truncated_share", 0.30, "learning", "{value} of the completions were cut at `rollout.max_new_tokens`",
           "a larger `rollout.max_new_tokens`, or a prompt that asks for short answers"),
    Advice("reward/deviation", 1e-6, "learning",
           "all completions have the same reward: there is nothing to learn from",
           "easier or harder prompts, or a reward with more than one value", below=True, form=".6f"),
    Advice("reward/num_masked", 0, "learning", "up to {value} rewards a step were masked: no verifier could judge them",
           "the reward's own errors in the log; a larger `phases.reward.timeout_s` where `reward/num_timeouts` counts them",
           any_step=True, form=".0f"),
    Advice("<role>/skipped_updates", 0, "learning", "up to {value} updates a step of the {phase} were skipped: overflow",
           "`trainer.precision: bf16`, or a smaller learning rate", any_step=True, form=".0f"),
    Advice("finite/skipped_updates", 0, "fault",
           "up to {value} updates a step were left out: a loss or gradient was NaN or infinite",
           "a lower learning rate, a smaller `grad_clip`; under fp16 bf16 or fp32", any_step=True, form=".0f"),
    Advice("finite/masked_samples", 0, "learning", "up to {value} samples a step count for nothing: NaN or infinite",
           "look at the reward, or at the samples that the warning names", any_step=True, form=".0f"),
    Advice("<role>/clip_fraction", 0.30, "learning", "{value} of the {phase}'s tokens are clipped",
           "a smaller `optimizer.lr`, or fewer updates a batch: a larger `mini_batch`, fewer `epochs`"),
    Advice("actor/kl", 0.30, "learning", "the policy is {value} nats a token away from the reference",
           "a larger `algorithm.kl.coefficient`, or a smaller `actor.optimizer.lr`", form=".2f"),
    Advice("mismatch/logprob_mean", 0.05, "fault", "engine and trainer disagree by {value} on a token's log-probability",
           "the same `rollout.precision` as the trainer's", form=".3f"),
    Advice("staleness/0/logprob_mean", 0.05, "fault",
           "engine and trainer disagree by {value} on the log-probability of a token that the same weights sampled",
           "the same `rollout.precision` as the trainer's", form=".3f"),
    Advice("mismatch/effective_sample_share", 0.5, "learning",
           "the weights of the correction leave {value} of the samples in effect",
           "a smaller `rollout.max_staleness` or `actor.optimizer.lr`; `algorithm.mismatch` with a smaller `cap`",
           below=True),
    Advice("actor/ratio_drift_exceeded", 0, "fault", "before the first update the policy ratio was not 1",
           "micro-batches of `actor_logprob` and `actor_update` more alike in size, or a finer `trainer.precision`",
           any_step=True, form=".0f"),
    Advice("rollout/num_sampled_again", 0, "fault",
           "tokens were lost with a node: groups or turns were sampled again {value} times",
           "the log of the node that had the tokens", any_step=True, form=".0f"),
    Advice("rollout/num_restarts", 0, "fault", "{value} rollout engines died and were started again",
           "the engine's last words in the log; a smaller `rollout.memory_utilization` where memory ran out",
           any_step=True, form=".0f"),
    Advice("rollout/num_lost_engines", 0, "fault", "{value} rollout engines died too often; the run went on without them",
           "the log of their nodes, and a resume once they are back: it starts all engines", any_step=True, form=".0f"),
    Advice("sync/attempts", 1, "fault", "a weight sync took {value} attempts",
           "the log says which engine refused its bytes; `weight_sync.retries` bounds how often",
           any_step=True, form=".0f"),
)  # fmt: skip

# Parts of a sync in their order: metric, name, and what to do where the part is the longest.
SYNC_PARTS = (
    ("sync/pause_s", "pause", "`weight_sync.in_flight: keep` or `abort`: the sync then does not wait for completions"),
    ("sync/pack_s", "pack", "more trainer ranks to pack on, or a larger `weight_sync.bucket_bytes`"),
    ("sync/transfer_s", "transfer",
     "`weight_sync.transport: mapped` on one host; over a slow network `wire: delta`"),
    ("sync/apply_s", "apply", "more workers an engine (`rollout.tensor`): each applies its own part"),
    ("sync/verify_s", "verify",
     "more cores for the engines; with `weight_sync.transport: mapped` for trainer ranks too: both compute checksums"),
    ("sync/repack_s", "repack", "nothing of megarl's: vLLM brings the weights into the form of its kernels"),
    ("sync/resume_s", "resume", "a smaller `phases.rollout.max_concurrent`, where completions are kept in flight"),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A problem of a run. `lost` is the part of a step that it costs, where it costs time."""

    metric: str
    kind: Kind
    says: str
    do: str
    lost: float = 0.0


def find(run: Run) -> list[Finding]:
    """Return the problems of a run, worst first."""
    recent = run.recent()
    worst = {key: max(values) for key in run.keys if (values := run.points(key)[1])}
    findings = []
    for advice in ADVICE:
        if advice.metric == "mismatch/logprob_mean" and run.at("rollout.max_staleness"):
            continue  # what the policy learned since adds to it; the row of tokens without staleness judges
        pattern = re.escape(advice.metric)
        for placeholder, part in PLACEHOLDERS.items():
            pattern = pattern.replace(re.escape(placeholder), part)
        for key, value in (worst if advice.any_step else recent).items():
            if match := re.fullmatch(pattern, key):
                findings += _judge(advice, key, match[1] if match.groups() else "", value, recent)
    findings += _sync(recent) + _straggler(run, recent)
    nulls = {key: steps for key in run.keys if (steps := [line["step"] for line in run.steps if line.get(key, 0) is None])}
    for key, steps in list(nulls.items())[:3]:
        says = f"{key} was NaN or infinite in {len(steps)} steps, first in step {steps[0]}"
        do = "a smaller learning rate, `trainer.precision: bf16` or `fp32`; the log names the phase and the samples"
        findings.append(Finding(key, "fault", says, do))
    if run.starts:
        says = " ".join(part.strip() for part in run.starts)
        is_fault = any(f" x {how}:" in says for how in (NAMES[FAILED], UNKNOWN))
        do = "the reason of each end; a smaller `run.checkpoint_every` bounds the steps that are repeated"
        findings.append(Finding("starts.jsonl", "fault" if is_fault else "time", says, do))
    return sorted(findings, key=lambda finding: (KINDS.index(finding.kind), -finding.lost))


def _judge(advice: Advice, key: str, phase: str, value: float, recent: Mapping[str, float]) -> list[Finding]:
    lost = 0.0
    if advice.kind == "time":
        value = lost = value if advice.lost is None else advice.lost(value)
        if phase:
            lost *= recent.get(f"time/{phase}", 0.0) / recent.get("time/step", 1.0)
        if lost < LEAST_LOST:
            return []
    if value == advice.limit or (value < advice.limit) != advice.below:
        return []
    says = advice.says.format(value=format(value, advice.form), phase=phase)
    return [Finding(key, advice.kind, says, advice.do, lost)]


def _sync(recent: Mapping[str, float]) -> list[Finding]:
    share = recent.get("time/weight_sync", 0.0) / recent.get("time/step", 1.0)
    parts = [(recent[key], name, do) for key, name, do in SYNC_PARTS if key in recent]
    if share <= SYNC_LIMIT or not parts:
        return []
    longest_s, name, do = max(parts)
    says = f"weight sync takes {share:.0%} of a step, and {name} is its longest part ({duration(longest_s)})"
    return [Finding("time/weight_sync", "time", says, do, share)]


def _straggler(run: Run, recent: Mapping[str, float]) -> list[Finding]:
    lost = recent.get("idle/straggler_s", 0.0) / recent.get("time/step", 1.0)
    ranks = [int(rank) for rank in run.points("idle/straggler_rank")[1]][-10:]
    if lost < STRAGGLER_LIMIT or not ranks:
        return []
    most_frequent = max(set(ranks), key=ranks.count)
    if ranks.count(most_frequent) > len(ranks) / 2:
        says = f"the others wait for rank {most_frequent}, {lost:.0%} of a step more than it waits for them"
        do = "look at that rank's device, host and link: `megarl doctor`"
        if (run.at("actor.layout.pipeline") or 1) > 1:
            do = f"fewer layers for its pipeline stage, by `actor.layout.stages`; if that is not it, {do}"
    else:
        says = f"ranks wait {lost:.0%} of a step for one of them, each time another one"
        do = "a `max_tokens` micro-batch, which balances work better"
    return [Finding("idle/straggler_s", "time", says, do, lost)]


# The three answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """`verdict` is a word or two, `says` are sentences with numbers and causes, `tone` is good, bad or open."""

    question: str
    verdict: str
    says: list[str]
    tone: str


def answers(run: Run, findings: Sequence[Finding]) -> list[Answer]:
    """Return the three answers: is it learning, where does the time go, what to change."""
    return [learning(run, findings), time(run), change(findings)]


def variance(values: Sequence[float]) -> float:
    """Return the variance of a value around a slow trend, from the differences of neighbors."""
    pairs = list(zip(values, values[1:], strict=False))
    return fmean((after - before) ** 2 for before, after in pairs) / 2 if pairs else 0.0


def learning(run: Run, findings: Sequence[Finding]) -> Answer:
    """Judge the change of the mean reward against its noise."""
    question, (_, values) = "Is it learning?", run.rewards()
    if len(values) < FEWEST_STEPS:
        says = f"{len(values)} steps have a {run.goal} so far; {FEWEST_STEPS} or more can say something."
        return Answer(question, "Too early", [says], "open")
    # From the first third to the last; the noise is twice the standard error of the change, from differences of neighboring
    # steps, where a trend hardly shows.
    ends = len(values) // 3
    before, after = fmean(values[:ends]), fmean(values[-ends:])
    gain, noise = after - before, 2 * sqrt(2 * variance(values) / ends)
    first, last = ("first step", "last") if ends == 1 else (f"first {ends} steps", f"last {ends}")
    says = (
        f"{capitalized(run.goal)} went from {before:.3f} in the {first} to {after:.3f} in the {last}: "
        f"{gain:+.3f}, where chance alone gives about ±{noise:.3f}."
    )
    causes = [f"{capitalized(finding.says)}." for finding in findings if finding.kind in ("fault", "learning")][:2]
    if abs(gain) <= noise or gain == 0.0:
        return Answer(question, "Not so far", [says, *causes], "open")
    if gain < 0:
        return Answer(question, "No: it gets worse", [says, *causes], "bad")
    best = max(smooth(values, ends)[ends - 1 :])
    if after < before + 0.5 * (best - before):
        fell = f"It was at {best:.3f} once, and has lost more than half of what it gained."
        return Answer(question, "It did, and fell back", [says, fell, *causes], "bad")
    return Answer(question, "Yes", [says], "good")


def time(run: Run) -> Answer:
    """Name the longest phases, and for whom ranks wait."""
    question, recent = "Where does the time go?", run.recent()
    shares = sorted(phase_shares(recent).items(), key=lambda part: -part[1])
    if not shares:
        return Answer(question, "Unknown", ["No step has its time."], "open")
    longest, share = shares[0]
    phases = ", ".join(f"{name} {part:.0%}" for name, part in shares[:3])
    says = [f"A step takes {duration(recent['time/step'])}: {phases}."]
    waits = {name: recent[key] for key, name in IDLE.items() if key in recent}
    if "idle/share" in recent and waits:
        whom = max(waits, key=waits.__getitem__)
        cause = f", most of it for {whom} ({waits[whom]:.0%})" if recent["idle/share"] >= 0.01 else ""
        says.append(f"Ranks wait {recent['idle/share']:.0%} of their time{cause}.")
    if run.at("rollout.max_staleness") and (sentence := starving(run)):
        says.append(sentence)
    if rate := recent.get("tokens/per_s"):
        mfu = recent.get(f"mfu/{longest}")
        says.append(f"{rate:,.0f} tokens a second." + (f" MFU of {longest}: {mfu:.0%}." if mfu else ""))
    return Answer(question, f"{share:.0%} in {longest}", says, "bad" if recent.get("idle/share", 0.0) > 0.4 else "open")


def totals(run: Run) -> list[str]:
    """Return a run's totals over all its starts, and where the time of its last steps went, as lines of text."""
    steps, _ = run.points("time/step")
    seconds, start_s, useful = (sum(run.points(key)[1]) for key in ("time/step", "run/start_s", "tokens/useful"))
    if not steps:
        return []
    text = f"{len(steps)} steps in {duration(seconds)}" + (f", and {duration(start_s)} to start" if start_s else "")
    text += f"; {useful / seconds:,.0f} useful tokens a second, {3600 * useful / seconds:,.0f} an hour" if useful else ""
    return [text, *time(run).says]


def starving(run: Run) -> str:
    """Return which of engines and trainer waits for the other, as a sentence; empty without engines or a clock."""
    recent = run.recent()
    if "idle/engines/busy_share" not in recent or "idle/share" not in recent:
        return ""
    trainer = recent.get("idle/engines_share", 0.0)
    engines = 1 - recent["idle/engines/busy_share"] - recent.get("idle/engines/weight_sync_share", 0.0)
    waits = (
        f"the trainer waits {trainer:.0%} of its time for engines, and these have no requests for {engines:.0%} of theirs"
    )
    if not run.at("rollout.max_staleness"):
        return f"Engines and trainer take turns, as `rollout.max_staleness` is 0: {waits}."
    if max(trainer, engines) < STARVES:
        return f"Neither engines nor trainer starve: {waits}."
    if trainer >= engines:
        return f"The trainer starves: {waits}. More `rollout.engines`, or a larger `rollout.max_staleness`."
    return f"The engines starve: {waits}. Fewer `rollout.engines`, or more `trainer.ranks`."


def phase_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the part of a step that each phase takes, and the time between phases; empty without `time/step`."""
    seconds = {key.removeprefix("time/"): value for key, value in metrics.items() if key.startswith("time/")}
    step_s = seconds.pop("step", None)
    return {phase: value / step_s for phase, value in seconds.items()} if step_s else {}


def change(findings: Sequence[Finding]) -> Answer:
    """Say what to do about the worst findings."""
    question = "What should I change?"
    if not findings:
        return Answer(question, "Nothing stands out", ["No metric is beyond its limit."], "good")
    says = [f"{capitalized(finding.says)}: {finding.do.split(';')[0]}." for finding in findings[:3]]
    if len(findings) > 3:
        says.append(f"{len(findings) - 3} more below.")
    num_faults = sum(finding.kind == "fault" for finding in findings)
    if num_faults:
        return Answer(question, plural(num_faults, "fault") + " first", says, "bad")
    return Answer(question, plural(len(findings), "thing"), says, "open")


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
