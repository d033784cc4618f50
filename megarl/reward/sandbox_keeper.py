"""Run programs in a sandbox; `megarl.reward.sandbox` starts this script, which uses only the standard library.

There are four processes. The keeper makes namespaces (user, process ids, mounts, network) and dies with its parent. The
keeper's child, the watcher, is process 1 of these namespaces: it builds a new root, runs the programs one after the other,
and adds up the memory of each program. Each program has further namespaces (process ids, mounts, IPC). Process 1 of these
namespaces starts the program and reports the program's end. So no program can name the watcher, and when process 1 ends, the
kernel ends everything that the program has started. Programs run as an unprivileged user without capabilities, behind a
filter of system calls.

The script reads a JSON document from standard input and writes a JSON document to standard output: `{"reasons": [...]}` with
a reason for each program, or `{"fault": "..."}`. It needs Linux 5.14, which counts processes of an unprivileged user by
namespace and can make a mount read-only together with all mounts below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import secrets
import select
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# From linux/sched.h, sys/mount.h, linux/mount.h and linux/prctl.h.
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_RECURSIVE, MOUNT_SETATTR = 0x8000, 442  # the number of the system call is the same on all architectures
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 1, 4, 22, 38, 41
SECCOMP_MODE_FILTER = 2
CLONE = {"x86_64": 56, "aarch64": 220}
F_ADD_SEALS, ALL_SEALS = 1033, 0xF

NOBODY = 65534
HOME = "/sandbox"  # the working directory of a program: a memory file system of its own
PROGRAM = f"{HOME}/program.py"
DEVICES = ("null", "full", "random", "urandom")  # without zero, which maps as shared memory
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
LOOK_S = 0.01  # between two checks of the processes
LOOK_SHARE = 0.2  # largest share of the watcher's time for checks
# Per process. No check counts the kernel's memory for full sockets and pipes. This number bounds it to 16 MiB: each socket
# holds at most net.core.wmem_default (208 KiB) and one more piece of 40 KiB. RLIMIT_AS bounds the memory for mappings to a
# sixteenth of itself (256 bytes for 4 KiB).
DESCRIPTORS = 64
INODE_BYTES, LOCK_LIST_BYTES = 1 << 14, 1 << 15
LIBC = ctypes.PyDLL(None, use_errno=True)  # holds the GIL, as a new process without the other threads needs it


def main() -> int:
    request = json.load(sys.stdin)
    answer: dict[str, Any] = {"fault": "the sandbox's first process gave no answer"}
    ours, theirs = os.pipe()
    try:
        _enter_namespaces(request["parent"])
        if (child := os.fork()) == 0:
            _watch_programs(request, theirs)
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
    """Make the next child process 1 of new namespaces. Raises OSError if the kernel does not allow it.

    Root stays root in the new namespaces, to mount files that only root may read, and programs run as nobody. An ordinary
    user is nobody from the start. Only a helper outside of the new user namespace may write these user ids.
    """
    keeper, (reader, writer) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        os._exit(_write_maps(keeper) if os.read(reader, 1) else 1)
    os.close(reader)
    _checked("unshare", LIBC.unshare(NEW_USER | NEW_PIDS | NEW_MOUNTS | NEW_NETWORK))
    os.write(writer, b"x")
    os.close(writer)
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError("the user ids of the new namespace could not be written")
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _write_maps(process: int) -> int:
    """Write the user ids of a new namespace; return the exit status of the helper."""
    proc, is_root = Path(f"/proc/{process}"), os.geteuid() == 0
    try:
        if not is_root:
            (proc / "setgroups").write_text("deny", encoding="utf-8")
        for name, number in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            ids = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if is_root else f"{NOBODY} {number} 1\n"
            (proc / name).write_text(ids, encoding="utf-8")
    except OSError:
        return 1
    return 0


def _die_with_parent() -> None:
    _checked("prctl", LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _checked(call: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


# The new root --------------------------------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    _checked(f"mount {kind or source} at {target}", LIBC.mount(*words, ctypes.c_ulong(flags), options.encode() or None))


def _restrict(target: str, attributes: int, below: bool) -> None:
    """Forbid writing, set-uid or devices in a mount, and with `below` in all mounts below it."""
    settings = struct.pack("=QQQQ", attributes, 0, 0, 0)  # struct mount_attr
    flags = ctypes.c_uint(AT_RECURSIVE if below else 0)
    done = LIBC.syscall(MOUNT_SETATTR, -1, target.encode(), flags, settings, ctypes.c_size_t(len(settings)))
    _checked(f"mount_setattr {target}", done)


def _build_root(readable: Sequence[str]) -> None:
    """Build a read-only root with system libraries and Python, and nothing else. Forbid further namespaces, so that no
    program can mount a file system without a size limit."""
    _mount("", "/", "", MS_REC | MS_PRIVATE)
    Path("/proc/sys/user/max_user_namespaces").write_text("0", encoding="utf-8")
    folders = {path: os.open(path, os.O_PATH) for path in _outermost(path for path in readable if os.path.exists(path))}
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path) and os.path.isdir(path)}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    root = tempfile.gettempdir()  # the files below this folder are open already
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, opened in folders.items():
        if path not in links:
            _bind(opened, root + path, is_folder=os.path.isdir(f"/proc/self/fd/{opened}"))
            _restrict(root + path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, below=True)
    for path, target in links.items():
        os.symlink(target, root + path)
    for path, opened in devices.items():
        _bind(opened, root + path, is_folder=False)
    for folder in ("/proc", HOME):
        os.makedirs(root + folder, exist_ok=True)
    if not os.path.lexists(f"{root}/tmp"):  # the environment may be below /tmp
        os.symlink(HOME, f"{root}/tmp")
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    _checked("pivot_root", LIBC.pivot_root(b".", b"."))
    _checked("umount", LIBC.umount2(b".", MNT_DETACH))
    os.chdir("/")
    _restrict("/", ATTR_RDONLY, below=False)
    for opened in (*folders.values(), *devices.values()):
        os.close(opened)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Leave out paths that lie below another path."""
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


def _watch_programs(request: dict[str, Any], answers: int) -> None:
    """Run as the watcher, process 1 of the keeper's namespaces. Does not return."""
    try:
        _die_with_parent()
        _build_root([*SYSTEM, *request["readable"]])
        end = time.monotonic() + request["limits"]["wall_s"]
        answer: dict[str, Any] = {"reasons": _run_all(request, end)}
    except BaseException as error:  # the parent reports it
        answer = {"fault": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        os.write(answers, json.dumps(answer).encode())
    os._exit(0)


def _run_all(request: dict[str, Any], end: float) -> list[str]:
    limits, reasons = request["limits"], []
    for program in request["programs"]:
        if time.monotonic() > end:
            reasons.append("wall_time")
            continue
        code = program["code"].encode(errors="replace")
        page = resource.getpagesize()
        room = limits["file_bytes"] + -(-(len(code) + 128) // page) * page  # the program's own code does not count
        inodes = 16 + limits["file_bytes"] // INODE_BYTES  # the size of the file system does not limit inodes
        size = f"size={room},nr_inodes={inodes},mode=700,uid={NOBODY},gid={NOBODY}"
        _mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, size)
        try:
            reasons.append(_run(program, code, request, end))
        finally:
            _checked("umount", LIBC.umount2(HOME.encode(), MNT_DETACH))
        if request["stop_at_failure"] and reasons[-1] != "passed":
            break
    return reasons


def _run(program: dict[str, Any], code: bytes, request: dict[str, Any], end: float) -> str:
    """Run a program and return `passed`, `failed`, or the limit that the program hit.

    A program without an expected output must run to its end, where an added line writes a random proof to a pipe. Raises
    OSError if the program's namespaces could not be made.
    """
    proof, limits = secrets.token_hex(16), request["limits"]
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "proof", "status")}
    if program["output"] is None:
        code += f"\n__import__('os').write({pipes['proof'][1]}, b'{proof}')\n".encode()
    Path(PROGRAM).write_bytes(code)
    os.chmod(PROGRAM, 0o644)
    given = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(given, program["input"].encode(errors="replace"))
    os.lseek(given, 0, os.SEEK_SET)
    fcntl.fcntl(given, F_ADD_SEALS, ALL_SEALS)
    # `clone` instead of Python's `fork` is safe, because this process has one thread.
    flags = NEW_PIDS | NEW_MOUNTS | NEW_IPC | signal.SIGCHLD
    process = LIBC.syscall(CLONE[os.uname().machine], ctypes.c_ulong(flags), *[ctypes.c_ulong(0)] * 4)
    if process == 0:
        _start(request, given, {name: ends[1] for name, ends in pipes.items()})
    _checked("clone", process)
    for descriptor in (given, *(ends[1] for ends in pipes.values())):
        os.close(descriptor)
    texts = {"stdout": b"", "stderr": b""}
    try:
        stopped = _watch(process, {pipes[name][0]: name for name in texts}, texts, limits, end)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)  # ends everything that the program has started
    written_proof, status = (os.read(pipes[name][0], 1 << 12) for name in ("proof", "status"))  # nobody can write any more
    for ends in pipes.values():
        os.close(ends[0])
    ending: dict[str, Any] = json.loads(status) if status else {"status": -signal.SIGKILL, "cpu_s": 0.0}
    if "fault" in ending:
        raise OSError(ending["fault"])
    if stopped:
        return stopped
    if reason := _limit_hit(ending["status"], texts["stderr"], ending["cpu_s"], limits):
        return reason
    is_right = (
        written_proof == proof.encode()
        if program["output"] is None
        else _lines(texts["stdout"]) == _lines(program["output"].encode(errors="replace"))
    )
    return "passed" if ending["status"] == 0 and is_right else "failed"


def _start(request: dict[str, Any], given: int, pipes: dict[str, int]) -> NoReturn:
    """Run as process 1 of a program's namespaces: start the program, and report how it ended or why it did not start."""
    status = pipes["status"]
    ending: dict[str, Any] = {}
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores signals of its own namespace without a handler
        _checked("prctl", LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # the first process to be killed
        _checked("prctl", LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
        _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
        if (program := os.fork()) == 0:
            _become_program(request, given, pipes)
        for descriptor in (given, pipes["stdout"], pipes["stderr"], pipes["proof"]):
            os.close(descriptor)
        while True:
            process, ended, used = os.wait4(-1, 0)
            if process == program:
                ending = {"status": os.waitstatus_to_exitcode(ended), "cpu_s": used.ru_utime + used.ru_stime}
                break
    except BaseException as error:  # the keeper must hear of every error
        ending = {"fault": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(ending).encode())
    os._exit(0)


def _become_program(request: dict[str, Any], given: int, pipes: dict[str, int]) -> NoReturn:
    """Turn this process into the program, with standard streams and the pipe of the proof."""
    try:
        for number, descriptor in enumerate((given, pipes["stdout"], pipes["stderr"])):
            os.dup2(descriptor, number)
        os.set_inheritable(pipes["proof"], True)
        os.chdir(HOME)
        _confine(request["limits"], bytes.fromhex(request["filter"]))
        python = request["python"]
        # No user site, no script directory on the path, no bytecode files.
        os.execve(python, [python, "-s", "-P", "-B", PROGRAM], _environment(python))
    except BaseException as error:  # the keeper must hear of every error
        os.write(pipes["status"], json.dumps({"fault": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(1)


def _environment(python: str) -> dict[str, str]:
    path = f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin"
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Threads share one heap; each heap reserves 64 MiB of the address space.
    one_thread["MALLOC_ARENA_MAX"] = "1"
    # With this hash seed sets have the same order in every run, so that rewards repeat.
    return {"PATH": path, "HOME": HOME, "TMPDIR": HOME, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"} | one_thread


def _confine(limits: dict[str, Any], steps: bytes) -> None:
    """Set limits, user and system call filter in the process that becomes the program."""
    cpu_s = limits["cpu_s"]
    # Keeper, watcher and process 1 count if they run as the same user.
    processes = limits["processes"] + (0 if os.geteuid() == 0 else 3)
    for limit, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, DESCRIPTORS),
        (resource.RLIMIT_SIGPENDING, 4 * DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    os.setsid()
    # Forbid huge pages, because only the used part of a huge page would count.
    _checked("prctl", LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _checked("prctl", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    kept = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("HP", len(steps) // 8, ctypes.addressof(kept))  # struct sock_fprog
    _checked("seccomp", LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


# The watcher -----------------------------------------------------------------------------------------------------------


def _watch(process: int, streams: dict[int, str], texts: dict[str, bytes], limits: dict[str, Any], end: float) -> str:
    """Read into `texts` until the program has ended or passed a limit; return the limit, or "" without one."""
    has_ended, look_at, open_streams = os.pidfd_open(process), 0.0, list(streams)
    for stream in streams:
        os.set_blocking(stream, False)
    try:
        while True:
            ready = select.select([has_ended, *open_streams], [], [], LOOK_S)[0]
            for stream in ready:
                if stream != has_ended and not _read(stream, texts, streams[stream], limits["output_bytes"]):
                    open_streams.remove(stream)
            if sum(map(len, texts.values())) > limits["output_bytes"]:
                return "output"
            if has_ended in ready:
                return ""
            now = time.monotonic()
            if now > end:
                return "wall_time"
            if now >= look_at:
                if reason := _over(process, limits["memory_bytes"]):
                    return reason
                checked = time.monotonic()
                look_at = checked + (checked - now) / LOOK_SHARE
    finally:
        os.close(has_ended)


def _read(stream: int, texts: dict[str, bytes], name: str, most: int) -> bool:
    """Read the available bytes, up to a limit; return False at the end of the stream."""
    while sum(map(len, texts.values())) <= most:
        try:
            more = os.read(stream, 1 << 16)
        except BlockingIOError:
            return True
        if not more:
            return False
        texts[name] += more
    return True


def _over(first: int, most: int) -> str:
    """Return the limit that the processes below a program's process 1, `first`, passed: `memory`, `files` for an excessive
    list of file locks, or "".

    Pages that forked processes share must count once. This count is slow, so it runs only if a plain sum is above the limit.
    """
    with open("/proc/locks", "rb") as locks:
        if len(locks.read(LOCK_LIST_BYTES)) == LOCK_LIST_BYTES:
            return "files"
    processes = [name for name in os.listdir("/proc") if name.isdigit() and name not in ("1", str(first))]
    statuses = [sizes(f"/proc/{process}/status") for process in processes]
    tables = sum(status.get("VmPTE", 0) for status in statuses)
    if tables + sum(status.get(key, 0) for status in statuses for key in ("RssAnon", "VmSwap")) <= most:
        return ""
    rollups = [sizes(f"/proc/{process}/smaps_rollup") for process in processes]
    pages = sum(rollup.get(key, 0) for rollup in rollups for key in ("Pss_Anon", "SwapPss"))
    return "memory" if tables + pages > most else ""


def sizes(path: str) -> dict[str, int]:
    """Return the sizes in a file of /proc, in bytes; empty for a process that has ended or may not be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    words_of_each = [line.split() for line in lines]
    return {words[0][:-1]: int(words[1]) << 10 for words in words_of_each if len(words) == 3 and words[2] == "kB"}


def _limit_hit(status: int, errors: bytes, cpu_s: float, limits: dict[str, Any]) -> str:
    """Return the limit that made a program end, or "" without one. Python names the limit in the last line of a traceback,
    which part of another process's traceback may follow."""
    lines = errors.decode(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith((" ", "Traceback "))), "")
    # Linux enforces the limit by counting ticks, and reports precise seconds: at a limit of 1 s, a busy machine reported
    # 0.93 s. A program that kills itself early has used almost no time.
    if status in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s >= 0.5 * limits["cpu_s"]:
        return "cpu_time"
    if status == -signal.SIGXFSZ or (status != 0 and ("[Errno 27]" in last or "[Errno 28]" in last)):
        return "files"
    if status != 0 and ("[Errno 11]" in last or "can't start new thread" in last):
        return "processes"
    return "memory" if status != 0 and (last.startswith("MemoryError") or "[Errno 12]" in last) else ""


def _lines(text: bytes) -> list[bytes]:
    """Split a text into lines without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
