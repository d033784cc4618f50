"""The vLLM worker's end: where it writes, and when it packs. Threads that copy mapped weights: each work is done once,
memory is bounded, and no thread is left behind."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.layout import RolloutLayout
from megarl.platform import Platform
from megarl.weight_sync import copies
from megarl.weight_sync.buckets import LocalBox
from megarl.weight_sync.copies import WORK_BYTES, SpareMemory, Works, apart_bytes, divide, in_threads, num_threads
from megarl.weight_sync.manifest import SyncError

pytestmark = pytest.mark.sync


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """vLLM sets environment variables for its workers from its import on."""
    with mock.patch.dict(os.environ):
        yield


CPU = torch.device("cpu")


def bare_receiver(shape: Any, modules: dict[str, Any], sizes: dict[str, tuple[int, int]], reader: Any) -> Any:
    """A receiver of an engine without CUDA graphs that was not started by vLLM."""
    pytest.importorskip("vllm", reason="needs vLLM's base class of receivers")
    from megarl.weight_sync.receiver import WeightReceiver

    receiver: Any = WeightReceiver.__new__(WeightReceiver)
    receiver._shape, receiver._modules, receiver._sizes, receiver._reader = shape, modules, sizes, reader
    receiver.model, receiver.device, receiver._repack_s = torch.nn.Module(), CPU, 0.0
    receiver._open, receiver._spares, receiver._homes = {}, [], None
    return receiver


def receiver_of(modules: dict[str, torch.nn.Module], covered: dict[str, int]) -> Any:
    """A worker whose modules have a weight [4, 8] each; `covered` elements of each are sent."""
    of_module = Counter[str]()
    for name, elements in covered.items():
        of_module[name.rpartition(".")[0]] += elements
    reader = SimpleNamespace(elements=covered, module_elements=of_module)
    sizes = {f"{name}.weight": (4, 8) for name in modules}
    receiver = bare_receiver(SimpleNamespace(tied=False), modules, sizes, reader)
    receiver._rollout, receiver._unpacked = RolloutLayout(), []
    return receiver


def take(receiver: Any, contents: Mapping[str, torch.Tensor], threads: int) -> None:
    """Give the worker a version as a reader does: box after box without threads."""
    boxes = [LocalBox(name, 0, 0, content.shape[0], content.shape[1], content.dtype) for name, content in contents.items()]

    def do(numbers: Sequence[int], spare: SpareMemory) -> None:
        for number in numbers:
            receiver.place(boxes[number], spare).copy_(contents[boxes[number].parameter])
        for owner in dict.fromkeys(boxes[number].owner for number in numbers):
            receiver.written(owner)
        spare.take_back()

    receiver._unpacked = []
    if threads:
        list(in_threads(receiver.works(boxes, 1 << 20), threads, do))
    else:
        for box in boxes:
            receiver.place(box).copy_(contents[box.parameter])
            receiver._arrived(box)
    receiver.finish()
    assert not receiver._open


def linear(elements: int, quant_method: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(elements), requires_grad=False)
    setattr(module, "quant_method", quant_method)  # noqa: B010
    return module


@pytest.mark.parametrize("threads", [0, 1], ids=["buckets", "mapped"])
def test_a_bias_that_vllm_keeps_in_fp32_comes_in_the_format_of_all_others(threads: int) -> None:
    """vLLM's kernel for small weights on CPUs with AMX does this."""

    class Widening:
        def process_weights_after_loading(self, module: Any) -> None:
            packed.append((module.weight.float().sum().item(), module.bias.dtype))
            module.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
            module.bias.data = module.bias.to(torch.float32)

    packed: list[tuple[float, torch.dtype]] = []
    module = linear(0, Widening())
    module.weight.data = module.weight.to(torch.bfloat16)
    module.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    receiver = receiver_of({"a": module}, {"a.weight": 32, "a.bias": 4})
    receiver._sizes["a.bias"] = (4, 1)
    for value in (1.0, 2.0):
        contents = {name: torch.full(receiver._sizes[name], value, dtype=torch.bfloat16) for name in ("a.weight", "a.bias")}
        take(receiver, contents, threads)
        assert packed.pop() == (32.0 * value, torch.bfloat16)
        assert module.bias.dtype == torch.float32 and module.bias.tolist() == [value] * 4
    with pytest.raises(SyncError, match="a.weight is torch.bfloat16 in the engine but torch.float16"):
        take(receiver, {"a.weight": torch.zeros(4, 8, dtype=torch.float16)}, threads)


@pytest.mark.parametrize("threads", [0, 1], ids=["buckets", "mapped"])
def test_a_worker_writes_one_module_after_the_other_into_the_same_memory(threads: int) -> None:
    """The modules pack their weight and drop it, as vLLM's linear layers do on CPUs with a kernel."""
    places, packed = [], []

    class Packing:
        def process_weights_after_loading(self, module: Any) -> None:
            assert not hasattr(module, "cpu_linear"), "the old packed form goes before there is a new one"
            places.append(module.weight.data_ptr())
            packed.append(module.weight.clone())
            module.weight, module.cpu_linear = torch.nn.Parameter(torch.empty(0), requires_grad=False), "packed"

    names = [f"model.layers.{number}.linear" for number in range(3)]  # modules of one layer could share a work
    # The last module has a row of padding, which is zero although the memory was written before.
    covered = dict(zip((f"{name}.weight" for name in names), (32, 32, 24), strict=True))
    receiver = receiver_of({name: linear(0, Packing()) for name in names}, covered)
    contents = {
        name: torch.full((elements // 8, 8), float(number)) for number, (name, elements) in enumerate(covered.items(), 1)
    }
    for _ in range(2):
        places.clear()
        packed.clear()
        take(receiver, contents, threads)
        assert len(set(places)) == 1
        assert [weight.sum().item() for weight in packed] == [32.0, 64.0, 72.0] and (packed[2][3] == 0).all()


def test_an_embedding_is_looked_up_alone_and_has_no_packed_form() -> None:
    """A packed form would be as large as the weights; `test_families.py` has heads that share the weights."""
    layers = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
    embedding = layers.VocabParallelEmbedding.__new__(layers.VocabParallelEmbedding)
    torch.nn.Module.__init__(embedding)
    embedding.weight, embedding.cpu_linear = torch.nn.Parameter(torch.randn(4, 8), requires_grad=False), None
    receiver_of({"embed_tokens": embedding}, {})._process("embed_tokens")
    hidden = torch.randn(3, 8)
    assert torch.equal(embedding.cpu_linear(hidden, embedding.weight, None), hidden @ embedding.weight.T)


# oneDNN packs bf16 only where the CPU has units for it.
PACKED_BY_ONEDNN = [torch.float32, *([torch.bfloat16] if torch.cpu._is_avx512_bf16_supported() else [])]


@pytest.mark.parametrize("dtype", PACKED_BY_ONEDNN)
def test_what_onednn_packs_comes_in_rows_that_lie_apart_and_is_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """vLLM's own packing of 40 rows of 1 KiB, which its kernel for small weights does not take. It must skip the gaps."""
    pytest.importorskip("vllm", reason="needs vLLM's kernels")
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    columns, gap = 1024 // dtype.itemsize, 64 // dtype.itemsize

    class Method:
        def process_weights_after_loading(self, module: Any) -> None:
            strides.append(module.weight.stride())
            dispatch_cpu_unquantized_gemm(module, remove_weight=True)

    def loaded() -> Any:
        module: Any = linear(0, Method())
        module.weight = torch.nn.Parameter(torch.zeros(40, columns, dtype=dtype), requires_grad=False)
        module.quant_method.process_weights_after_loading(module)
        return module

    strides: list[tuple[int, ...]] = []
    modules: dict[str, Any] = {"a": loaded(), "kept": loaded()}
    other = torch.zeros(1)  # as other kernels hold what they have packed

    def of_another_kernel(hidden: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        return hidden + other

    modules["kept"].cpu_linear = of_another_kernel
    receiver = receiver_of(modules, {f"{name}.weight": 40 * columns for name in modules})
    receiver._sizes = {f"{name}.weight": (40, columns) for name in modules}
    content, hidden = torch.randn(40, columns).to(dtype), torch.randn(3, columns).to(dtype)
    expected = torch.nn.functional.linear(hidden, content)
    dirty = SpareMemory.take

    def with_garbage(spare: SpareMemory, *arguments: Any, **options: Any) -> torch.Tensor:
        """What lies between the rows too."""
        taken = dirty(spare, *arguments, **options)
        torch.frombuffer(spare._blocks[spare.num_lent - 1], dtype=torch.uint8).fill_(0xFF)
        return taken

    monkeypatch.setattr(SpareMemory, "take", with_garbage)
    for has_avx, stored in ((True, columns + gap), (False, columns)):
        monkeypatch.setattr(Platform, "has_avx", lambda platform, has_avx=has_avx: has_avx)
        strides.clear()
        take(receiver, {f"{name}.weight": content for name in modules}, threads=1)
        assert strides == [(stored, 1), (columns, 1)] and modules["a"].weight.numel() == 0
        for module in modules.values():
            assert torch.allclose(module.cpu_linear(hidden, None, None), expected, atol=0.2, rtol=0.02)
        modules["kept"].cpu_linear = of_another_kernel


PATIENT_S = 60.0


def works_of(count: int) -> Works:
    return Works([(number,) for number in range(count)], most_threads=4)


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_work_is_done_once_with_spare_memory_that_nobody_else_has(threads: int) -> None:
    lent: set[SpareMemory] = set()
    spares: set[SpareMemory] = set()

    def do(numbers: Sequence[int], spare: SpareMemory) -> int:
        assert spare not in lent and not torch.is_grad_enabled()
        lent.add(spare)
        spares.add(spare)
        torch.ones(1000).sum()  # another thread may run meanwhile
        lent.remove(spare)
        return numbers[0]

    assert sorted(in_threads(works_of(300), threads, do)) == list(range(300))
    assert len(spares) <= threads


@pytest.mark.parametrize(("before", "threads", "shared"), [(1, 2, 1), (3, 4, 1), (7, 4, 2), (4, 1, 4)])
def test_threads_share_the_openmp_threads_and_give_them_back(before: int, threads: int, shared: int) -> None:
    """Also after a failure, which ends all threads, and in vLLM's worker, which replaces `torch.set_num_threads`."""
    barrier, initial, begun = threading.Barrier(threads), torch.get_num_threads(), list[int]()

    def do(numbers: Sequence[int], spare: SpareMemory) -> int:
        barrier.wait(PATIENT_S)
        return torch.get_num_threads()

    def fail(numbers: Sequence[int], spare: SpareMemory) -> None:
        begun.append(numbers[0])
        torch.ones(10_000).sum()  # another thread may run meanwhile
        if numbers[0] == 10:
            raise MemoryError("no room for a module")

    torch.set_num_threads(before)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "set_num_threads", lambda count: None)
            assert in_threads(works_of(threads), threads, do) == [shared] * threads
            assert torch.get_num_threads() == before
            with pytest.raises(MemoryError, match="no room"):
                in_threads(works_of(20_000), threads, fail)
            assert torch.get_num_threads() == before and len(begun) < 20_000
    finally:
        torch.set_num_threads(initial)


MATRICES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 600)), min_size=1, max_size=3)


@given(
    st.lists(MATRICES, min_size=1, max_size=12), st.integers(0, 1 << 20), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_spare_memory_of_all_threads_is_at_most_a_layer_and_two_buckets(
    modules: list[list[tuple[int, int]]], bucket_bytes: int, dtype: torch.dtype
) -> None:
    """Three modules a layer, and an embedding, which is written in place. Small modules of a layer share a work;
    each thread has each work at some time."""
    names = [f"model.layers.{number // 3}.part{number % 3}" for number in range(len(modules))]
    sizes = {
        f"{name}.{position}": size
        for name, of_module in zip(names, modules, strict=True)
        for position, size in enumerate(of_module)
    } | {"embed.weight": (5000, 600)}
    halves = [(name, half, rows) for name, (rows, _) in sizes.items() for half in (0, 1)]
    boxes = [
        LocalBox(name, rows // 2 if half else 0, 0, rows - rows // 2 if half else rows // 2, sizes[name][1], dtype)
        for name, half, rows in halves
        if half or rows > 1
    ]
    works = divide(boxes, sizes, lambda owner: owner == "embed", bucket_bytes)
    assert sorted(number for work in works.each for number in work) == list(range(len(boxes)))
    owners = [list(dict.fromkeys(boxes[number].owner for number in work)) for work in works.each]
    assert owners.count(["embed"]) == 2
    assert sorted(name for some in owners for name in some if name != "embed") == sorted(names)
    by_module, spare, layers = dict(zip(names, modules, strict=True)), SpareMemory(), dict[str, int]()
    for some in owners:
        assert some == ["embed"] or len({name.split(".")[2] for name in some}) == 1, "modules of one layer"
        lent = 0
        for name in some:
            for rows, cols in by_module.get(name, []):
                spare.take((rows, cols), dtype, CPU, apart=True)
                lent += rows * apart_bytes(cols * dtype.itemsize)
                layer = name.split(".")[2]
                layers[layer] = layers.get(layer, 0) + rows * cols * dtype.itemsize
        assert len(some) == 1 or lent <= WORK_BYTES
        spare.take_back()
    held = sum(len(block) for block in spare._blocks)
    assert works.most_threads == 1 or works.most_threads * held <= max(layers.values()) + 2 * bucket_bytes


def test_memory_that_somebody_kept_is_not_lent_again() -> None:
    """Where vLLM has no packing kernel it computes with the weights as they are."""
    spare = SpareMemory()
    kept = torch.nn.Parameter(spare.take((4, 8), torch.float32, CPU).fill_(1), requires_grad=False)
    other = spare.take((4, 8), torch.float32, CPU)
    assert spare.num_lent == 2 and other.data_ptr() != kept.data_ptr()
    address = other.data_ptr()
    del other
    spare.take_back()
    assert not spare.num_lent
    assert spare.take((2, 8), torch.float32, CPU).fill_(2).data_ptr() == address, "memory is used again"
    assert (kept == 1).all()


def test_workers_share_the_cores_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers, threads in ((1, 1, 1), (2, 1, 2), (2, 2, 1), (8, 1, 4), (8, 4, 2), (2, 4, 1)):
        monkeypatch.setattr(copies.os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert num_threads(works_of(1), workers) == threads
    assert num_threads(Works([], most_threads=1), 1) == 1
