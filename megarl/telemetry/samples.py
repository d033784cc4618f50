"""Show sampled rollouts as conversations, from what a run has written to `samples/`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.markup import escape

from megarl.telemetry.disk import read_lines

Row = Mapping[str, Any]


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
    for number, segments in groupby(rows, lambda row: row["rollout"]):
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
