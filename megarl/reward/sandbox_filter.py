"""The seccomp filter of sandboxed programs, as a BPF program (linux/filter.h, linux/seccomp.h).

It denies what holds memory that no process's resident size shows, what reaches into other processes, and what has often had
holes. Written by hand: pyseccomp has had no release since 2021 and needs libseccomp wherever rewards run.
"""

from __future__ import annotations

import errno
import platform
import struct

# The architecture's name in linux/audit.h and, by column, where its numbers of system calls stand in the tables below.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
NEWEST = 462  # mseal, of Linux 6.10; what came later does not exist for a program
NONE = None  # aarch64 has no such call

# Numbers on x86-64 and aarch64, from asm/unistd_64.h and asm-generic/unistd.h. Denied whatever the arguments are.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # Memory beside the address space, or that outlives a mapping.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "io_setup": (206, 0),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "inotify_init": (253, NONE),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "seccomp": (317, 277), "landlock_create_ruleset": (444, 444),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "modify_ldt": (154, NONE),
    # Sockets of all families, also of vsock, which no network namespace has; descriptors in flight, which no process shows.
    "socket": (41, 198), "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # Namespaces, mounts and the kernel's own.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443),
}  # fmt: skip
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000
F_NOTIFY, F_SETPIPE_SZ = 1026, 1031
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_THP_DISABLE = 4, 22, 41
AF_UNIX = 1
# Number, argument, and the test of its lower half: denied where all of these bits are set, where it is one of these values,
# or where it is none of them.
ARGUMENTS: tuple[tuple[str, tuple[int, int], int, str, tuple[int, ...]], ...] = (
    ("mmap", (9, 222), 3, "bits", (MAP_SHARED | MAP_ANONYMOUS,)),
    ("mmap", (9, 222), 3, "bits", (MAP_HUGETLB,)),
    ("prlimit64", (302, 261), 0, "other", (0,)),
    ("socketpair", (53, 199), 0, "other", (AF_UNIX,)),
    ("fcntl", (72, 25), 1, "one", (F_NOTIFY, F_SETPIPE_SZ)),
    ("prctl", (157, 167), 0, "one", (PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_THP_DISABLE)),
)

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, ALU|AND|K, JMP|JEQ|K, JMP|JGE|K, RET|K
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data, of a little-endian machine
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def filter_program(machine: str | None = None) -> bytes:
    """The instructions for a machine as `platform.machine()` names it, this one by default.

    Raises ValueError for an architecture whose system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"no filter of system calls for {machine}; there are some for {', '.join(ARCHITECTURES)}")
    architecture, column = ARCHITECTURES[machine]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),  # as int 0x80 on x86-64, whose numbers are others
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, NEWEST + 1),  # those of the x32 ABI are beyond, too
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
