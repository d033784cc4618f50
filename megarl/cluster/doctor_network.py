"""How this node reaches others: its address, the interfaces that libraries were told to use, ports, Ray, Slurm."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.cluster.doctor_finding import Finding, fail, ok, warn

INTERFACES = Path("/sys/class/net")
CONNECT_S = 5.0
COMMAND_S = 30.0


def check_network(ports: Mapping[str, int], environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """`ports` are to be free on this node, by what will listen there."""
    yield _host_name(socket.gethostname())
    yield from _chosen_interfaces(environment)
    yield _interconnect()
    for name, port in ports.items():
        yield _free_port(name, port)
    yield from _proxy(environment)


def check_ray(address: str) -> Iterator[Finding]:
    """The head of a Ray cluster, as HOST:PORT: does it answer, and is it of this node's version?"""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        fix = f"start it there: ray start --head --port {port or 6379}; or mend --ray, HOST:PORT of the head"
        yield fail("ray head", f"{address} does not answer: {error}", fix)
        return
    ray = shutil.which("ray")
    if ray is None:
        yield warn("ray head", f"{address} answers; no `ray` on PATH to ask it", "run from megarl's environment")
        return
    answer = _run([ray, "health-check", "--address", address])
    if answer is None:
        yield ok("ray head", f"{address} is healthy")
        return
    yield fail("ray head", f"{address} answers, but is no healthy head of this Ray: {answer}", "ray stop there, start again")


# A site may have put munged's socket somewhere else, and Slurm's configuration then says where.
MUNGE = """socket=$(scontrol show config | sed -n 's/^AuthInfo *=.*socket=\\([^,]*\\).*/\\1/p')
munge --no-input ${socket:+"--socket=$socket"} | unmunge ${socket:+"--socket=$socket"}"""


def check_slurm(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The controller and the authentication between nodes; only inside a job. A container need not have Slurm's programs: it
    is the job outside of it that calls them."""
    if "SLURM_JOB_ID" not in environment:
        return
    for name, program, command, fix in (
        (
            "slurm controller",
            "scontrol",
            ["scontrol", "ping"],
            "is slurmctld up, and SlurmctldHost of slurm.conf reachable?",
        ),
        ("munge", "munge", ["sh", "-c", MUNGE], "start munged; all nodes need the same /etc/munge/munge.key"),
    ):
        if shutil.which(program) is None:
            yield ok(name, f"not asked: no program {program} here, as in a container")
            continue
        answer = _run(command)
        yield ok(name, "answers") if answer is None else fail(name, answer, fix)


def _run(command: list[str]) -> str | None:
    """None where it succeeds, else the last line of what it said."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMMAND_S)
    except FileNotFoundError:
        return f"no program {command[0]!r}"
    except subprocess.TimeoutExpired:
        return f"no answer within {COMMAND_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = (done.stderr + done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _host_name(name: str) -> Finding:
    try:
        addresses = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = "add the name to /etc/hosts or DNS: torchrun and Ray meet by it"
        return fail("host name", f"{name!r} does not resolve: {error.strerror}", fix)
    if all(ipaddress.ip_address(str(address)).is_loopback for address in addresses):
        fix = "on more than one node: give it its network address in /etc/hosts (Debian writes 127.0.1.1)"
        return warn("host name", f"{name} is {', '.join(map(str, addresses))}, which other nodes cannot reach", fix)
    return ok("host name", f"{name} is {', '.join(map(str, addresses))}")


def _chosen_interfaces(environment: Mapping[str, str]) -> Iterator[Finding]:
    """A name that no interface has makes gloo fail at once and NCCL at its first collective."""
    # Not /sys, which in a container may be that of another network.
    present = sorted(name for _, name in socket.if_nameindex())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = environment.get(variable)
        if not value:
            continue
        # NCCL: ^ excludes, = compares whole names, else a prefix is enough.
        names, exact = value.lstrip("^=").split(","), value.startswith("=") or not variable.startswith("NCCL")
        known = [n for n in names if any(p == n if exact else p.startswith(n) for p in present)]
        if value.startswith("^") or known:
            yield ok(variable, value)
        else:
            yield fail(variable, f"{value}, but this node has {', '.join(present)}", f"export {variable}=one of these")


def _interconnect() -> Finding:
    """The fastest way out of the node."""
    cards = Path("/sys/class/infiniband")
    names = sorted(card.name for card in cards.iterdir()) if cards.is_dir() else []
    if names:
        return ok("interconnect", f"InfiniBand or RoCE: {', '.join(names)}")
    up = [
        i
        for i in sorted(INTERFACES.iterdir())
        if i.name != "lo" and (i / "operstate").read_text(encoding="utf-8").strip() != "down"
    ]
    if not up:
        return warn("interconnect", "no interface but the loopback is up", "fine on one node; with more, bring one up")
    return ok("interconnect", f"Ethernet: {', '.join(interface.name for interface in up)}")


def _free_port(name: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            fix = f"end what listens there (ss -ltnp 'sport = :{port}'), or choose another port"
            return fail(f"port {port}", f"for {name}: {error.strerror}", fix)
    return ok(f"port {port}", f"free for {name}")


def _proxy(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Ray and torchrun speak gRPC and TCP to other nodes; gRPC goes through a proxy where one is set."""
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        if environment.get(variable) and not (environment.get("no_proxy") or environment.get("no_grpc_proxy")):
            fix = "export no_proxy with the nodes' names and addresses: Ray's gRPC would go through the proxy"
            yield warn(variable, environment[variable], fix)
            return
