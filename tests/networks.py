"""Two network namespaces of this machine with one cable between them: two machines, as far as messages know."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

CLONE_NEWNET = 0x40000000
CABLE = "cable"  # the name of the interface at both ends


class Network(NamedTuple):
    """A namespace, by the process that holds it, and its address."""

    holder: int
    address: str

    def enter(self) -> None:
        """Move this thread, and what it starts from now on, into the namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.holder}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of process {self.holder}")

    def command(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.holder), "-n", *words], check=True, capture_output=True, text=True)

    def switch(self, state: str) -> None:
        """The cable's end here: `up` or `down`."""
        self.command("ip", "link", "set", CABLE, state)

    def slow(self, bytes_per_s: int) -> None:
        """Have the cable take no more from here."""
        self.command("tc", "qdisc", "add", "dev", CABLE, "root", "tbf", "rate", f"{8 * bytes_per_s}bit",
                     "burst", "32kb", "latency", "400ms")  # fmt: skip

    def sent_bytes(self) -> int:
        """What the cable has taken from here."""
        lines = Path(f"/proc/{self.holder}/net/dev").read_text().splitlines()
        (line,) = [line for line in lines if line.strip().startswith(f"{CABLE}:")]
        return int(line.partition(":")[2].split()[8])

    def emptied(self, timeout_s: float) -> bool:
        """Whether every process in it but the holder ends; one that loses its parent takes a moment."""
        end = time.monotonic() + timeout_s
        while self.processes():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def clear(self) -> None:
        """End every process in it but the holder, by force."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def processes(self) -> list[int]:
        """In it, but the holder."""
        mine, pids = os.stat(f"/proc/{self.holder}/ns/net").st_ino, []
        for process in psutil.process_iter():
            try:
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == mine and process.pid != self.holder:
                    pids.append(process.pid)
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is not ours
                continue
        return pids


@contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Both with a loopback interface of their own; gone with the processes that hold them, which end with this one.

    Skips, and says why, where this machine grants no namespaces.
    """
    if shutil.which("ip") is None:
        pytest.skip("no `ip`: Debian package iproute2")
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    # `cat` ends when its input does, so when this process ends in whatever way.
    holders = [subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        near, far = networks = [Network(child.pid, f"10.231.7.{number}") for number, child in enumerate(holders, start=1)]
        for network in networks:
            while Path(f"/proc/{network.holder}/comm").read_text().strip() != "cat":  # until `unshare` has become it
                os.sched_yield()
        near.command("ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(far.holder))
        for network in networks:
            network.command("ip", "link", "set", "lo", "up")
            network.command("ip", "address", "add", f"{network.address}/24", "dev", CABLE)
            network.switch("up")
        yield near, far
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
