"""Checkpoint mode: every worker gets all of every tensor, and a vLLM engine that took them through vLLM's own loader equals
one that loaded them from disk.

The engines live in one process of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from megarl.models import ModelShape
from megarl.models.layout import RolloutLayout
from megarl.models.vllm_weights import fixed_tensors
from tests.in_process_engine import answers, close_engines, open_engine
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


def loads_in_turn(old: Path, new: Path) -> None:
    """All on one engine, which loaded `old` when it started."""
    engine, other = open_engine(old), open_engine(new)
    first, second = answers(engine), answers(other)
    assert first != second
    with pytest.raises(Broken):
        load(engine, breaking(checkpoint(new), 0))
    assert answers(engine) == first, "a load of nothing changed the engine"
    with pytest.raises(Broken):
        load(engine, breaking(checkpoint(new), len(checkpoint(new)) // 2))
    tensors = checkpoint(new)
    random.Random(0).shuffle(tensors)
    assert load(engine, tensors) == sum(tensor.nbytes for _, tensor in tensors)
    assert answers(engine) == second, "not the engine that loaded from disk"
    load(engine, checkpoint(old))
    assert answers(engine) == first, "a second load did not bring the first weights back"
    close_engines()


def test_workers_receive_the_whole_model_and_the_bound_is_their_shards(tmp_path: Path) -> None:
    """By that ratio a report says what `mode: reshard` would save."""
    model, rollout, bounds = save_model(tmp_path, "llama", False, seed=0), RolloutLayout(2), []
    whole = dict(checkpoint(model))
    for mode in ("reshard", "checkpoint"):
        publisher = Publisher(model, rollout, engines=2, mode=mode)
        engines = ThreadEngines(ModelShape.from_directory(model), rollout, engines=2)
        figures = publisher.publish(1, model, engines)
        engines.close()
        publisher.close()
        received, bound = figures["sync/received_bytes"], figures["sync/bound_bytes"]
        bounds.append(bound)
        assert bound == bounds[0] > 0, "it depends on the engines alone"
        if mode == "reshard":
            assert received == bound
            continue
        assert received == 4 * sum(4 * tensor.numel() for tensor in whole.values()) > 1.9 * bound
        for taken in engines.taken.values():
            assert taken.keys() == whole.keys()
            for name, tensor in whole.items():
                matrix = tensor.view(len(tensor), -1)
                assert torch.equal(taken[name][: matrix.shape[0], : matrix.shape[1]], matrix), name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3_moe", False), ("deepseek_v3", False)])
def test_loaded_engine_equals_one_that_loaded_from_disk(
    engine_process: ProcessPoolExecutor, tmp_path: Path, family: str, tied: bool
) -> None:
    old, new = (save_model(tmp_path / name, family, tied, seed) for seed, name in enumerate(("old", "new")))
    engine_process.submit(loads_in_turn, old, new).result(timeout=300)


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
    twice: r"'model\.embed_tokens\.weight' came twice",
    unknown: r"'model\.layers\.7\.mlp\.up_proj\.weight' is not in the model",
    a_row_less: r"model\.norm\.weight is \(127,\), expected 128 x 1",
}


def loads_of_wrong_checkpoints(model: Path, wrong: dict[Callable[[list[Named]], list[Named]], str]) -> None:
    from megarl.weight_sync.manifest import SyncError

    engine = open_engine(model)
    before, right = answers(engine), checkpoint(model)
    for change, message in wrong.items():
        with pytest.raises(SyncError, match=f"checkpoint mode: .*{message}"):
            load(engine, change(right))
    load(engine, right)
    assert answers(engine) == before
    close_engines()


@pytest.mark.slow
def test_wrong_checkpoints_are_refused_and_the_next_load_is_right(
    engine_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    engine_process.submit(loads_of_wrong_checkpoints, save_model(tmp_path, "llama", True, seed=0), WRONG).result(timeout=300)
