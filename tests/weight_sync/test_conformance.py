"""megarl's table of where a vLLM worker holds each checkpoint element is vLLM's own, and so are its FP8 blocks.

The oracle is vLLM's loader: its model is built as a worker of the layout builds it, `load_weights` runs once over a
checkpoint in which no two elements are equal, and the parameters then say which element stands where. No weight is packed
yet. A worker learns its place from vLLM's process groups alone, so groups that only know their size and rank stand in for
them, and one process is every worker in turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megarl.models import ModelShape
from megarl.models.layout import Box, Layout, RolloutLayout
from megarl.models.vllm_weights import fixed_parameters, idle_parameters, parameter_sizes, worker_boxes
from megarl.recipe.rollout_section import known_engine_args
from megarl.weight_sync.codec import quantise_blocks
from megarl.weight_sync.plan import sync_plan
from tests.rollout_cases import save_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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


@cache
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


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """vLLM writes there what it wants of its worker processes, from its import on."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """A model's directory by family and whether its head is tied; each is written once.

    Three layers: vLLM's Qwen3-MoE does not start where a stage has no layer with experts, and the first has none.
    """
    written: dict[tuple[str, bool], Path] = {}

    def directory(family: str, tied: bool) -> Path:
        if (family, tied) not in written:
            written[family, tied] = save_model(tmp_path_factory.mktemp("model"), family, tied, seed=0, layers=3)
        return written[family, tied]

    return directory


@cache
def vllm_config(model: Path, rollout: RolloutLayout) -> VllmConfig:
    """Return the configuration of an engine's workers, without their data-parallel rank."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=rollout.tensor,
        pipeline_parallel_size=rollout.pipeline,
        enable_expert_parallel=rollout.expert_parallel,
        distributed_executor_backend="mp",
    ).create_engine_config()


@contextmanager
def vllm_model(model: Path, rollout: RolloutLayout, worker: int) -> Iterator[Any]:
    """A worker's model as vLLM builds it, before it loads anything."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils as vllm_models
    from vllm.utils.torch_utils import set_default_torch_dtype

    tensor_rank, pipeline_rank, data_rank = rollout.coordinates(worker)
    groups = {
        "_TP": Group(rollout.tensor, tensor_rank),
        "_PP": Group(rollout.pipeline, pipeline_rank),
        "_DP": Group(rollout.data, data_rank),
        "_EP": Group(rollout.tensor * rollout.data, tensor_rank + rollout.tensor * data_rank),
        "_PCP": Group(1, 0),
        "_DCP": Group(1, 0),
    }
    config = vllm_config(model, rollout)
    # As arguments they would have the ranks look for each other.
    config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_rank = rollout.data, data_rank
    config.compilation_config.static_forward_context.clear()  # the layers of the worker before
    with pytest.MonkeyPatch.context() as patch:
        for name, group in groups.items():
            patch.setattr(parallel_state, name, group)
        # vLLM keeps the layers that a model lacks by id(): the next model may get the address of one that is gone.
        patch.setattr(vllm_models, "_model_to_pp_missing_layer_names", {})
        with set_default_torch_dtype(torch.float32):
            yield initialize_model(config)


def vllm_view(model: Path, rollout: RolloutLayout, worker: int) -> Parameters:
    """Which checkpoint element stands at each place of each parameter of one worker, by vLLM's loader."""
    with vllm_model(model, rollout, worker) as built:
        for parameter in built.parameters():
            parameter.data.fill_(UNSET)
        built.load_weights(numbered_checkpoint(model).items())
    return {name: as_matrix(parameter.data) for name, parameter in built.named_parameters()}


def table_view(model: Path, boxes: Iterable[Box], sizes: dict[str, tuple[int, int]]) -> Parameters:
    """The same by megarl's table: the boxes of one worker and the sizes of its parameters."""
    checkpoint = {name: as_matrix(tensor) for name, tensor in numbered_checkpoint(model).items()}
    view = {name: torch.full(size, PADDING) for name, size in sizes.items()}
    for box in boxes:
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


def assert_the_same(model: Path, rollout: RolloutLayout) -> None:
    """Every worker's parameters, but for those that vLLM builds and no stage of theirs reads."""
    shape = ModelShape.from_directory(model)
    for worker in range(rollout.workers):
        loader, idle = vllm_view(model, rollout, worker), idle_parameters(shape, rollout, worker)
        read = {name: content for name, content in loader.items() if name not in idle}
        table = table_view(model, worker_boxes(shape, rollout, worker), parameter_sizes(shape, rollout, worker))
        assert list(differences(read, table)) == [], worker


FAMILIES = [
    ("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True), ("qwen3_moe", False), ("mixtral", False),
    ("deepseek_v3", False), ("gemma3", True),
]  # fmt: skip


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


# CI cuts tensors in four, and in two on each stage; `test_families.py` has engines of one worker.
@pytest.mark.parametrize("tensor", [nightly(1), nightly(2), 4])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_the_table_places_every_element_where_vllm_s_loader_puts_it(
    models: Callable[[str, bool], Path], family: str, tied: bool, tensor: int
) -> None:
    """Four tensor ranks are more than the two key-value heads, and one of them holds padding alone of the vocabulary."""
    assert_the_same(models(family, tied), RolloutLayout(tensor))


@pytest.mark.parametrize("tensor", [nightly(1), 2])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_so_it_does_on_pipeline_stages(models: Callable[[str, bool], Path], family: str, tied: bool, tensor: int) -> None:
    assert_the_same(models(family, tied), RolloutLayout(tensor, pipeline=2))


@pytest.mark.parametrize(
    "rollout",
    [
        nightly(RolloutLayout(tensor=2, expert_parallel=True)),
        nightly(RolloutLayout(data=2)),
        RolloutLayout(data=3, expert_parallel=True),  # 8 experts: 3, 3 and 2
        RolloutLayout(tensor=2, data=2),
        RolloutLayout(tensor=2, data=2, expert_parallel=True),
        nightly(RolloutLayout(tensor=2, pipeline=2, expert_parallel=True)),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_so_it_does_where_experts_are_shared_out(
    models: Callable[[str, bool], Path], family: str, rollout: RolloutLayout
) -> None:
    assert_the_same(models(family, False), rollout)


def vllm_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's own, without compiling it."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return per_block_cast_to_fp8._torchdynamo_orig_callable(matrix)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(256, 384), (129, 127), (1, 500), (128, 128)])
def test_fp8_blocks_are_those_of_vllm(size: tuple[int, int], precision: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    # Blocks of very different sizes of values, one of zeros, and a value that rounds up to the largest.
    matrix = torch.randn(size, generator=random) * torch.logspace(-6, 3, size[1])
    matrix[:128, :128] = 0.0
    blocks, (weight, scale) = quantise_blocks(matrix.to(precision)), vllm_blocks(matrix.to(precision))
    assert blocks.weight.shape == matrix.shape and blocks.weight_scale_inv.dtype == torch.float32
    assert torch.equal(blocks.weight.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(blocks.weight_scale_inv, scale)


def test_engine_arguments_read_from_source_are_those_of_vllm_s_class() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert known_engine_args().keys() == given  # type: ignore[union-attr]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_after_a_sleep_every_tensor_of_an_engine_is_sent_or_was_kept(
    models: Callable[[str, bool], Path], family: str, tied: bool
) -> None:
    """Level 2 keeps the buffers and the parameters that the engine's patterns name (vLLM 0.32, `Worker.sleep`), and what
    latent attention makes of `kv_b_proj` is made again after each sync. No other tensor may have memory of its own."""
    from vllm.model_executor.layers.attention import MLAAttention

    shape = ModelShape.from_directory(models(family, tied))
    plan = sync_plan(shape, Layout(), RolloutLayout())
    sent = {plan.destination_parameters[number] for number in set(plan.destination_parameter.tolist())}
    with vllm_model(models(family, tied), RolloutLayout(), 0) as built:
        parameters = {name for name, _ in built.named_parameters()}
        preserved = {pattern: set(matching(parameters, pattern)) for pattern in fixed_parameters(shape)}
        assert all(preserved.values()), "vLLM refuses a pattern that no parameter matches"
        assert parameters == sent.union(*preserved.values())
        assert all(sent.isdisjoint(names) for names in preserved.values())
        latent = [module for module in built.modules() if isinstance(module, MLAAttention)]
        for attention in latent:
            attention.process_weights_after_loading(torch.float32)
        assert len(latent) == (shape.num_layers if shape.latent else 0)
        known = {tensor.untyped_storage().data_ptr() for tensor in [*built.parameters(), *built.buffers()]}
        for owner, module in built.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.numel() and not name.endswith("_cpu"):
                    assert value.untyped_storage().data_ptr() in known, f"{owner}.{name}"
