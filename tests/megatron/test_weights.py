"""Loading and saving hold no more than a rank's own shards and a few tensors, whatever the model's size."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.megatron.weights import load_shards
from megarl.models import ModelShape
from megarl.models.layout import Layout
from megarl.models.megatron_weights import checkpoint_sizes, parameter_sizes, rank_boxes
from megarl.models.stored_weights import stored_tensors
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

LAYERS = 12


class HeldBytes(TorchDispatchMode):
    """Bytes of all tensors made inside that are alive, now and at most; `before` were made outside."""

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def largest_bytes(shape: ModelShape) -> int:
    return 4 * max(rows * columns for rows, columns in checkpoint_sizes(shape).values())


def model_bytes(shape: ModelShape) -> int:
    return 4 * sum(rows * columns for rows, columns in checkpoint_sizes(shape).values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_rank_loads_its_shards_and_holds_one_tensor_more(tmp_path: Path, family: str) -> None:
    directory = save_tiny_model(tmp_path, family, layers=LAYERS)
    shape, layout = ModelShape.from_directory(directory), Layout(tensor=2, data=2, expert=2, expert_tensor=2)
    rank = layout.rank(1, 0, 1)
    shards = {name: nn.Parameter(torch.empty(size)) for name, size in parameter_sizes(shape, layout, rank).items()}
    with HeldBytes(shards.values()) as held:
        load_shards(directory, shape, rank_boxes(shape, layout, layout.rank(1, 0, 1)), shards)
    assert 0 < held.most <= largest_bytes(shape)
    assert all(bool(parameter.any()) for parameter in shards.values())


def export_held(folder: str, directory: str) -> tuple[int, int]:
    """Save a distributed checkpoint of a model, write it as safetensors; the bytes held, before and at most."""
    from megarl.megatron.checkpoint import save_checkpoint
    from megarl.megatron.export import write_model
    from tests.engine_cases import engine, objective_of, planned, small_batch, start

    shape, place = ModelShape.from_directory(directory), start(Layout())
    actor = engine(directory, place, lr=1e-2)
    batch = small_batch(shape.vocab, 4)
    actor.update(batch, planned(batch, place.layout, max_tokens=80), objective_of("actor", 100))
    checkpoint = save_checkpoint(folder, 1, {"actor": actor}, {})
    target = Path(folder) / "out"
    target.mkdir()
    with HeldBytes() as held:
        write_model(target, checkpoint, shape, "fp32", seed=1, max_file_bytes=largest_bytes(shape))
    torch.save({name: weight.clone() for name, weight in actor.shards().items()}, Path(folder) / "weights.pt")
    return held.most


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_export_holds_a_few_tensors_and_writes_the_trained_weights(tmp_path: Path, family: str) -> None:
    directory = save_tiny_model(tmp_path / "model", family, layers=LAYERS)
    shape = ModelShape.from_directory(directory)
    (most,) = run_ranks(export_held, 1, str(tmp_path), str(directory))
    # A file, the parameter, its tensors, and the part of it that was read last; it may be two fused tensors.
    assert 0 < most <= 6 * largest_bytes(shape) < model_bytes(shape) / 2
    files = list((tmp_path / "out").glob("*.safetensors"))
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1 and stored_tensors(tmp_path / "out").keys() == after.keys()
    before = load_file(directory / "model.safetensors")
    trained = torch.load(tmp_path / "weights.pt")
    assert before.keys() == after.keys() and not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    checked = 0
    for box in rank_boxes(shape, Layout(), 0):
        matrix = trained[box.parameter].view(trained[box.parameter].shape[0], -1)
        rows, columns = box.row1 - box.row0, box.col1 - box.col0
        held = matrix[box.local_row : box.local_row + rows, box.local_col : box.local_col + columns]
        written = after[box.name].view(after[box.name].shape[0], -1)
        assert torch.equal(held, written[box.row0 : box.row1, box.col0 : box.col1])
        checked += held.numel()
    assert checked * 4 == model_bytes(shape)
