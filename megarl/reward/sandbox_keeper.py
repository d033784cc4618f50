"""Runs programs where they can do no harm: started by `megarl.reward.sandbox` as a script, with the standard library alone.

Three processes. The keeper makes the namespaces (user, process ids, mounts, network, IPC) and dies with its parent. Its
child is process 1 in there: it builds a root of its own, runs the programs one after the other, and with its death the
kernel kills whatever else is left, however it was forked. The programs run as an unprivileged user without capabilities.

Reads one JSON document from standard input and writes one to standard output: `{"reasons": [...]}`, one word for each
program, or `{"fault": "..."}`. Needs Linux 5.14: before, processes of an unprivileged user were counted over the whole
machine, and mounts could not be made read-only with all below them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# From linux/sched.h, sys/mount.h, linux/mount.h and linux/prctl.h.
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_RECURSIVE, MOUNT_SETATTR = 0x8000, 442  # the number of the system call is the same on all machines of today
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38

NOBODY = 65534
HOME = "/sandbox"  # the working directory of a program: a memory file system of its own
PROGRAM = f"{HOME}/program.py"
DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
POLL_S = 0.05  # how often the memory of all processes is added up
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    asked = json.load(sys.stdin)
    answer: dict[str, Any] = {"fault": "the sandbox's first process gave no answer"}
    ours, theirs = os.pipe()
    try:
        _enter_namespaces(asked["parent"])
        if (child := os.fork()) == 0:
            _first_process(asked, theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as answers:
            if words := answers.read():
                answer = json.loads(words)
        os.waitpid(child, 0)
    except OSError as error:
        answer = {"fault": f"{error}"}
    json.dump(answer, sys.stdout)
    return 0


# Namespaces ----------------------------------------------------------------------------------------------------------


def _enter_namespaces(parent: int) -> None:
    """The next child is process 1 of a world of its own. Raises OSError where the kernel does not allow it.

    Root there is root here, so that it can bring in files that only root may read, and programs then run as nobody; an
    ordinary user is nobody from the start. A helper that stays outside writes that down, as only it may.
    """
    keeper, (asked, ask) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(ask)
        os._exit(_write_maps(keeper) if os.read(asked, 1) else 1)
    os.close(asked)
    _checked("unshare", LIBC.unshare(NEW_USER | NEW_PIDS | NEW_MOUNTS | NEW_NETWORK | NEW_IPC))
    os.write(ask, b"x")
    os.close(ask)
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError("the user ids of the new namespace could not be written")
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _write_maps(process: int) -> int:
    """The exit status of the helper."""
    proc, is_root = Path(f"/proc/{process}"), os.geteuid() == 0
    try:
        if not is_root:
            (proc / "setgroups").write_text("deny", encoding="utf-8")
        for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            (proc / name).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n" if is_root else f"{NOBODY} {own} 1\n", encoding="utf-8")
    except OSError:
        return 1
    return 0


def _die_with_parent() -> None:
    _checked("prctl", LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _checked(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# The root of its own -------------------------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    _checked(f"mount {kind or source} at {target}", LIBC.mount(*words, ctypes.c_ulong(flags), options.encode() or None))


def _restrict(target: str, attributes: int, below: bool) -> None:
    """No writing, no set-uid, no devices: here, or also in all mounts below."""
    settings = struct.pack("=QQQQ", attributes, 0, 0, 0)  # struct mount_attr
    flags = ctypes.c_uint(AT_RECURSIVE if below else 0)
    done = LIBC.syscall(MOUNT_SETATTR, -1, target.encode(), flags, settings, ctypes.c_size_t(len(settings)))
    _checked(f"mount_setattr {target}", done)


def _build_root(readable: Sequence[str]) -> None:
    """System libraries and Python, read-only; nothing else of this machine. No program will make namespaces, in which it
    could mount what no limit is kept for."""
    _mount("", "/", "", MS_REC | MS_PRIVATE)
    Path("/proc/sys/user/max_user_namespaces").write_text("0", encoding="utf-8")
    found = {path: os.open(path, os.O_PATH) for path in _outermost(path for path in readable if os.path.exists(path))}
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path) and os.path.isdir(path)}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    root = tempfile.gettempdir()  # whatever lies there is opened already
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, opened in found.items():
        if path not in links:
            _bind(opened, root + path, is_folder=os.path.isdir(f"/proc/self/fd/{opened}"))
            _restrict(root + path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, below=True)
    for path, target in links.items():
        os.symlink(target, root + path)
    for path, opened in devices.items():
        _bind(opened, root + path, is_folder=False)
    for folder in ("/proc", HOME):
        os.makedirs(root + folder, exist_ok=True)
    if not os.path.lexists(f"{root}/tmp"):  # the environment may be below it
        os.symlink(HOME, f"{root}/tmp")
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    _checked("pivot_root", LIBC.pivot_root(b".", b"."))
    _checked("umount", LIBC.umount2(b".", MNT_DETACH))
    os.chdir("/")
    _restrict("/", ATTR_RDONLY, below=False)
    for opened in (*found.values(), *devices.values()):
        os.close(opened)


def _outermost(paths: Iterator[str]) -> list[str]:
    """Without those that lie in another one."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{above}/") for above in kept):
            kept.append(path)
    return kept


def _bind(opened: int, target: str, is_folder: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{opened}", target, "", MS_BIND | MS_REC)


# The programs ----------------------------------------------------------------------------------------------------------


def _first_process(asked: dict[str, Any], answers: int) -> None:
    """Process 1. Does not return."""
    try:
        _die_with_parent()
        _build_root([*SYSTEM, *asked["readable"]])
        end = time.monotonic() + asked["limits"]["wall_s"]
        answer: dict[str, Any] = {"reasons": _run_all(asked, end)}
    except BaseException as error:  # the parent says it; there is nobody else to
        answer = {"fault": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        os.write(answers, json.dumps(answer).encode())
    os._exit(0)


def _run_all(asked: dict[str, Any], end: float) -> list[str]:
    limits, reasons = asked["limits"], []
    for program in asked["programs"]:
        if time.monotonic() > end:
            reasons.append("wall_time")
            continue
        room = limits["file_bytes"] + 2 * len(program["code"].encode(errors="replace"))  # its own code takes none of it
        size = f"size={room},nr_inodes=4096,mode=700,uid={NOBODY},gid={NOBODY}"
        _mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, size)
        try:
            reasons.append(_run(program, asked["python"], limits, end))
        finally:
            _kill_all()
            _checked("umount", LIBC.umount2(HOME.encode(), MNT_DETACH))
        if asked["stop_at_failure"] and reasons[-1] != "passed":
            break
    return reasons


def _kill_all() -> None:
    """Every process but this one: in its namespace, that is whatever the program has left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _run(program: dict[str, Any], python: str, limits: dict[str, Any], end: float) -> str:
    """What became of one program: `passed`, `failed`, or the limit that it ran into.

    A program without an expected output must come to its end: a line behind it says so in a pipe, with a word that no
    other run has.
    """
    proof, said = secrets.token_hex(16), b""
    reading, writing = os.pipe()
    code = program["code"]
    if program["output"] is None:
        code += f"\n__import__('os').write({writing}, b'{proof}')\n"
    Path(PROGRAM).write_bytes(code.encode(errors="replace"))
    os.chmod(PROGRAM, 0o644)
    given = os.memfd_create("stdin")
    os.write(given, program["input"].encode(errors="replace"))
    os.lseek(given, 0, os.SEEK_SET)
    process = subprocess.Popen(
        # No user site, no directory of the program on its path, no bytecode beside it.
        [python, "-s", "-P", "-B", PROGRAM],
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writing],
        cwd=HOME,
        env=_environment(python),
        preexec_fn=lambda: _confine(limits),  # this process has one thread
    )
    os.close(writing)
    os.close(given)
    stopped, output, errors = _watch(process, limits, end)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.set_blocking(reading, False)
    with contextlib.suppress(BlockingIOError):
        said = os.read(reading, 64)
    os.close(reading)
    if stopped:
        return stopped
    if reason := _limit_hit(process.returncode, errors, used.ru_utime + used.ru_stime, limits):
        return reason
    right = (
        said == proof.encode()
        if program["output"] is None
        else _lines(output) == _lines(program["output"].encode(errors="replace"))
    )
    return "passed" if process.returncode == 0 and right else "failed"


def _environment(python: str) -> dict[str, str]:
    path = f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin"
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Threads share one heap, else each would reserve 64 MiB of the address space.
    one_thread["MALLOC_ARENA_MAX"] = "1"
    # One order of sets in every run: a reward is to be the same again.
    return {"PATH": path, "HOME": HOME, "TMPDIR": HOME, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"} | one_thread


def _confine(limits: dict[str, Any]) -> None:
    """In the child that becomes the program."""
    cpu_s = limits["cpu_s"]
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        # The keeper and process 1 count, where they are the same user.
        (resource.RLIMIT_NPROC, limits["processes"] + 2, limits["processes"] + 2),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    os.setsid()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _checked("prctl", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _watch(process: subprocess.Popen, limits: dict[str, Any], end: float) -> tuple[str, bytes, bytes]:
    """Read until the program ends, or a limit does it: the limit or "", standard output, and standard error."""
    texts, has_ended = {"stdout": b"", "stderr": b""}, os.pidfd_open(process.pid)
    stopped = ""
    with selectors.DefaultSelector() as selector:
        selector.register(has_ended, selectors.EVENT_READ, "")
        for name in texts:
            stream = getattr(process, name)
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, name)
        going = True
        while going:
            ready = {key.data: key.fileobj for key, _ in selector.select(POLL_S)}
            going = "" not in ready and not stopped
            for name, stream in ready.items():
                if name and not _read(stream, texts, name, limits["output_bytes"]):
                    selector.unregister(stream)
            if sum(map(len, texts.values())) > limits["output_bytes"]:
                stopped = "output"
            elif going and time.monotonic() > end:
                stopped = "wall_time"
            elif going and _resident_bytes() > limits["memory_bytes"]:
                stopped = "memory"
            if stopped:
                _stop(process.pid)
                break
    os.close(has_ended)
    for name in texts:
        getattr(process, name).close()
    return stopped, texts["stdout"], texts["stderr"]


def _read(stream: Any, texts: dict[str, bytes], name: str, most: int) -> bool:
    """Take what is there, until it is too much. False where nothing will come any more."""
    while sum(map(len, texts.values())) <= most:
        try:
            more = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not more:
            return False
        texts[name] += more
    return True


def _stop(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _resident_bytes() -> int:
    """Memory of all processes but this one, without pages of files; what forked processes share counts in each."""
    total = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1":
            with contextlib.suppress(OSError):  # it has ended
                resident, shared = Path(f"/proc/{entry}/statm").read_text(encoding="utf-8").split()[1:3]
                total += int(resident) - int(shared)
    return total * resource.getpagesize()


def _limit_hit(status: int, errors: bytes, cpu_s: float, limits: dict[str, Any]) -> str:
    """Which limit has ended a program that ended by itself; "" for none. Python says some in its last line alone, but where
    its processes share standard error, another one may have said half of its traceback behind that."""
    lines = errors.decode(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith((" ", "Traceback "))), "")
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu_s >= limits["cpu_s"]):
        return "cpu_time"
    if status == -signal.SIGXFSZ or (status != 0 and ("[Errno 27]" in last or "[Errno 28]" in last)):
        return "files"
    if status != 0 and ("[Errno 11]" in last or "can't start new thread" in last):
        return "processes"
    return "memory" if status != 0 and (last.startswith("MemoryError") or "[Errno 12]" in last) else ""


def _lines(text: bytes) -> list[bytes]:
    """Lines without blanks at their ends, and without empty ones at the end of all."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
