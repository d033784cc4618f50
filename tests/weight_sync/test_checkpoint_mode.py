"""Checkpoint mode: every worker gets all of every tensor. `test_families.py` loads these into vLLM engines, and
`test_plan.py` has trainers of many layouts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import fixed_tensors
from megarl.weight_sync.boxes import shard_bytes
from tests.in_process_engine import answers
from tests.rollout_cases import Publisher, save_model
from tests.sync_cases import ThreadEngines

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.sync

Named = tuple[str, torch.Tensor]


def load(engine: LLM, tensors: Iterable[Named]) -> int:
    from megarl.weight_sync.checkpoint_loader import load_checkpoint_tensors

    config = engine.llm_engine.vllm_config.model_config
    [num_bytes] = engine.apply_model(lambda model: load_checkpoint_tensors(model, config, tensors))
    return num_bytes


def checkpoint(model: Path) -> list[Named]:
    fixed = fixed_tensors(ModelShape.from_directory(model))
    return [(name, tensor) for name, tensor in load_file(model / "model.safetensors").items() if name not in fixed]


class Broken(RuntimeError):
    """A source that ends in the middle."""


def breaking(tensors: list[Named], at: int) -> Iterator[Named]:
    yield from tensors[:at]
    raise Broken


def missing(tensors: list[Named]) -> list[Named]:
    return tensors[:-1]


def twice(tensors: list[Named]) -> list[Named]:
    return [*tensors, tensors[0]]


def unknown(tensors: list[Named]) -> list[Named]:
    return [*tensors, ("model.layers.7.mlp.up_proj.weight", tensors[0][1])]


def a_row_less(tensors: list[Named]) -> list[Named]:
    return [(name, tensor[:-1] if name == "model.norm.weight" else tensor) for name, tensor in tensors]


WRONG: dict[Callable[[list[Named]], list[Named]], str] = {
    missing: r"1 tensors did not come, \['model\.norm\.weight'\]",
    twice: "' came twice",
    unknown: r"'model\.layers\.7\.mlp\.up_proj\.weight' is not in the model",
    a_row_less: r"model\.norm\.weight is \(127,\), expected 128 x 1",
}


def loads_in_turn(engine: LLM, old: Path, new: Path) -> None:
    """Loads that break off, are wrong, or succeed, on an engine that has `old`. `test_families.py` has the engines."""
    from megarl.weight_sync.manifest import SyncError

    first, tensors = answers(engine), checkpoint(new)
    with pytest.raises(Broken):
        load(engine, breaking(tensors, 0))
    assert answers(engine) == first, "a load of nothing changed the engine"
    with pytest.raises(Broken):
        load(engine, breaking(tensors, len(tensors) // 2))
    for change, message in WRONG.items():
        with pytest.raises(SyncError, match=f"checkpoint mode: .*{message}"):
            load(engine, change(tensors))
    random.Random(0).shuffle(tensors)
    assert load(engine, tensors) == sum(tensor.nbytes for _, tensor in tensors)


def test_workers_receive_the_whole_model_and_the_bound_is_their_shards(tmp_path: Path) -> None:
    """A report uses the ratio to say what `mode: reshard` would save."""
    model, rollout = save_model(tmp_path, "llama", False, seed=0), RolloutLayout(2)
    shape, whole = ModelShape.from_directory(model), dict(checkpoint(model))
    publisher, engines = Publisher(model, rollout, engines=2, mode="checkpoint"), ThreadEngines(shape, rollout, engines=2)
    metrics = publisher.publish(1, model, engines)
    engines.close()
    publisher.close()
    assert metrics["sync/received_bytes"] == 4 * sum(4 * tensor.numel() for tensor in whole.values())
    assert metrics["sync/received_bytes"] > 1.9 * metrics["sync/bound_bytes"]
    assert metrics["sync/bound_bytes"] == 2 * shard_bytes(shape, rollout, 4), "it depends on the engines alone"
    for taken in engines.taken.values():
        assert taken.keys() == whole.keys()
        for name, tensor in whole.items():
            matrix = tensor.view(len(tensor), -1)
            assert torch.equal(taken[name][: matrix.shape[0], : matrix.shape[1]], matrix), name
