"""From a LoRA run's checkpoint to a directory that the PEFT library (and vLLM) loads beside the base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.megatron.export import alone, to_export
from megarl.megatron.lora import Adapter
from megarl.megatron.parallel import start_parallel
from megarl.megatron.settings import DTYPES
from megarl.megatron.stored_adapters import stored_adapters
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import rank_segments
from megarl.models.model_files import model_directory
from megarl.recipe.role_sections import LoraSection


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
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for part in rank_segments(shape, Layout(), 0, 0):
        if part.parameter not in adapters:
            continue
        adapter = adapters[part.parameter]
        a, b = adapter.a.detach(), adapter.b.detach()
        rows, columns = part.row1 - part.row0, part.col1 - part.col0
        # On one rank a part has all columns of its weight; its rows may come in several pieces.
        assert (part.col0, part.local_col, columns) == (0, 0, a.shape[1]), part
        piece = b[part.local_row : part.local_row + rows]
        held = found.get(part.name)
        assert part.row0 == (0 if held is None else len(held[1])), f"{part.name} comes out of order"
        found[part.name] = (a, piece if held is None else torch.cat([held[1], piece]))
    for name, (a, b) in found.items():
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
