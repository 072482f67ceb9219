"""The filter twice: read by a small BPF interpreter, for both machines, and in force, on this one."""

import errno
import os
import platform
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.sandbox import linux, seccomp
from holdfast.sandbox.syscalls import NUMBERS

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PACKAGES = Path(seccomp.__file__).parents[2]
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")

machines = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
only_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 has these ABIs")

DANGEROUS = """
unshare setns mount umount2 fsopen fsmount fsconfig fspick open_tree move_mount mount_setattr pivot_root
chroot ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd bpf perf_event_open
userfaultfd keyctl add_key request_key open_by_handle_at name_to_handle_at kexec_load kexec_file_load
init_module finit_module delete_module reboot swapon swapoff acct quotactl quotactl_fd syslog
clock_settime clock_adjtime settimeofday adjtimex sethostname setdomainname vhangup lookup_dcookie
io_uring_setup io_uring_enter io_uring_register memfd_secret fanotify_init fanotify_mark seccomp
"""


def refusal(number: int) -> int:
    return 0x00050000 | number


# --- The program, interpreted ---------------------------------------------------------------------


def interpret(program: bytes, *, arch: int, number: int, args: Sequence[int] = ()) -> tuple[int, int]:
    """The verdict of a filter, and how many instructions it took."""
    padded = [arg & 0xFFFFFFFFFFFFFFFF for arg in (*args, *[0] * (6 - len(args)))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, at, steps = 0, 0, 0
    while True:
        code, if_true, if_false, k = instructions[at]
        steps, at = steps + 1, at + 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, k)
            case 0x54:
                accumulator &= k
            case 0x15:
                at += if_true if accumulator == k else if_false
            case 0x35:
                at += if_true if accumulator >= k else if_false
            case 0x45:
                at += if_true if accumulator & k else if_false
            case 0x06:
                return k, steps
            case _:
                raise AssertionError(f"instruction {code:#x} is not in our assembler")


def judge(machine: str, call: str | int, *args: int) -> int:
    number = NUMBERS[machine][call] if isinstance(call, str) else call
    return interpret(seccomp.compile_filter(machine), arch=ARCH[machine], number=number, args=args)[0]


@machines
def test_every_listed_call_is_allowed_whatever_its_arguments(machine: str) -> None:
    for name in seccomp.ALLOWED & NUMBERS[machine].keys():
        assert judge(machine, name) == ALLOW, name
        assert judge(machine, name, *[-1] * 6) == ALLOW, name


@machines
def test_every_other_known_call_is_refused(machine: str) -> None:
    for name in NUMBERS[machine].keys() - seccomp.ALLOWED - seccomp.CHECKED.keys():
        assert judge(machine, name) == refusal(errno.EPERM), name
        assert judge(machine, name, *[-1] * 6) == refusal(errno.EPERM), name


@machines
def test_numbers_outside_the_table_do_not_exist(machine: str) -> None:
    known = set(NUMBERS[machine].values())
    for number in {*range(600), 0x3FFFFFFF} - known:
        assert judge(machine, number) == refusal(errno.ENOSYS), number


@machines
def test_another_architecture_is_killed_even_for_a_listed_number(machine: str) -> None:
    program = seccomp.compile_filter(machine)
    others = {0x40000003, 0x40000028, *ARCH.values()} - {ARCH[machine]}
    for arch in others:
        assert interpret(program, arch=arch, number=NUMBERS[machine]["read"])[0] == KILL


def test_the_x32_abi_is_killed() -> None:
    for number in (0x40000000, 0x40000000 + NUMBERS["x86_64"]["getpid"], 0xFFFFFFFF):
        assert judge("x86_64", number) == KILL


@machines
def test_no_edit_of_the_list_lets_a_dangerous_call_in(machine: str) -> None:
    for name in DANGEROUS.split():
        assert judge(machine, name) == refusal(errno.EPERM), name


@machines
@pytest.mark.parametrize(
    ("call", "args", "verdict"),
    [
        ("clone", (signal.SIGCHLD,), ALLOW),
        ("clone", (0x3D0F00,), ALLOW),  # what pthread_create asks for
        ("clone", (0x8000 | signal.SIGCHLD,), ALLOW),  # CLONE_PARENT
        *[
            ("clone", (flag | signal.SIGCHLD,), refusal(errno.EPERM))
            for flag in (0x80, 0x20000, *(0x2000000 << bit for bit in range(6)))
        ],
        ("clone3", (), refusal(errno.ENOSYS)),
        ("socket", (socket.AF_UNIX, socket.SOCK_SEQPACKET, 0), ALLOW),
        ("socket", (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 6), ALLOW),
        ("socket", (socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 17), ALLOW),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0), ALLOW),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 12), refusal(errno.EAFNOSUPPORT)),
        ("socket", (socket.AF_UNIX, socket.SOCK_RAW, 0), refusal(errno.EPERM)),
        ("socket", (socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 1), refusal(errno.EPERM)),
        ("socket", (socket.AF_INET6, socket.SOCK_RAW, 58), refusal(errno.EPERM)),
        ("socket", (socket.AF_INET, 10, 0), refusal(errno.EPERM)),  # SOCK_PACKET
        ("socket", (socket.AF_INET, socket.SOCK_STREAM, 132), refusal(errno.EPROTONOSUPPORT)),  # SCTP
        *[
            ("socket", (family, socket.SOCK_DGRAM, 0), refusal(errno.EAFNOSUPPORT))
            for family in range(46)
            if family not in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
        ],
        ("socketpair", (socket.AF_UNIX, socket.SOCK_STREAM, 0), ALLOW),
        ("socketpair", (30, socket.SOCK_STREAM, 0), refusal(errno.EAFNOSUPPORT)),  # TIPC
        ("ioctl", (0, 0x5401), ALLOW),  # TCGETS
        ("ioctl", (0, 0x5412), refusal(errno.EPERM)),
        ("ioctl", (0, 0x100005412), refusal(errno.EPERM)),  # Linux looks at the lower half only; so do we
        ("ioctl", (0, 0x541C), refusal(errno.EPERM)),
        ("prctl", (linux.PR_SET_NAME,), ALLOW),
        ("prctl", (linux.PR_SET_DUMPABLE, 0), ALLOW),
        ("prctl", (40,), ALLOW),  # GET_TID_ADDRESS
        ("prctl", (linux.PR_SET_SECCOMP, 2), refusal(errno.EPERM)),
        ("prctl", (36, 1), refusal(errno.EPERM)),  # SET_CHILD_SUBREAPER
        ("prctl", (0x59616D61, -1), refusal(errno.EPERM)),  # SET_PTRACER
        ("prctl", (35,), refusal(errno.EPERM)),  # SET_MM
        ("personality", (0,), ALLOW),
        ("personality", (0xFFFFFFFF,), ALLOW),
        ("personality", (0x40000,), refusal(errno.EPERM)),  # ADDR_NO_RANDOMIZE
        ("mknodat", (0, 0, 0o644), ALLOW),
        ("mknodat", (0, 0, stat.S_IFREG | 0o644), ALLOW),
        ("mknodat", (0, 0, stat.S_IFIFO), ALLOW),
        ("mknodat", (0, 0, stat.S_IFSOCK), ALLOW),
        ("mknodat", (0, 0, stat.S_IFCHR), refusal(errno.EPERM)),
        ("mknodat", (0, 0, stat.S_IFBLK), refusal(errno.EPERM)),
        ("renameat2", (0, 0, 0, 0, 1), ALLOW),
        ("renameat2", (0, 0, 0, 0, 4), refusal(errno.EINVAL)),
    ],
)
def test_arguments_decide(machine: str, call: str, args: tuple[int, ...], verdict: int) -> None:
    assert judge(machine, call, *args) == verdict


@machines
def test_an_allowed_call_is_found_in_a_dozen_instructions(machine: str) -> None:
    program = seccomp.compile_filter(machine)
    for name in seccomp.ALLOWED & NUMBERS[machine].keys():
        number = NUMBERS[machine][name]
        assert interpret(program, arch=ARCH[machine], number=number)[1] <= 12, name


@machines
def test_the_program_fits_into_the_kernels_limit(machine: str) -> None:
    assert len(seccomp.compile_filter(machine)) <= 4096 * 8


def test_each_listed_name_is_a_call_with_one_rule() -> None:
    assert set().union(*NUMBERS.values()) >= seccomp.ALLOWED | seccomp.CHECKED.keys()
    assert not seccomp.ALLOWED & seccomp.CHECKED.keys()


@pytest.mark.skipif(not HEADER.exists(), reason="the Linux headers are not installed")
def test_the_table_agrees_with_the_headers() -> None:
    header = {name: int(number) for name, number in re.findall(r"__NR_(\w+) (\d+)", HEADER.read_text())}
    shared = header.keys() & NUMBERS["x86_64"].keys()  # another version of Linux knows more, or less
    assert {name: header[name] for name in shared} == {name: NUMBERS["x86_64"][name] for name in shared}
    assert len(shared) > 300


def test_a_machine_without_a_table_is_refused_by_name() -> None:
    with pytest.raises(seccomp.SeccompError, match="riscv64"):
        seccomp.compile_filter("riscv64")


def test_a_branch_that_no_jump_can_reach_is_not_assembled() -> None:
    long = seccomp._ALLOW * 256
    with pytest.raises(seccomp.SeccompError, match="outgrown"):
        seccomp._branch(0x15, 0, yes=long, no=long)


@pytest.mark.parametrize("program", [b"", bytes(7), bytes(8 * 4097)])
def test_what_cannot_be_a_filter_is_not_installed(program: bytes) -> None:
    with pytest.raises(seccomp.SeccompError, match="not a filter"):
        seccomp.install(program)


# --- The program, in force ------------------------------------------------------------------------

OPEN = """
import ctypes, errno, os, resource, signal, socket, sys
from holdfast.sandbox import linux, seccomp
from holdfast.sandbox.syscalls import NUMBERS

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(name, *args):
    number = NUMBERS[os.uname().machine][name] if isinstance(name, str) else name
    words = [arg if isinstance(arg, bytes) else ctypes.c_ulong(arg) for arg in args]
    done = libc.syscall(ctypes.c_long(number), *words)
    return errno.errorcode[ctypes.get_errno()] if done == -1 else done

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""
CONFINE = """
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(seccomp.compile_filter())
"""


def run(code: str, *, cwd: Path, before: str = OPEN + CONFINE) -> subprocess.CompletedProcess[str]:
    # A fresh interpreter, not a fork: pytest may have threads, and a filter binds one.
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", before + code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(PACKAGES), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def said(code: str, *, cwd: Path) -> str:
    done = run(code, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("attempt", "answer"),
    [
        ("call('mount', b'none', b'nowhere', b'tmpfs', 0, 0)", "EPERM"),
        ("call('clone', 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)", "EPERM"),
        ("call('unshare', 0x10000000)", "EPERM"),
        ("call('unshare', 0)", "EPERM"),
        ("call('setns', 0, 0)", "EPERM"),
        ("call('ptrace', 0, 0, 0, 0)", "EPERM"),
        ("call('process_vm_readv', os.getpid(), 0, 0, 0, 0, 0)", "EPERM"),
        ("call('keyctl', 0, -3, 0)", "EPERM"),
        ("call('bpf', 99, 0, 0)", "EPERM"),
        ("call('io_uring_setup', 1, 0)", "EPERM"),
        ("call('userfaultfd', 1)", "EPERM"),
        ("call('personality', 0x40000)", "EPERM"),
        ("call('mknodat', -100, b'whiteout', 0o20000, 0)", "EPERM"),
        ("call('seccomp', 1, 8, 0)", "EPERM"),
        ("call('prctl', 22, 2, 0)", "EPERM"),
        ("call('prctl', 36, 1)", "EPERM"),
        ("call('ioctl', os.openpty()[1], 0x5412, b'x')", "EPERM"),
        ("call('ioctl', os.openpty()[1], 0x100005412, b'x')", "EPERM"),
        ("call('socket', 17, 3, 0)", "EAFNOSUPPORT"),  # AF_PACKET
        ("call('socket', 38, 5, 0)", "EAFNOSUPPORT"),  # AF_ALG
        ("call('socket', 40, 1, 0)", "EAFNOSUPPORT"),  # AF_VSOCK
        ("call('socket', 16, 3, 12)", "EAFNOSUPPORT"),  # NETLINK_NETFILTER
        ("call('socket', 2, 3, 1)", "EPERM"),  # a raw ICMP socket
        ("call('socket', 2, 3 | socket.SOCK_CLOEXEC, 1)", "EPERM"),
        ("call('clone3', 0, 0)", "ENOSYS"),
        ("call(451, 0, 0, 0, 0)", "ENOSYS"),  # cachestat, from Linux 6.5
        ("call(100000)", "ENOSYS"),
    ],
)
def test_a_forbidden_call_is_refused(attempt: str, answer: str, tmp_path: Path) -> None:
    assert said(f"print({attempt})", cwd=tmp_path) == answer


@only_x86_64
def test_an_x32_call_kills(tmp_path: Path) -> None:
    assert run("call(0x40000000 + 39)", cwd=tmp_path).returncode == -signal.SIGSYS


@only_x86_64
def test_a_32_bit_call_never_returns(tmp_path: Path) -> None:
    done = run(
        """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, getpid; int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""",
        cwd=tmp_path,
    )
    # Where Linux is built without 32-bit support, the instruction itself faults.
    assert done.returncode in (-signal.SIGSYS, -signal.SIGSEGV)


def test_children_and_what_they_execute_stay_confined(tmp_path: Path) -> None:
    attempt = "import ctypes; print(ctypes.CDLL(None, use_errno=True).unshare(0), ctypes.get_errno())"
    assert said(f'import subprocess; subprocess.run([sys.executable, "-c", {attempt!r}])', cwd=tmp_path) == "-1 1"


def test_without_no_new_privs_nothing_is_installed(tmp_path: Path) -> None:
    done = run("seccomp.install(seccomp.compile_filter())", cwd=tmp_path, before=OPEN)

    assert done.returncode == 1
    assert "no_new_privs is not set" in done.stderr


def test_a_program_that_linux_rejects_raises(tmp_path: Path) -> None:
    done = run("linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1); seccomp.install(bytes(8))", cwd=tmp_path, before=OPEN)

    assert done.returncode == 1
    assert "Invalid argument" in done.stderr


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(
            """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    assert sum(pool.map(abs, range(10))) == 45
""",
            id="threads",
        ),
        pytest.param(
            """
import subprocess
assert subprocess.run("echo a | tr a b", shell=True, capture_output=True).stdout == b"b\\n"
assert os.waitstatus_to_exitcode(os.system("exit 3")) == 3
""",
            id="subprocesses",
        ),
        pytest.param(
            """
import multiprocessing
for method in ("fork", "spawn"):
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
""",
            id="multiprocessing",
        ),
        pytest.param(
            """
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=10)
block.buf[0] = 1
block.close()
block.unlink()
""",
            id="shared memory",
        ),
        pytest.param(
            """
import sqlite3
database = sqlite3.connect("x.db")
database.execute("pragma journal_mode = wal")
database.execute("create table t (a)")
database.commit()
database.close()
""",
            id="sqlite",
        ),
        pytest.param(
            """
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert await process.communicate(b"x") == (b"x", None)
asyncio.run(main())
""",
            id="asyncio",
        ),
        pytest.param(
            """
for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "s")):
    with socket.socket(family) as server, socket.socket(family) as client:
        server.bind(address)
        server.listen()
        client.connect(server.getsockname())
        server.accept()[0].close()
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
socket.if_nameindex()
""",
            id="sockets",
        ),
        pytest.param(
            """
os.mkfifo("fifo")
os.mknod("file")
os.rename("file", "moved")
assert call("renameat2", -100, b"moved", -100, b"again", 1) == 0
assert call("personality", 0xFFFFFFFF) == 0
linux.prctl(linux.PR_SET_DUMPABLE, 0)
linux.prctl(linux.PR_SET_NAME, ctypes.addressof(ctypes.create_string_buffer(b"name")))
""",
            id="files and names",
        ),
        pytest.param(
            """
# A snapshot: the child forks a sibling of itself, which this process can then reap.
if os.fork() == 0:
    call("clone", 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
    os._exit(0)
assert os.wait()[1] == os.wait()[1] == 0
""",
            id="a fork with CLONE_PARENT",
        ),
    ],
)
def test_ordinary_work_goes_on(work: str, tmp_path: Path) -> None:
    assert said(work + "\nprint('done')", cwd=tmp_path) == "done"
