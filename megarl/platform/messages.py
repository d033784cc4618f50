"""Groups of processes for messages between pairs of their members, beside torch's default group.

Each class has `send` and `receive`, which only begin, `finish`, which waits for one of them, and `leave`. `number` is what a
message is known by where its transport knows any; a member's messages to another one must begin in the same order on both.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# What torch's errors have in their text, as they have no type of their own (2.13).
LATE = re.compile("Timed out waiting|wait timeout after|has timed out after|collective operation timeout")
LOST = re.compile("Connection closed by peer|Connection reset by peer|Broken pipe|Application timeout caused pair closure")
LOOK_S = 0.0002
EAGER_LOOKS = 20


class GlooMessages:
    """From and to the host's memory. Who loses its partner sees it at once."""

    def __init__(
        self, store: dist.Store, member: int, size: int, timeout_s: float, host: str, numbered: bool = True
    ) -> None:
        """Members reach each other on the way on which they reach `host`, the store's machine. Raises RuntimeError where
        the other members do not come. Without `numbered` messages are told apart by their order alone, as NCCL's are.

        Left alone gloo binds to what this machine's own name resolves to, often a loopback address that no other machine
        reaches. Where GLOO_SOCKET_IFNAME is set, as for torch's own groups, gloo takes that interface.
        """
        self._numbered, timeout = numbered, timedelta(seconds=timeout_s)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            self._group: Any = dist.ProcessGroupGloo(store, member, size, timeout)
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address(store, member, size, host))]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(store, member, size, options)

    def send(self, content: torch.Tensor, member: int, number: int) -> Any:
        return self._group.send([content], member, number if self._numbered else 0)

    def receive(self, content: torch.Tensor, member: int, number: int) -> Any:
        return self._group.recv([content], member, number if self._numbered else 0)

    def finish(self, work: Any, timeout_s: float) -> None:
        """Raises RuntimeError at the deadline, and where the partner is gone."""
        work.wait(timedelta(seconds=timeout_s))

    def leave(self) -> None:
        """Let go of the group: its other members' waits fail at once."""
        self._group = None


class NcclMessages:
    """From and to the memory of the current device.

    All messages of a member run one after the other in one stream of its device, in the order in which they began, and each
    waits for its partner. NCCL knows no numbers. Members that all begin theirs in one common order cannot wait for each
    other in a circle: the first message that is not through is the next one at both of its ends.
    """

    def __init__(self, store: dist.Store, member: int, size: int, timeout_s: float, meeting_s: float) -> None:
        """Raises RuntimeError where the other members do not come within `meeting_s`."""
        store.set(f"here-{member}", "")
        store.wait([f"here-{one}" for one in range(size)], timedelta(seconds=meeting_s))
        options = dist.ProcessGroupNCCL.Options()
        # Calls that must wait for a partner return at once, and torch gives them up after this time: else a partner that
        # hangs holds this process for ever.
        options.config.blocking = 0
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, round(timeout_s))))  # read at the first such wait
        # By default torch's watchdog ends the process whose partner fails. This one must live on and serve other engines.
        with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):
            self._group: Any = dist.ProcessGroupNCCL(store, member, size, options)
            # One communicator for all members. Left alone torch makes one for each pair of them when it first sends.
            self._group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))

    def send(self, content: torch.Tensor, member: int, number: int) -> Any:
        """What is written by then in the current stream is sent."""
        return self._group.send([content], member, 0)

    def receive(self, content: torch.Tensor, member: int, number: int) -> Any:
        """What is queued by then in the current stream still reads what was there before."""
        return self._group.recv([content], member, 0)

    def finish(self, work: Any, timeout_s: float) -> None:
        """Raises RuntimeError at the deadline. `work.wait` would only have the current stream wait, and this process go on:
        the other end, and the next bucket, are told by the host. A message that failed is through as well; its bytes are
        then wrong, which their checksums tell."""
        looks, end = 0, time.monotonic() + timeout_s
        while not work.is_completed():
            looks += 1
            if time.monotonic() > end:
                raise RuntimeError("its partner did not come")
            time.sleep(0 if looks < EAGER_LOOKS else LOOK_S)
        work.wait()

    def leave(self) -> None:
        """End what is under way, so that no kernel of this device waits for ever for a partner."""
        if self._group is not None:
            self._group.abort()
            self._group = None


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """For what torch reads in the environment alone, when it makes a NCCL group."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _address(store: dist.Store, member: int, size: int, host: str) -> str:
    """The address at which all other members find this one.

    The machine of the store may know itself by a loopback address (Debian lists its own name as 127.0.1.1). Members
    elsewhere have another one, and the way to them has the right address.
    """
    own = address_towards(host)
    store.set(f"address-{member}", own)
    if not ipaddress.ip_address(own).is_loopback:
        return own
    addresses = [text.decode() for text in store.multi_get([f"address-{one}" for one in range(size)])]
    outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return address_towards(outside[0]) if outside else own


def deadline_passed(error: BaseException) -> bool:
    """Whether an error says that somebody did not come by a deadline: Python's, or one of torch's groups and stores."""
    return isinstance(error, TimeoutError) or (isinstance(error, RuntimeError) and LATE.search(str(error)) is not None)


def peer_lost(error: BaseException) -> bool:
    """Whether an error of torch says that the other end is gone: it has ended, or its own deadline has passed."""
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


def address_towards(host: str) -> str:
    """This machine's own address on the way to another one; nothing is sent. Raises RuntimeError where there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no way to {host}: {error}") from error
