"""Write a run's checkpoint as a Hugging Face directory that transformers and vLLM load, or its adapters as PEFT's.

`megarl export` starts it as a process: `python -m megarl.megatron.export RUN_DIR OUT [--adapter]`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megarl.megatron.checkpoint import StoredRole, load_adapters
from megarl.megatron.lora import MODULES, Adapter
from megarl.megatron.model import DTYPES, WithoutContent, build_model, named_shards
from megarl.megatron.parallel import Place, start_parallel
from megarl.megatron.weights import box, load_shards
from megarl.models import ModelShape
from megarl.models.layout import Layout, Segment
from megarl.models.megatron_weights import checkpoint_sizes, rank_segments
from megarl.models.model_files import copy_model_files, model_directory
from megarl.models.stored_weights import INDEX
from megarl.planner.roles import adapted_sizes
from megarl.recipe import Recipe
from megarl.recipe.role_sections import LoraSection
from megarl.recipe.yaml_text import apply_overrides
from megarl.telemetry.run_directory import RunDirectory, latest_checkpoint

_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_FILE_BYTES = 4 << 30


def export(run_dir: str | Path, target: str | Path) -> Path:
    """Write the actor of a run's latest checkpoint to `target`, in the trainer's precision; returns the checkpoint used.

    Runs in one process, whatever layout trained, and holds one file of weights at a time; `target` is complete or not there
    at all. Raises ValueError where there is nothing to export or `target` is not empty.
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
    """Find a run's recipe and latest checkpoint. Raises ValueError where there is none or `target` is not empty."""
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
    """Start a process group of one process, without which megatron-core builds no model."""
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
    max_file_bytes: int = MAX_FILE_BYTES,
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
    segments_of: dict[str, list[Segment]] = defaultdict(list)
    for segment in rank_segments(shape, place.layout, 0, 0):
        segments_of[segment.parameter].append(segment)
    sizes = checkpoint_sizes(shape)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for parameter, segments in segments_of.items():
            content = stored.read(parameter)
            # As trained: in bf16, a tensor that the family keeps in fp32 stays in fp32.
            held = {segment.name: torch.empty(sizes[segment.name], dtype=stored.dtype(parameter)) for segment in segments}
            for segment in segments:
                held[segment.name][segment.row0 : segment.row1, segment.col0 : segment.col1] = box(content, segment)
            yield from ((name, tensor if sizes[name][1] > 1 else tensor.squeeze(1)) for name, tensor in held.items())

    save_tensors(target, tensors(), max_file_bytes)


def save_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int) -> None:
    """Write safetensors files and their index; a file has at most `max_file_bytes`, or one tensor, and is held until it is
    written."""
    file_of: dict[str, str] = {}
    total_bytes = held_bytes = 0
    held: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
        save_file(held, directory / file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > max_file_bytes:
            flush()
            held_bytes = 0
        held[name] = tensor
        held_bytes, total_bytes = held_bytes + tensor.nbytes, total_bytes + tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def stored_adapters(
    checkpoint: Path, shape: ModelShape, lora: LoraSection, dtype: torch.dtype, place: Place
) -> dict[str, Adapter]:
    """Load the actor's adapters, by the names of their weights. Call it inside `place`, which has one rank."""
    adapters = {}
    for layer in range(shape.num_layers):
        for target in lora.targets:
            weight = torch.empty(adapted_sizes(shape, target), dtype=dtype)
            adapters[f"decoder.layers.{layer}.{MODULES[target][0]}"] = Adapter(
                weight, target, lora, False, place.tensor_group
            )
    load_adapters(checkpoint, "actor", adapters)
    return {f"{name}.weight": adapter for name, adapter in adapters.items()}


class MergedRole:
    """The weights of a model directory with adapters added, to be read parameter by parameter; as `StoredRole`."""

    def __init__(
        self, directory: str | Path, shape: ModelShape, parameters: Mapping[str, Tensor], adapters: Mapping[str, Adapter]
    ) -> None:
        """`parameters` are of one rank that holds the whole model, by local name, and may be without content."""
        self._directory, self._shape, self._parameters, self._adapters = directory, shape, parameters, adapters
        self._segments: dict[str, list[Segment]] = defaultdict(list)
        for segment in rank_segments(shape, Layout(), 0, 0):
            self._segments[segment.parameter].append(segment)

    def dtype(self, parameter: str) -> torch.dtype:
        return self._parameters[parameter].dtype

    def read(self, parameter: str) -> Tensor:
        """One parameter by its local name, with its padding. Raises what `load_shards` raises."""
        like = self._parameters[parameter]
        content = torch.empty(like.shape, dtype=like.dtype)
        load_shards(self._directory, self._shape, self._segments[parameter], {parameter: content})
        return self._adapters[parameter].merged_into(content) if parameter in self._adapters else content


def export_adapter(run_dir: str | Path, target: str | Path) -> Path:
    """Write the adapters of a run's latest checkpoint to `target`, in the trainer's precision; returns the checkpoint used.

    Runs in one process, whatever layout trained, and reads no weight of the base model. Raises ValueError where there is
    nothing to export, the run trained no adapters, or `target` is not empty.
    """
    target = Path(target)
    recipe, checkpoint = to_export(run_dir, target)
    lora = recipe.actor.lora
    if lora is None:
        raise ValueError(
            f"{str(run_dir)!r} trained the model itself: its recipe has no actor.lora; export without --adapter"
        )
    shape = ModelShape.from_directory(model_directory(recipe.model.path))
    with alone():
        (place,) = start_parallel([Layout()], recipe.run.seed, 300.0, local_rank=0).values()
        with place.active():
            adapters = stored_adapters(checkpoint, shape, lora, DTYPES[recipe.trainer.precision], place)
    tensors = dict(peft_tensors(shape, adapters))
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_config(lora, recipe.model.path, tensors)
    (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)
    return checkpoint


def peft_tensors(shape: ModelShape, adapters: Mapping[str, Adapter]) -> Iterator[tuple[str, Tensor]]:
    """Both factors of every checkpoint weight that an adapter belongs to, by PEFT's names.

    `adapters` are whole, by the names of Megatron's weights. A fused weight holds several checkpoint weights: each has the
    same A and its own rows of B.
    """
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for part in rank_segments(shape, Layout(), 0, 0):
        if part.parameter not in adapters:
            continue
        adapter = adapters[part.parameter]
        a, b = adapter.a.detach(), adapter.b.detach()
        rows, columns = part.row1 - part.row0, part.col1 - part.col0
        # On one rank a part has all columns of its weight; its rows may come in several pieces.
        assert (part.col0, part.local_col, columns) == (0, 0, a.shape[1]), part
        piece = b[part.local_row : part.local_row + rows]
        held = factors.get(part.name)
        assert part.row0 == (0 if held is None else len(held[1])), f"{part.name} comes out of order"
        factors[part.name] = (a, piece if held is None else torch.cat([held[1], piece]))
    for name, (a, b) in factors.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        yield f"{prefix}.lora_A.weight", a.clone()  # a copy: one file holds no tensor twice
        yield f"{prefix}.lora_B.weight", b.clone()


def peft_config(lora: LoraSection, base: str, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """PEFT's `adapter_config.json`; `base` is the base model's directory or hub name."""
    modules = sorted({name.split(".")[-3] for name in tensors})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": modules,
        "inference_mode": True,
    }


def main(run_dir: str, target: str, *options: str) -> int:
    """Exit status 2 for errors that the caller can repair."""
    adapter = "--adapter" in options
    try:
        checkpoint = (export_adapter if adapter else export)(run_dir, target)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {'the adapters of ' if adapter else ''}{checkpoint.name} of {run_dir} to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
