"""What a run's figures say is wrong, and what to do about it: one table, which docs/reading-a-run.md shows too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from megarl.telemetry.report_reading import Run
from megarl.telemetry.starts import FAILED, UNKNOWN

Kind = Literal["fault", "learning", "time"]
# Faults first: figures of a run that computes something wrong say nothing about learning or time.
ORDER: tuple[Kind, ...] = ("fault", "learning", "time")
# Less of a step than this is not worth a warning, however bad the phase itself is.
LEAST_LOST = 0.03
# What stands for a part of a key, and the pattern of that part.
NAMES = {"<phase>": "([a-z_]+)", "<role>": "(actor|critic)"}


@dataclass(frozen=True)
class Advice:
    """`figure` is a key of metrics.jsonl, with `<phase>` or `<role>` for all that have one; `{value}` and `{phase}` stand in
    `says`. `do` is what to change. Of advice on time `lost` gives the part of the phase (of the step, where no phase is
    named) that a value costs; it is read over the last steps, as the rest is unless `any_step`: then one step is enough."""

    figure: str
    above: float
    kind: Kind
    says: str
    do: str
    lost: Callable[[float], float] | None = None
    any_step: bool = False
    form: str = ".0%"


def _itself(share: float) -> float:
    return share


ADVICE = (
    Advice("idle/engines_share", 0.15, "time", "ranks wait {value} of their time for rollout engines",
           "more `rollout.engines`, a larger `max_concurrent`, a smaller `max_new_tokens`", _itself),
    Advice("idle/rewards_share", 0.05, "time", "ranks wait {value} of their time for rewards",
           "fewer `phases.reward.sequences` a task: more tasks run at a time", _itself),
    Advice("idle/data_share", 0.05, "time", "ranks wait {value} of their time for the tokens of a step",
           "a faster network between the nodes", _itself),
    Advice("idle/layers_share", 0.20, "time", "ranks wait {value} of their time for each other inside of layers",
           "a smaller `tensor`, `context` or `expert`; on CPUs: not more ranks than cores", _itself),
    Advice("idle/pipeline_share", 0.10, "time", "pipeline stages wait {value} of their time for each other",
           "more micro-batches a mini-batch, a smaller `pipeline`, `virtual_pipeline`; `bubble_share` of the phase is what "
           "the plan expects", _itself),
    Advice("idle/gradients_share", 0.08, "time", "ranks spend {value} of their time on reducing gradients and waiting there",
           "`imbalance` of the phase: a `max_tokens` rule deals out work better than `sequences`; `overlap_gradients`",
           _itself),
    Advice("idle/ranks_share", 0.10, "time", "ranks wait {value} of their time for other ranks outside the pipeline",
           "`idle/straggler_rank` says which: always one is a slow device or link, another each time uneven work", _itself),
    Advice("idle/unaccounted_share", 0.10, "time", "{value} of the ranks' time is in no span",
           "`run.trace: spans`, and look at the phase that is longer than its spans", _itself),
    Advice("schedule/<phase>/useful_share", 0.10, "time", "{value} of the slots of {phase} are padding",
           "a `max_tokens` micro-batch in place of `sequences`, and one that the lengths fill: `megarl check --plan`",
           lambda share: 1 - share),
    Advice("schedule/<phase>/bubble_share", 0.15, "time", "pipeline stages idle {value} of {phase}, by its plan",
           "more micro-batches a mini-batch: a smaller `max_tokens` or fewer `sequences`; else a smaller `pipeline`, or "
           "`virtual_pipeline`", _itself),
    Advice("schedule/<phase>/imbalance", 0.10, "time", "ranks idle {value} of {phase} for the one with the most work",
           "a `max_tokens` micro-batch: the balancer needs smaller pieces to deal out", lambda ratio: 1 - 1 / ratio),
    Advice("rollout/truncated_share", 0.30, "learning", "{value} of the completions were cut at `rollout.max_new_tokens`",
           "a larger `rollout.max_new_tokens`, or a prompt that asks for short answers"),
    Advice("reward/num_masked", 0, "learning", "up to {value} rewards a step were masked: no verifier could judge them",
           "the reward's own errors in the log; a larger `phases.reward.timeout_s` where `reward/num_timeouts` counts them",
           any_step=True, form=".0f"),
    Advice("<role>/skipped_updates", 0, "learning", "up to {value} updates a step of the {phase} were skipped: overflow",
           "`trainer.precision: bf16`, or a smaller learning rate", any_step=True, form=".0f"),
    Advice("finite/skipped_updates", 0, "fault",
           "up to {value} updates a step were left out: a loss or gradient was not finite",
           "a lower learning rate, a smaller `grad_clip`; under fp16 bf16 or fp32", any_step=True, form=".0f"),
    Advice("finite/masked_samples", 0, "learning", "up to {value} samples a step count for nothing: they were not finite",
           "look at the reward, or at the samples that the warning names", any_step=True, form=".0f"),
    Advice("<role>/clip_fraction", 0.30, "learning", "{value} of the {phase}'s tokens are clipped",
           "a smaller `optimizer.lr`, or fewer updates a batch: a larger `mini_batch`, fewer `epochs`"),
    Advice("actor/kl", 0.30, "learning", "the policy is {value} nats a token away from the reference",
           "a larger `algorithm.kl.coefficient`, or a smaller `actor.optimizer.lr`", form=".2f"),
    Advice("mismatch/logprob_mean", 0.05, "fault", "engine and trainer disagree by {value} on a token's log-probability",
           "the same `rollout.precision` as the trainer's; then `weight_sync.verify: all`", form=".3f"),
    Advice("actor/ratio_drift_exceeded", 0, "fault", "before the first update the policy ratio was not 1",
           "micro-batches of `actor_logprob` and `actor_update` more alike in size, or a finer `trainer.precision`",
           any_step=True, form=".0f"),
    Advice("rollout/num_restarts", 0, "fault", "{value} rollout engines died and were started again",
           "the engine's last words in the log; a smaller `rollout.memory_utilization` where memory ran out",
           any_step=True, form=".0f"),
    Advice("sync/attempts", 1, "fault", "a weight sync took {value} attempts",
           "the log says which engine refused its bytes; `weight_sync.retries` bounds how often",
           any_step=True, form=".0f"),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run. `lost`: the part of a step that it costs, where it costs time."""

    figure: str
    kind: Kind
    says: str
    do: str
    lost: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """Worst first."""
        return ORDER.index(self.kind), -self.lost


def find(run: Run) -> list[Finding]:
    """All that is to be said about a run, worst first."""
    recent = run.recent()
    worst = {key: max(values) for key in run.keys if (values := run.points(key)[1])}
    found = [
        finding
        for advice in ADVICE
        for key, phase in _keys(advice.figure, worst)
        if (finding := _judge(advice, key, phase, worst if advice.any_step else recent, recent)) is not None
    ]
    found += _sync(recent) + _straggler(run, recent) + _nulls(run) + _flat(recent) + _starts(run)
    return sorted(found, key=lambda finding: finding.rank)


def _keys(figure: str, figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """The keys that a figure of the table stands for, each with its phase."""
    text = re.escape(figure)
    for name, part in NAMES.items():
        text = text.replace(re.escape(name), part)
    pattern = re.compile(text)
    return [(key, match[1] if match.groups() else "") for key in figures if (match := pattern.fullmatch(key))]


def _judge(advice: Advice, key: str, phase: str, values: Mapping[str, float], recent: Mapping[str, float]) -> Finding | None:
    if key not in values:
        return None
    value, lost = values[key], 0.0
    if advice.lost is not None:
        value = lost = advice.lost(value)
        if phase:
            lost *= recent.get(f"time/{phase}", 0.0) / recent.get("time/step", 1.0)
        if lost < LEAST_LOST:
            return None
    if value <= advice.above:
        return None
    says = advice.says.format(value=format(value, advice.form), phase=phase)
    return Finding(key, advice.kind, says, advice.do, lost)


# Parts of a sync, in the order of time: figure, name, what to do where it is the longest.
SYNC_PARTS = (
    ("sync/pause_s", "pause", "`weight_sync.in_flight: keep` or `abort`: the sync then does not wait for completions"),
    ("sync/pack_s", "pack", "more trainer ranks to pack on, or a larger `weight_sync.bucket_bytes`"),
    ("sync/transfer_s", "transfer",
     "compare `sync/bytes_per_s` with `sync/memcpy_bytes_per_s`; over a network another `weight_sync.transport`, or "
     "`wire: delta`"),
    ("sync/apply_s", "apply", "more workers an engine (`rollout.tensor`): each applies its own part"),
    ("sync/verify_s", "verify", "`weight_sync.verify: sampled`, on a GPU"),
    ("sync/repack_s", "repack", "nothing of megarl's: vLLM brings the weights into the form of its kernels"),
    ("sync/resume_s", "resume", "a smaller `phases.rollout.max_concurrent`, where completions are kept in flight"),
)  # fmt: skip
SYNC_LIMIT = 0.15


def _sync(recent: Mapping[str, float]) -> list[Finding]:
    found = []
    share = recent.get("time/weight_sync", 0.0) / recent.get("time/step", 1.0)
    parts = {key: recent[key] for key, _, _ in SYNC_PARTS if key in recent}
    if share > SYNC_LIMIT and parts:
        longest = max(parts, key=parts.__getitem__)
        _, name, do = next(part for part in SYNC_PARTS if part[0] == longest)
        says = f"weight sync takes {share:.0%} of a step, and {name} is its longest part ({parts[longest]:.2g} s)"
        found.append(Finding("time/weight_sync", "time", says, do, share))
    received, bound = recent.get("sync/received_bytes", 0.0), recent.get("sync/bound_bytes", 0.0)
    if bound and received > 1.01 * bound:
        says = f"workers receive {received / bound:.2f} times the bytes that they need"
        lost = share * (1 - bound / received)
        found.append(Finding("sync/received_bytes", "time", says, "`weight_sync.mode: reshard`", lost))
    return found


STRAGGLER_LIMIT = 0.05


def _straggler(run: Run, recent: Mapping[str, float]) -> list[Finding]:
    late = recent.get("idle/straggler_s", 0.0) / recent.get("time/step", 1.0)
    ranks = [int(rank) for rank in run.points("idle/straggler_rank")[1]][-10:]
    if late < STRAGGLER_LIMIT or not ranks:
        return []
    most = max(set(ranks), key=ranks.count)
    if ranks.count(most) > len(ranks) / 2:
        says = f"the others wait for rank {most}, {late:.0%} of a step more than it waits for them"
        do = "look at that rank's device, host and link: `megarl doctor`"
        if (run.at("actor.layout.pipeline") or 1) > 1:
            do = f"fewer layers for its pipeline stage, by `actor.layout.stages`; if that is not it, {do}"
    else:
        says = f"ranks wait {late:.0%} of a step for one of them, each time another one"
        do = "a `max_tokens` micro-batch, which deals out work more evenly"
    return [Finding("idle/straggler_s", "time", says, do, late)]


def _nulls(run: Run) -> list[Finding]:
    broken = {key: steps for key in run.keys if (steps := run.nulls(key))}
    return [
        Finding(key, "fault", f"{key} was no finite number in {len(steps)} steps, first in step {steps[0]}",
                "a smaller learning rate, `trainer.precision: bf16` or `fp32`; the log names the phase and the samples")
        for key, steps in list(broken.items())[:3]
    ]  # fmt: skip


def _flat(recent: Mapping[str, float]) -> list[Finding]:
    if recent.get("reward/deviation", 1.0) > 1e-6:
        return []
    says = "all completions have the same reward: there is nothing to learn from"
    return [Finding("reward/deviation", "learning", says, "easier or harder prompts, or a reward with more than one value")]


def _starts(run: Run) -> list[Finding]:
    if not run.starts:
        return []
    says = " ".join(part.strip() for part in run.starts)
    bad = any(f" x {how}:" in says for how in (FAILED, UNKNOWN))
    do = "the reason of each end; a smaller `run.checkpoint_every` bounds the steps that are made again"
    return [Finding("starts.jsonl", "fault" if bad else "time", says, do)]


def markdown() -> str:
    """The table for docs/reading-a-run.md; what it says of the idle shares is said there, in their own table."""
    rows = ["| figure | warns | what to do |", "| --- | --- | --- |"]
    for advice in ADVICE:
        if advice.figure.startswith("idle/"):
            continue
        of_it = {"useful_share": "padding", "imbalance": "lost to it"}.get(advice.figure.rsplit("/", 1)[-1], "")
        limit = format(advice.above, advice.form)
        warns = f"above {limit}{' ' + of_it if of_it else ''}" + (", in any step" if advice.any_step else "")
        rows.append(f"| `{advice.figure}` | {warns} | {advice.do} |")
    return "\n".join(rows)
