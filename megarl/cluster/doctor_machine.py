"""The machine: memory that processes share, limits, disks, the clock."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from megarl.cluster.doctor_finding import Finding, Verdict, fail, ok, warn
from megarl.cluster.job_environment import (
    LONGEST_TEMPORARY,
    SHORT_TEMPORARY,
    can_write,
    home_directory,
    is_too_long,
    lacks_ray_token,
    nearest_existing,
    temporary_directory,
)
from megarl.reward.sandbox import refusal

MIB = 1 << 20
GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
# Ray's object store takes 256 MiB; the weight sync's buckets and vLLM's messages between workers come on top.
SHARED_BYTES = 1 * GIB
OPEN_FILES, FEWEST_FILES = 65536, 4096
PROCESSES = 4096
DISK_BYTES = 10 * GIB
CPU_FACTS = Path("/proc/cpuinfo")
# Without one of these a product in bf16 is emulated: 1.8 GFLOPS against 30 in fp32 on two AVX2 cores, torch 2.13.
BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
# adjtimex(2): the return value TIME_ERROR, a clock that nothing disciplines.
TIME_ERROR = 5


def check_machine(run_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """`run_dir` is where runs are written; it need not exist yet."""
    yield _shared_memory(shared_memory)
    yield _open_files()
    yield _processes()
    yield _memory()
    yield _writable("run directory", run_dir)
    yield _temporary_directory(os.environ)
    yield _home(os.environ)
    yield _clock()


def check_precision(precision: str, facts: Path = CPU_FACTS) -> Finding:
    """Whether this CPU computes in `precision` (a value of trainer.precision) about as fast as in fp32."""
    if precision == "bf16" and not multiplies_bf16(facts):
        found = "trainer.precision = bf16 on a CPU without bf16 units (avx512_bf16, amx_bf16): emulated, many times slower"
        return warn("precision", found, "on this machine: trainer.precision=fp32")
    return ok("precision", precision)


def multiplies_bf16(facts: Path = CPU_FACTS) -> bool:
    """Whether this CPU has units for products in bf16; torch runs them on others, too."""
    return bool(BF16_UNITS & {unit for line in facts.read_text(encoding="utf-8").splitlines() for unit in line.split()})


def check_sandbox() -> Finding:
    """Whether a reward of kind: code finds the sandbox that it runs in; it is tried out."""
    reason = refusal()
    if reason is None:
        return ok("sandbox", "programs run without network, privileges and other processes")
    found, _, fix = reason.rpartition("; code runs in ")
    return fail("sandbox", found, f"code runs in {fix}")


def _shared_memory(root: Path) -> Finding:
    if not root.is_dir():
        return fail("shared memory", f"{root} does not exist", f"mount a tmpfs there: mount -t tmpfs tmpfs {root}")
    usage = shutil.disk_usage(root)
    found = f"{root}: {_mib(usage.free)} of {_mib(usage.total)} free"
    if usage.free >= SHARED_BYTES:
        return ok("shared memory", found)
    left = sorted(file.name for file in root.glob("megarl-*"))
    fix = f"megarl wants {_mib(SHARED_BYTES)}: docker run --shm-size=8g, or mount -o remount,size=8g {root}"
    if usage.total >= SHARED_BYTES:
        names = f" (of megarl: {', '.join(left[:3])})" if left else ""
        fix = f"megarl wants {_mib(SHARED_BYTES)}: remove what dead programs left in {root}{names}"
    return fail("shared memory", found, fix)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (hard limit {hard})"
    fix = f"ulimit -n {OPEN_FILES} before the start, or LimitNOFILE of the service (slurmd, docker --ulimit nofile)"
    if soft < FEWEST_FILES:
        return fail("open files", f"{found}: Ray and torchrun run out of them", fix)
    return ok("open files", found) if soft >= OPEN_FILES else warn("open files", found, fix)


def _processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft not in (resource.RLIM_INFINITY,) and soft < PROCESSES:
        fix = f"ulimit -u {PROCESSES}; every rank, engine and Ray worker has tens of threads"
        return fail("processes", f"{soft} processes and threads allowed", fix)
    return ok("processes", "no limit" if soft == resource.RLIM_INFINITY else str(soft))


def _memory() -> Finding:
    """What this process may use: a container's limit is not what /proc/meminfo says."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    if text != "max" and int(text) < available:
        available = int(text)
    found = f"{available / GIB:.1f} GiB available"
    if available < 4 * GIB:
        return fail("memory", found, "the smallest recipe takes 4 GiB: end other programs, or ask the scheduler for more")
    return ok("memory", found)


def _writable(name: str, directory: Path) -> Finding:
    """Whether a directory, or the nearest one above it that exists, takes files and has space."""
    place = nearest_existing(directory)
    if not place.is_dir():
        return fail(name, f"{place} is a file", f"remove it, or choose another place than {directory}")
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".megarl-doctor-"):
            pass
    except OSError as error:
        return fail(name, f"{place} takes no file: {error.strerror}", "choose a directory that this user may write to")
    free = shutil.disk_usage(place).free
    found = f"{place}: {free / GIB:.1f} GiB free"
    return ok(name, found) if free >= DISK_BYTES else warn(name, found, "checkpoints may not fit: make room")


def _temporary_directory(environment: MutableMapping[str, str]) -> Finding:
    finding = _writable("temporary directory", Path(temporary_directory(environment)))
    sockets = environment.get("RAY_TMPDIR") or temporary_directory(environment)
    if finding.verdict == Verdict.FAIL or not is_too_long(sockets):
        return finding
    found = f"{sockets} has {len(os.fsencode(sockets))} bytes; Ray's sockets need one of at most {LONGEST_TEMPORARY}"
    if "RAY_TMPDIR" in environment:
        return fail("temporary directory", found, "set RAY_TMPDIR to a shorter path, or not at all")
    if not can_write(Path(SHORT_TEMPORARY)):
        return fail("temporary directory", found, f"set TMPDIR to a shorter path: {SHORT_TEMPORARY} takes no link")
    found += f": a run reaches it by a short link in {SHORT_TEMPORARY}"
    return warn("temporary directory", found, "set TMPDIR to a shorter path to do without")


def _home(environment: MutableMapping[str, str]) -> Finding:
    home = home_directory(environment)
    if can_write(home):
        return ok("home directory", str(home))
    found = f"{home} takes no file: caches of vLLM and others go to {temporary_directory(environment)}"
    if lacks_ray_token(environment):
        found += ", and a run on one node gets a token for Ray of its own"
    fix = "set HOME to a directory that can be written; on several nodes without one, set RAY_AUTH_TOKEN alike on all"
    return warn("home directory", found, fix)


def _clock() -> Finding:
    """Whether something keeps the clock right; how far it is from other nodes' is compared between the nodes."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only asks
    if state < 0:
        return warn("clock", f"adjtimex: {os.strerror(ctypes.get_errno())}", "compare the nodes' clocks by hand")
    if state == TIME_ERROR:
        return warn("clock", "nothing keeps it right", "run chrony or systemd-timesyncd: traces of nodes are merged by time")
    return ok("clock", "kept right")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB"
