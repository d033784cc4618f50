"""Programs in a sandbox: what may run how long, and what became of it. `sandbox_keeper.py` is what keeps it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.reward.sandbox_filter import filter_program

KEEPER = Path(__file__).with_name("sandbox_keeper.py")
# What a sandbox takes to come up and to go, beyond the time of its programs, on a machine that is busy.
GRACE_S = 20.0
# What can become of a program; all but the first score 0.
REASONS = ("passed", "failed", "wall_time", "cpu_time", "memory", "files", "processes", "output")


class SandboxFault(RuntimeError):
    """The sandbox has failed, and not the program in it: nothing is known of the program."""


@dataclass(frozen=True)
class SandboxLimits:
    """`wall_s` is of all programs of a call together, all else of each: `cpu_s` and `memory_bytes` of each of its processes
    (the latter also of all of them, as far as it is resident), `file_bytes` of all its files, `output_bytes` of what it
    writes to standard output and standard error."""

    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    processes: int
    output_bytes: int


@dataclass(frozen=True)
class Program:
    """Python code. It passes where it writes `output` for `input`, blanks at the ends of lines aside; without an output,
    where it comes to its end without an error."""

    code: str
    input: str = ""
    output: str | None = None


def run_programs(programs: Sequence[Program], limits: SandboxLimits, stop_at_failure: bool = False) -> list[str]:
    """One of REASONS for each program, in order; fewer where it stops at a failure. Each finds an empty working directory.

    Raises SandboxFault where a sandbox could not be made, or gave no answer.
    """
    try:
        steps = filter_program()
    except ValueError as error:
        raise SandboxFault(str(error)) from error
    asked = {
        "filter": steps.hex(),
        "parent": os.getpid(),
        # Its folder without links, its own link as it is: next to it an environment's Python finds the environment.
        "python": os.path.join(os.path.realpath(os.path.dirname(sys.executable)), os.path.basename(sys.executable)),
        "readable": [os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)],
        "limits": asdict(limits),
        "programs": [asdict(program) for program in programs],
        "stop_at_failure": stop_at_failure,
    }
    # An empty environment: a program cannot read what is not there. `-I -S` starts fastest.
    command = [sys.executable, "-I", "-S", str(KEEPER)]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked).encode(), capture_output=True, timeout=limits.wall_s + GRACE_S, env={}
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
# Each must be refused, by name.
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
    """Why this machine has no sandbox, and what helps; None where it has one, which is tried out."""
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
