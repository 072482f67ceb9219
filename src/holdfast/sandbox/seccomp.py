"""Which system calls a kernel may make. All others are refused, for good, in it and in whatever it starts.

| call | answer |
|---|---|
| of another architecture, or of the x32 ABI | the process is killed |
| unknown to our table (a newer kernel's), and `clone3` | ENOSYS: callers fall back to the older call |
| in `ALLOWED` | allowed |
| in `CHECKED` | depends on its arguments |
| any other | EPERM |

The list is measured. `strace -f` of IPython cells; numpy, pandas, pyarrow, polars, duckdb, matplotlib, scipy,
sklearn; multiprocessing (spawn, fork, forkserver, shared memory), asyncio, threads, ptys; git, bash,
coreutils, tar, make, gcc, g++, sqlite3, node, curl, perl showed 156 calls. Their siblings were added (one
library calls `accept` where another calls `accept4`), and the rest of what acts only on the caller's own
memory, files, signals, timers and IPC. Then the same programs ran under the filter.

`seccomp` is refused, in both its forms. A further filter could only tighten, but nothing measured installs
one, and with it would come listeners (user notification: one process answers another's calls), a flag that
turns off the mitigation of speculative store bypass, and filters that a kernel can never shed again.
"""

import ctypes
import errno
import itertools
import platform
import socket
import stat
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.sandbox import linux
from holdfast.sandbox.syscalls import NUMBERS

_MACHINE = platform.machine()
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_SECCOMP_MODE_FILTER = 2
_PR_GET_SECCOMP = 21
_PR_GET_NO_NEW_PRIVS = 39
_MAX_INSTRUCTIONS = 4096

# Not there, though programs use them: inotify (on /usr it would tell which programs the host starts, and its
# instances are counted against the host's user; what uses it falls back to polling), sync and syncfs (they write back
# the whole machine's files).
_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile splice tee
copy_file_range open openat openat2 creat close close_range dup dup2 dup3 flock pipe pipe2 truncate
ftruncate fallocate fadvise64 readahead fsync fdatasync sync_file_range

stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 getdents getdents64 getcwd
chdir fchdir mkdir mkdirat rmdir link linkat unlink unlinkat symlink symlinkat readlink readlinkat rename
renameat chmod fchmod fchmodat chown fchown lchown fchownat umask utime utimes utimensat futimesat setxattr
lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
fremovexattr landlock_create_ruleset landlock_add_rule landlock_restrict_self

poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd
eventfd2 signalfd signalfd4

munmap mremap mprotect madvise msync mincore brk mlock mlock2 mlockall munlock munlockall pkey_alloc
pkey_free pkey_mprotect membarrier mbind get_mempolicy set_mempolicy

fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid set_tid_address getpgid
getpgrp setpgid getsid setsid kill tkill tgkill pidfd_open pidfd_send_signal futex futex_waitv
set_robust_list get_robust_list rseq arch_prctl restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn
rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo sigaltstack pause

getuid geteuid getgid getegid getgroups getresuid getresgid setuid setgid setreuid setregid setresuid
setresgid setfsuid setfsgid setgroups capget capset

sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler
sched_setscheduler sched_getattr sched_setattr sched_get_priority_max sched_get_priority_min
sched_rr_get_interval getpriority setpriority ioprio_get ioprio_set getrlimit setrlimit prlimit64 getrusage
getcpu

time gettimeofday times clock_gettime clock_getres clock_nanosleep nanosleep alarm getitimer setitimer
timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime
timerfd_gettime uname sysinfo getrandom

bind listen connect accept accept4 shutdown getsockname getpeername getsockopt sendto recvfrom
sendmsg recvmsg sendmmsg recvmmsg

shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open mq_unlink
mq_timedsend mq_timedreceive mq_notify mq_getsetattr
"""
ALLOWED = frozenset(_ALLOWED.split())

# Own process only, and nothing that changes who reaps (PR_SET_CHILD_SUBREAPER: pid 1 must), who may trace
# (PR_SET_PTRACER), or what /proc shows of it (PR_SET_MM). SET_DUMPABLE stays: a snapshot clears its own.
PRCTL_OPTIONS = {
    "SET_PDEATHSIG": linux.PR_SET_PDEATHSIG,
    "GET_PDEATHSIG": 2,
    "GET_DUMPABLE": linux.PR_GET_DUMPABLE,
    "SET_DUMPABLE": linux.PR_SET_DUMPABLE,
    "SET_NAME": linux.PR_SET_NAME,
    "GET_NAME": 16,
    "GET_SECCOMP": _PR_GET_SECCOMP,
    "CAPBSET_READ": 23,
    "GET_SECUREBITS": 27,
    "SET_TIMERSLACK": 29,
    "GET_TIMERSLACK": 30,
    "GET_CHILD_SUBREAPER": 37,
    "SET_NO_NEW_PRIVS": linux.PR_SET_NO_NEW_PRIVS,
    "GET_NO_NEW_PRIVS": _PR_GET_NO_NEW_PRIVS,
    "GET_TID_ADDRESS": 40,  # how a snapshot learns where each thread's tid is kept
    "SET_THP_DISABLE": 41,
    "GET_THP_DISABLE": 42,
    "SVE_SET_VL": 50,  # arm64: vector lengths and pointer authentication of the calling thread
    "SVE_GET_VL": 51,
    "GET_SPECULATION_CTRL": 52,
    "PAC_RESET_KEYS": 54,
    "SET_TAGGED_ADDR_CTRL": 55,
    "GET_TAGGED_ADDR_CTRL": 56,
    "SET_VMA": 0x53564D41,  # allocators name their mappings
}

# A namespace would give back capabilities, over code of Linux that few but root reach. 0x80 is CLONE_NEWTIME.
NAMESPACE_FLAGS = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | 0x80
)

# TIOCSTI and TIOCLINUX type into a terminal for somebody else; TIOCSETD loads line disciplines.
DENIED_IOCTLS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423}

# mknod is for files, FIFOs and sockets. A character device 0:0 needs no privilege and is how overlayfs says
# "deleted": one smuggled into a layer would hide a committed file. RENAME_WHITEOUT makes the same thing.
_NODE_TYPES = (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK)
_RENAME_WHITEOUT = 4

# A lease makes everybody else's open() of the file wait, and /usr and the environment are everybody's.
DENIED_FCNTLS = {"F_SETLEASE": 1024, "F_NOTIFY": 1026}

# Whoever closes a TCP socket that lingers waits for it. A descriptor that is sent to the host is closed by the host: a
# guest could make it wait for as long as it likes.
_SO_LINGER = 13

# Huge pages come from a pool of the whole machine that no memory cap counts.
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000

_SOCK_TYPE_MASK = 0xF  # the bits above are SOCK_NONBLOCK and SOCK_CLOEXEC
_SOCK_PACKET = 10
_NETLINK_ROUTE = 0  # what getaddrinfo and if_nameindex ask

# Plain Linux, and the question "which have I?". Others turn off ASLR or make readable memory executable.
_PERSONALITIES = (0, 0xFFFFFFFF)


class SeccompError(RuntimeError):
    """There is no filter for this machine, or it is not in force. Never go on without."""


# --- A small assembler for classic BPF ------------------------------------------------------------


class Instruction(NamedTuple):
    """One `struct sock_filter`."""

    code: int
    if_true: int
    if_false: int
    k: int


Code = tuple[Instruction, ...]
"""Instructions whose every path ends in a verdict: pieces join by concatenation, without labels."""

# These six, and loads of arch and number, are what Linux >= 5.11 can evaluate ahead: a call that is allowed
# whatever its arguments then costs a bit test, and the program does not run at all.
_LOAD, _RETURN, _AND = 0x20, 0x06, 0x54
_JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT = 0x15, 0x35, 0x45

# Offsets into `struct seccomp_data`.
_NUMBER, _ARCH, _ARGS = 0, 4, 16


def _verdict(value: int) -> Code:
    return (Instruction(_RETURN, 0, 0, value),)


def _errno(number: int) -> Code:
    return _verdict(0x00050000 | number)


_KILL = _verdict(0x80000000)
_ALLOW = _verdict(0x7FFF0000)
_EPERM = _errno(errno.EPERM)
_EINVAL = _errno(errno.EINVAL)
_ENOSYS = _errno(errno.ENOSYS)
_NO_FAMILY = _errno(errno.EAFNOSUPPORT)
_NO_PROTOCOL = _errno(errno.EPROTONOSUPPORT)


def _load(offset: int, then: Code) -> Code:
    return (Instruction(_LOAD, 0, 0, offset), *then)


def _mask(bits: int, then: Code) -> Code:
    return (Instruction(_AND, 0, 0, bits), *then)


def _branch(jump: int, k: int, *, yes: Code, no: Code) -> Code:
    """Jump offsets have 8 bits: only the branch that comes first must be short."""
    if len(yes) <= 255:
        return (Instruction(jump, 0, len(yes), k), *yes, *no)
    if len(no) <= 255:
        return (Instruction(jump, len(no), 0, k), *no, *yes)
    raise SeccompError("the filter has outgrown its jumps: both branches are longer than 255 instructions")


def _match(cases: dict[int, Code], *, otherwise: Code) -> Code:
    code = otherwise
    for value, yes in reversed(cases.items()):
        code = _branch(_JUMP_EQUAL, value, yes=yes, no=code)
    return code


def _one_of(values: Iterable[int], *, otherwise: Code) -> Code:
    return _match(dict.fromkeys(values, _ALLOW), otherwise=otherwise)


def _argument(index: int, then: Code) -> Code:
    """The lower half of an argument, which is the whole of each that we check.

    Linux declares them int, unsigned int or umode_t and drops the rest; clone's flags are long, but it drops
    their upper half too. (Both machines are little endian: the lower half comes first.)
    """
    return _load(_ARGS + 8 * index, then)


# --- The policy -----------------------------------------------------------------------------------


def _node(*, mode: int) -> Code:
    return _argument(mode, _mask(0xF000, _one_of(_NODE_TYPES, otherwise=_EPERM)))


def _socket() -> Code:
    # TCP and UDP by name: SCTP, MPTCP, L2TP and others would have the host load a module for us.
    stream = _argument(2, _one_of((0, socket.IPPROTO_TCP), otherwise=_NO_PROTOCOL))
    datagram = _argument(2, _one_of((0, socket.IPPROTO_UDP), otherwise=_NO_PROTOCOL))
    inet_types = {int(socket.SOCK_STREAM): stream, int(socket.SOCK_DGRAM): datagram}
    inet = _argument(1, _mask(_SOCK_TYPE_MASK, _match(inet_types, otherwise=_EPERM)))

    raw_types = dict.fromkeys((int(socket.SOCK_RAW), _SOCK_PACKET), _EPERM)
    unix = _argument(1, _mask(_SOCK_TYPE_MASK, _match(raw_types, otherwise=_ALLOW)))

    # No look at the type: glibc opens it as SOCK_RAW, which means nothing special in this family.
    netlink = _argument(2, _one_of((_NETLINK_ROUTE,), otherwise=_NO_FAMILY))

    families = {
        socket.AF_UNIX: unix,
        socket.AF_INET: inet,
        socket.AF_INET6: inet,
        socket.AF_NETLINK: netlink,
    }
    return _argument(0, _match({int(family): code for family, code in families.items()}, otherwise=_NO_FAMILY))


def _socket_option() -> Code:
    return _argument(2, _match({_SO_LINGER: _EPERM}, otherwise=_ALLOW))


CHECKED: Mapping[str, Code] = {
    "clone": _argument(0, _branch(_JUMP_ANY_BIT, NAMESPACE_FLAGS, yes=_EPERM, no=_ALLOW)),
    "clone3": _ENOSYS,  # its flags lie in memory, where a filter cannot look
    "fcntl": _argument(1, _match(dict.fromkeys(DENIED_FCNTLS.values(), _EPERM), otherwise=_ALLOW)),
    "ioctl": _argument(1, _match(dict.fromkeys(DENIED_IOCTLS.values(), _EPERM), otherwise=_ALLOW)),
    "memfd_create": _argument(1, _branch(_JUMP_ANY_BIT, _MFD_HUGETLB, yes=_EINVAL, no=_ALLOW)),
    "mknod": _node(mode=1),
    "mknodat": _node(mode=2),
    "mmap": _argument(3, _branch(_JUMP_ANY_BIT, _MAP_HUGETLB, yes=_EINVAL, no=_ALLOW)),
    "personality": _argument(0, _one_of(_PERSONALITIES, otherwise=_EPERM)),
    "prctl": _argument(0, _one_of(PRCTL_OPTIONS.values(), otherwise=_EPERM)),
    "renameat2": _argument(4, _branch(_JUMP_ANY_BIT, _RENAME_WHITEOUT, yes=_EINVAL, no=_ALLOW)),
    "setsockopt": _argument(1, _match({int(socket.SOL_SOCKET): _socket_option()}, otherwise=_ALLOW)),
    "shmget": _argument(2, _branch(_JUMP_ANY_BIT, _SHM_HUGETLB, yes=_EINVAL, no=_ALLOW)),
    "socket": _socket(),
    "socketpair": _argument(0, _one_of((int(socket.AF_UNIX),), otherwise=_NO_FAMILY)),
}


def _decide(name: str | None) -> Code:
    if name is None:
        return _ENOSYS
    return CHECKED.get(name, _ALLOW if name in ALLOWED else _EPERM)


def _decide_all(numbers: Mapping[str, int]) -> list[tuple[int, Code]]:
    """Each stretch of numbers with the same answer, as (first, answer). The last stretch has no end."""
    names = {number: name for name, number in numbers.items()}
    decisions = [(number, _decide(names.get(number))) for number in range(max(names) + 2)]
    stretches = itertools.groupby(decisions, key=lambda decision: decision[1])
    return [next(stretch) for _, stretch in stretches]


def _search(stretches: list[tuple[int, Code]]) -> Code:
    """Binary search for the number: about seven comparisons, whichever the call."""
    if len(stretches) == 1:
        return stretches[0][1]
    middle = len(stretches) // 2
    lower, upper = stretches[:middle], stretches[middle:]
    return _branch(_JUMP_GREATER_EQUAL, upper[0][0], yes=_search(upper), no=_search(lower))


def compile_filter(machine: str = _MACHINE) -> bytes:
    """The filter for a machine, as an array of `struct sock_filter`.

    >>> len(compile_filter("x86_64")) % 8
    0
    """
    if machine not in NUMBERS:
        raise SeccompError(f"no system call filter for {machine!r}, only for {', '.join(NUMBERS)}")
    return _assembled(_search(_decide_all(NUMBERS[machine])), machine)


def compile_allow_list(calls: Iterable[str], machine: str = _MACHINE) -> bytes:
    """A filter that allows these calls, as far as a kernel may make them, and refuses all others: for a process of the
    host that needs hardly any."""
    if machine not in NUMBERS:
        raise SeccompError(f"no system call filter for {machine!r}, only for {', '.join(NUMBERS)}")
    answers = {NUMBERS[machine][call]: CHECKED.get(call, _ALLOW) for call in calls if call in NUMBERS[machine]}
    return _assembled(_match(answers, otherwise=_EPERM), machine)


def _assembled(code: Code, machine: str) -> bytes:
    if machine == "x86_64":
        # x32 shares the architecture's name but numbers its calls anew: every comparison would be wrong.
        code = _branch(_JUMP_GREATER_EQUAL, _X32_BIT, yes=_KILL, no=code)
    code = _load(_ARCH, _branch(_JUMP_EQUAL, _AUDIT_ARCH[machine], yes=_load(_NUMBER, code), no=_KILL))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


# --- Putting it in force --------------------------------------------------------------------------


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def install(program: bytes) -> None:
    """Confine the calling thread, and all that it will start, to `program`. It cannot be undone.

    Call it in a process with one thread (others would stay free), after no_new_privs and after every call
    that the filter forbids. If this raises, the process must end.
    """
    count, rest = divmod(len(program), struct.calcsize("=HBBI"))
    # Checked here because the length field would wrap silently, and cut the program short.
    if rest or not 0 < count <= _MAX_INSTRUCTIONS:
        raise SeccompError(f"{len(program)} bytes are not a filter of 1 to {_MAX_INSTRUCTIONS} instructions")
    if linux.prctl(_PR_GET_NO_NEW_PRIVS) != 1:
        # Root could load it all the same, and a set-uid program would then run with rights we never meant.
        raise SeccompError("no_new_privs is not set; set it before the filter")
    instructions = ctypes.create_string_buffer(program, len(program))
    header = _SockFprog(count, ctypes.addressof(instructions))
    linux.prctl(linux.PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))
    if linux.prctl(_PR_GET_SECCOMP) != _SECCOMP_MODE_FILTER:
        raise SeccompError("Linux accepted the filter, yet none is in force")
