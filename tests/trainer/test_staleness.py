"""A run whose engine samples while the trainer works: no token is too old, every group is trained on once, and a resume goes
on with the groups that were under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.tokenizer import load_tokenizer
from tests.runs import forget_after, metrics_of, tiny_recipe, tiny_run, train_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.stream]

STALENESS, STEPS, SAVED = 2, 6, 3
PROMPTS, SIZE = 4, 4
CHANGES: dict[str, Any] = {
    "rollout__max_staleness": STALENESS,
    "weight_sync": {"in_flight": "abort"},
    "algorithm__mismatch": {"correction": "truncate"},
    "phases__actor_logprob": {"micro_batch": {"max_tokens": 64}},
    "run__checkpoint_every": SAVED,
    "telemetry": {"samples_per_step": PROMPTS * SIZE},
}


def tables(run: Path) -> list[list[dict[str, Any]]]:
    """The samples of each step."""
    files = [run / "samples" / f"step-{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check(folder: Path) -> list[list[int]]:
    """The laws of a run. Returns the groups of each step."""
    groups = []
    for step, table in enumerate(tables(folder / "runs" / "stale"), 1):
        groups.append(sorted({row["group"] for row in table}))
        assert len(groups[-1]) == PROMPTS and len(table) == PROMPTS * SIZE
        # A step trains the version before it.
        assert all(step - 1 - STALENESS <= row["first_version"] <= row["version"] <= step - 1 for row in table)
    trained = [group for step in groups for group in step]
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    assert set(range((STEPS - STALENESS) * PROMPTS)) <= set(trained) and max(trained) < STEPS * PROMPTS, "none is lost"
    lines = metrics_of(folder, "stale")
    assert all(line["staleness/max"] <= STALENESS and line["rollout/num_too_old"] == 0 for line in lines)
    assert max(line["staleness/mean"] for line in lines) > 0, "the engine waited for the trainer"
    assert all(0 < line["mismatch/effective_sample_share"] <= 1.0 + 1e-6 for line in lines)
    assert lines[-1]["rollout/groups_ahead"] == 0, "groups were sampled that no step trains on"
    return groups


def test_a_stale_run_keeps_its_bound_and_a_resume_goes_on_with_the_groups_under_way(tmp_path: Path) -> None:
    tiny_run(tmp_path, layers=2)
    recipe = tiny_recipe(tmp_path, "stale", False, 1, 1, 1, STEPS, **CHANGES)
    train_on_ranks(recipe)
    first = check(tmp_path)

    run = tmp_path / "runs" / "stale"
    saved = torch.load(run / "checkpoints" / f"step-{SAVED:06d}" / "rollouts.pt", weights_only=True)
    under_way = {group["index"]: group["parts"][0] for group in saved["groups"]}
    assert under_way and not set(under_way) & {group for step in first[:SAVED] for group in step}
    forget_after(run, SAVED)
    train_on_ranks(recipe, resume=True)
    assert check(tmp_path)[:SAVED] == first[:SAVED]

    decode = load_tokenizer(str(tmp_path / "model")).decode
    num_kept = 0
    for row in [row for table in tables(run)[SAVED:] for row in table if row["group"] in under_way]:
        member, part = row["sample"] % SIZE, under_way[row["group"]]
        if part["result"] is not None:
            lengths = part["result"]["lengths"].tolist()
            start = sum(lengths[:member])
            begun = part["result"]["token_ids"].tolist()[start : start + lengths[member]]
            assert row["completion"] == decode(begun), "what was sampled is not sampled again"
        elif part["partials"]:
            begun = part["partials"][member]["token_ids"].tolist()
            assert row["completion"].startswith(decode(begun))
        else:
            begun = []
        num_kept += len(begun)
    assert num_kept > 0, "nothing of what was under way was kept"
