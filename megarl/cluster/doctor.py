"""`megarl doctor`: check one node, then compare all nodes of a job.

Node 0 serves HTTP at the port where torchrun's agents will meet, so the comparison also tests the network. Every other node
posts a `NodeReport` there, with its time and the name of a file that it has left in the run directory; node 0 compares the
clocks, looks for the file, and answers with the findings.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from megarl.cluster.doctor_checks import DoctorOptions, Finding, Severity, check_node, fail, ok
from megarl.cluster.job_environment import package_versions

RETRY_S = 0.2
# How long a client of node 0 may take to send a request.
REQUEST_TIMEOUT_S = 5.0
MAX_REPORT_BYTES = 1 << 20
# Traces are merged and metrics are ordered by time; Slurm's munge refuses credentials at five minutes.
MAX_CLOCK_DIFFERENCE_S = 1.0


@dataclass(frozen=True)
class NodeReport:
    """What a node tells node 0: its package versions, its failed checks, how far its clock is ahead of node 0's, and
    whether node 0 sees its run directory (None if unknown)."""

    rank: int
    name: str
    versions: Mapping[str, str]
    failures: Sequence[str] = ()
    clock_ahead_s: float = 0.0
    shares_run_dir: bool | None = None


def examine(options: DoctorOptions) -> Iterator[Finding]:
    """Yield the findings as they are made. The comparison of the nodes comes last: this node's faults show even where the
    other nodes never answer, and node 0 hears of them."""
    failures = []
    for finding in check_node(options):
        if finding.severity == Severity.FAIL:
            failures.append(f"{finding.check}: {finding.message}")
        yield finding
    if options.num_nodes > 1:
        report = NodeReport(options.node_rank, socket.gethostname(), package_versions(), failures)
        yield from compare_nodes(report, options.num_nodes, options.master, options.timeout_s, options.run_dir)


def compare_nodes(
    report: NodeReport,
    num_nodes: int,
    master: tuple[str, int],
    timeout_s: float,
    run_dir: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Return the findings on all nodes, the same list on each node. Node 0 listens at `master`, and the others report there.

    A node that does not report, or that cannot reach node 0, gives a failed finding with its number after `timeout_s`.
    Without `run_dir` nobody checks whether the nodes share it.
    """
    if report.rank:
        with _token_in(run_dir) as token:
            return _report_to_first_node(report, master, timeout_s, token, clock)
    reports, arrived = {0: report}, threading.Condition()
    findings: list[Finding] = []
    decided = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_POST(self) -> None:
            try:
                fields = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), MAX_REPORT_BYTES)))
                # A node with another version of megarl may send fewer fields: the version is then the finding.
                token = fields.get("token")
                shares = None if token is None or run_dir is None else _sees(token, run_dir)
                ahead_s = fields.get("time", clock()) - clock()
                other = NodeReport(
                    fields["rank"], fields["name"], dict(fields["versions"]), fields.get("failures", ()), ahead_s, shares
                )
            except (ValueError, KeyError, TypeError) as error:
                self.send_error(400, str(error))
                return
            with arrived:
                reports[other.rank] = other
                arrived.notify()
            decided.wait()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([asdict(finding) for finding in findings]).encode())

        def log_message(self, *arguments: Any) -> None:
            """Print nothing: the command prints findings only."""

    try:
        server = _Server(("", master[1]), Handler)
    except OSError as error:
        fix = "choose another port (MASTER_PORT), or end the program that listens there"
        return [fail("node 0", f"cannot listen for the others at port {master[1]}: {error.strerror}", fix)]
    with server:  # its end waits for the answers to be sent
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with arrived:
                arrived.wait_for(lambda: len(reports) >= num_nodes, timeout_s)
                findings += _compare(dict(sorted(reports.items())), num_nodes, timeout_s, run_dir)
        finally:
            decided.set()
            server.shutdown()
    return findings


class _Server(socketserver.ThreadingTCPServer):
    """`http.server.HTTPServer` would look up this machine's name, which takes long on a broken network."""

    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, *arguments: Any) -> None:
        """Ignore a client that breaks off: a node tries again, and a port scan may do as it likes."""


def _report_to_first_node(
    report: NodeReport,
    master: tuple[str, int],
    timeout_s: float,
    token: tuple[str, int] | None,
    clock: Callable[[], float],
) -> list[Finding]:
    end, reason = time.monotonic() + timeout_s, "nobody listens"
    while time.monotonic() < end:
        with contextlib.closing(HTTPConnection(*master, timeout=max(0.1, end - time.monotonic()))) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(2 * timeout_s)  # node 0 answers when the last node has reported
                connection.request("POST", "/", json.dumps(asdict(report) | {"time": clock(), "token": token}))
                rows = json.loads(connection.getresponse().read())
                return [Finding(row["check"], Severity(row["severity"]), row["message"], row["fix"]) for row in rows]
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                reason = str(error)
                time.sleep(RETRY_S)
    fix = "is the name right, the port open between the nodes (firewall), and doctor running on node 0?"
    message = f"node {report.rank} does not reach {master[0]}:{master[1]} within {timeout_s:g} s: {reason}"
    return [fail("node 0", message, fix)]


def _compare(nodes: Mapping[int, NodeReport], num_nodes: int, timeout_s: float, run_dir: Path | None) -> list[Finding]:
    """Return the findings of node 0 from the reports by node."""
    first, findings = nodes[0], []
    missing = [str(rank) for rank in range(num_nodes) if rank not in nodes]
    if missing:
        fix = "read the logs of those nodes: doctor has not started there, or cannot reach node 0"
        findings.append(fail("nodes", f"{', '.join(missing)} of {num_nodes} did not come within {timeout_s:g} s", fix))
    else:
        findings.append(ok("nodes", f"all {num_nodes} came: {', '.join(node.name for node in nodes.values())}"))
    # A fault of one node fails all nodes: no node may wait for ranks that do not start.
    for rank, node in nodes.items():
        fix = "the output of that node shows the finding with its fix"
        findings += [fail(f"node {rank}", f"{node.name}: {failure}", fix) for failure in node.failures]
    num_before = len(findings)
    for package in sorted({package for node in nodes.values() for package in node.versions}):
        version = first.versions.get(package, "none")
        others = [f"{node.name} {node.versions.get(package, 'none')}" for node in nodes.values()
                  if node.versions.get(package, "none") != version]  # fmt: skip
        if others:
            fix = "all nodes need one environment: share it, or use one container image"
            findings.append(fail(f"same {package}", f"{first.name} has {version}, {', '.join(others)}", fix))
    if len(findings) == num_before:
        findings.append(ok("same versions", "on all nodes that came"))
    farthest = max(nodes.values(), key=lambda node: abs(node.clock_ahead_s))
    if abs(farthest.clock_ahead_s) > MAX_CLOCK_DIFFERENCE_S:
        message = f"{farthest.name} is {farthest.clock_ahead_s:+.1f} s from {first.name}"
        findings.append(fail("same time", message, "run chrony or systemd-timesyncd on all nodes"))
    else:
        findings.append(ok("same time", f"within {abs(farthest.clock_ahead_s):.3f} s"))
    apart = [f"node {node.rank} ({node.name})" for node in nodes.values() if node.shares_run_dir is False]
    if run_dir is not None and apart:
        message = f"node 0 does not see in {run_dir.absolute()} what {', '.join(apart)} writes: checkpoints would be torn"
        fix = "give run.dir a place on a file system that all nodes share, under one path; a container must have it mounted"
        findings.append(fail("shared run directory", message, fix))
    elif run_dir is not None and any(node.shares_run_dir for node in nodes.values()):
        findings.append(ok("shared run directory", f"{run_dir.absolute()} is the same on all nodes that came"))
    return findings


@contextmanager
def _token_in(run_dir: Path | None) -> Iterator[tuple[str, int] | None]:
    """Leave a file in the run directory, or in its nearest existing parent; yield its name and how many levels up it lies.

    The name is new, so that no cache of a network file system says that it is absent. Yields None where no file can be
    written, which is a finding of its own.
    """
    if run_dir is None:
        yield None
        return
    directories = [run_dir.absolute(), *run_dir.absolute().parents]
    levels = next(level for level, directory in enumerate(directories) if directory.exists())
    file = directories[levels] / f".megarl-doctor-{secrets.token_hex(16)}"
    try:
        file.touch(exist_ok=False)
    except OSError:
        yield None
        return
    try:
        yield file.name, levels
    finally:
        file.unlink(missing_ok=True)


def _sees(token: Sequence[Any], run_dir: Path) -> bool:
    """Return whether the token of another node lies where this node has the run directory."""
    name, levels = token
    directories = [run_dir.absolute(), *run_dir.absolute().parents]
    return levels < len(directories) and (directories[levels] / name).is_file()
