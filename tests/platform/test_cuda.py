"""megarl's calls to a GPU, on the stand-in for `torch.cuda`: when memory returns to the driver, and how other processes map
memory."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megarl import build as run
from megarl import trainer as pipeline
from megarl.megatron import offload
from megarl.planner.placement import Transport
from megarl.platform import Platform, _detect, cuda_stub, device_memory
from megarl.recipe import Recipe
from megarl.telemetry import run_writer
from megarl.telemetry.clock import PhaseClock, recording
from tests.recipe_cases import PPO

GIVEN_BACK = ["synchronize", "empty_cache"]


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Yield a list that gets the names of the calls that return memory to the driver, in order."""
    calls: list[str] = []
    with ExitStack() as stack:
        for name in GIVEN_BACK:
            stack.enter_context(mock.patch.object(cuda_stub, name, partial(calls.append, name)))
        yield calls


class Pageable(Platform):
    """A GPU whose host has no pinned memory, because pinning needs a driver."""

    def host_bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """Replace this machine's platform by a GPU's platform, with the stand-in for `torch.cuda`."""
    monkeypatch.setattr(torch, "cuda", cuda_stub)
    platform = Pageable("cuda", "nccl", "local")
    for module in (run_writer, pipeline, run, offload):
        monkeypatch.setattr(module, "platform", platform)
    return platform


@pytest.mark.parametrize(
    ("installed", "spec"),
    [({"transformer_engine"}, "local"), ({"transformer_engine", "transformer_engine_torch"}, "transformer_engine")],
)
def test_transformer_engine_counts_only_with_its_compiled_part(
    gpu: Platform, monkeypatch: pytest.MonkeyPatch, installed: set[str], spec: str
) -> None:
    monkeypatch.setattr(cuda_stub, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert _detect() == Platform("cuda", "nccl", spec)


# Memory that returns to the driver -----------------------------------------------------------------------------------


class Actor:
    """The methods of a role that a weight sync calls."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    @contextmanager
    def present(self) -> Iterator[None]:
        self._calls.append("present")
        yield
        self._calls.append("away")

    def shards(self) -> dict[str, Any]:
        self._calls.append("gathered")
        return {}


@pytest.mark.parametrize(("engines_sleep", "before"), [(True, GIVEN_BACK), (False, [])])
def test_memory_returns_to_the_driver_before_engines_on_the_same_devices_wake(
    gpu: Platform, engines_sleep: bool, before: list[str]
) -> None:
    with recorded() as calls:
        weights = SimpleNamespace(publish=lambda *_: calls.append("publish"))
        trainer = object.__new__(pipeline.Trainer)
        trainer.parts = SimpleNamespace(
            roles={"actor": Actor(calls)}, weights=weights, engines=None, rollouts=None, engines_sleep=engines_sleep
        )  # type: ignore[assignment]
        trainer.canary = None
        trainer._publish(1, None)
    assert calls == ["present", "gathered", *before, "publish", "away"]


@pytest.mark.parametrize(("number", "after"), [(1, []), (2, ["awake"]), (3, [])])
@pytest.mark.parametrize("steps", [2, 5])
def test_engines_on_the_same_devices_sleep_while_a_warmup_is_measured(number: int, after: list[str], steps: int) -> None:
    """They wake again only for the rollouts that follow the warm-up, and they answer held-out prompts first."""
    calls: list[str] = []
    trainer = object.__new__(pipeline.Trainer)
    clock, evaluates = PhaseClock(), {"evaluates_after": lambda _: True}

    def sync(version: int) -> dict[str, Any]:
        calls.append("awake")
        return {"sync/version": version}

    run_section = SimpleNamespace(steps=steps, is_supervised=False)
    part: dict[str, Any] = {
        "recipe": SimpleNamespace(**evaluates, sft_steps=2, run=run_section),
        "supervised": SimpleNamespace(recipe=SimpleNamespace(**evaluates), evaluate=lambda _: calls.append("loss")),
        "parts": SimpleNamespace(engines=SimpleNamespace(rest=lambda: calls.append("asleep")), engines_sleep=True),
        "evaluate": lambda _: calls.append("answers"), "sync": sync, "clock": clock, "version": 1,
        "boundary": lambda _: None,
    }  # fmt: skip
    for name, value in part.items():
        setattr(trainer, name, value)
    writer: Any = SimpleNamespace(evaluated=lambda *_: {})
    with recording(clock):
        trainer._evaluate_after(number, writer, lambda: False)
    measured = ["asleep", "loss", *(after if steps > 2 else [])] if number <= 2 else []
    assert calls == ["answers", *measured]


@pytest.mark.parametrize(("shared", "before"), [(True, GIVEN_BACK), (False, [])])
def test_memory_returns_to_the_driver_after_all_roles_are_built_and_before_engines_start(
    gpu: Platform, monkeypatch: pytest.MonkeyPatch, shared: bool, before: list[str]
) -> None:
    """The constructor of the weight sync is collective; rank 0 starts the engines after it."""
    recipe = Recipe.model_validate(copy.deepcopy(PPO))
    places: Any = {role: SimpleNamespace(rank=1, layout=recipe.layouts[role], is_leader=False) for role in recipe.layouts}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with recorded() as calls, ExitStack() as stack:
        monkeypatch.setattr(run, "takes_turns", lambda recipe: shared)
        monkeypatch.setattr(run, "model_directory", lambda path: path)
        monkeypatch.setattr(run.ModelShape, "from_directory", lambda path: None)
        monkeypatch.setattr(run, "Role", lambda role, *_, **__: calls.append(role))

        def meet(*_: Any) -> Any:
            calls.append("meet")
            return SimpleNamespace(close=lambda: None)

        monkeypatch.setattr(run, "WeightSync", meet)
        monkeypatch.setattr(run, "broadcast_from_first", lambda value: value)
        run.build_parts(recipe, places, None, None, run.Stage((), Transport("mapped", "")), stack)  # type: ignore[arg-type]
    assert calls == ["actor", "reference", "critic", *before, "meet"]


@pytest.mark.parametrize(("setting", "sizes"), [("all", [0]), ("none", [])])
def test_offloaded_memory_returns_to_the_driver_once_it_has_left_the_device(
    gpu: Platform, monkeypatch: pytest.MonkeyPatch, setting: str, sizes: list[int]
) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    returned_at: list[int] = []
    monkeypatch.setattr(cuda_stub, "empty_cache", lambda: returned_at.append(model.weight.untyped_storage().nbytes()))
    role = offload.RoleOffload(setting, [model], [], None, constant=False)
    role.offload()
    assert returned_at == sizes
    with role.present():
        assert model.weight.untyped_storage().nbytes() == 64 and returned_at == sizes
    assert returned_at == 2 * sizes


# Memory that other processes map --------------------------------------------------------------------------------------


class Runtime(ModuleType):
    """`runtime` and `driver` of `cuda.bindings` for two processes on a CPU; `gone` lists the memory that was released."""

    cudaIpcMemLazyEnablePeerAccess = 1

    class cudaIpcMemHandle_t:
        def __init__(self) -> None:
            self._bytes = ctypes.create_string_buffer(device_memory.IPC_HANDLE_BYTES)

        def getPtr(self) -> int:
            return ctypes.addressof(self._bytes)

    def __init__(self) -> None:
        super().__init__("runtime")
        self.memory: dict[int, Any] = {}
        self.gone: list[str] = []
        self.expandable = False
        self.fault: Any = SimpleNamespace(name="cudaErrorTooManyPeers")

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        block = ctypes.create_string_buffer(b"\1" * size, size)
        self.memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[Any, Any]:
        if self.expandable:
            return SimpleNamespace(name="cudaErrorInvalidValue"), None
        handle = self.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), pointer.to_bytes(64, "little"), 64)
        return 0, handle

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, int | None]:
        pointer = int.from_bytes(ctypes.string_at(handle.getPtr(), 64), "little")
        return (0, pointer) if pointer in self.memory and flags == 1 else (self.fault, None)

    def cuMemGetAddressRange(self, pointer: int) -> tuple[int, int, int]:
        base = max(base for base in self.memory if base <= pointer)
        return 0, base, len(self.memory[base])

    def cudaIpcCloseMemHandle(self, pointer: int) -> None:
        self.gone.append("closed")

    def cudaFree(self, pointer: int) -> None:
        self.gone.append("freed")


@pytest.fixture
def runtime(gpu: Platform, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime, bindings = Runtime(), ModuleType("cuda.bindings")
    vars(bindings).update(runtime=runtime, driver=runtime)
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    here = torch.device("cpu")
    monkeypatch.setattr(torch, "device", lambda *_: here)
    return runtime


def test_shared_memory_does_not_come_from_the_allocator_and_lives_as_long_as_a_view(runtime: Runtime) -> None:
    """So the allocator's settings, as `expandable_segments`, do not matter. The handle is valid for a process that sees
    other devices."""
    memory, handle = device_memory.share_on_cuda(4096, torch.device("cpu"))
    assert memory.shape == (4096,) and memory.data_ptr() in runtime.memory and not memory.any()
    name = memory.data_ptr().to_bytes(64, "little")
    assert handle == repr((name, 4096, 0, 4096)), "only the memory and the place in it: no device, and no event"
    owned, reached = memory.view(2, -1), device_memory.reach(handle).view(2, -1)
    del memory
    reached[1, 3] = 5
    assert owned[1, 3] == 5 and runtime.gone == []
    del reached
    assert runtime.gone == ["closed"]
    del owned
    assert runtime.gone == ["closed", "freed"]


def test_a_parameter_is_mapped_at_its_place_in_an_allocation_of_torch(runtime: Runtime) -> None:
    """torch's allocator puts several storages into one allocation, and CUDA shares only whole allocations."""
    _, base = runtime.cudaMalloc(64)
    storage: Any = torch._C._construct_storage_from_data_pointer(base + 16, torch.device("cpu"), 32)
    runtime.memory[base][16:48] = bytes(range(32))
    handle = device_memory.share_cuda(storage)
    assert device_memory.reach(handle).tolist() == list(range(32))
    runtime.expandable = True
    with pytest.raises(RuntimeError, match="cudaIpcGetMemHandle: cudaErrorInvalidValue; .*expandable_segments:True"):
        device_memory.share_cuda(storage)


def test_memory_that_cannot_be_mapped_raises_with_cudas_error(runtime: Runtime) -> None:
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle: cudaErrorTooManyPeers"):
        device_memory.reach(repr((b"\0" * 64, 8, 0, 8)))


def test_devices_without_peer_access_are_found(gpu: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[int, int]] = []

    def is_peer(*pair: int) -> bool:
        pairs.append((pair[0], pair[1]))
        return pair != (2, 0)

    monkeypatch.setattr(cuda_stub, "can_device_access_peer", is_peer)
    assert gpu.pair_without_peer_access([0, 2, 2, 3]) == (2, 0)
    assert gpu.pair_without_peer_access([0]) is None and gpu.pair_without_peer_access([0, 3]) is None
    assert set(pairs) <= set(itertools.permutations((0, 2, 3), 2)), "a device is not compared with itself"
