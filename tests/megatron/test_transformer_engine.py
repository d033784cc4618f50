"""Layers of Transformer Engine's, built and run by megatron-core over a stand-in for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl import platform
from megarl.megatron import model
from megarl.megatron.model import fusion_settings
from megarl.models import ModelShape
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("qwen3_moe", "deepseek_v3", "gemma3")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(folder / name, name, tied=name == "gemma3", layers=3) for name in FAMILIES}


def test_both_layer_specs_give_one_model(directories: dict[str, Path]) -> None:
    """The same log-probabilities, updates, names of shards and keys in a checkpoint; under Transformer Engine with fused
    norms and gradient accumulation, and with one grouped matrix product for the experts."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.transformer_engine_stub", *map(str, directories.values())]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for family, specs in zip(directories, results, strict=True):
        local, fused = specs["local"], specs["transformer_engine"]
        assert fused["logprobs"] == pytest.approx(local["logprobs"], abs=1e-5), family
        for update, expected in zip(fused["updates"], local["updates"], strict=True):
            assert update == pytest.approx(expected, rel=1e-4), family
        assert fused["shards"] == local["shards"] and fused["keys"] == local["keys"], family
        assert local["fused"] == 0 and fused["fused"] > 0, family
        modules = set(fused["modules"])
        assert not modules & {"ColumnParallelLinear", "RowParallelLinear", "SequentialMLP"}, family
        assert ("TEGroupedMLP" in modules) == (family != "gemma3"), family
        assert ("TEDotProductAttention" in modules) == (family == "qwen3_moe"), family


@pytest.mark.parametrize(
    ("capability", "precision", "expected"),
    [
        ((9, 0), "bf16", "transformer_engine"), ((10, 0), "fp16", "transformer_engine"), ((8, 9), "bf16", "local"),
        ((9, 0), "fp32", "local"), (None, "bf16", "local"),
    ],
)  # fmt: skip
def test_attention_that_cudnn_lacks_is_megarl_s(
    capability: tuple[int, int] | None, precision: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "cpu" if capability is None else "cuda"
    monkeypatch.setattr(platform, "current", platform.Platform(kind, "gloo", "transformer_engine"))
    monkeypatch.setattr(platform.torch.cuda, "get_device_capability", lambda *_: capability)
    assert model.spec_name(precision) == expected


def test_fusions_follow_the_layer_spec(directories: dict[str, Path]) -> None:
    shapes = {name: ModelShape.from_directory(directory) for name, directory in directories.items()}
    assert all(fusion_settings(shape, "local", False) == {} for shape in shapes.values())

    def fused(family: str, router_replay: bool = False) -> set[str]:
        settings = fusion_settings(shapes[family], "transformer_engine", router_replay)
        return {name for name, is_on in settings.items() if is_on}

    experts = {"bias_activation_fusion", "moe_permute_fusion", "moe_router_fusion"}
    assert fused("qwen3_moe") == experts | {"apply_rope_fusion"}
    # A fused router would not ask for the engine's choice.
    assert fused("qwen3_moe", router_replay=True) == experts - {"moe_router_fusion"} | {"apply_rope_fusion"}
    # Their attention rotates by itself, and megatron-core fuses no tanh-approximated GELU.
    assert fused("deepseek_v3") == experts and fused("gemma3") == set()
