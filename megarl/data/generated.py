"""Questions of reasoning-gym, the same in every process: run as `python -m megarl.data.generated`.

Some of its tasks (`ransom_note`, `word_ladder`) walk through sets of texts, whose order Python draws anew in each process.
So they are generated in a process of their own, where that order is fixed: a run that goes on must find its old rows.
"""

from __future__ import annotations

import difflib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


def generate(task: str, size: int, seed: int, options: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place; `key` is where the recipe has the source. Raises ValueError naming it for a task that
    reasoning-gym does not have or options that it refuses."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    question = pickle.dumps((task, size, seed, options))
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=question, stdout=subprocess.PIPE, env=environment, check=False
    )
    if done.returncode:
        raise ValueError(f"{key}: reasoning-gym's {task} ended with status {done.returncode}; what it said is above")
    refusal, rows = pickle.loads(done.stdout)
    if refusal:
        raise ValueError(f"{key}.{refusal}")
    for number, row in enumerate(rows):
        yield f"reasoning-gym {task}, row {number}", row


def _rows(task: str, size: int, seed: int, options: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """(what is refused, rows). reasoning-gym's configs check themselves with assertions, hence the odd except."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)} tasks"
        return f"task is {task!r}, which reasoning-gym does not have; {hint}", []
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except (TypeError, AssertionError, ValueError) as error:
        return f"options is {options!r}, which reasoning-gym's {task} refuses: {error}", []
    return "", [dict(dataset[number]) for number in range(size)]


if __name__ == "__main__":
    answer = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a task prints is no part of the answer
    answer.write(pickle.dumps(_rows(*pickle.load(sys.stdin.buffer))))
    answer.flush()
