"""Process groups for messages between pairs of their members, beside torch's default group."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def gloo_group(store: dist.Store, member: int, size: int, timeout_s: float, host: str) -> Any:
    """A gloo group from and to the host's memory, whose members reach each other on the way on which they reach `host`,
    the store's machine. Raises RuntimeError where the other members do not come.

    Left alone gloo binds to what this machine's own name resolves to, often a loopback address that no other machine
    reaches. Where GLOO_SOCKET_IFNAME is set, as for torch's own groups, gloo takes that interface.
    """
    timeout = timedelta(seconds=timeout_s)
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, member, size, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address(store, member, size, host))]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, member, size, options)


def _address(store: dist.Store, member: int, size: int, host: str) -> str:
    """The address at which all other members find this one.

    The machine of the store may know itself by a loopback address (Debian lists its own name as 127.0.1.1). Members
    elsewhere have another one, and the way to them has the right address.
    """
    own = _towards(host)
    store.set(f"address-{member}", own)
    if not ipaddress.ip_address(own).is_loopback:
        return own
    addresses = [text.decode() for text in store.multi_get([f"address-{one}" for one in range(size)])]
    outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return _towards(outside[0]) if outside else own


def _towards(host: str) -> str:
    """This machine's own address on the way to another one; nothing is sent. Raises RuntimeError where there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no way to {host}: {error}") from error
