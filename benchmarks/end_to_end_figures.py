"""What `benchmarks/end_to_end.py` makes of its runs: steps of either side in one form, parts put together, targets
judged.

A run is `{"side", "seed", "start_s", "peak_bytes", "steps": [...]}`. A step has `seconds`, its parts by `PARTS` (which
sum to it), `cpu_seconds` of all processes, `prompt_tokens`, `completion_tokens`, `reward`, and megarl's `overhead` by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

MEGARL, PEERS = "megarl", ("trl-hf", "trl-vllm")
PARTS = ("generation", "logprobs", "update", "sync", "rest")
FASTER, MOST_OVERHEAD, LESS_REWARD, LEAST_SEEDS = 2.5, 0.05, 0.05, 3
# Spans in which a trainer rank works on the model.
COMPUTE = ("forward", "backward", "optimizer")
ENGINE_PHASES = {"actor_logprob": "logprobs", "reference_logprob": "logprobs", "actor_update": "update"}
Run = dict[str, Any]
Line = Mapping[str, Any]


def megarl_steps(run: Path) -> list[dict[str, Any]]:
    """Steps of a run directory, from `metrics.jsonl` and rank 0's trace, which must hold spans.

    Generation is the time in which the engine had requests, an update and the log-probabilities are their phases, sync is
    the phase. `overhead` is what is left of each without the engine's work, the model's passes, the optimizer and vLLM's own
    repack, and everything else by phase.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    traces = (json.loads(line) for line in (run / "trace" / "rank-00000.jsonl").read_text().splitlines())
    compute = {trace["step"]: compute_s(trace["events"]) for trace in traces if "step" in trace}
    return [megarl_step(line, compute[line["step"]]) for line in lines]


def compute_s(events: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Seconds of the model's passes and the optimizer by phase; events are (name, depth, start, length in microseconds),
    an inner one before the one that it is inside of."""
    seconds: dict[str, float] = {}
    inside = 0.0
    for name, depth, _, length in events:
        if depth == 0:
            seconds[name] = seconds.get(name, 0.0) + inside
            inside = 0.0
        elif name in COMPUTE:
            inside += length / 1e6
    return seconds


def megarl_step(line: Line, compute: Mapping[str, float]) -> dict[str, Any]:
    """One step; `compute` is of rank 0, by phase."""
    seconds = line["time/step"]
    phases = {key.removeprefix("time/"): value for key, value in line.items() if key.startswith("time/")}
    del phases["step"]
    generation = min(line["idle/engines/busy_share"] * seconds, phases["rollout"])
    parts = {"generation": generation, "logprobs": 0.0, "update": 0.0, "sync": phases["weight_sync"]}
    overhead = {"rollout": phases.pop("rollout") - generation}
    overhead["weight_sync"] = phases.pop("weight_sync") - line.get("sync/repack_s", 0.0)
    for phase, part in ENGINE_PHASES.items():
        if phase in phases:
            parts[part] += phases[phase]
            overhead[phase] = phases.pop(phase) - compute.get(phase, 0.0)
    overhead |= phases
    overhead["between phases"] = seconds - sum(line[key] for key in line if key.startswith("time/") and key != "time/step")
    return {
        "seconds": seconds, **parts, "rest": seconds - sum(parts.values()), "reward": line["reward/mean"],
        "prompt_tokens": line["tokens/prompt"], "completion_tokens": line["tokens/completion"], "overhead": overhead,
    }  # fmt: skip


def merged(contents: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Runs of several files of results. Raises ValueError where they were not made alike, or have a run twice."""
    first = contents[0]
    runs: dict[tuple[str, int], Run] = {}
    for content in contents:
        for key in ("commit", "device", "config"):
            if content[key] != first[key]:
                raise ValueError(
                    f"results of unlike runs: {key} is {first[key]!r} in one file and {content[key]!r} in another"
                )
        for run in content["runs"]:
            name = run["side"], run["seed"]
            if name in runs:
                raise ValueError(f"{name[0]}, seed {name[1]}, is in two files")
            runs[name] = run
    return list(runs.values())


def measured(run: Run) -> list[dict[str, Any]]:
    """The steps that count: the first warms up, where it is not the only one."""
    return run["steps"][1:] or run["steps"]


def summary(runs: Sequence[Run], side: str) -> dict[str, Any] | None:
    """Means over all measured steps of a side's seeds; None where it has no run."""
    side_runs = [run for run in runs if run["side"] == side]
    if not side_runs:
        return None
    steps = [step for run in side_runs for step in measured(run)]
    seconds = sum(step["seconds"] for step in steps)
    tokens = sum(step["prompt_tokens"] + step["completion_tokens"] for step in steps)
    names = {name for step in steps for name in step.get("overhead", {})}
    overhead = {name: fmean(step["overhead"].get(name, 0.0) for step in steps) for name in names}
    cpu = [step["cpu_seconds"] for step in steps if step.get("cpu_seconds") is not None]
    return {
        "seeds": sorted(run["seed"] for run in side_runs), "steps": min(len(run["steps"]) for run in side_runs),
        "seconds": seconds / len(steps), **{part: fmean(step[part] for step in steps) for part in PARTS},
        "cpu_seconds": fmean(cpu) if cpu else None, "tokens_per_s": tokens / seconds, "overhead": overhead,
        "overhead_share": sum(overhead.values()) * len(steps) / seconds if names else None,
        "completion_tokens": fmean(step["completion_tokens"] for step in steps),
        "peak_bytes": max(run["peak_bytes"] for run in side_runs),
    }  # fmt: skip


def last_steps(steps: int) -> int:
    """How many the last quarter of so many steps is."""
    return max(1, steps // 4)


def last_reward(runs: Sequence[Run], side: str, steps: int) -> float:
    """Mean reward of the last quarter of the first `steps` steps, over the seeds of a side."""
    last = last_steps(steps)
    return fmean(step["reward"] for run in runs if run["side"] == side for step in run["steps"][steps - last : steps])


def targets(runs: Sequence[Run]) -> dict[str, tuple[float, float, bool]]:
    """Each target by its name: value, limit and whether it is reached. Sides without a run have none."""
    megarl_means = summary(runs, MEGARL)
    if megarl_means is None:
        return {}
    outcomes = {
        "overhead share": (megarl_means["overhead_share"], MOST_OVERHEAD, megarl_means["overhead_share"] < MOST_OVERHEAD)
    }
    for side in PEERS:
        peer = summary(runs, side)
        if peer is None:
            continue
        ratio = megarl_means["tokens_per_s"] / peer["tokens_per_s"]
        outcomes[f"tokens a second / {side}"] = (ratio, FASTER, ratio >= FASTER)
        steps = min(megarl_means["steps"], peer["steps"])
        rise = last_reward(runs, MEGARL, steps) - last_reward(runs, side, steps)
        outcomes[f"reward - {side}"] = (rise, -LESS_REWARD, rise >= -LESS_REWARD)
    return outcomes


def too_few(runs: Sequence[Run]) -> list[str]:
    """Sides whose seeds are too few to be compared, in words."""
    counts = {side: len({run["seed"] for run in runs if run["side"] == side}) for side in (MEGARL, *PEERS)}
    return [f"{side} has {count} of {LEAST_SEEDS} seeds" for side, count in counts.items() if count < LEAST_SEEDS]
