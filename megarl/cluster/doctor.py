"""`megarl doctor`: check one node (Python packages, the machine, the network, Slurm), then compare all nodes of a job."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from packaging.requirements import Requirement

from megarl.cluster.job_environment import package_versions
from megarl.reward.sandbox import refusal
from megarl.telemetry.disk import nearest_existing

MIB, GIB = 1 << 20, 1 << 30
IMPORT_TIMEOUT_S, COMMAND_TIMEOUT_S = 120.0, 30.0
NVIDIA_DRIVER = Path("/dev/nvidiactl")
SHARED_MEMORY = Path("/dev/shm")
# Ray's object store takes 256 MiB; weight-sync buckets and vLLM's messages come on top.
SHARED_MEMORY_BYTES = 1 * GIB
OPEN_FILES, MIN_OPEN_FILES = 65536, 4096
DISK_BYTES = 10 * GIB
CPU_INFO = Path("/proc/cpuinfo")
# Other CPUs emulate bf16 products: 1.8 GFLOPS against 30 in fp32 on two AVX2 cores (torch 2.13).
BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
RETRY_S = 0.2
# How long a client of node 0 may take to send a report; the others wait meanwhile.
REQUEST_TIMEOUT_S = 5.0
MAX_REPORT_BYTES = 1 << 20
# Traces are merged and metrics are ordered by time; Slurm's munge refuses credentials at five minutes.
MAX_CLOCK_DIFFERENCE_S = 1.0


class Severity(StrEnum):
    """`fail` stops a run or makes it wrong; `warn` makes it slower or less safe."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class CheckResult:
    """The result of a check and, unless the result is ok, how to fix the fault."""

    check: str
    severity: Severity
    message: str
    fix: str = ""


@dataclass(frozen=True)
class DoctorOptions:
    """The checks to make on node `node_rank` of `num_nodes`. The nodes meet at `master` (host and port) within `timeout_s`.

    `run_dir` is the directory of runs; `model` and `precision` are the recipe's model.path and trainer.precision; `code`
    is set if a reward runs code. Ray's head will listen at `ray_port` of node 0, if given.
    """

    run_dir: Path = Path("runs")
    model: str | None = None
    precision: str | None = None
    num_nodes: int = 1
    node_rank: int = 0
    master: tuple[str, int] = ("127.0.0.1", 29500)
    ray_port: int | None = None
    code: bool = False
    timeout_s: float = 60.0


def ok(check: str, message: str) -> CheckResult:
    return CheckResult(check, Severity.OK, message)


def warn(check: str, message: str, fix: str) -> CheckResult:
    return CheckResult(check, Severity.WARN, message, fix)


def fail(check: str, message: str, fix: str) -> CheckResult:
    return CheckResult(check, Severity.FAIL, message, fix)


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


# One node ------------------------------------------------------------------------------------------------------------------


def check_node(options: DoctorOptions) -> Iterator[CheckResult]:
    """Yield the findings of all checks of this node."""
    yield from check_packages()
    yield from check_machine(options.run_dir)
    if options.precision is not None and not NVIDIA_DRIVER.exists():
        yield check_precision(options.precision)
    if options.code:
        yield check_sandbox()
    ports = {"torchrun": options.master[1]} | ({} if options.ray_port is None else {"Ray": options.ray_port})
    yield from check_network(ports if options.node_rank == 0 else {})
    yield from check_slurm()
    if options.model is not None:
        # A model directory must exist on every node. The run itself fetches a hub name.
        directory = Path(options.model)
        is_hub_name = not options.model.startswith((".", "models/")) and not directory.is_absolute()
        fix = "share the directory between the nodes, or copy it to each; a relative path counts from where the job starts"
        if is_hub_name and not directory.exists():
            yield ok("model", f"{options.model}: a name of the model hub, not looked up")
        elif not (directory / "config.json").is_file():
            yield fail("model", f"{directory.absolute()} has no config.json", fix)
        else:
            yield ok("model", str(directory))


def check_packages() -> Iterator[CheckResult]:
    """Compare Python packages with the tested versions, and import the fragile ones."""
    # The CUDA version of the installed torch, without an import of torch; None for a CPU build or no torch.
    spec = importlib.util.find_spec("torch")
    version_file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin is not None else Path()
    text = version_file.read_text(encoding="utf-8") if version_file.is_file() else ""
    match = re.search(r"^cuda\b.*= *'([^']+)'", text, re.MULTILINE)
    cuda = None if match is None else match[1]
    yield from _check_pins("cpu" if cuda is None else "gpu")
    has_gpu = NVIDIA_DRIVER.exists()
    if cuda is None and has_gpu:
        fix = "install megarl[gpu], whose torch is a CUDA build, or hide the GPUs on purpose"
        yield fail("torch build", "torch is a CPU build, and this machine has NVIDIA GPUs", fix)
    elif cuda is not None and not has_gpu:
        fix = f"without a GPU install the CPU build (launch/setup.sh); with one, load the driver: {NVIDIA_DRIVER} is missing"
        yield fail("torch build", f"torch is built for CUDA {cuda}, and this machine shows no NVIDIA driver", fix)
    else:
        yield ok("torch build", "CPU" if cuda is None else f"CUDA {cuda}")
    yield _check_import("torch", "import torch", "install the wheel of launch/setup.sh's lock again")
    if importlib.util.find_spec("torchvision") is not None:
        fix = "pip uninstall torchvision: megarl does not need it, and a torchvision for another torch breaks transformers"
        yield _check_import("torchvision", "import torchvision, transformers", fix)


def _check_pins(extra: str) -> Iterator[CheckResult]:
    """Compare packages with the pins of megarl's extra: a missing package fails, another version warns."""
    num_pins = num_wrong = 0
    for line in importlib.metadata.requires("megarl") or []:
        pin = Requirement(line)
        if pin.marker is not None and not pin.marker.evaluate({"extra": extra}):
            continue
        num_pins += 1
        try:
            version = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            num_wrong += 1
            fix = f"pip install '{pin.name}{pin.specifier}' without its dependencies, or run launch/setup.sh"
            yield fail(f"package {pin.name}", "not installed", fix)
            continue
        if not pin.specifier.contains(version, prereleases=True):
            num_wrong += 1
            fix = f"megarl is tested with {pin.specifier}: run launch/setup.sh, or continue at your own risk"
            yield warn(f"package {pin.name}", version, fix)
    if not num_wrong:
        yield ok("packages", f"all {num_pins} match the pins of megarl[{extra}]")


def _check_import(package: str, statement: str, fix: str) -> CheckResult:
    """Run an import in a child process, because a broken library may crash the process."""
    error = _command_error([sys.executable, "-W", "ignore", "-c", statement], IMPORT_TIMEOUT_S)
    return ok(package, "imports") if error is None else fail(package, f"`{statement}` fails: {error}", fix)


def check_machine(run_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Iterator[CheckResult]:
    """Check shared memory, open files and the run directory, which need not exist yet."""
    yield _check_shared_memory(shared_memory)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"{soft} (hard limit {hard})"
    fix = f"ulimit -n {OPEN_FILES} before the start, or LimitNOFILE of the service (slurmd, docker --ulimit nofile)"
    if soft < MIN_OPEN_FILES:
        yield fail("open files", f"{limits}: Ray and torchrun need more", fix)
    else:
        yield ok("open files", limits) if soft >= OPEN_FILES else warn("open files", limits, fix)
    yield check_writable("run directory", run_dir)


def check_precision(precision: str, cpu_info: Path = CPU_INFO) -> CheckResult:
    """Check that this CPU does not emulate trainer.precision."""
    if precision == "bf16" and not multiplies_bf16(cpu_info):
        message = "trainer.precision = bf16 on a CPU without bf16 units (avx512_bf16, amx_bf16): emulated, many times slower"
        return warn("precision", message, "on this machine: trainer.precision=fp32")
    return ok("precision", precision)


def multiplies_bf16(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether this CPU has units for bf16 products; torch emulates bf16 on other CPUs."""
    return not BF16_UNITS.isdisjoint(cpu_info.read_text(encoding="utf-8").split())


def check_sandbox() -> CheckResult:
    """Try the sandbox of rewards of kind: code."""
    reason = refusal()
    if reason is None:
        return ok("sandbox", "programs run without network, privileges and other processes")
    message, _, fix = reason.rpartition("; code runs in ")
    return fail("sandbox", message, f"code runs in {fix}")


def _check_shared_memory(root: Path) -> CheckResult:
    if not root.is_dir():
        return fail("shared memory", f"{root} does not exist", f"mount a tmpfs there: mount -t tmpfs tmpfs {root}")
    usage, wanted = shutil.disk_usage(root), f"megarl wants {SHARED_MEMORY_BYTES // MIB} MiB"
    message = f"{root}: {usage.free // MIB} MiB of {usage.total // MIB} MiB free"
    if usage.free >= SHARED_MEMORY_BYTES:
        return ok("shared memory", message)
    if usage.total < SHARED_MEMORY_BYTES:
        fix = f"{wanted}: docker run --shm-size=8g, or mount -o remount,size=8g {root}"
        return fail("shared memory", message, fix)
    return fail("shared memory", message, f"{wanted}: remove what dead programs left in {root}")


def check_writable(check: str, directory: Path) -> CheckResult:
    """Check that a directory, or its nearest existing parent, takes files and has space."""
    place = nearest_existing(directory)
    if not place.is_dir():
        return fail(check, f"{place} is a file", f"remove it, or choose another place than {directory}")
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".megarl-doctor-"):
            pass
    except OSError as error:
        return fail(check, f"{place} takes no file: {error.strerror}", "choose a directory that this user may write to")
    free_bytes = shutil.disk_usage(place).free
    message = f"{place}: {free_bytes / GIB:.1f} GiB free"
    return ok(check, message) if free_bytes >= DISK_BYTES else warn(check, message, "checkpoints may not fit: make room")


def check_network(ports: Mapping[str, int], environment: Mapping[str, str] = os.environ) -> Iterator[CheckResult]:
    """Check name, interfaces, and that `ports` (by the program that will listen) are free on this node."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = "add the name to /etc/hosts or DNS: torchrun and Ray reach the node by it"
        yield fail("host name", f"{name!r} does not resolve: {error.strerror}", fix)
    else:
        message = f"{name} is {', '.join(addresses)}"
        if all(ipaddress.ip_address(address).is_loopback for address in addresses):
            fix = "on more than one node: give it its network address in /etc/hosts (Debian writes 127.0.1.1)"
            yield warn("host name", f"{message}, which other nodes cannot reach", fix)
        else:
            yield ok("host name", message)
    yield from _check_chosen_interfaces(environment)
    for program, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                yield ok(f"port {port}", f"free for {program}")
            except OSError as error:
                variable = "RAY_PORT" if program == "Ray" else "MASTER_PORT"
                fix = f"end the program that listens there (ss -ltnp 'sport = :{port}'), or set another {variable}"
                yield fail(f"port {port}", f"for {program}: {error.strerror}", fix)


def _check_chosen_interfaces(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the interfaces that the user chose. A wrong name fails gloo at once, and NCCL at the first collective."""
    # Do not read /sys, which may show another network in a container.
    present = sorted(name for _, name in socket.if_nameindex())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = environment.get(variable)
        if not value:
            continue
        # In NCCL, ^ excludes names, = compares whole names, and otherwise a prefix matches.
        names, exact = value.lstrip("^=").split(","), value.startswith("=") or not variable.startswith("NCCL")
        exists = any(have == name if exact else have.startswith(name) for have in present for name in names)
        if value.startswith("^") or exists:
            yield ok(variable, value)
        else:
            yield fail(variable, f"{value}, but this node has {', '.join(present)}", f"export {variable}=one of these")


def check_slurm(environment: Mapping[str, str] = os.environ) -> Iterator[CheckResult]:
    """Check Slurm's controller, inside a job only."""
    # A container may lack Slurm's programs; the job outside of the container calls them.
    if "SLURM_JOB_ID" in environment and shutil.which("scontrol") is not None:
        error_line = _command_error(["scontrol", "ping"])
        fix = "is slurmctld up, and SlurmctldHost of slurm.conf reachable?"
        yield ok("slurm controller", "answers") if error_line is None else fail("slurm controller", error_line, fix)


def _command_error(command: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
    """Run a command; return None if it succeeds, else the last line of its output."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return None if done.returncode == 0 else lines[-1] if lines else f"exit status {done.returncode}"


# All nodes -----------------------------------------------------------------------------------------------------------------


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


def compare_nodes(
    report: NodeReport,
    num_nodes: int,
    master: tuple[str, int],
    timeout_s: float,
    run_dir: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> list[CheckResult]:
    """Return the findings about all nodes, the same list on each node.

    Node 0 listens at `master`, the port of torchrun's rendezvous, so the comparison also tests the network. It takes the
    other nodes one after the other: a line from node 0, then the node's `NodeReport` with its time and the name of a file
    that it wrote into the run directory. Node 0 compares the clocks, looks for the file, and answers all nodes with the
    findings.

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
            # Close the connection of a client that disconnects or sends something else, or too late: a node tries again, and
            # a port scan is harmless.
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError), ExitStack() as attempt:
                connection = attempt.enter_context(server.accept()[0])
                connection.settimeout(min(left_s, REQUEST_TIMEOUT_S))
                connection.sendall(b"\n")  # the node reads its clock now
                node = _read_report(connection, run_dir, clock)
                reports[node.rank] = node
                connections.append(connection)
                stack.enter_context(attempt.pop_all())
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
    file = None
    if run_dir is not None:
        directory = nearest_existing(run_dir)
        with suppress(OSError):
            file = tempfile.NamedTemporaryFile(dir=directory, prefix=".megarl-doctor-")  # noqa: SIM115
    if run_dir is None or file is None:
        yield None
        return
    with file:
        yield Path(file.name).name, len(run_dir.absolute().parts) - len(directory.parts)
