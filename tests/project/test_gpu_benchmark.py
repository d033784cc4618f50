"""`benchmarks/gpu.py --dry-run` runs each part on a CPU, and docs/results.md says what ran on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import gpu
from benchmarks.results import GPU_NOTHING, PAGE, RESULTS, gpu_part
from megarl.models import ModelShape
from tests.memory_cases import HEADS, MODELS
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


# CI walks one part, the others take minutes.
@pytest.fixture(scope="module", params=[("dense",), pytest.param(tuple(gpu.PARTS), marks=pytest.mark.nightly)], ids=str)
def walked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    into = tmp_path_factory.mktemp("gpu") / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", "--check", "--json", str(into), "--parts", *request.param]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(into.read_text())


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_says_what_needs_a_gpu(walked: dict) -> None:
    parts = walked["parts"]
    assert {part["status"] for part in parts.values()} == {"ran"}
    assert parts["dense"]["values"]["update"]["utilisation"] == gpu.NEEDS_GPU
    if parts.keys() == gpu.PARTS.keys():
        assert parts["colocated"]["values"]["sync/attempts"] == 1 and parts["colocated"]["values"]["sync/version"] == 2
        assert parts["quickstart"]["values"]["steps"] == 2
        assert parts["experts"]["values"]["logprob"]["utilisation"] == gpu.NEEDS_GPU
    # Every part but these two needs a GPU for some value.
    assert {name for name, part in parts.items() if gpu.NEEDS_GPU in json.dumps(part["values"])} == parts.keys() - {
        "imports", "quickstart",
    }  # fmt: skip


@pytest.mark.slow
def test_the_page_lists_every_part_with_device_and_commit(walked: dict) -> None:
    text = gpu_part(walked | {"commit": "0123456789abcdef"})
    assert all(f"| {name} | ran |" in text for name in walked["parts"])
    assert walked["device"] in text and "0123456789." in text and GPU_NOTHING not in text


def test_the_page_ends_with_what_was_measured() -> None:
    file = RESULTS / "gpu.json"
    assert PAGE.read_text().endswith(gpu_part(json.loads(file.read_text()) if file.is_file() else None) + "\n")


def test_a_missed_target_and_a_failed_part_are_on_the_page() -> None:
    missed = {
        "status": "ran",
        "seconds": 1.0,
        "values": {},
        "targets": [gpu.target("update: utilisation", 0.4, 0.45, False)],
    }
    failed = {"status": "failed", "seconds": 2.0, "why": "exit status 1", "output": []}
    text = gpu_part({"device": "NVIDIA H100", "commit": "0" * 40, "parts": {"dense": missed, "memory": failed}})
    assert "update: utilisation 0.4 (target 0.45, missed)" in text and "| memory | failed | 2 | exit status 1 |" in text


def _figures(folder: str) -> dict:
    from megarl import platform

    with mock.patch.object(type(platform.current), "peak_tflops", lambda self, precision: 1e-3):
        return gpu.speed({**MODELS["layers"], **HEADS}, True, Path(folder), recompute="none", takes_steps=True)


def test_utilisation_is_that_of_the_model_s_operations(tmp_path: Path) -> None:
    ((values, targets),) = [(one["values"], one["targets"]) for one in run_ranks(_figures, 1, str(tmp_path))]
    shape = ModelShape.from_config(gpu.tiny({**MODELS["layers"], **HEADS}))
    # By hand, leaving attention's scores out (they are less than 2 % of so short sequences): weights times two a token.
    attention = 2 * shape.heads * shape.head_dim + 2 * shape.groups * shape.head_dim
    layers = 2 * shape.num_layers * shape.hidden * (attention + 3 * shape.ffn) * 48
    forward = layers + 2 * shape.hidden * shape.vocab * 33
    for kind, passes in (("update", 3), ("logprob", 1)):
        seconds = values[kind]["seconds"]
        assert values[kind]["utilisation"] == pytest.approx(passes * forward / (seconds * 1e9), rel=0.04)
        assert values[kind]["tokens_per_s"] == pytest.approx(48 / seconds)
    assert [one["limit"] for one in targets] == [0.45, 0.55]
