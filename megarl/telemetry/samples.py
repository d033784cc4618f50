"""The sampled rollouts in `samples/` of a run directory: a run writes them, and a person reads them as conversations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from megarl.telemetry.disk import read_lines, write_whole

Row = Mapping[str, Any]


class SampleTable:
    """Writes `samples/step-000012.jsonl` on rank 0: some prompts and completions of a step with rewards. `rows` are the last
    step's."""

    def __init__(self, run: Path, num_samples: int, decode: Callable[[Sequence[int]], str]) -> None:
        """Keep `num_samples` rollouts of each step, spread evenly over its groups; `decode` turns token ids into text."""
        self._folder, self._num_samples, self._decode = run / "samples", num_samples, decode
        self.rows: list[dict[str, Any]] = []

    def write(self, step: int, rollouts: Any, scored: Any, batch: Any) -> None:
        """Write a step's table from a RolloutBatch, a RewardResult, and a batch with rewards, `valid` and advantages; a row
        for each segment of a rollout."""
        total = int(batch.rollouts[-1]) + 1
        num = min(self._num_samples, total)
        wanted = {number * total // num for number in range(num)}
        chosen = [sample for sample, rollout in enumerate(batch.rollouts.tolist()) if rollout in wanted]
        fetched = rollouts.payload.fetch(chosen)
        self.rows = [self._row(step, sample, fetched[sample], rollouts, scored, batch) for sample in chosen]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)
        write_whole(self._folder / f"step-{step:06d}.jsonl", text)

    def _row(self, step: int, sample: int, rollout: Any, rollouts: Any, scored: Any, batch: Any) -> dict[str, Any]:
        """Return a row. Masked rewards and values that are not finite are null; `advantage` is the mean over the completion;
        `version` and `first_version` sampled its last and its first token. `turns` divides the completion into what the
        policy sampled (`own`) and what it observed; `turn_rewards` has the rewards of all turns of the rollout, if any."""
        completion, number = rollout.completion, int(batch.rollouts[sample])
        is_valid = bool(batch.valid[sample])
        advantages = batch.fields["advantages"][sample]
        notes = {} if rollouts.episodes is None else json.loads(rollouts.episodes.notes[number])
        return {
            "step": step,
            "sample": sample,
            "rollout": number,
            "group": int(rollout.group),
            "prompt": self._decode(rollout.prompt_ids.tolist()),
            "completion": self._decode(completion.token_ids.tolist()),
            "reward": _finite(batch.rewards[sample]) if is_valid and batch.sampled else None,  # rows of data have none
            "parts": {name: _finite(rewards[number]) for name, rewards in scored.parts.items()},
            "advantage": _finite(advantages.mean()) if is_valid and len(advantages) else None,
            "valid": is_valid,
            "reason": scored.failures.get(number),
            "prompt_tokens": len(rollout.prompt_ids),
            "completion_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "version": completion.last_version,
            "first_version": completion.first_version,
            "turns": self._turns(completion),
            "turn_rewards": notes.get("rewards", []),
        }

    def _turns(self, completion: Any) -> list[dict[str, Any]]:
        ends = [*(np.flatnonzero(np.diff(completion.own)) + 1).tolist(), len(completion.own)]
        return [
            {
                "own": bool(completion.own[first]),
                "tokens": end - first,
                "text": self._decode(completion.token_ids[first:end].tolist()),
                "versions": completion.versions[[first, end - 1]].tolist(),
            }
            for first, end in itertools.pairwise([0, *ends])
            if end > first
        ]


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(float(value)) else None


def read_samples(run: Path, step: int | None = None) -> list[dict[str, Any]]:
    """Return the sampled rows of a step, or of the last one that has any. Raises ValueError if there are none."""
    files = {int(path.stem.removeprefix("step-")): path for path in sorted((run / "samples").glob("step-*.jsonl"))}
    if step is not None and step not in files:
        steps = f"steps {min(files)} to {max(files)} have" if files else "no step has"
        raise ValueError(f"--step = {step}: {steps} samples in {run / 'samples'}")
    for number in [step] if step is not None else sorted(files, reverse=True):
        if rows := read_lines(files[number]):
            return rows
    raise ValueError(f"{run / 'samples'} has no samples; telemetry.samples_per_step says how many each step writes")


def conversations(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each rollout as text with rich's markup: its reward or why it has none, and its segments turn by turn."""
    for number, segments in itertools.groupby(rows, lambda row: row["rollout"]):
        yield "\n".join(_rollout(number, list(segments)))


def _rollout(number: int, segments: Sequence[Row]) -> Iterator[str]:
    last = segments[-1]
    parts = ", ".join(f"{escape(name)} {_number(value)}" for name, value in last["parts"].items())
    head = f"[bold]step {last['step']}, rollout {number} of group {last['group']}[/]: "
    if last["valid"]:
        yield f"{head}reward [bold]{_number(last['reward'])}[/] ({parts}), advantage {_number(last['advantage'])}"
    else:
        yield f"{head}[red]masked: {escape(str(last['reason'] or 'not finite'))}[/]"
    rewards = iter(last["turn_rewards"])
    for place, row in enumerate(segments, 1):
        shape = f"{row['prompt_tokens']} prompt tokens, {row['completion_tokens']} after them"
        yield f"  [bold]segment {place} of {len(segments)}[/]: {shape}, ended by {row['finish_reason']}"
        yield _said("prompt", "cyan", "", row["prompt"])
        for turn in row["turns"]:
            about = f"{turn['tokens']} tokens"
            if turn["own"]:
                first, final = turn["versions"]
                about += f", weight version {first}" + (f" to {final}" if final != first else "")
                reward = next(rewards, None)
                about += "" if reward is None else f", reward {_number(reward)}"
            yield _said(*(("policy", "green") if turn["own"] else ("observed", "yellow")), about, turn["text"])


def _said(who: str, color: str, about: str, text: str) -> str:
    lines = "\n".join(f"      {escape(line)}" for line in text.splitlines() or [""])
    return f"    [{color}]{who}[/]" + (f" [dim]({about})[/]" if about else "") + f"\n{lines}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
