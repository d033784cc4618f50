"""Run directories made by hand, for what a report says of them."""

import json
from pathlib import Path
from typing import Any

import yaml

from megarl.telemetry.metrics_file import MetricsWriter

RECIPE = {
    "run": {"name": "made", "steps": 20, "trace": "spans"}, "model": {"path": "models/tiny"},
    "algorithm": {"advantage": "grpo", "group_size": 8}, "trainer": {"ranks": 2, "precision": "fp32"},
    "rollout": {"engines": 1}, "phases": {"rollout": {"prompts": 8}},
}  # fmt: skip
PHASES = {"rollout": 2.0, "reward": 0.5, "actor_update": 6.0, "weight_sync": 1.0}
HOSTILE = "<script>document.body.innerHTML = 'gone'</script><img src=x onerror=\"document.title='gone'\">"


def metrics_of(step: int, **others: float | None) -> dict[str, float | None]:
    """A step of 10 seconds in which nothing is to be found fault with."""
    planned = {"micro_batches": 8, "tokens": 1000, "slots": 1024, "max_tokens": 160}
    metrics: dict[str, float | None] = {
        "reward/mean": 0.2 + 0.03 * step + 0.01 * (step % 2), "reward/deviation": 0.4, "reward/num_masked": 0,
        "rollout/truncated_share": 0.1, "tokens/per_s": 100.0, "tokens/useful": 1000, "schedule/rollout/prompts": 8,
        **{f"schedule/actor_update/planned_{name}": value for name, value in planned.items()},
        **{f"schedule/actor_update/{name}": value for name, value in planned.items()},
        "schedule/actor_update/useful_share": 0.98, "schedule/actor_update/imbalance": 1.01,
        "schedule/actor_update/bubble_share": 0.05, "actor/loss": 0.1 / step, "actor/skipped_updates": 0,
        **{f"time/{phase}": seconds for phase, seconds in PHASES.items()}, "time/unaccounted": 0.5, "time/step": 10.0,
        "idle/share": 0.1, "idle/engines_share": 0.08, "idle/pipeline_share": 0.02, "idle/unaccounted_share": 0.05,
        "idle/straggler_rank": step % 2, "idle/straggler_s": 0.1,
        "sync/pause_s": 0.01, "sync/pack_s": 0.1, "sync/transfer_s": 0.4, "sync/apply_s": 0.2, "sync/total_s": 0.9,
        "sync/received_bytes": 1e6, "sync/bound_bytes": 1e6, "sync/bytes_per_s": 2.5e6, "sync/attempts": 1,
    }  # fmt: skip
    return metrics | others


def sampled_row(rollout: int, texts: list[str], **changes: Any) -> dict[str, Any]:
    """A segment of a sampled rollout; `texts` are the texts that both sides said in turn."""
    turns = [{"own": n % 2 == 0, "tokens": len(text), "text": text, "versions": [3, 3 + n]} for n, text in enumerate(texts)]
    row = {"step": 2, "sample": rollout, "rollout": rollout, "group": 1, "prompt": "[bold]1+1=", "completion": "",
           "reward": 0.75, "parts": {"environment": 0.75}, "advantage": -0.5, "valid": True, "reason": None,
           "prompt_tokens": 4, "completion_tokens": 9, "finish_reason": "stop", "version": 3, "first_version": 3,
           "turns": turns, "turn_rewards": [0.5, 0.25, 0.0]}  # fmt: skip
    return row | changes


def make_run(path: Path, lines: list[dict], recipe: dict | None = RECIPE, sampled: bool = True) -> Path:
    """A run directory with these metrics_of, a line a step."""
    writer = MetricsWriter(path / "metrics.jsonl")
    for step, line in enumerate(lines, 1):
        writer.write(step, line)
    writer.close()
    if recipe is not None:
        (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    if sampled:
        (path / "samples").mkdir()
        rows = [sampled_row(n, [HOSTILE], step=len(lines), prompt=f"{n} +\u2028 1?", reward=n / 10) for n in range(9)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in rows) + '{"step": 1, "cut'
        (path / "samples" / f"step-{len(lines):06d}.jsonl").write_text(text)
    return path
