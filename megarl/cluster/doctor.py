"""`megarl doctor`: check one node, then compare all nodes of a job.

Node 0 listens at the port of torchrun's rendezvous, so the comparison also tests the network. It takes the other nodes one
after the other: a line from node 0, then the node's `NodeReport` with its time and the name of a file that it wrote into the
run directory. Node 0 compares the clocks, looks for the file, and answers all nodes with the findings.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.cluster.doctor_checks import CheckResult, DoctorOptions, Severity, check_node, fail, ok
from megarl.cluster.job_environment import package_versions

RETRY_S = 0.2
# How long a client of node 0 may take to send a report; the others wait meanwhile.
REQUEST_TIMEOUT_S = 5.0
MAX_REPORT_BYTES = 1 << 20
# Traces are merged and metrics are ordered by time; Slurm's munge refuses credentials at five minutes.
MAX_CLOCK_DIFFERENCE_S = 1.0


@dataclass(frozen=True)
class NodeReport:
    """A node's report to node 0: package versions, failed checks, how far the node's clock is ahead of node 0's, and whether
    node 0 sees the node's run directory (None if unknown)."""

    rank: int
    name: str
    versions: Mapping[str, str]
    failures: Sequence[str] = ()
    clock_ahead_s: float = 0.0
    shares_run_dir: bool | None = None


def examine(options: DoctorOptions) -> Iterator[CheckResult]:
    """Yield the findings as they are made. The comparison of the nodes comes last, so that this node's faults show even if
    other nodes never answer."""
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
) -> list[CheckResult]:
    """Return the findings about all nodes, the same list on each node. Node 0 listens at `master`; the other nodes report
    there.

    A node that does not report within `timeout_s`, or cannot reach node 0, becomes a failure that names the node. Without
    `run_dir`, skip the check that the nodes share the run directory.
    """
    if report.rank:
        with _token_in(run_dir) as token:
            return _report_to_first_node(report, master, timeout_s, token, clock)
    try:
        server = socket.create_server(("", master[1]), backlog=max(128, num_nodes))
    except OSError as error:
        fix = "choose another port (MASTER_PORT), or end the program that listens there"
        return [fail("node 0", f"cannot listen for the others at port {master[1]}: {error.strerror}", fix)]
    with ExitStack() as stack:
        stack.enter_context(server)
        reports, connections = {0: report}, []
        end = time.monotonic() + timeout_s
        while len(reports) < num_nodes and (left_s := end - time.monotonic()) > 0:
            server.settimeout(left_s)
            # Ignore a client that disconnects or sends something else: a node tries again, and a port scan is harmless.
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(min(left_s, REQUEST_TIMEOUT_S))
                connection.sendall(b"\n")  # the node reads its clock now
                node = _read_report(connection, run_dir, clock)
                reports[node.rank] = node
                connections.append(connection)
        reports = dict(sorted(reports.items()))
        findings = _compare_presence(reports, num_nodes, timeout_s) + _compare_versions(reports)
        findings += _compare_clocks(reports) + _compare_run_dirs(reports, run_dir)
        for connection in connections:
            with suppress(OSError):
                connection.sendall(json.dumps([asdict(finding) for finding in findings]).encode() + b"\n")
    return findings


def _read_report(connection: socket.socket, run_dir: Path | None, clock: Callable[[], float]) -> NodeReport:
    """Read the report of another node, a line of JSON."""
    fields = json.loads(connection.makefile("rb").readline(MAX_REPORT_BYTES))
    shares = None
    if fields.get("token") is not None and run_dir is not None:
        name, level = fields["token"]
        directories = [run_dir.absolute(), *run_dir.absolute().parents]
        shares = level < len(directories) and (directories[level] / name).is_file()
    # Another version of megarl may send fewer fields; then the difference of versions is the finding.
    failures, ahead_s = fields.get("failures", ()), fields.get("time", clock()) - clock()
    return NodeReport(fields["rank"], fields["name"], dict(fields["versions"]), failures, ahead_s, shares)


def _report_to_first_node(
    report: NodeReport, master: tuple[str, int], timeout_s: float, token: tuple[str, int] | None, clock: Callable[[], float]
) -> list[CheckResult]:
    end, reason = time.monotonic() + timeout_s, "nobody listens"
    while time.monotonic() < end:
        try:
            with socket.create_connection(master, max(0.1, end - time.monotonic())) as connection:
                connection.settimeout(2 * timeout_s)  # node 0 answers after the last report
                answers = connection.makefile("rb")
                answers.readline()  # node 0 reads the report now, so that the clocks can be compared
                connection.sendall(json.dumps(asdict(report) | {"time": clock(), "token": token}).encode() + b"\n")
                rows = json.loads(answers.readline())
                return [CheckResult(row["check"], Severity(row["severity"]), row["message"], row["fix"]) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error)
            time.sleep(RETRY_S)
    fix = "is the name right, the port open between the nodes (firewall), and doctor running on node 0?"
    message = f"node {report.rank} does not reach {master[0]}:{master[1]} within {timeout_s:g} s: {reason}"
    return [fail("node 0", message, fix)]


def _compare_presence(nodes: Mapping[int, NodeReport], num_nodes: int, timeout_s: float) -> list[CheckResult]:
    """Name missing nodes and repeat each node's failures, so that no node waits for ranks that never start."""
    findings = [ok("nodes", f"all {num_nodes} came: {', '.join(node.name for node in nodes.values())}")]
    if missing := [str(rank) for rank in range(num_nodes) if rank not in nodes]:
        fix = "read the logs of those nodes: doctor has not started there, or cannot reach node 0"
        findings = [fail("nodes", f"{', '.join(missing)} of {num_nodes} did not come within {timeout_s:g} s", fix)]
    fix = "the output of that node shows the finding with its fix"
    for rank, node in nodes.items():
        findings += [fail(f"node {rank}", f"{node.name}: {failure}", fix) for failure in node.failures]
    return findings


def _compare_versions(nodes: Mapping[int, NodeReport]) -> list[CheckResult]:
    first, findings = nodes[0], []
    for package in sorted({package for node in nodes.values() for package in node.versions}):
        versions = {node.name: node.versions.get(package, "none") for node in nodes.values()}
        version = first.versions.get(package, "none")
        if others := [f"{name} {other}" for name, other in versions.items() if other != version]:
            fix = "all nodes need one environment: share it, or use one container image"
            findings.append(fail(f"same {package}", f"{first.name} has {version}, {', '.join(others)}", fix))
    return findings or [ok("same versions", "on all nodes that came")]


def _compare_clocks(nodes: Mapping[int, NodeReport]) -> list[CheckResult]:
    farthest = max(nodes.values(), key=lambda node: abs(node.clock_ahead_s))
    if abs(farthest.clock_ahead_s) <= MAX_CLOCK_DIFFERENCE_S:
        return [ok("same time", f"within {abs(farthest.clock_ahead_s):.3f} s")]
    message = f"{farthest.name} is {farthest.clock_ahead_s:+.1f} s from {nodes[0].name}"
    return [fail("same time", message, "run chrony or systemd-timesyncd on all nodes")]


def _compare_run_dirs(nodes: Mapping[int, NodeReport], run_dir: Path | None) -> list[CheckResult]:
    apart = [f"node {node.rank} ({node.name})" for node in nodes.values() if node.shares_run_dir is False]
    if run_dir is None or not (apart or any(node.shares_run_dir for node in nodes.values())):
        return []
    if not apart:
        return [ok("shared run directory", f"{run_dir.absolute()} is the same on all nodes that came")]
    message = f"node 0 does not see in {run_dir.absolute()} what {', '.join(apart)} writes: checkpoints would be torn"
    fix = "give run.dir a place on a file system that all nodes share, under one path; a container must have it mounted"
    return [fail("shared run directory", message, fix)]


@contextmanager
def _token_in(run_dir: Path | None) -> Iterator[tuple[str, int] | None]:
    """Write a file into the run directory, or its nearest existing parent; yield the file's name and how many levels up it
    is.

    The name is new, so that no cache of a network file system reports the file absent. Yield None if no file can be written;
    `check_writable` reports that fault.
    """
    if run_dir is None:
        yield None
        return
    directories = [run_dir.absolute(), *run_dir.absolute().parents]
    level = next(level for level, directory in enumerate(directories) if directory.exists())
    file = directories[level] / f".megarl-doctor-{secrets.token_hex(16)}"
    try:
        file.touch(exist_ok=False)
    except OSError:
        yield None
        return
    try:
        yield file.name, level
    finally:
        file.unlink(missing_ok=True)
