"""Checkpoint mode: every worker gets all of every tensor. `test_families.py` loads these into vLLM engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.vllm_weights import fixed_tensors
from megarl.weight_sync.buckets import LocalBox
from megarl.weight_sync.plan import ReshardPlan, sync_plan
from megarl.weight_sync.read import WholeTensors
from tests.in_process_engine import answers
from tests.rollout_cases import Publisher, megatron_shards, save_model
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
    model, rollout, bounds = save_model(tmp_path, "llama", False, seed=0), RolloutLayout(2), []
    whole = dict(checkpoint(model))
    for mode in ("reshard", "checkpoint"):
        publisher = Publisher(model, rollout, engines=2, mode=mode)
        engines = ThreadEngines(ModelShape.from_directory(model), rollout, engines=2)
        metrics = publisher.publish(1, model, engines)
        engines.close()
        publisher.close()
        received, bound = metrics["sync/received_bytes"], metrics["sync/bound_bytes"]
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


def write(
    writer: WholeTensors, plan: ReshardPlan, shards: dict[int, dict[str, torch.Tensor]], worker: int
) -> Iterator[LocalBox]:
    """Write the boxes of a worker, each in two pieces, the later rows first."""
    for copy in plan.to_destination(worker):
        source = shards[int(plan.source_rank[copy])][plan.source_parameters[plan.source_parameter[copy]]]
        row, col = int(plan.source_row[copy]), int(plan.source_col[copy])
        content = source[row : row + int(plan.rows[copy]), col : col + int(plan.cols[copy])]
        parameter = plan.destination_parameters[plan.destination_parameter[copy]]
        row, col, half = int(plan.destination_row[copy]), int(plan.destination_col[copy]), len(content) // 2
        for first, last in ((half, len(content)), (0, half)):
            if last > first:
                box = LocalBox(parameter, row + first, col, last - first, content.shape[1], content.dtype)
                writer.place(box).copy_(content[first:last])
                yield box


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("llama", True, Layout(2, 2, 2)),
        ("qwen2", False, Layout(4)),  # more tensor ranks than key-value heads
        ("qwen3_moe", False, Layout(tensor=2, data=2, expert=4, expert_tensor=1)),
        ("deepseek_v3", False, Layout(2, 2)),
        ("gemma3", True, Layout(1, 2)),
    ],
)
def test_every_worker_gets_the_checkpoint_that_the_trainer_ranks_hold(
    tmp_path: Path, family: str, tied: bool, layout: Layout
) -> None:
    model = save_model(tmp_path, family, tied, seed=0)
    shape, rollout = ModelShape.from_directory(model), RolloutLayout(tensor=2)
    plan, expected = sync_plan(shape, layout, rollout, "checkpoint"), dict(checkpoint(model))
    assert plan.hash == sync_plan.__wrapped__(shape, layout, rollout, "checkpoint").hash
    for worker in range(rollout.workers):
        writer = WholeTensors(checkpoint_sizes(shape), torch.device("cpu"))
        got = list(writer.complete(write(writer, plan, megatron_shards(model, layout), worker)))
        assert len(got) == len(expected) and dict(got).keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in got)


def test_a_tensor_with_a_gap_is_not_given() -> None:
    writer = WholeTensors({"whole": (2, 3), "gap": (2, 3)}, torch.device("cpu"))
    boxes = [LocalBox("whole", 0, 0, 2, 3, torch.float32), LocalBox("gap", 0, 0, 1, 3, torch.float32)]
    for box in boxes:
        writer.place(box).fill_(1)
    [(name, tensor)] = writer.complete(iter(boxes))
    assert name == "whole" and torch.equal(tensor, torch.ones(2, 3))
