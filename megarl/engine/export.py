"""From a run's checkpoint to a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file
from torch import Tensor

from megarl.data.model_files import model_directory
from megarl.engine.checkpoint import load_weights
from megarl.engine.model import build_model, named_shards
from megarl.engine.parallel import start_parallel
from megarl.engine.weights import box, copy_model_files
from megarl.family import ModelShape
from megarl.recipe import Recipe
from megarl.reshard.boxes import Layout, Segment
from megarl.reshard.megatron import rank_segments
from megarl.telemetry.run_directory import RunDirectory, latest_checkpoint

MAX_FILE_BYTES = 4 << 30
_PRECISION = {"fp32": "float32", "bf16": "bfloat16"}


def export(run_dir: str | Path, target: str | Path) -> Path:
    """Write the actor of a run's latest checkpoint to `target`, in the trainer's precision; returns the checkpoint used.

    Runs in one process, whatever layout trained; `target` is complete or not there at all. Raises ValueError where there
    is nothing to export or `target` is not empty.
    """
    run_dir, target = Path(run_dir), Path(target)
    run = RunDirectory(run_dir)
    if not run.recipe.is_file():
        raise ValueError(f"{str(run_dir)!r} is no run directory: it has no recipe.yaml")
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{run.checkpoints} holds no complete checkpoint; a run writes one after its last step")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(target)!r} is no empty directory; export to another one")
    # Its sections alone: that the prompts have moved since is no reason not to export.
    recipe = Recipe.model_validate(yaml.safe_load(run.recipe.read_text()), strict=False)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    source = model_directory(recipe.model.path)
    shape, precision = ModelShape.from_directory(source), recipe.trainer.precision
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}/store", rank=0, world_size=1, timeout=timedelta(minutes=5)
        )
        try:
            (place,) = start_parallel([Layout()], recipe.run.seed, 300.0, local_rank=0).values()
            with place.active():
                chunks = build_model(shape, place.layout, precision, "actor", place.device)
                load_weights(checkpoint, "actor", chunks)
            partial.mkdir(parents=True)
            write_tensors(partial, assembled(rank_segments(shape, place.layout, 0, 0), named_shards(chunks, place.layout)))
        finally:
            dist.destroy_process_group()
    copy_model_files(source, partial)
    config = json.loads((partial / "config.json").read_text())
    config.pop("torch_dtype", None)
    (partial / "config.json").write_text(json.dumps(config | {"dtype": _PRECISION[precision]}, indent=2) + "\n")
    partial.replace(target)
    return checkpoint


def assembled(segments: Iterator[Segment], shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint tensors, one after the other, from a rank that holds all their boxes."""
    boxes: dict[str, list[Segment]] = {}
    for segment in segments:
        boxes.setdefault(segment.name, []).append(segment)
    for name, parts in boxes.items():
        rows, columns = max(part.row1 for part in parts), max(part.col1 for part in parts)
        tensor = torch.empty(rows, columns, dtype=shards[parts[0].parameter].dtype)
        for part in parts:
            tensor[part.row0 : part.row1, part.col0 : part.col1] = box(shards[part.parameter], part)
        vector = shards[parts[0].parameter].dim() == 1
        yield name, tensor.flatten() if vector else tensor


def write_tensors(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Safetensors files of at most `MAX_FILE_BYTES` and their index."""
    files: list[dict[str, Tensor]] = [{}]
    held = total = 0
    index: dict[str, str] = {}

    def file_name(number: int) -> str:
        return f"model-{number:05d}.safetensors"

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and held + size > MAX_FILE_BYTES:
            save_file(files[-1], directory / file_name(len(files)), metadata={"format": "pt"})
            files[-1] = {}  # written: let it go
            files.append({})
            held = 0
        files[-1][name] = tensor
        index[name] = file_name(len(files))
        held += size
        total += size
    save_file(files[-1], directory / file_name(len(files)), metadata={"format": "pt"})
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    """`python -m megarl.engine.export RUN_DIR OUT`; exit status 2 for what the caller can mend."""
    try:
        checkpoint = export(*arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {checkpoint.name} of {arguments[0]} to {arguments[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
