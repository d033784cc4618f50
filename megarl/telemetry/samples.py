"""`samples/step-000012.jsonl` of a run directory: some prompts and completions of each step, with what came of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "samples"
_FILE = re.compile(r"step-(\d{6})\.jsonl$")
Decode = Callable[[Sequence[int]], str]


class SampleTable:
    """Writes a table a step; `rows` is that of the last one. On rank 0."""

    def __init__(self, run: Path, num_samples: int, decode: Decode) -> None:
        """`num_samples` of each step, spread evenly over its groups; `decode` makes text of token ids."""
        self._folder, self._num_samples, self._decode = run / FOLDER, num_samples, decode
        self.rows: list[dict[str, Any]] = []

    def write(self, step: int, rollouts: Any, scored: Any, batch: Any) -> None:
        """Write a step's table; atomic. `rollouts` is its RolloutBatch, `scored` its RewardResult, and `batch` has rewards,
        `valid` and advantages."""
        total = len(rollouts)
        num = min(self._num_samples, total)
        chosen = [number * total // num for number in range(num)]
        fetched = rollouts.payload.fetch(chosen)
        self.rows = [_row(step, sample, fetched[sample], scored, batch, self._decode) for sample in chosen]
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step:06d}.jsonl"
        beside = path.with_suffix(".new")
        beside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows), encoding="utf-8")
        os.replace(beside, path)


def _row(step: int, sample: int, found: Any, scored: Any, batch: Any, decode: Decode) -> dict[str, Any]:
    """One line. A masked reward, its parts and what has no finite value are null; `advantage` is the mean over the
    completion's tokens; `version` that of the weights the last token was sampled with."""
    completion = found.completion
    valid = bool(batch.valid[sample])
    advantages = batch.fields["advantages"][sample]
    return {
        "step": step,
        "sample": sample,
        "group": int(found.group),
        "prompt": decode(found.prompt_ids.tolist()),
        "completion": decode(completion.token_ids.tolist()),
        "reward": _number(batch.rewards[sample]) if valid else None,
        "parts": {name: _number(said[sample]) for name, said in scored.parts.items()},
        "advantage": _number(advantages.mean()) if valid and len(advantages) else None,
        "valid": valid,
        "reason": scored.failures.get(sample),
        "prompt_tokens": len(found.prompt_ids),
        "completion_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "version": int(completion.last_version),
        "first_version": int(completion.first_version),
    }


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(float(value)) else None


def remove_samples_after(run: Path, step: int) -> None:
    """Remove the tables of steps behind `step`, which are done again."""
    for path in (run / FOLDER).glob("step-*.jsonl"):
        if (found := _FILE.match(path.name)) and int(found[1]) > step:
            path.unlink()


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """The rows of one step's file."""
    # Texts may hold other line separators than the one that ends a line here.
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
