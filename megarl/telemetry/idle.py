"""Where the time went in a step: busy, waiting and for whom, over all ranks, by role, by phase, by engine and by device.

Pure functions of seconds by phase and span of each rank, in rank order (`StepTimes.by_span`), which sum to its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from megarl.recipe import ROLE_OF
from megarl.telemetry.clock import REST, WAIT

# Waits that a slower rank causes. Those for engines and rewards end for all ranks at once.
FOR_RANKS = ("ranks", "pipeline", "gradients", "layers")
OFFLOAD, BUSY = "offload", "busy"
# A rank's seconds by phase and span.
Spans = Mapping[tuple[str, str], float]


def cause_of(span: str) -> str:
    """What a span's seconds count as: whom the rank waits for, `offload`, `unaccounted`, or `busy`."""
    if span.startswith(WAIT):
        return span.removeprefix(WAIT)
    return span if span in (REST, OFFLOAD) else BUSY


def causes(spans: Spans, phases: Sequence[str] | None = None) -> dict[str, float]:
    """A rank's seconds by cause, in some phases or (None) in the whole step."""
    found: dict[str, float] = {}
    for (phase, name), seconds in spans.items():
        if phases is None or phase in phases:
            cause = cause_of(name)
            found[cause] = found.get(cause, 0.0) + seconds
    return found


def idle_figures(ranks: Sequence[Spans]) -> dict[str, float]:
    """Over all ranks: `idle/share`, the part of their time in which they waited, and `idle/<whom>_share`, its parts;
    `offload/share`, in which memory was moved; `idle/unaccounted_share`, the part that no span has;
    `idle/straggler_rank`, the rank that waited least for other ranks, and `idle/straggler_s`, how many seconds less than the
    median rank.
    """
    by_rank = [causes(spans) for spans in ranks]
    seconds = _sum(by_rank)
    total = sum(seconds.values())
    busy, rest, offload = (seconds.pop(cause, 0.0) for cause in (BUSY, REST, OFFLOAD))
    for_ranks = [waited_for_ranks(one) for one in by_rank]
    straggler = min(range(len(ranks)), key=for_ranks.__getitem__)
    return {
        "idle/share": sum(seconds.values()) / total,
        **{f"idle/{whom}_share": waited / total for whom, waited in sorted(seconds.items())},
        **({"offload/share": offload / total} if offload else {}),
        f"idle/{REST}_share": rest / total,
        "idle/straggler_rank": straggler,
        "idle/straggler_s": median(for_ranks) - for_ranks[straggler],
    }


def waited_for_ranks(by_cause: Mapping[str, float]) -> float:
    """Seconds in which a rank waited for another one."""
    return sum(by_cause.get(cause, 0.0) for cause in FOR_RANKS)


def role_figures(ranks: Sequence[Spans]) -> dict[str, float]:
    """Of each role that runs, parts of all ranks' time, which sum to 1: `idle/<role>/busy_share`, `.../<cause>_share` (the
    bubble is `pipeline`), and `.../resting_share`, in which its devices were in phases of others."""
    total = sum(sum(spans.values()) for spans in ranks)
    ran = {phase for spans in ranks for phase, _ in spans}
    figures: dict[str, float] = {}
    for role in dict.fromkeys(ROLE_OF.values()):
        phases = [phase for phase in ROLE_OF if ROLE_OF[phase] == role and phase in ran]
        if phases:
            seconds = _sum([causes(spans, phases) for spans in ranks])
            shares = {cause: seconds[cause] / total for cause in sorted(seconds)}
            shares["resting"] = 1.0 - sum(shares.values())
            figures |= {f"idle/{role}/{cause}_share": share for cause, share in shares.items()}
    return figures


def bubble_figures(ranks: Sequence[Spans]) -> dict[str, float]:
    """`idle/<phase>/bubble_share`, measured: the part of a phase's pipeline runs in which stages waited for each other. The
    plan's own is `schedule/<phase>/bubble_share`."""
    figures = {}
    for phase in ROLE_OF:
        seconds = _sum([{name: spans.get((phase, name), 0.0) for name in _RUN} for spans in ranks])
        if seconds["wait_pipeline"]:
            figures[f"idle/{phase}/bubble_share"] = seconds["wait_pipeline"] / sum(seconds.values())
    return figures


# Spans of a pipeline run.
_RUN = ("forward", "backward", "pipeline", "wait_layers", "wait_pipeline")


def engine_figures(busy_s: Sequence[float], step_s: float, rollout_s: float, sync_s: float) -> dict[str, float]:
    """What the rollout engines did in a step, as the mean over them; parts that sum to 1. `busy_s` is the time in which each
    had requests in flight; `rollout_s` and `sync_s` are the lengths of the phases rollout and weight_sync.

    Without requests an engine waits in phase rollout for the others (`tail`), then takes weights, and else waits for the
    trainer (`training`). `idle/slowest_engine` had requests for the longest time, `idle/slowest_engine_s` more than the
    median.
    """
    parts = [engine_causes(busy, step_s, rollout_s, sync_s) for busy in busy_s]
    if not parts:
        return {}
    slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
    return {
        **{f"idle/engines/{cause}_share": sum(one[cause] for one in parts) / len(parts) / step_s for cause in parts[0]},
        "idle/slowest_engine": slowest,
        "idle/slowest_engine_s": busy_s[slowest] - median(busy_s),
    }


def engine_causes(busy_s: float, step_s: float, rollout_s: float, sync_s: float) -> dict[str, float]:
    """Seconds of one engine by cause; they sum to the step."""
    busy_s = min(busy_s, step_s)
    tail = min(max(rollout_s - busy_s, 0.0), step_s - busy_s)
    sync = min(sync_s, step_s - busy_s - tail)
    return {BUSY: busy_s, "tail": tail, "weight_sync": sync, "training": step_s - busy_s - tail - sync}


def worker_figures(busy_s: float, num_workers: int, step_s: float) -> dict[str, float]:
    """What the reward workers did in a step, as the mean over them: `busy_s` is the sum of the time they scored for."""
    busy = min(busy_s / num_workers / step_s, 1.0)
    return {"idle/reward_workers/busy_share": busy, "idle/reward_workers/resting_share": 1.0 - busy}


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for key, seconds in part.items():
            found[key] = found.get(key, 0.0) + seconds
    return found
