"""Find the Hugging Face directory of `model.path`, and check and copy its files."""

from __future__ import annotations

import shutil
from pathlib import Path

# Everything except weights in other formats than safetensors.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "*.md", "LICENSE*", "NOTICE*"]
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data",
            ".ot", ".npz", "adapter_config.json")  # fmt: skip
# A directory with any of these files has a tokenizer.
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_POINTER = b"version https://git-lfs.github.com/spec/"


def model_directory(path: str) -> Path:
    """Return the directory itself, or the snapshot of a hub name, from the local cache if possible.

    Raises ValueError naming `model.path` if the path is neither a directory nor a hub name.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=_PATTERNS))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"model.path = {path!r} is no directory, and no model hub gives it: {error}") from error


def check_fetched(file: str | Path) -> None:
    """Raise ValueError if the file is a pointer that Git LFS has not replaced by the content."""
    path = Path(file)
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
        raise ValueError(f"{path}: is a pointer of Git LFS, not the file itself; run `git lfs pull` in {str(path.parent)!r}")


def check_has_tokenizer(directory: str | Path) -> None:
    """Raise ValueError if the directory has no tokenizer; transformers would make an empty tokenizer."""
    files = [file for pattern in _TOKENIZERS for file in Path(directory).glob(pattern)]
    if not files:
        raise ValueError(
            f"{str(directory)!r} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); copy the files that "
            "belong to the model there, as AutoTokenizer's save_pretrained writes them"
        )
    for file in files:
        check_fetched(file)


def copy_model_files(source: str | Path, target: str | Path) -> None:
    """Copy all files of a Hugging Face directory except weights: config, tokenizer, templates, code, licence."""
    source = Path(source)
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not any(part.startswith(".") for part in inside.parts):
            (Path(target) / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, Path(target) / inside)
