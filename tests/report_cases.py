"""Run directories made by hand, for what a report says of them."""

import json
from pathlib import Path

import yaml

from megarl.telemetry.clock import Event, StepTimes
from megarl.telemetry.metrics_file import MetricsWriter
from megarl.telemetry.trace import TraceWriter

RECIPE = {
    "run": {"name": "made", "steps": 20, "trace": "spans"},
    "model": {"path": "models/tiny"},
    "algorithm": {"advantage": "grpo", "group_size": 8},
    "trainer": {"ranks": 2, "precision": "fp32"},
    "rollout": {"engines": 1},
    "phases": {"rollout": {"prompts": 8}},
}
PHASES = {"rollout": 2.0, "reward": 0.5, "actor_update": 6.0, "weight_sync": 1.0}
HOSTILE = "<script>document.body.innerHTML = 'gone'</script><img src=x onerror=\"document.title='gone'\">"


def metrics_of(step: int, **others: float | None) -> dict[str, float | None]:
    """A step of 10 seconds in which nothing is to be found fault with."""
    planned = {"micro_batches": 8, "tokens": 1000, "slots": 1024, "max_tokens": 160}
    found: dict[str, float | None] = {
        "reward/mean": 0.2 + 0.03 * step + 0.01 * (step % 2),
        "reward/deviation": 0.4,
        "reward/num_masked": 0,
        "rollout/truncated_share": 0.1,
        "tokens/prompt": 600,
        "tokens/completion": 400,
        "schedule/rollout/prompts": 8,
        **{f"schedule/actor_update/planned_{name}": value for name, value in planned.items()},
        **{f"schedule/actor_update/{name}": value for name, value in planned.items()},
        "schedule/actor_update/useful_share": 0.98,
        "schedule/actor_update/imbalance": 1.01,
        "schedule/actor_update/bubble_share": 0.05,
        "actor/loss": 0.1 / step,
        "actor/skipped_updates": 0,
        **{f"time/{phase}": seconds for phase, seconds in PHASES.items()},
        "time/unaccounted": 0.5,
        "time/step": 10.0,
        "idle/share": 0.1,
        "idle/engines_share": 0.08,
        "idle/pipeline_share": 0.02,
        "idle/unaccounted_share": 0.05,
        "idle/straggler_rank": step % 2,
        "idle/straggler_s": 0.1,
        "sync/pause_s": 0.01,
        "sync/pack_s": 0.1,
        "sync/transfer_s": 0.4,
        "sync/apply_s": 0.2,
        "sync/total_s": 0.9,
        "sync/received_bytes": 1e6,
        "sync/bound_bytes": 1e6,
        "sync/bytes_per_s": 2.5e6,
        "sync/attempts": 1,
    }
    return found | others


def make_run(path: Path, lines: list[dict], recipe: dict | None = RECIPE, ranks: int = 2, sampled: bool = True) -> Path:
    """A run directory with these metrics_of, a line a step, and a trace of so many ranks."""
    writer = MetricsWriter(path / "metrics.jsonl")
    for step, line in enumerate(lines, 1):
        writer.write(step, line)
    writer.close()
    if recipe is not None:
        (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for rank in range(ranks):
        trace = TraceWriter(path, rank, "node0", 0.0)
        for step in range(max(1, len(lines) - 4), len(lines) + 1):
            trace.write(step, step_times(step))
        trace.close()
    if sampled:
        (path / "samples").mkdir()
        kept = [{"step": len(lines), "prompt": f"{n} +\u2028 1?", "completion": HOSTILE, "reward": n / 10} for n in range(9)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept) + '{"step": 1, "cut'
        (path / "samples" / f"step-{len(lines):06d}.jsonl").write_text(text)
    return path


def step_times(step: int) -> StepTimes:
    """The phases of a step one after the other; each waits for its first quarter."""
    events, at = [], 0.0
    for phase, seconds in PHASES.items():
        events += [Event("wait_ranks", 1, at, seconds / 4), Event("forward", 1, at + seconds / 4, seconds / 2)]
        events.append(Event(phase, 0, at, seconds))
        at += seconds
    return StepTimes(1000.0 + 10 * step, 10.0, {}, {}, events, 0)
