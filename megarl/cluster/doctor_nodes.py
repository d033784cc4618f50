"""All nodes of a job compared: each tells the first one about itself, which answers with what differs.

The exchange is the test of the network, too: it takes the way that torchrun's rendezvous takes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.doctor_finding import Finding, Verdict, fail, ok
from megarl.cluster.doctor_sharing import Token, judge, leave_token, sees

LINE_BYTES = 1 << 20
RETRY_S = 0.2
# Traces are merged and metrics ordered by time; Slurm's munge refuses credentials at five minutes.
CLOCK_S = 1.0


@dataclass(frozen=True)
class Node:
    """A node of the job: its number, its name, `versions`, which all nodes must share, what makes it unfit, and where it has
    the directory of runs; None where that is not asked."""

    rank: int
    name: str
    versions: Mapping[str, str]
    unfit: Sequence[str] = ()
    run_dir: Path | None = None


def compare_nodes(
    node: Node, num_nodes: int, master: tuple[str, int], timeout_s: float, clock: Callable[[], float] = time.time
) -> list[Finding]:
    """The findings on all nodes, the same ones on each. Node 0 listens at `master`, the others come there.

    A node that does not come, or that cannot reach node 0, is found at the deadline, by its number.
    """
    if node.rank == 0:
        return _serve(node, num_nodes, master[1], timeout_s, clock)
    return _ask(node, master, timeout_s, clock)


def _serve(node: Node, num_nodes: int, port: int, timeout_s: float, clock: Callable[[], float]) -> list[Finding]:
    nodes, skews, seen = {0: node}, {0: 0.0}, {}
    connections: dict[int, socket.socket] = {}
    end = time.monotonic() + timeout_s
    try:
        listening = socket.create_server(("", port))
    except OSError as error:
        fix = "choose another port (MASTER_PORT), or end what listens there"
        return [fail("node 0", f"cannot listen for the others at port {port}: {error.strerror}", fix)]
    with listening as server, _token_of(node) as token:
        while len(nodes) < num_nodes:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = server.accept()
                connection.settimeout(max(0.01, end - time.monotonic()))
                said = _receive(connection)
                asked = clock()
                _send(connection, {"time": asked} | ({} if token is None else {"token": asdict(token)}))
                answered = _receive(connection)
                # Another megarl may say less: that it is another one is then the finding.
                other = Node(int(said["rank"]), said["name"], said["versions"], said.get("unfit", ()))
                # Its clock was read half-way between our question and its answer.
                skew = float(answered["time"]) - (asked + clock()) / 2
            except (OSError, ValueError, KeyError, TypeError):  # who breaks off, or is no doctor at all, may come again
                if time.monotonic() >= end:
                    break
                continue
            skews[other.rank], nodes[other.rank], connections[other.rank] = skew, other, connection
            if "sees" in answered:
                seen[f"node {other.rank} ({other.name})"] = bool(answered["sees"])
    found = [_missing(num_nodes, nodes, timeout_s), *_unfit(nodes), *_differences(nodes), _clocks(nodes, skews)]
    if node.run_dir is not None and seen:
        found.append(judge(seen, node.run_dir))
    for connection in connections.values():
        with connection, contextlib.suppress(OSError):  # one that has gone says so itself
            _send(connection, {"findings": [[one.check, one.verdict, one.found, one.fix] for one in found]})
    return found


def _ask(node: Node, master: tuple[str, int], timeout_s: float, clock: Callable[[], float]) -> list[Finding]:
    end, reason = time.monotonic() + timeout_s, "nobody listens"
    where = f"{master[0]}:{master[1]}"
    while time.monotonic() < end:
        try:
            with socket.create_connection(master, max(0.1, end - time.monotonic())) as connection:
                _send(
                    connection,
                    {"rank": node.rank, "name": node.name, "versions": dict(node.versions), "unfit": list(node.unfit)},
                )
                asked = _receive(connection)
                answer: dict[str, Any] = {"time": clock()}
                if node.run_dir is not None and "token" in asked:
                    answer["sees"] = sees(Token(**asked["token"]), node.run_dir)
                _send(connection, answer)
                connection.settimeout(2 * timeout_s)  # until the last node has come
                rows = _receive(connection)["findings"]
                return [Finding(check, Verdict(verdict), found, fix) for check, verdict, found, fix in rows]
        except (OSError, ValueError, TypeError) as error:
            reason = str(error)
            time.sleep(RETRY_S)
    fix = "is the name right, the port open between the nodes (firewall), and doctor running on node 0?"
    return [fail("node 0", f"node {node.rank} does not reach {where} within {timeout_s:g} s: {reason}", fix)]


def _token_of(node: Node) -> AbstractContextManager[Token | None]:
    return contextlib.nullcontext() if node.run_dir is None else leave_token(node.run_dir)


def _missing(num_nodes: int, nodes: Mapping[int, Node], timeout_s: float) -> Finding:
    late = [str(rank) for rank in range(num_nodes) if rank not in nodes]
    if late:
        fix = "look at their own logs: not started, or no way to node 0"
        return fail("nodes", f"{', '.join(late)} of {num_nodes} did not come within {timeout_s:g} s", fix)
    return ok("nodes", f"all {num_nodes} came: {', '.join(nodes[rank].name for rank in sorted(nodes))}")


def _unfit(nodes: Mapping[int, Node]) -> list[Finding]:
    """No node is to wait for one that does not start: what a node has found about itself fails all of them."""
    fix = "the finding stands with its fix in that node's own output"
    return [fail(f"node {rank}", f"{node.name}: {what}", fix) for rank, node in sorted(nodes.items()) for what in node.unfit]


def _differences(nodes: Mapping[int, Node]) -> list[Finding]:
    """A version that not all nodes have is named with the nodes that have another than node 0."""
    found = []
    for name in sorted({name for node in nodes.values() for name in node.versions}):
        values = {rank: node.versions.get(name, "none") for rank, node in nodes.items()}
        other = {rank: value for rank, value in values.items() if value != values[0]}
        if other:
            said = ", ".join(f"{nodes[rank].name} {value}" for rank, value in sorted(other.items()))
            fix = "all nodes need one environment: share it, or use one container image"
            found.append(fail(f"same {name}", f"{nodes[0].name} has {values[0]}, {said}", fix))
    return found or [ok("same versions", "on all nodes that came")]


def _clocks(nodes: Mapping[int, Node], skews: Mapping[int, float]) -> Finding:
    rank = max(skews, key=lambda rank: abs(skews[rank]))
    if abs(skews[rank]) > CLOCK_S:
        fix = "run chrony or systemd-timesyncd on all nodes"
        return fail("same time", f"{nodes[rank].name} is {skews[rank]:+.1f} s from {nodes[0].name}", fix)
    return ok("same time", f"within {abs(skews[rank]):.3f} s")


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON. Raises ValueError for anything else, also for an end."""
    content = b""
    while not content.endswith(b"\n"):
        more = connection.recv(LINE_BYTES)
        content += more
        if not more or len(content) > LINE_BYTES:
            raise ValueError("the connection ended or sent no line")
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def shared_versions(packages: Sequence[str], version: Callable[[str], str]) -> dict[str, str]:
    """The versions of some packages here; `version` is `importlib.metadata.version`."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except ImportError:  # PackageNotFoundError is one
            found[package] = "none"
    return found
