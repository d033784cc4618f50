"""Programs that try to hold, take or leave what the sandbox forbids: as root, and as an ordinary user.

An attack ends without an error if it succeeds, so `passed` means a hole. A program named `held: ...` checks the limit
itself, and ends without an error if the limit holds.
"""

import json
import os
import platform
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megarl.reward import sandbox, sandbox_keeper
from megarl.reward.sandbox import Program, SandboxFault, SandboxLimits, run_programs

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
LIMITS = {"wall_s": 60.0, "cpu_s": 20, "memory_bytes": 128 * MIB, "file_bytes": 4 * MIB, "processes": 6,
          "output_bytes": 1 << 16}  # fmt: skip
# The mark of the attacks in names of processes, files and sockets.
MARK = os.environ.get("MEGARL_TEST_MARK") or f"x{secrets.token_hex(5)}"
NUMBERS = {name: columns[sandbox.ARCHITECTURES[platform.machine()][1]]
           for name, columns in sandbox.DENIED.items()}  # fmt: skip
BEGIN = f"""import ctypes, errno, fcntl, mmap, os, resource, signal, socket, sys, threading, time
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.prctl(15, b'{MARK}', 0, 0, 0)
LIBC.mmap.restype, LIBC.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [
    ctypes.c_long]
def call(number, *arguments):
    if LIBC.syscall(number, *[ctypes.c_long(one) for one in arguments]) < 0:
        raise OSError(ctypes.get_errno(), 'refused')
def fill(size):
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, 4096): held[at] = 1
    return held
def crowd(number, work):
    is_child = any(os.fork() == 0 for _ in range(number - 1))
    held = work()
    time.sleep(5)
    if is_child: os._exit(0)
"""
N = NUMBERS
# Name: (code, expected outcome, other limits).
ATTACKS: dict[str, tuple[str, str, dict]] = {
    # Memory of each kind.
    "one process": ("fill(140 << 20)", "memory", {}),
    "bytes": ("held = bytearray(140 << 20)", "memory", {}),
    "several processes": ("crowd(4, lambda: fill(40 << 20))", "memory", {}),
    "written after a fork": ("held = fill(30 << 20)\ndef work():\n    for at in range(0, len(held), 4096): held[at] = 2\n"
                             "crowd(6, work)", "memory", {}),
    "shared memory": ("held = mmap.mmap(-1, 70 << 20)\nheld.resize(4096)", "failed", {}),
    "shared memory of /dev/zero": ("mmap.mmap(os.open('/dev/zero', os.O_RDWR), 70 << 20)", "failed", {}),
    "huge pages": ("mmap.mmap(-1, 2 << 20, flags=0x40022)", "failed", {}),
    "memfd": ("os.ftruncate(os.memfd_create('x'), 1 << 20)", "failed", {}),
    "standard input": ("os.ftruncate(0, 3 << 20)", "failed", {}),
    "written standard input": ("os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'1' << 20)", "failed", {}),
    "System V shared memory": (f"call({N['shmget']}, 0, 1 << 20, 0o1600)", "failed", {}),
    "System V messages": (f"call({N['msgget']}, 0, 0o1600)", "failed", {}),
    "System V semaphores": (f"call({N['semget']}, 0, 32000, 0o1600)", "failed", {}),
    "POSIX messages": (f"call({N['mq_open']}, ctypes.addressof(ctypes.create_string_buffer(b'x')), 0o102, 0o600, 0)",
                       "failed", {}),
    "POSIX shared memory": (f"from multiprocessing.shared_memory import SharedMemory\n"
                            f"SharedMemory('{MARK}', create=True, size=1 << 20)", "failed", {}),
    "large pipes": ("fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)", "failed", {}),
    "pages in pipes": (f"call({N['vmsplice']}, os.pipe()[1], 0, 0, 0)", "failed", {}),
    "held: full sockets of a process": ("held = []\ntry:\n    while True: held += socket.socketpair()\n"
                                        "except OSError: pass\n"
                                        "sent = 0\nfor end in held:\n    end.setblocking(False)\n    try:\n"
                                        "        while True: sent += end.send(bytes(103000))\n"
                                        "    except BlockingIOError: pass\nassert 60 <= len(held) < 64 and sent < 16 << 20",
                                        "passed", {}),
    "large sockets": ("socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)", "failed", {}),
    "datagrams of closed senders": (
        "receiver, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nother.close()\nreceiver.bind('\\0x')\n"
        "LIBC.connect(receiver.fileno(), bytes(16), 16)\n"
        "for _ in range(9):\n    sender, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "    sender.connect('\\0x')\n    sender.send(bytes(200000))\n    sender.close()", "failed", {}),
    "packets": ("socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)", "failed", {}),
    "descriptors in flight": ("socket.send_fds(socket.socketpair()[0], [b'x'], [0])", "failed", {}),
    "page tables": ("for i in range(9000):\n    at = LIBC.mmap((1 << 40) + (i << 30), 4096, 3, 0x22 | 0x100000, -1, 0)\n"
                    "    ctypes.string_at(at, 1)\ntime.sleep(1)", "memory", {"memory_bytes": 64 * MIB}),
    "held: mappings of a process": ("number = 0\nwhile LIBC.mmap(None, 4096, number % 2, 0x22, -1, 0) != 2**64 - 1:\n"
                                    "    number += 1\n"
                                    "assert 1000 < number < 128 << 20 >> 12", "passed", {}),
    # Together at most `processes` times 16 MiB in sockets, and 256 bytes for each 4 KiB of `processes` address spaces.
    "held: full sockets and mappings of all processes": (
        "reader, writer = os.pipe()\nis_child = any(os.fork() == 0 for _ in range(5))\nends, sent, number = [], 0, 0\n"
        "try:\n    while True: ends += socket.socketpair()\nexcept OSError: pass\n"
        "for end in ends:\n    end.setblocking(False)\n    try:\n        while True: sent += end.send(bytes(103000))\n"
        "    except BlockingIOError: pass\n"
        "while LIBC.mmap(None, 4096, number % 2, 0x22, -1, 0) != 2**64 - 1: number += 1\n"
        "os.write(writer, b'%09d%09d' % (sent, number))\nif is_child: time.sleep(99)\n"
        "reports = [os.read(reader, 18) for _ in range(6)]\n"
        "sent, number = (sum(int(report[at:at + 9]) for report in reports) for at in (0, 9))\n"
        "assert 6 << 20 < sent < 6 * 16 << 20 and 6000 < number and number << 8 < 6 * (128 << 20) // 16", "passed", {}),
    "huge pages that are kept": ("LIBC.prctl.restype = ctypes.c_int\nassert LIBC.prctl(41, 0, 0, 0, 0) == 0", "failed", {}),
    # Files.
    "a file": ("open('x', 'wb').write(bytes(5 << 20))", "files", {}),
    "a sparse file": ("os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 5 << 20)", "files", {}),
    "many files": ("for i in range(9): open(f'x{i}', 'wb').write(bytes(1 << 20))", "files", {}),
    "files without a name": ("held = [open('x', 'wb') for i in range(9)]\nfor i, one in enumerate(held):\n"
                             "    one = open(f'{i}', 'wb')\n    os.unlink(f'{i}')\n    one.write(bytes(1 << 20))\n"
                             "    one.flush()\n    held[i] = one", "files", {}),
    "files without a byte": ("for i in range(1000): os.close(os.open(f'{i}', os.O_CREAT))", "files", {}),
    "mapped files": ("held = []\nfor i in range(9):\n    end = os.open(f'x{i}', os.O_CREAT | os.O_RDWR)\n"
                     "    os.truncate(end, 1 << 20)\n    one = mmap.mmap(end, 1 << 20)\n"
                     "    for at in range(0, 1 << 20, 4096): one[at] = 1\n    held.append(one)", "failed", {}),
    "locks": ("end = os.open('x', os.O_CREAT | os.O_RDWR)\nfor i in range(2000, 0, -1): fcntl.lockf(end, 2 | 4, 1, 2 * i)\n"
              "time.sleep(1)", "files", {}),
    "files outside": (f"for folder in ('/dev/shm', '/var/tmp', '/usr', '/dev', '/'):\n    try:\n"
                      f"        open(folder + '/{MARK}', 'w')\n        sys.exit(0)\n    except OSError: pass\nassert 0",
                      "failed", {}),
    "held: temporary files are its own": (f"open(os.environ['TMPDIR'] + '/{MARK}', 'w').write('x')", "passed", {}),
    # Processes.
    "forks without end": ("while True: os.fork()", "processes", {}),
    "threads without end": ("while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "processes",
                            {}),
    "one process too many": ("for _ in range(6):\n    if os.fork() == 0: time.sleep(9)", "processes", {}),
    "held: as many processes as allowed": ("for _ in range(5):\n    if os.fork() == 0: time.sleep(9)", "passed", {}),
    "held: a daemon": ("if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(999)\n    os._exit(0)\n"
                       "os.wait()",
                       "passed", {}),
    # Signals, and other ways to reach processes.
    "signals to process 1": ("for number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\n"
                             "time.sleep(0.1)\nassert 0", "failed", {}),
    "signals to all": ("os.kill(-1, 9)\nassert 0", "failed", {}),
    "signals to the parent": ("os.kill(os.getppid(), signal.SIGSTOP)\nos.kill(os.getppid(), 2)\nassert 0", "failed", {}),
    "its own end": ("os.kill(os.getpid(), 9)", "failed", {}),
    "limits of process 1": ("for limit in range(16):\n    resource.prlimit(1, limit, (0, 0))", "failed", {}),
    "limits of all others": ("assert all(LIBC.prlimit(one, 0, bytes(16), None) == 0 for one in range(1, 99))", "failed", {}),
    "priority of process 1": ("try: os.setpriority(os.PRIO_PROCESS, 1, 19); os.sched_setaffinity(1, {0})\n"
                              "except OSError: pass\nassert 0", "failed", {}),
    "memory of process 1": ("open('/proc/1/mem', 'r+b')", "failed", {}),
    "ptrace": (f"call({N['ptrace']}, 16, 1, 0, 0)", "failed", {}),
    "the first to be killed": ("open('/proc/self/oom_score_adj', 'w').write('0')", "failed", {}),
    "held: the watcher has no name": ("assert sorted(filter(str.isdigit, os.listdir('/proc'))) == ['1', str(os.getpid())]",
                                      "passed", {}),
    "held: calls that are denied": (f"for number in {[one for one in N.values() if one is not None]} + [500, 1 << 30]:\n"
                                    "    assert LIBC.syscall(number, -1, -1, -1, -1, -1, -1) == -1, number\n"
                                    "    assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), number", "passed", {}),
    # Sockets.
    "a socket": ("socket.socket()", "failed", {}),
    "a socket of this machine": (f"socket.socket(socket.AF_UNIX).bind('\\0{MARK}')", "failed", {}),
    "a socket to the host": ("socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)", "failed", {}),
    "a socket to the kernel": ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "failed", {}),
    # Time and output.
    "without an end": ("signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "cpu_time", {"cpu_s": 1}),
    "held: processor time of a child": ("signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nif (child := os.fork()) == 0:\n"
                                        "    while True: pass\nused = os.wait4(child, 0)[2]\n"
                                        "assert used.ru_utime + used.ru_stime < 1.1", "passed", {"cpu_s": 1}),
    "sleeps": ("time.sleep(99)", "wall_time", {"wall_s": 1.0}),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", "wall_time", {"wall_s": 1.0}),
    "closes all and sleeps": ("os.closerange(0, 64)\ntime.sleep(99)", "wall_time", {"wall_s": 1.0}),
    "bears every signal": ("for one in range(1, 65):\n    try: signal.signal(one, signal.SIG_IGN)\n"
                           "    except (OSError, ValueError): pass\nif os.fork() == 0: os.setsid()\n"
                           "while True: time.sleep(9)", "wall_time", {"wall_s": 1.0}),
    "says too much": ("while True: print('x' * 1000)", "output", {}),
    "complains too much": ("while True: print('x' * 1000, file=sys.stderr)", "output", {}),
}  # fmt: skip
CLEAN = Program(
    "import os; assert os.listdir('.') == ['program.py'] and not os.path.exists('/dev/shm')\n"
    "assert len(open('/proc/sysvipc/shm').readlines()) == 1"
)


def outcomes_of(name: str) -> list[str]:
    """Return the outcome of an attack, and of a harmless program after it if time is left."""
    code, reason, others = ATTACKS[name]
    after = [] if reason == "wall_time" else [CLEAN]
    try:
        return run_programs([Program(BEGIN + code), *after], SandboxLimits(**(LIMITS | others)))
    except SandboxFault as fault:
        return [f"masked: {fault}"]


def outcomes_of_all() -> dict[str, list[str]]:
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(ATTACKS, pool.map(outcomes_of, ATTACKS), strict=True))


def as_nobody() -> None:
    """Become an ordinary user who can read this environment; if it is in root's folders, use mounts of this process only."""
    needed = set[str]()
    for path in sandbox_keeper._outermost(iter({str(ROOT), *map(os.path.realpath, (sys.prefix, sys.base_prefix))})):
        # A closed folder, as `mktemp -d` makes it, is opened entry by entry.
        needed |= {path} if Path(path).stat().st_mode & 0o001 else {str(entry) for entry in Path(path).iterdir()}
    closed = {
        str(above) for path in needed for above in list(Path(path).parents)[:-1] if not above.stat().st_mode & 0o001
    }  # fmt: skip
    sandbox_keeper._checked("unshare", sandbox_keeper.LIBC.unshare(sandbox_keeper.NEW_MOUNTS))
    sandbox_keeper._mount("", "/", "", sandbox_keeper.MS_REC | sandbox_keeper.MS_PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in needed}
    for folder in sandbox_keeper._outermost(iter(closed)):
        sandbox_keeper._mount("tmpfs", folder, "tmpfs", 0, "mode=755")
        for path, descriptor in opened.items():
            if path.startswith(f"{folder}/"):
                sandbox_keeper._bind(descriptor, path, is_folder=os.path.isdir(f"/proc/self/fd/{descriptor}"))
    os.setgroups([])
    os.setresgid(*[sandbox_keeper.NOBODY] * 3)
    os.setresuid(*[sandbox_keeper.NOBODY] * 3)


def left() -> list[str]:
    """Return the traces of the attacks on this machine."""
    traces = [str(path) for folder in ("/tmp", "/dev/shm", "/var/tmp") for path in Path(folder).glob(f"*{MARK}*")]
    traces += [line for line in Path("/proc/net/unix").read_text().splitlines() if MARK in line]
    return traces + [str(process) for process in processes_named(MARK)]


def processes_named(name: str) -> list[psutil.Process]:
    """Return the processes of this machine with a name, without zombies."""
    processes = [process for process in psutil.process_iter(["name", "status"]) if process.info["name"] == name]
    return [process for process in processes if process.info["status"] != psutil.STATUS_ZOMBIE]


def segments() -> set[str]:
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()}


@pytest.mark.parametrize("user", ["root", "nobody"] if os.geteuid() == 0 else ["own"])
def test_no_attack_passes_a_limit_or_is_masked_or_leaves_traces(user):
    before = segments()
    if user == "nobody":
        code = "import json; from tests.reward.test_reward_attacks import *; print(json.dumps(outcomes_of_all()))"
        command = [sys.executable, "-B", "-c", code]
        environment = {"PYTHONPATH": str(ROOT), "MEGARL_TEST_MARK": MARK, "PATH": os.environ["PATH"]}
        done = subprocess.run(command, preexec_fn=as_nobody, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outcomes = json.loads(done.stdout)
    else:
        outcomes = outcomes_of_all()
    wanted = {name: [reason] + ["passed"] * (reason != "wall_time") for name, (_, reason, _) in ATTACKS.items()}
    assert len(ATTACKS) >= 40
    assert {name: outcome for name, outcome in outcomes.items() if outcome != wanted[name]} == {}
    deadline = time.monotonic() + 2
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == [] and segments() <= before
