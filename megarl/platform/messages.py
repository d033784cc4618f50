"""Process groups that exchange messages between pairs of members, next to torch's default group.

Both classes have the same methods: `send` and `receive` start a transfer, `together` starts several transfers at once,
`finish` waits for a transfer, and `leave` leaves the group. Both ends must start the messages between them in the same
order.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Texts of torch's errors, which have no types of their own (2.13).
LATE = re.compile("Timed out waiting|wait timeout after|has timed out after|collective operation timeout")
LOST = re.compile("Connection closed by peer|Connection reset by peer|Broken pipe|Application timeout caused pair closure")
LOOK_S = 0.0002
EAGER_LOOKS = 20
ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class GlooMessages:
    """Exchanges host memory. A member sees at once that its partner is gone.

    A group lives as long as any of its transfers, and the other members wait until it ends. So only the group holds
    transfers, and callers know a transfer by its number.
    """

    def __init__(self, store: dist.Store, member: int, size: int, timeout_s: float, host: str) -> None:
        """Bind to GLOO_SOCKET_IFNAME or, without it, to the interface that leads to `host`, the store's machine. By default
        gloo binds to the address of this machine's name, which is often a loopback address. Raises RuntimeError if the other
        members do not come.
        """
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Any, torch.Tensor]] = {}  # each transfer, with the memory that it needs
        timeout = timedelta(seconds=timeout_s)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            self._group: Any = dist.ProcessGroupGloo(store, member, size, timeout)
            return
        # Not by setting GLOO_SOCKET_IFNAME for a moment: other threads, which open other groups meanwhile, would read it.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address(store, member, size, host))]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(store, member, size, options)

    def together(self) -> AbstractContextManager[None]:
        """Do nothing, because gloo's messages do not wait for each other; see `NcclMessages.together`."""
        return nullcontext()

    def send(self, content: torch.Tensor, member: int) -> int:
        self._pending[next(self._numbers)] = self._group.send([content], member, 0), content
        return next(reversed(self._pending))

    def receive(self, content: torch.Tensor, member: int) -> int:
        self._pending[next(self._numbers)] = self._group.recv([content], member, 0), content
        return next(reversed(self._pending))

    def finish(self, number: int, timeout_s: float) -> None:
        """Wait for a transfer. Raises RuntimeError at the deadline, and if the partner is gone."""
        # No variable of this frame holds the transfer, which a traceback would keep.
        self._pending[number][0].wait(timedelta(seconds=timeout_s))
        del self._pending[number]

    def leave(self) -> None:
        """Leave the group, so that pending transfers of other members fail at once."""
        self._pending.clear()
        self._group = None


class NcclMessages:
    """Exchanges memory of the current device.

    A member's messages run in one stream, one after another, in the order in which they started, and each waits for its
    partner. Messages that start `together` run at the same time. There is no deadlock if all members start messages in one
    common order, because then the first unfinished message is the next message at both ends.
    """

    def __init__(self, store: dist.Store, member: int, size: int, timeout_s: float, join_s: float) -> None:
        """Join the group. Raises RuntimeError if the other members do not come within `join_s`."""
        store.set(f"here-{member}", "")
        store.wait([f"here-{number}" for number in range(size)], timedelta(seconds=join_s))
        options = dist.ProcessGroupNCCL.Options()
        # Calls return at once, and torch abandons them after this time. Otherwise a hanging partner would block this process
        # forever.
        options.config.blocking = 0
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, round(timeout_s))))  # read at the first wait
        # By default torch's watchdog ends a process whose partner fails. This process must go on to serve other engines.
        # torch takes this setting in no other way.
        before = os.environ.pop(ON_ERROR, None)
        os.environ[ON_ERROR] = "0"
        try:
            self._group: Any = dist.ProcessGroupNCCL(store, member, size, options)
            # One communicator for all members; by default torch makes one for each pair at its first message.
            self._group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        finally:
            os.environ.pop(ON_ERROR)
            if before is not None:
                os.environ[ON_ERROR] = before
        self._together: list[Any] | None = None  # the work of the messages that start together, once there is one

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start all messages of the block at once; they end together. `torch.distributed.batch_isend_irecv` does the same,
        but only for groups that torch has registered."""
        works = self._together = []
        self._group._start_coalescing()
        try:
            yield
        finally:
            self._together = None
            if self._group is not None:
                works.append(self._group._end_coalescing())

    def send(self, content: torch.Tensor, member: int) -> list[Any]:
        """Start to send what the current stream has written so far."""
        work = self._group.send([content], member, 0)
        return [work] if self._together is None else self._together

    def receive(self, content: torch.Tensor, member: int) -> list[Any]:
        """Start to receive; work queued in the current stream so far still reads the old content."""
        work = self._group.recv([content], member, 0)
        return [work] if self._together is None else self._together

    def finish(self, works: list[Any], timeout_s: float) -> None:
        """Block the host until a message is done, because the host tells the other end; `work.wait` blocks only the stream.

        Raises RuntimeError at the deadline. A failed message counts as done: its checksums reveal the wrong bytes.
        """
        (work,) = works
        looks, end = 0, time.monotonic() + timeout_s
        while not work.is_completed():
            looks += 1
            if time.monotonic() > end:
                raise RuntimeError("Timed out waiting for its partner")
            time.sleep(0 if looks < EAGER_LOOKS else LOOK_S)
        work.wait()

    def leave(self) -> None:
        """Abort pending messages, so that no kernel of this device waits forever for a partner."""
        if self._group is not None:
            self._group.abort()
            self._group = None


def _address(store: dist.Store, member: int, size: int, host: str) -> str:
    """Return the address at which all other members reach this member.

    The store's machine may resolve its own name to a loopback address (Debian writes 127.0.1.1). Then return the address on
    the route to a member on another machine.
    """
    local = address_towards(host)
    store.set(f"address-{member}", local)
    if not ipaddress.ip_address(local).is_loopback:
        return local
    addresses = [text.decode() for text in store.multi_get([f"address-{number}" for number in range(size)])]
    remote = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return address_towards(remote[0]) if remote else local


def deadline_passed(error: BaseException) -> bool:
    """Return whether an error says that a deadline passed: a TimeoutError, or an error of torch's groups and stores."""
    return isinstance(error, TimeoutError) or (isinstance(error, RuntimeError) and LATE.search(str(error)) is not None)


def peer_lost(error: BaseException) -> bool:
    """Return whether an error of torch says that the other end is gone: it has ended, or its deadline has passed."""
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host; sends nothing. Raises RuntimeError without a route."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no way to {host}: {error}") from error
