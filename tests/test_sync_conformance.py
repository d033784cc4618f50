"""megarl's table of where a vLLM worker holds each checkpoint element is vLLM's own.

The oracle is vLLM's loader: its model is built as a worker of the layout builds it, `load_weights` runs once over a
checkpoint in which no two elements are equal, and the parameters then say which element stands where. No weight is packed
yet. A worker learns its place from vLLM's process groups alone, so groups that only know their size and rank stand in for
them, and one process is every worker in turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megarl.family import ModelShape, blocks
from megarl.family.cut import PaddedRows
from megarl.reshard.boxes import RolloutLayout, Segment
from megarl.reshard.vllm import parameter_sizes, worker_segments
from tests.rollout_cases import save_model

pytestmark = pytest.mark.sync

UNSET, PADDING = -1.0, 0.0
LARGEST = 1 << 24  # float32 counts so far

Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Group:
    """What a layer asks of a process group when it is built."""

    world_size: int
    rank_in_group: int

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def device_group(self) -> Group:
        return self

    def size(self) -> int:
        return self.world_size

    def rank(self) -> int:
        return self.rank_in_group


def numbered_checkpoint(model: Path) -> Parameters:
    """A checkpoint of the model's names and sizes in which every element has a number of its own, from 1."""
    start, numbered = 1, {}
    for name, tensor in load_file(model / "model.safetensors").items():
        numbered[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        start += tensor.numel()
    assert start <= LARGEST
    return numbered


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """As the table counts: a vector is one column, experts stand one below the other."""
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor.reshape(-1, tensor.shape[-1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """A model's directory by family and whether its head is tied; each is written once."""
    written: dict[tuple[str, bool], Path] = {}

    def directory(family: str, tied: bool) -> Path:
        if (family, tied) not in written:
            written[family, tied] = save_model(tmp_path_factory.mktemp("model"), family, tied, seed=0)
        return written[family, tied]

    return directory


def vllm_view(model: Path, tensor: int, rank: int) -> Parameters:
    """Which checkpoint element stands at each place of each parameter of one worker, by vLLM's loader."""
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with mock.patch.dict(os.environ):  # vLLM writes there what it wants of its worker processes
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            tensor_parallel_size=tensor,
            distributed_executor_backend="mp",
        ).create_engine_config()
    groups = {"_TP": Group(tensor, rank), "_EP": Group(tensor, rank)}
    groups |= {name: Group(1, 0) for name in ("_PP", "_DP", "_PCP", "_DCP")}
    with pytest.MonkeyPatch.context() as patch:
        for name, group in groups.items():
            patch.setattr(parallel_state, name, group)
        with set_default_torch_dtype(torch.float32):
            worker = initialize_model(config)
        for parameter in worker.parameters():
            parameter.data.fill_(UNSET)
        worker.load_weights(numbered_checkpoint(model).items())
    return {name: as_matrix(parameter.data) for name, parameter in worker.named_parameters()}


def table_view(model: Path, segments: Iterable[Segment], sizes: dict[str, tuple[int, int]]) -> Parameters:
    """The same by megarl's table: the boxes of one worker and the sizes of its parameters."""
    checkpoint = {name: as_matrix(tensor) for name, tensor in numbered_checkpoint(model).items()}
    view = {name: torch.full(size, PADDING) for name, size in sizes.items()}
    for box in segments:
        content = checkpoint[box.name][box.row0 : box.row1, box.col0 : box.col1]
        rows, cols = content.shape
        target = view[box.parameter][box.local_row : box.local_row + rows, box.local_col : box.local_col + cols]
        assert target.shape == content.shape, f"a box outside {box.parameter}: {box}"
        target.copy_(content)
    return view


def differences(loader: Parameters, table: Parameters) -> Iterator[str]:
    """Parameters that the two hold differently. What vLLM leaves unset or zero must be padding of the table."""
    yield from sorted(loader.keys() ^ table.keys())
    for name in loader.keys() & table.keys():
        mine, its = table[name], loader[name]
        if mine.shape != its.shape:
            yield f"{name}: {tuple(mine.shape)} in the table, {tuple(its.shape)} in vLLM"
        elif not torch.equal(mine, torch.where(its == UNSET, PADDING, its)):
            yield f"{name}: {int((mine != its).sum())} elements stand elsewhere"


def table_of(model: Path, tensor: int, rank: int) -> tuple[list[Segment], dict[str, tuple[int, int]]]:
    shape, rollout = ModelShape.from_directory(model), RolloutLayout(tensor)
    return list(worker_segments(shape, rollout, rank)), parameter_sizes(shape, rollout, rank)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", True),
        ("llama", False),
        ("qwen2", False),
        ("qwen3", True),
        ("qwen3_moe", False),
        ("mixtral", False),
        ("deepseek_v3", False),
        ("gemma3", True),
    ],
)
def test_the_table_places_every_element_where_vllm_s_loader_puts_it(
    models: Callable[[str, bool], Path], family: str, tied: bool, tensor: int
) -> None:
    """Four tensor ranks are more than the two key-value heads, and one of them holds padding alone of the vocabulary."""
    model = models(family, tied)
    for rank in range(tensor):
        assert list(differences(vllm_view(model, tensor, rank), table_view(model, *table_of(model, tensor, rank)))) == []


# Wrong tables: each changes one box of the right one, or drops it.
def gate_and_up_swapped(box: Segment) -> Segment | None:
    return renamed(box, ".gate_proj.", ".up_proj.")


def key_head_shifted(box: Segment) -> Segment | None:
    height = box.row1 - box.row0
    return box._replace(row0=box.row0 + height, row1=box.row1 + height) if ".k_proj." in box.name else box


def layer_skipped(box: Segment) -> Segment | None:
    return None if ".layers.1." in box.name else box


def layers_exchanged(box: Segment) -> Segment | None:
    return renamed(box, ".layers.0.self_attn.", ".layers.1.self_attn.")


def experts_exchanged(box: Segment) -> Segment | None:
    return renamed(box, ".experts.2.", ".experts.3.")


def renamed(box: Segment, one: str, other: str) -> Segment:
    """With either string in its name, it gets the other."""
    for old, new in ((one, other), (other, one)):
        if old in box.name:
            return box._replace(name=box.name.replace(old, new))
    return box


@pytest.mark.parametrize(
    "mutation", [gate_and_up_swapped, key_head_shifted, layer_skipped, layers_exchanged, experts_exchanged]
)
def test_a_wrong_table_is_told_apart(
    models: Callable[[str, bool], Path], mutation: Callable[[Segment], Segment | None]
) -> None:
    model = models("qwen3_moe", False)
    segments, sizes = table_of(model, 2, 0)
    wrong = [changed for box in segments if (changed := mutation(box)) is not None]
    assert wrong != segments, "the mutation changes nothing"
    assert list(differences(vllm_view(model, 2, 0), table_view(model, wrong, sizes)))


def test_a_table_without_the_vocabulary_s_padding_is_told_apart(
    models: Callable[[str, bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("llama", True)
    monkeypatch.setattr(blocks, "VLLM_VOCABULARY", PaddedRows(1, each_rank=True))
    for rank in (0, 1):
        assert list(differences(vllm_view(model, 2, rank), table_view(model, *table_of(model, 2, rank))))
