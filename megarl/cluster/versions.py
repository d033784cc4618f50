"""What every node of a job must have alike. Nothing heavy is imported: a node is asked before anything starts there."""

from __future__ import annotations

import importlib.metadata
import platform

import megarl


def versions() -> dict[str, str]:
    """Of megarl, of Python, and of the packages that speak to each other across nodes."""
    found = {"megarl": megarl.__version__, "Python": platform.python_version()}
    for package in ("ray", "torch", "vllm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found
