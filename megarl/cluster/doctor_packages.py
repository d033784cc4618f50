"""Python and its packages: are they those that megarl was tested with, do they fit each other and the machine?"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from megarl.cluster.doctor_finding import Finding, fail, ok, warn

TESTED = ((3, 11), (3, 12))
IMPORT_TIMEOUT_S = 120.0
NVIDIA = Path("/dev/nvidiactl")


def check_packages() -> Iterator[Finding]:
    """Everything about the Python that runs this."""
    yield _python()
    torch_cuda = _torch_cuda()
    yield from _pins("cpu" if torch_cuda is None else "gpu")
    yield _torch_build(torch_cuda)
    yield _imports("torch", "import torch", "install the wheel of launch/setup.sh's lock again")
    if importlib.util.find_spec("torchvision") is not None:
        yield _imports(
            "torchvision",
            "import torchvision, transformers",
            "megarl needs no torchvision, and one built for another torch breaks transformers: pip uninstall torchvision",
        )
    yield _libnuma()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] not in TESTED:
        return warn("python", version, "megarl is tested with Python 3.11 and 3.12: make its environment with one of them")
    return ok("python", f"{version} at {sys.executable}")


def _pins(extra: str) -> Iterator[Finding]:
    """Packages against the pins of megarl's extra: one that is missing stops a run, another version was not tested."""
    wrong = False
    pinned = 0
    for line in importlib.metadata.requires("megarl") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        pinned += 1
        name = requirement.name
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong = True
            fix = f"pip install '{name}{requirement.specifier}' without its dependencies, or run launch/setup.sh"
            yield fail(f"package {name}", "not installed", fix)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong = True
            fix = f"megarl is tested with {requirement.specifier}: run launch/setup.sh, or go on at your own risk"
            yield warn(f"package {name}", version, fix)
    if not wrong:
        yield ok("packages", f"all {pinned} are as megarl[{extra}] asks")


def _torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, without importing it; None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    found = re.search(
        r"^cuda\b.*= *'([^']+)'", version.read_text(encoding="utf-8") if version.exists() else "", re.MULTILINE
    )
    return None if found is None else found.group(1)


def _torch_build(cuda: str | None) -> Finding:
    has_gpu = NVIDIA.exists()
    if cuda is None and has_gpu:
        fix = "install megarl[gpu], whose torch is a CUDA build, or hide the GPUs on purpose"
        return fail("torch build", "a CPU build of torch on a machine with NVIDIA GPUs", fix)
    if cuda is not None and not has_gpu:
        fix = f"without a GPU use the CPU build (launch/setup.sh); with one, {NVIDIA} is missing: load the driver"
        return fail("torch build", f"torch is built for CUDA {cuda}, and this machine shows no NVIDIA driver", fix)
    return ok("torch build", "CPU" if cuda is None else f"CUDA {cuda}")


def _imports(name: str, statement: str, fix: str) -> Finding:
    """Import in another process: a library that fails may take its process with it."""
    try:
        command = [sys.executable, "-W", "ignore", "-c", statement]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return fail(name, f"`{statement}` took longer than {IMPORT_TIMEOUT_S:.0f} s", "a slow or hanging file system?")
    if done.returncode == 0:
        return ok(name, "imports")
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return fail(name, f"`{statement}` fails: {last}", fix)


def _libnuma() -> Finding:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return fail("libnuma", "libnuma.so.1 does not load; vLLM's CPU kernels need it", "apt-get install libnuma1")
    return ok("libnuma", "loads")
