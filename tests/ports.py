"""Ports that nobody takes by chance between their choice and their use."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

FIRST, BLOCK = 20000, 256  # above what Ray gives its workers
# Those from here on the kernel hands out to whoever asks for any port, as Ray, gloo and every outgoing connection do.
END = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def unused_port() -> int:
    """A port of 127.0.0.1 and of all other addresses that nothing listens on; no other process of tests is given it."""
    if END < FIRST + BLOCK:
        return _bound(0)
    for port in _ports(os.getpid()):
        try:
            return _bound(port)
        except OSError:
            continue
    raise AssertionError("the ports do not end")


@functools.cache
def _ports(process: int) -> Iterator[int]:
    """Those of one block, around and around. A lock keeps the block for this process: two streams of tests that walked over
    the same ports have met, each finding free what the other was about to listen on."""
    folder = Path(tempfile.gettempdir()) / f"megarl-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for block in range((END - FIRST) // BLOCK):
        lock = os.open(folder / str(block), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return itertools.cycle(range(FIRST + block * BLOCK, FIRST + (block + 1) * BLOCK))
    raise AssertionError(f"all blocks of ports are taken: see {folder}")


def _bound(port: int) -> int:
    """Raises OSError where it is in use."""
    with socket.socket() as probe:
        probe.bind(("", port))
        return int(probe.getsockname()[1])
