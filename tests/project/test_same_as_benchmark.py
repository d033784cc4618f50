"""What `benchmarks/same_as.py` reads of a run: one bit of a metric, a sampled token or a weight makes a difference."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from benchmarks.same_as import Values, differences, values_of


def write_run(run: Path, loss: float = 0.5, token: int = 7, weight: float = 1.0) -> Values:
    line = {"step": 1, "actor/loss": loss, "time/step": np.random.default_rng().random(), "run/host": "a"}
    (run / "rollouts").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    np.savez(run / "rollouts" / "step-000001.npz", token_ids=np.array([3, token], np.int32))
    role = run / "checkpoints" / "step-000001" / "actor"
    checkpoint.save({"actor.embedding": torch.tensor([weight, 2.0])}, checkpoint_id=role, no_dist=True)
    return values_of(run)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, ""),
        ({"loss": 0.5000000000000001}, "metrics step 1, actor/loss"),
        ({"token": 8}, "rollouts step-000001, token_ids"),
        ({"weight": float(np.nextafter(np.float32(1), np.float32(2)))}, "weights of the actor, actor.embedding"),
    ],
)
def test_one_bit_makes_a_difference(tmp_path: Path, change: dict[str, float], name: str) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after", **change)  # type: ignore[arg-type]
    result = differences(after, before)
    assert (result["compared"], result["only_one"]) == (4, 0)
    assert [text.partition(":")[0] for text in result["differing"]] == ([name] if name else [])
