"""Run programs in a sandbox: limits, outcomes, and the seccomp filter. `sandbox_keeper.py` is the sandbox's own process."""

from __future__ import annotations

import errno
import functools
import json
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KEEPER = Path(__file__).with_name("sandbox_keeper.py")
# Time to start and stop a sandbox on a busy machine, beyond the time of its programs.
GRACE_S = 20.0
# The outcomes of a program; all outcomes except the first score 0.
REASONS = ("passed", "failed", "wall_time", "cpu_time", "memory", "files", "processes", "output")


class SandboxFault(RuntimeError):
    """The sandbox failed, so the outcome of its program is unknown."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a call's programs: `wall_s` holds for all programs together, the other limits hold for each program. `cpu_s`
    and `memory_bytes` limit each process, `memory_bytes` also the resident memory of all processes together. `file_bytes`
    limits all files together, `output_bytes` standard output and standard error together."""

    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    processes: int
    output_bytes: int


@dataclass(frozen=True)
class Program:
    """Python code. The program passes if it writes `output` for `input` (blanks at line ends do not count). Without an
    `output`, it passes if it ends without an error."""

    code: str
    input: str = ""
    output: str | None = None


def run_programs(programs: Sequence[Program], limits: SandboxLimits, stop_at_failure: bool = False) -> list[str]:
    """Return a reason of REASONS for each program, in order; `stop_at_failure` ends the list at the first failure. Each
    program has an empty working directory.

    Raises SandboxFault if the sandbox could not be made or gave no answer.
    """
    try:
        steps = filter_program()
    except ValueError as error:
        raise SandboxFault(str(error)) from error
    request = {
        "filter": steps.hex(),
        "parent": os.getpid(),
        # Resolve the folder but not the file: a virtual environment's Python finds its environment by this link.
        "python": os.path.join(os.path.realpath(os.path.dirname(sys.executable)), os.path.basename(sys.executable)),
        "readable": [os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)],
        "limits": asdict(limits),
        "programs": [asdict(program) for program in programs],
        "stop_at_failure": stop_at_failure,
    }
    # The environment is empty, so that a program cannot read secrets from it. `-I -S` starts fastest.
    command = [sys.executable, "-I", "-S", str(KEEPER)]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=limits.wall_s + GRACE_S, env={}
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxFault(f"the sandbox gave no answer within {limits.wall_s + GRACE_S:g} s") from error
    if done.returncode != 0 or not done.stdout:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxFault(f"the sandbox ended with exit status {done.returncode}: {last}")
    answer = json.loads(done.stdout)
    if "fault" in answer:
        raise SandboxFault(f"the sandbox could not be made: {answer['fault']}")
    return answer["reasons"]


_TRIAL_LIMITS = SandboxLimits(60.0, cpu_s=30, memory_bytes=1 << 29, file_bytes=1 << 20, processes=4, output_bytes=1 << 16)
_WORKS = Program("import os, threading; threading.Thread(target=print).start(); os.wait() if os.fork() else os._exit(0)")
# The sandbox must refuse each of these programs.
_ESCAPES = (
    ("a program may use the network", "import socket\ntry: socket.socket()\nexcept PermissionError: pass\nelse: assert 0"),
    ("a program may hold memory that nobody counts",
     "import mmap\ntry: mmap.mmap(-1, 4096)\nexcept PermissionError: pass\nelse: assert 0"),
    ("a program sees other processes",
     "import os\nassert {int(name) for name in os.listdir('/proc') if name.isdigit()} == {1, os.getpid()}"),
    ("a program has privileges", "assert 'CapEff:\\t0000000000000000' in open('/proc/self/status').read()"),
)  # fmt: skip


@functools.cache
def refusal() -> str | None:
    """Return why this machine has no sandbox and how to get a sandbox; None if a trial run works."""
    help_ = (
        "code runs in namespaces, which need Linux 5.14 and user.max_user_namespaces > 0 (on Ubuntu also "
        "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined --security-opt "
        "systempaths=unconfined); or run it on a machine that has them, behind a reward of kind: http"
    )
    checks = (("an ordinary program does not run", _WORKS), *((what, Program(code)) for what, code in _ESCAPES))
    try:
        reasons = run_programs([program for _, program in checks], _TRIAL_LIMITS)
    except SandboxFault as fault:
        return f"{fault}; {help_}"
    wrong = [f"{what} ({reason})" for (what, _), reason in zip(checks, reasons, strict=True) if reason != "passed"]
    return f"{'; '.join(wrong)}; {help_}" if wrong else None


# The seccomp filter of sandboxed programs, as a BPF program (linux/filter.h, linux/seccomp.h). The filter denies memory that
# no process's resident size shows, access to other processes, and calls that often had vulnerabilities. The filter is
# written by hand, because pyseccomp has had no release since 2021 and needs libseccomp. The architecture's number in
# linux/audit.h, and the architecture's column in the tables below.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
NEWEST = 462  # mseal, of Linux 6.10; the filter hides later calls
NONE = None  # aarch64 has no such call

# Denied for all arguments: numbers on x86-64 and aarch64, from asm/unistd_64.h and asm-generic/unistd.h.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # Memory outside of the address space, and memory that outlives a mapping.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "io_setup": (206, 0),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "inotify_init": (253, NONE),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "seccomp": (317, 277), "landlock_create_ruleset": (444, 444),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "modify_ldt": (154, NONE),
    # Sockets of all families, including vsock, which a network namespace does not confine; descriptors in flight.
    "socket": (41, 198), "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # Namespaces, mounts and the kernel.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443),
}  # fmt: skip
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000
F_NOTIFY, F_SETPIPE_SZ = 1026, 1031
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_THP_DISABLE = 4, 22, 41
AF_UNIX = 1
SOCK_DGRAM, SOCK_RDM = 2, 4  # as bits: each type except SOCK_STREAM = 1 has one of them (SOCK_RAW = 3, SOCK_SEQPACKET = 5)
# Call, argument, and the test of the argument's lower half. The filter denies the call if all these bits are set ("bits"),
# if the argument is one of these values ("one"), or if it is none of these values ("other").
ARGUMENTS: tuple[tuple[str, tuple[int, int], int, str, tuple[int, ...]], ...] = (
    ("mmap", (9, 222), 3, "bits", (MAP_SHARED | MAP_ANONYMOUS,)),
    ("mmap", (9, 222), 3, "bits", (MAP_HUGETLB,)),
    ("prlimit64", (302, 261), 0, "other", (0,)),
    ("socketpair", (53, 199), 0, "other", (AF_UNIX,)),
    # Only streams: a datagram socket can hold messages of many senders, even after these are closed.
    ("socketpair", (53, 199), 1, "bits", (SOCK_DGRAM,)),
    ("socketpair", (53, 199), 1, "bits", (SOCK_RDM,)),
    ("fcntl", (72, 25), 1, "one", (F_NOTIFY, F_SETPIPE_SZ)),
    ("prctl", (157, 167), 0, "one", (PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_THP_DISABLE)),
)

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, ALU|AND|K, JMP|JEQ|K, JMP|JGE|K, RET|K
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data, of a little-endian machine
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def filter_program(machine: str | None = None) -> bytes:
    """Return the filter's instructions for a machine of `platform.machine()`, by default this one.

    Raises ValueError for an architecture that is not in the tables.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"no filter of system calls for {machine}; there are some for {', '.join(ARCHITECTURES)}")
    architecture, column = ARCHITECTURES[machine]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),  # int 0x80 on x86-64 has other numbers
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, NEWEST + 1),  # also the x32 ABI
        (RETURN, 0, 0, UNKNOWN),
    ]
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    for _, called, argument, test, values in ARGUMENTS:
        body: list[tuple[int, int, int, int]] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]
        for value in values:
            if test == "bits":
                body.append((AND, 0, 0, value))
            body += [(EQUAL, 1, 0, value) if test == "other" else (EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSE)]
        steps += [(EQUAL, 0, len(body) + 1, called[column]), *body, (LOAD, 0, 0, NUMBER_AT)]
    steps.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
