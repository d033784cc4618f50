"""Shared memory and messages between processes, without a GPU: stand-ins for CUDA memory and NCCL."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.platform import NcclMessages, messages
from megarl.platform import current as platform


def compare(handle: str) -> None:
    assert bool((platform.reach_bytes(handle) == 7).all())


@pytest.mark.parametrize("on_device", [False, True])
def test_another_process_reads_shared_memory(on_device: bool) -> None:
    """On a machine with a GPU also memory of the GPU."""
    memory, handle = platform.share_bytes(1 << 20, on_device)
    memory.fill_(7)
    platform.settle()
    process = multiprocessing.get_context("spawn").Process(target=compare, args=(handle,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


class Work:
    """A message that is through when it was looked at so many times."""

    def __init__(self, looks: float) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        assert self.looks < 0, "the host went on before the message was through"
        self.waited = True


def test_a_message_over_nccl_is_through_when_the_device_says_so_and_late_at_the_deadline() -> None:
    group = object.__new__(NcclMessages)  # a real one needs a GPU
    work = Work(looks=50)
    group.finish([work], timeout_s=60.0)
    assert work.waited
    with pytest.raises(RuntimeError, match="Timed out waiting for its partner"):
        group.finish([Work(looks=float("inf"))], timeout_s=0.05)


class Coalescing:
    """The calls of torch's NCCL group that a block of messages makes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.work = Work(looks=0)

    def send(self, *arguments: Any) -> None:
        self.calls.append("send")

    def recv(self, *arguments: Any) -> None:
        self.calls.append("recv")

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Work:
        self.calls.append("end")
        return self.work


def test_messages_over_nccl_that_start_together_are_through_together() -> None:
    group = object.__new__(NcclMessages)  # a real one needs a GPU
    group._group, group._together = (backend := Coalescing()), None
    with group.together():
        first, second = group.send(torch.zeros(1), 1), group.receive(torch.zeros(1), 2)
    group.finish(first, timeout_s=60.0)
    group.finish(second, timeout_s=60.0)
    assert backend.calls == ["start", "send", "recv", "end"] and backend.work.waited


def test_a_machine_that_knows_itself_as_loopback_is_found_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the store, whose own name may mean 127.0.1.1 there and something else everywhere else."""
    own = {"store": "127.0.1.1", "127.0.1.1": "127.0.1.1", "192.0.2.9": "192.0.2.1"}
    monkeypatch.setattr(messages, "address_towards", own.__getitem__)
    store = dist.HashStore()
    store.set("address-1", "127.0.1.1")
    assert messages._address(store, 0, 2, "store") == "127.0.1.1"
    store.set("address-2", "192.0.2.9")
    assert messages._address(store, 0, 3, "store") == "192.0.2.1"
