"""Threads that copy mapped weights: each work is done once, memory is bounded, and no thread is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.weight_sync import copies
from megarl.weight_sync.buckets import LocalBox
from megarl.weight_sync.copies import WORK_BYTES, SpareMemory, Works, apart_bytes, divide, in_threads, num_threads

pytestmark = pytest.mark.sync
CPU = torch.device("cpu")
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


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_failure_ends_all_threads(threads: int) -> None:
    begun: list[int] = []

    def do(numbers: Sequence[int], spare: SpareMemory) -> None:
        begun.append(numbers[0])
        torch.ones(10_000).sum()
        if numbers[0] == 10:
            raise MemoryError("no room for a module")

    with pytest.raises(MemoryError, match="no room"):
        in_threads(works_of(20_000), threads, do)
    assert len(begun) < 20_000


@pytest.mark.parametrize(("before", "threads", "shared"), [(1, 2, 1), (3, 4, 1), (7, 4, 2), (4, 1, 4)])
def test_threads_share_the_openmp_threads_and_give_them_back(before: int, threads: int, shared: int) -> None:
    """Also in vLLM's worker, which replaces `torch.set_num_threads`."""
    barrier, initial = threading.Barrier(threads), torch.get_num_threads()

    def do(numbers: Sequence[int], spare: SpareMemory) -> int:
        barrier.wait(PATIENT_S)
        return torch.get_num_threads()

    def fail(numbers: Sequence[int], spare: SpareMemory) -> None:
        raise MemoryError

    torch.set_num_threads(before)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "set_num_threads", lambda count: None)
            assert in_threads(works_of(threads), threads, do) == [shared] * threads
            assert torch.get_num_threads() == before
            with pytest.raises(MemoryError):
                in_threads(works_of(threads), threads, fail)
            assert torch.get_num_threads() == before
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
