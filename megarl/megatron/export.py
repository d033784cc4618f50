"""Write a run's checkpoint as a Hugging Face directory that transformers and vLLM load, or only its adapters for PEFT.

`megarl export` runs `python -m megarl.megatron.export RUN_DIR OUT [--adapter]`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save, save_file
from torch import Tensor

from megarl.megatron.checkpoint import StoredRole, load_adapters
from megarl.megatron.lora import MODULES, Adapter
from megarl.megatron.model import DTYPES, WithoutContent, build_model, named_shards
from megarl.megatron.parallel import Place, start_parallel
from megarl.megatron.weights import load_shards, score_box, view_of
from megarl.models import ModelShape
from megarl.models.layout import Box, Layout
from megarl.models.megatron_weights import checkpoint_sizes, rank_boxes
from megarl.models.model_files import copy_model_files, model_directory
from megarl.models.stored_weights import INDEX, SCORE
from megarl.planner.roles import adapted_sizes
from megarl.recipe import Recipe
from megarl.recipe.role_sections import LoraSection
from megarl.telemetry.run_directory import RunDirectory, latest_checkpoint

# A and B of adapters by the names of Megatron's weights; a rank's shards of them.
Factors = Mapping[str, tuple[Tensor, Tensor]]
_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_FILE_BYTES = 4 << 30


def export(run_dir: str | Path, target: str | Path) -> Path:
    """Write the actor of a run's latest checkpoint to `target`, in the trainer's precision; returns the checkpoint used.

    Runs in one process for every layout, and holds one file of weights at a time; `target` is complete or absent. Raises
    ValueError if there is nothing to export or `target` is not empty.
    """
    recipe, checkpoint = to_export(run_dir, Path(target))
    source, precision, lora = model_directory(recipe.model.path), recipe.trainer.precision, recipe.actor.lora
    with _renamed_when_complete(Path(target)) as directory:
        with alone():
            base = None if lora is None else (source, lora)
            shape, role = ModelShape.from_directory(source), recipe.trained_role
            write_model(directory, checkpoint, shape, precision, recipe.run.seed, base, role=role)
        copy_model_files(source, directory)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = exported_config(config, precision)
        _write_json(directory / "config.json", classifier_config(config) if role == "reward_model" else config)
    return checkpoint


@contextmanager
def _renamed_when_complete(target: Path) -> Iterator[Path]:
    """Give an empty directory to write to, and rename it to `target` afterwards."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.replace(target)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def to_export(run_dir: str | Path, target: Path) -> tuple[Recipe, Path]:
    """Find a run's recipe and latest checkpoint. Raises ValueError if there is none or `target` is not empty."""
    run_dir = Path(run_dir)
    run = RunDirectory(run_dir)
    if not run.recipe.is_file():
        raise ValueError(f"{str(run_dir)!r} is no run directory: it has no recipe.yaml")
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{run.checkpoints} holds no complete checkpoint; a run writes one after its last step")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(target)!r} is no empty directory; export to another one")
    # Only the sections are validated: an export does not need the prompts, which may have moved.
    recipe = Recipe.model_validate(run.read_recipe(), strict=False)
    try:
        model_directory(recipe.model.path)
    except ValueError as error:
        way_out = f"start where the run was started, or write the model's new path into {run.recipe}"
        raise ValueError(f"{error}; {way_out}") from error
    return recipe, checkpoint


def exported_config(config: dict[str, Any], precision: str) -> dict[str, Any]:
    """Return a model's `config.json` for the exported tensors: in the trainer's precision, without the layers for
    multi-token prediction, which are not exported."""
    changed: dict[str, Any] = {"dtype": _PRECISION[precision]}
    if "num_nextn_predict_layers" in config:
        changed["num_nextn_predict_layers"] = 0
    return {key: value for key, value in config.items() if key != "torch_dtype"} | changed


def classifier_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a sequence classifier with one label."""
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or ()]
    return config | {"architectures": names, "id2label": {"0": "score"}, "label2id": {"score": 0}}


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
    role: str = "actor",
) -> None:
    """Write the actor of a checkpoint as safetensors files of at most `max_file_bytes` (or one parameter), one at a time,
    and their index; call this in a process group of one.

    `base` is the model directory and the section of adapters, if the checkpoint holds adapters only. `role` is
    `reward_model` for a run that trained one.
    """
    scores = role == "reward_model"
    boxes: dict[str, list[Box]] = defaultdict(list)  # by parameter
    for box in rank_boxes(shape, Layout(), 0, critic=scores):
        boxes[box.parameter].append(box)
    sizes = checkpoint_sizes(shape, scores)
    if scores:
        sizes[SCORE] = 1, shape.hidden
        boxes["output_layer.weight"] = [score_box(shape, Layout(), 0)]
    (place,) = start_parallel([Layout()], seed, 300.0, local_rank=0).values()
    with place.active():
        # A model on "meta" is enough to know where the checkpoint holds each parameter.
        with WithoutContent():
            chunks = build_model(shape, place.layout, precision, role, torch.device("meta"))
        parameters = named_shards(chunks, place.layout)
        read: Callable[[str], Tensor]  # a parameter, with its padding
        if base is None:
            read = StoredRole(checkpoint, role, chunks).read
        else:
            source, lora = base
            adapters = stored_adapters(checkpoint, shape, lora, DTYPES[precision], place)

            def merged(name: str) -> Tensor:
                content = torch.empty_like(parameters[name], device="cpu")
                load_shards(source, shape, boxes[name], {name: content})
                return adapters[name].merged_into(content) if name in adapters else content

            read = merged

    file_of: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(_batches(boxes, parameters, max_file_bytes), 1):
        file, held = f"model-{number:05d}.safetensors", dict[str, Tensor]()
        for name in names:
            content = read(name)
            for box in boxes[name]:
                if box.name not in held:  # a tensor that the family keeps in fp32 stays in fp32 in a bf16 model
                    held[box.name] = torch.empty(sizes[box.name], dtype=content.dtype)
                held[box.name][box.row0 : box.row1, box.col0 : box.col1] = view_of(content, box)
        held = {name: tensor if sizes[name][1] > 1 else tensor.squeeze(1) for name, tensor in held.items()}
        save_file(held, target / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(held, file)
        total_bytes += sum(tensor.nbytes for tensor in held.values())
    _write_json(target / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": file_of})


def _batches(names: Iterable[str], parameters: Mapping[str, Tensor], most_bytes: int) -> Iterator[list[str]]:
    """Divide parameters into batches of at most `most_bytes`, or of one parameter."""
    batch, num_bytes = list[str](), 0
    for name in names:
        if batch and num_bytes + parameters[name].nbytes > most_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += parameters[name].nbytes
    yield batch


def stored_adapters(
    checkpoint: Path, shape: ModelShape, lora: LoraSection, dtype: torch.dtype, place: Place
) -> dict[str, Adapter]:
    """Load the actor's adapters, by the names of their weights. Call this inside `place`, which has one rank."""
    adapters = {}
    for layer in range(shape.num_layers):
        for target in lora.targets:
            weight = torch.empty(adapted_sizes(shape, target), dtype=dtype)
            adapters[f"decoder.layers.{layer}.{MODULES[target][0]}"] = Adapter(
                weight, target, lora, False, place.tensor_group
            )
    load_adapters(checkpoint, "actor", adapters)
    return {f"{name}.weight": adapter for name, adapter in adapters.items()}


def export_adapter(run_dir: str | Path, target: str | Path) -> Path:
    """Write the adapters of a run's latest checkpoint to `target`, in the trainer's precision; returns the checkpoint used.

    Runs in one process for every layout, and reads no weight of the base model. Raises ValueError if there is nothing to
    export, the run trained no adapters, or `target` is not empty.
    """
    recipe, checkpoint = to_export(run_dir, Path(target))
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
    files = peft_files(peft_tensors(shape, Layout(), [adapter_factors(adapters)]), lora, recipe.model.path)
    with _renamed_when_complete(Path(target)) as directory:
        for name, content in files.items():
            (directory / name).write_bytes(content)
    return checkpoint


def adapter_factors(adapters: Mapping[str, Adapter]) -> Factors:
    """Copy this rank's A and B of each adapter to the host."""
    return {
        name: (adapter.a.detach().to("cpu", copy=True), adapter.b.detach().to("cpu", copy=True))
        for name, adapter in adapters.items()
    }


def peft_files(tensors: Mapping[str, Tensor], lora: LoraSection, base: str) -> dict[str, bytes]:
    """Return the files of a PEFT directory by name."""
    config = {
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
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "inference_mode": True,
    }
    return {
        "adapter_model.safetensors": save(dict(tensors), metadata={"format": "pt"}),
        "adapter_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def peft_tensors(shape: ModelShape, layout: Layout, factors: Sequence[Factors]) -> dict[str, Tensor]:
    """Return both factors of every checkpoint weight that has an adapter, whole, by PEFT's names.

    `factors` are those of each rank. A fused weight holds several checkpoint weights: all have the same A, and each has its
    rows of B.
    """
    sizes, tensors = checkpoint_sizes(shape), dict[str, Tensor]()
    for rank, held in enumerate(factors):
        for part in rank_boxes(shape, layout, rank):
            if part.parameter not in held:
                continue
            a, b = held[part.parameter]
            (all_rows, all_columns), rows, columns = sizes[part.name], part.row1 - part.row0, part.col1 - part.col0
            prefix = f"base_model.model.{part.name.removesuffix('.weight')}"
            whole_a = tensors.setdefault(f"{prefix}.lora_A.weight", a.new_zeros(len(a), all_columns))
            whole_b = tensors.setdefault(f"{prefix}.lora_B.weight", b.new_zeros(all_rows, len(a)))
            whole_a[:, part.col0 : part.col1] = a[:, part.local_col : part.local_col + columns]
            whole_b[part.row0 : part.row1] = b[part.local_row : part.local_row + rows]
    return tensors


def main(run_dir: str, target: str, *options: str) -> int:
    """Run the export; returns exit status 2 for an error that the user can fix."""
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
