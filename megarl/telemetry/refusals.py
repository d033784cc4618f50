"""What `telemetry` of a recipe asks for and this machine has not, said before anything starts on it."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlparse

from megarl.recipe import Recipe
from megarl.recipe.telemetry_section import WandbSinkSection
from megarl.recipe.violation import Violation

# Where wandb looks for a key (0.31), besides the netrc file.
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
WANDB_SERVICE = "https://api.wandb.ai"


def refusals(recipe: Recipe, device: str) -> list[Violation]:
    """Violations of a recipe on a machine that computes on `device`; a machine that only checks recipes needs none of it."""
    found = []
    for number, sink in enumerate(recipe.telemetry.sinks):
        if isinstance(sink, WandbSinkSection) and sink.mode == "online" and not _has_wandb_key():
            rule = "needs an API key, and neither WANDB_API_KEY nor the netrc file has one; `wandb login` puts it there"
            found.append(Violation(f"telemetry.sinks.{number}.mode", sink.mode, rule, "offline"))
    profile = recipe.telemetry.profile
    if profile is not None and profile.kind == "nsight" and device != "cuda":
        rule = f"Nsight Systems captures what GPUs do, and this machine computes on {device}"
        found.append(Violation("telemetry.profile.kind", profile.kind, rule, "torch"))
    return found


def _has_wandb_key() -> bool:
    """Whether wandb will find a key: without one it would ask at the terminal, in the midst of a run."""
    if any(os.environ.get(name) for name in WANDB_KEYS):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", WANDB_SERVICE)).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
