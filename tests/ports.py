"""Ports that nobody takes by chance between their choice and their use."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

FIRST, STRIDE = 20000, 61  # above what Ray gives its workers
# Those from here on the kernel hands out to whoever asks for any port, as Ray, gloo and every outgoing connection do.
END = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
# Another process of the tests begins elsewhere.
_NUMBERS = itertools.count(os.getpid() * STRIDE)


def unused_port() -> int:
    """A port of 127.0.0.1 and of all other addresses that nothing listens on. Each call gives another one."""
    if END <= FIRST:
        return _bound(0)
    for number in _NUMBERS:
        try:
            return _bound(FIRST + number % (END - FIRST))
        except OSError:
            continue
    raise AssertionError("the numbers do not end")


def _bound(port: int) -> int:
    """Raises OSError where it is in use."""
    with socket.socket() as probe:
        probe.bind(("", port))
        return int(probe.getsockname()[1])
