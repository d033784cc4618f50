"""Shared memory and messages between processes, without a GPU: stand-ins for CUDA memory and NCCL."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.platform import NcclMessages, messages
from megarl.platform import current as platform


def compare(handles: list[str]) -> None:
    assert all(bool((platform.reach_bytes(handle) == 7).all()) for handle in handles)


def test_another_process_reads_shared_memory() -> None:
    """Memory of the host, and of the GPU if the machine has a GPU."""
    shared = [platform.share_bytes(1 << 20, on_device) for on_device in (False, True)]
    for memory, _ in shared:
        memory.fill_(7)
    platform.settle()
    handles = [handle for _, handle in shared]
    process = multiprocessing.get_context("spawn").Process(target=compare, args=(handles,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


class Work:
    """A message that completes after a number of looks."""

    def __init__(self, looks: float) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        assert self.looks < 0, "the host continued before the message was complete"
        self.waited = True


def test_a_message_over_nccl_ends_with_the_devices_work_or_at_the_deadline() -> None:
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


def test_messages_over_nccl_that_start_together_end_together() -> None:
    group = object.__new__(NcclMessages)  # a real one needs a GPU
    group._group, group._together = (backend := Coalescing()), None
    with group.together():
        first, second = group.send(torch.zeros(1), 1), group.receive(torch.zeros(1), 2)
    group.finish(first, timeout_s=60.0)
    group.finish(second, timeout_s=60.0)
    assert backend.calls == ["start", "send", "recv", "end"] and backend.work.waited


def test_a_machine_with_a_loopback_name_publishes_a_reachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's machine may resolve its own name to 127.0.1.1, while other machines resolve the name to its address."""
    addresses = {"store": "127.0.1.1", "127.0.1.1": "127.0.1.1", "192.0.2.9": "192.0.2.1"}
    monkeypatch.setattr(messages, "address_towards", addresses.__getitem__)
    store = dist.HashStore()
    store.set("address-1", "127.0.1.1")
    assert messages._address(store, 0, 2, "store") == "127.0.1.1"
    store.set("address-2", "192.0.2.9")
    assert messages._address(store, 0, 3, "store") == "192.0.2.1"
