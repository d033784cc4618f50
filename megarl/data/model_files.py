"""From `model.path` to a Hugging Face directory on this machine."""

from __future__ import annotations

from pathlib import Path

_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def model_directory(path: str) -> Path:
    """The directory itself, or the snapshot of a hub name (from the local cache where it is there).

    Raises ValueError naming `model.path` where neither is to be had.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=_PATTERNS))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"model.path = {path!r} is no directory, and no model hub gives it: {error}") from error
