"""From a run's checkpoint to a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.megatron.checkpoint import StoredRole
from megarl.megatron.model import WithoutContent, build_model, named_shards
from megarl.megatron.parallel import start_parallel
from megarl.megatron.settings import DTYPES
from megarl.megatron.stored_adapters import MergedRole, stored_adapters
from megarl.megatron.weights import WeightFiles
from megarl.models import ModelShape
from megarl.models.layout import Layout, Segment
from megarl.models.megatron_weights import rank_segments
from megarl.models.model_files import copy_model_files, model_directory
from megarl.recipe import Recipe
from megarl.recipe.role_sections import LoraSection
from megarl.recipe.yaml_text import apply_overrides
from megarl.telemetry.run_directory import RunDirectory, latest_checkpoint

_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(run_dir: str | Path, target: str | Path) -> Path:
    """Write the actor of a run's latest checkpoint to `target`, in the trainer's precision; returns the checkpoint used.

    Runs in one process, whatever layout trained, which holds one parameter at a time; `target` is complete or not there at
    all. Raises ValueError where there is nothing to export or `target` is not empty.
    """
    target = Path(target)
    recipe, checkpoint = to_export(run_dir, target)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    source = model_directory(recipe.model.path)
    shape, precision = ModelShape.from_directory(source), recipe.trainer.precision
    partial.mkdir(parents=True)
    with alone():
        lora = recipe.actor.lora
        base = None if lora is None else (source, lora)
        write_model(partial, checkpoint, shape, precision, recipe.run.seed, base)
    copy_model_files(source, partial)
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(exported_config(config, precision), indent=2) + "\n"
    (partial / "config.json").write_text(text, encoding="utf-8")
    partial.replace(target)
    return checkpoint


def to_export(run_dir: str | Path, target: Path) -> tuple[Recipe, Path]:
    """A run's recipe and its latest checkpoint. Raises ValueError where there is none or `target` is not empty."""
    run_dir = Path(run_dir)
    run = RunDirectory(run_dir)
    if not run.recipe.is_file():
        raise ValueError(f"{str(run_dir)!r} is no run directory: it has no recipe.yaml")
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{run.checkpoints} holds no complete checkpoint; a run writes one after its last step")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(target)!r} is no empty directory; export to another one")
    # Its sections alone: that the prompts have moved since is no reason not to export.
    content = run.read_recipe()
    apply_overrides(content, run.moved_paths())
    recipe = Recipe.model_validate(content, strict=False)
    try:
        model_directory(recipe.model.path)
    except ValueError as error:
        raise ValueError(f"{error}; if the model has moved, write its new place into {run.recipe}") from error
    return recipe, checkpoint


def exported_config(config: dict[str, Any], precision: str) -> dict[str, Any]:
    """A model's `config.json` as it fits the tensors that are written: in the trainer's precision, without the layers for
    multi-token prediction, which no engine holds."""
    changed: dict[str, Any] = {"dtype": _PRECISION[precision]}
    if "num_nextn_predict_layers" in config:
        changed["num_nextn_predict_layers"] = 0
    return {key: value for key, value in config.items() if key != "torch_dtype"} | changed


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process, without which megatron-core builds no model."""
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}/store", rank=0, world_size=1, timeout=timedelta(minutes=5)
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def write_model(
    target: Path,
    checkpoint: Path,
    shape: ModelShape,
    precision: str,
    seed: int,
    base: tuple[str | Path, LoraSection] | None = None,
) -> None:
    """Write the actor of a checkpoint as safetensors, parameter by parameter; to be called in a process group of one.

    With `base` the checkpoint holds adapters alone, and this is the model directory that they are added to.
    """
    stored: StoredRole | MergedRole
    (place,) = start_parallel([Layout()], seed, 300.0, local_rank=0).values()
    with place.active():
        # A model without content: it knows where the checkpoint holds each of its parameters.
        with WithoutContent():
            chunks = build_model(shape, place.layout, precision, "actor", torch.device("meta"))
        if base is None:
            stored = StoredRole(checkpoint, "actor", chunks)
        else:
            source, lora = base
            adapters = stored_adapters(checkpoint, shape, lora, DTYPES[precision], place)
            stored = MergedRole(source, shape, named_shards(chunks, place.layout), adapters)
    by_parameter: dict[str, list[Segment]] = defaultdict(list)
    for segment in rank_segments(shape, place.layout, 0, 0):
        by_parameter[segment.parameter].append(segment)
    # As they were trained: in bf16, what a family keeps in fp32 stays so.
    dtypes = {part.name: stored.dtype(name) for name, parts in by_parameter.items() for part in parts}
    files = WeightFiles(target, shape, dtypes)
    files.create()
    for parameter, segments in by_parameter.items():
        files.write(segments, {parameter: stored.read(parameter)})
