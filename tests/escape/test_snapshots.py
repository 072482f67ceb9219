"""Attacks on the mechanism that brings memory back. User code may spoil its own protection, and nothing else.

Whatever is tried, the host answers in time and the session does honest work afterwards.
"""

import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from holdfast import Run, Session
from holdfast.sandbox.syscalls import NUMBERS

SLOW_S = 60.0
"""Nothing here takes as long, but for a host that hangs."""

TOOLS = (
    f"""
numbers = {NUMBERS[platform.machine()]!r}
"""
    + """
import ctypes, errno, gc, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
snapshots = next(o for o in gc.get_objects() if type(o).__name__ == "Snapshots")
control, wake = get_ipython().sink._channel._keep, snapshots._wake

def tries(function, *args):
    try:
        return f"SUCCESS {function(*args)!r}"
    except OSError as error:
        return errno.errorcode.get(error.errno, repr(error))

def call(name, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(numbers[name]), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return f"SUCCESS {result}" if result >= 0 else errno.errorcode[ctypes.get_errno()]

def others():
    "Processes that are there, though hidepid hides them: pid 1, and the snapshot."
    found = []
    for pid in range(1, 500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError:
            pass
        if pid != os.getpid() and not os.path.exists(f"/proc/self/task/{pid}"):
            found.append(pid)
    return found

def snapshot_pid():
    return max(others())
"""
)


def in_time(session: Session, code: str, **options: Any) -> Run:
    """The run; a host that hangs is a failed test and not a hanging one."""
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(session.run(dedent(code), **options)), daemon=True)
    thread.start()
    thread.join(SLOW_S)
    assert runs, "the host did not answer, or failed"
    return runs[0]


def attack(session: Session, code: str, **options: Any) -> Run:
    """An attack that the kernel lives through."""
    run = in_time(session, code, **options)
    assert run.error is None, f"the attack itself broke: {run.error.traceback or run.error.message}"
    return run


def assert_works(session: Session) -> None:
    run = in_time(session, "print('alive'); open('works', 'w').write('x'); 6 * 7")
    assert (run.error, run.stdout, run.text) == (None, "alive\n", "42")
    assert session.shell("echo $((6 * 7))").stdout == "42\n"


def assert_protected(session: Session) -> None:
    """A death takes nothing along."""
    attack(session, "honest = 1")
    attack(session, "pass")
    run = in_time(session, "honest = 2; import os; os._exit(1)")
    assert (run.memory, run.unprotected) == ("restored", None)
    assert attack(session, "honest").text == "1"


@contextmanager
def armed(**settings: object) -> Iterator[Session]:
    with Session(**{"memory": "512M", "timeout": 30, **settings}) as session:
        attack(session, TOOLS + "\nx = 1")
        yield session
        assert_works(session)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long the host waits for a snapshot that never comes, or never wakes."""
    monkeypatch.setattr("holdfast.resources.memory._SNAPSHOT_S", 3.0)
    monkeypatch.setattr("holdfast.resources.memory._WAKE_S", 3.0)


@pytest.fixture
def session() -> Iterator[Session]:
    """A session with the attacker's tools in memory and a snapshot beside it."""
    with armed() as session:
        yield session


# -- looking into the snapshot -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mem", "maps", "environ", "smaps", "pagemap", "auxv", "stack", "syscall", "io"])
def test_the_snapshots_memory_cannot_be_opened(session: Session, name: str) -> None:
    run = attack(session, f"""
        pid = snapshot_pid()
        assert pid > 2, others()
        print(tries(lambda: open(f"/proc/{{pid}}/{name}", "rb").read(64)))
        print(tries(lambda: os.open(f"/proc/{{pid}}/{name}", os.O_RDWR)))
        pidfd = os.pidfd_open(pid)
        print(tries(lambda: os.open(f"/proc/self/fdinfo/{{pidfd}}/../../../{{pid}}/{name}", os.O_RDONLY)))
    """)  # fmt: skip

    assert "SUCCESS" not in run.stdout
    assert_protected(session)


@pytest.mark.parametrize("name", ["fd", "map_files", "task", "root", "cwd", "exe", "ns"])
def test_the_snapshots_links_cannot_be_followed(session: Session, name: str) -> None:
    run = attack(session, f"""
        path = f"/proc/{{snapshot_pid()}}/{name}"
        print(tries(os.listdir, path), tries(os.readlink, path), tries(os.open, path, os.O_RDONLY))
    """)  # fmt: skip

    assert "SUCCESS" not in run.stdout


def test_the_snapshot_cannot_be_traced_or_written_through_the_kernel(session: Session) -> None:
    """ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, kcmp, process_madvise."""
    run = attack(session, """
        pid = snapshot_pid()
        buffer = ctypes.create_string_buffer(64)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
        at = ctypes.addressof(vector)
        print(call('ptrace', 16, pid, 0, 0), call('ptrace', 0x4206, pid, 0, 0))
        print(call('process_vm_readv', pid, at, 1, at, 1, 0), call('process_vm_writev', pid, at, 1, at, 1, 0))
        print(call('pidfd_getfd', os.pidfd_open(pid), 3, 0), call('kcmp', pid, os.getpid(), 1, 0, 0))
        print(call('process_madvise', os.pidfd_open(pid), at, 1, 4, 0))
    """)  # fmt: skip

    assert "SUCCESS" not in run.stdout
    assert_protected(session)


@pytest.mark.parametrize(
    "limit", ["RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_STACK", "RLIMIT_NPROC", "RLIMIT_CPU", "RLIMIT_FSIZE"]
)
def test_a_snapshot_whose_limits_were_lowered_wakes_or_is_missed(session: Session, limit: str) -> None:
    """Linux asks for the same uid and nothing else. Who does it to himself spoils his own kernel."""
    attack(session, "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()")
    attack(session, f"import resource; print(tries(resource.prlimit, snapshot_pid(), resource.{limit}, (1, 1)))")
    run = in_time(session, f"tries(resource.prlimit, snapshot_pid(), resource.{limit}, (1, 1)); os._exit(1)")

    assert run.memory == "restored" or (run.memory == "lost" and run.unprotected and run.generation == 2)
    session.reset()


# -- signals to the snapshot ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "os.kill(-1, 9)",
        "os.kill(snapshot_pid(), 9)",
        "signal.pidfd_send_signal(os.pidfd_open(snapshot_pid()), 9)",
    ],
)
def test_a_killed_snapshot_is_missed_and_replaced(session: Session, how: str) -> None:
    run = attack(session, f"{how}\nwhile others() != [1]: time.sleep(0.01)\nx = 2")

    assert "snapshot was killed" in (run.unprotected or "")
    assert_protected(session)


def test_a_killed_snapshot_costs_memory_when_the_run_fails_and_only_then(session: Session) -> None:
    run = in_time(session, "os.kill(-1, 9)\nwhile others() != [1]: time.sleep(0.01)\nos._exit(1)")

    assert (run.memory, run.generation) == ("lost", 2)
    assert "snapshot was killed" in (run.unprotected or "")


def test_a_process_that_kills_every_snapshot_it_sees_ends_with_its_run(session: Session) -> None:
    hunter = (
        "if os.fork() == 0:\n    os.setsid()\n    while True:\n        for pid in range(3, 300):\n"
        "            if pid not in (os.getpid(), os.getppid(), {kernel}):\n"
        "                try: os.kill(pid, 9)\n                except OSError: pass\n"
    )
    attack(session, hunter.replace("{kernel}", str(attack(session, "os.getpid()").text)))

    assert_protected(session)


@pytest.mark.parametrize(
    "number", ["SIGSTOP", "SIGINT", "SIGTERM", "SIGSEGV", "SIGXCPU", "SIGPWR", "SIGCHLD", "SIGCONT"]
)
def test_other_signals_do_not_wake_or_spoil_the_snapshot(session: Session, number: str) -> None:
    attack(session, f"os.kill(snapshot_pid(), signal.{number}); time.sleep(0.05)")
    attack(session, f"x = 5; os.kill(snapshot_pid(), signal.{number})")
    run = in_time(session, f"os.kill(snapshot_pid(), signal.{number}); x = 6; os._exit(1)")

    # A stopped or interrupted sleeper may be lost; it is never lost in silence.
    assert run.memory == "restored" or (run.memory == "lost" and run.unprotected and run.generation == 2)
    assert_protected(session)


def test_signal_33_does_not_wake_the_snapshot(session: Session) -> None:
    run = attack(session, """
        pid = snapshot_pid()
        print(*(call('tgkill', pid, pid, 33) for _ in range(100)), tries(os.kill, pid, 33))
    """)  # fmt: skip

    assert "SUCCESS" in run.stdout
    assert_protected(session)


# -- the wake socket -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "wake.send(b'asleep')",
        "for _ in range(100): wake.send(b'asleep')",
        "wake.send(b'wake'); wake.send(b'')",
        "wake.send(b'x' * 100)",
        "wake.send(b'asleep' * 1000)",
        "wake.send(struct.pack('ii', 1, 9))",
        "if os.fork() == 0: wake.send(b'asleep'); os._exit(0)\ntime.sleep(0.2)",
        "if os.fork() == 0: wake.send(b'x' * 1000); os._exit(0)\ntime.sleep(0.2)",
        "if os.fork() == 0: os.setsid(); wake.send(b'asleep'); time.sleep(1000)\ntime.sleep(0.2)",
        "wake.setblocking(False)\nwhile 'SUCCESS' in tries(wake.send, b'asleep'): pass\nwake.setblocking(True)",
        "wake.setblocking(False)\nwhile 'SUCCESS' in tries(wake.send, b'junk'): pass\nwake.setblocking(True)",
    ],
    ids=[
        "asleep", "asleep often", "wake", "too long", "far too long", "a report", "asleep from a child that dies",
        "too long from a child", "asleep from a child that lives", "full of asleep", "full of junk",
    ],
)  # fmt: skip
def test_forged_messages_wake_and_confuse_nobody(session: Session, code: str) -> None:
    attack(session, code)
    attack(session, "x = 7")
    run = in_time(session, "x = 8; os._exit(1)")

    assert run.memory == "restored" or (run.memory == "lost" and run.unprotected)
    assert_protected(session)


@pytest.mark.parametrize(
    "code",
    [
        "wake.close()",
        "wake.shutdown(socket.SHUT_RD)",
        "wake.shutdown(socket.SHUT_WR)",
        "wake.shutdown(socket.SHUT_RDWR)",
        "os.set_blocking(wake.fileno(), False)",
        "wake.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 0, 1000))",
        "wake.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)",
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); os.dup2(a.fileno(), wake.fileno())",
        "os.dup2(os.open('/dev/null', os.O_RDWR), wake.fileno())",
        "os.dup2(os.open('/dev/zero', os.O_RDWR), wake.fileno())",
    ],
    ids=[
        "closed", "no reading", "no writing", "shut down", "not blocking", "a time-out", "no room", "another socket",
        "null", "zero",
    ],
)  # fmt: skip
def test_a_spoilt_wake_socket_costs_protection_at_most(session: Session, code: str) -> None:
    attack(session, code)
    run = attack(session, "x = 9; x")

    assert run.text == "9"
    died = in_time(session, "x = 10; os._exit(1)")
    assert died.memory == "restored" or (died.memory == "lost" and died.unprotected and died.generation == 2)
    if died.memory == "restored":
        assert attack(session, "x").text == "9"


def test_a_snapshot_that_sleeps_on_the_control_socket_is_a_death(session: Session) -> None:
    """Its first word breaks the protocol. The next run says so, at once and not at its deadline."""
    attack(session, "os.dup2(control.fileno(), wake.fileno())")
    run = in_time(session, "x = 9")

    assert run.error is None or (run.error.code, run.memory) == ("killed", "lost")


def test_a_wake_message_cannot_be_stolen_by_a_thread_or_a_child(session: Session) -> None:
    """All of the old kernel is dead before the message is sent; who reads earlier reads nothing."""
    attack(session, """
        stolen = []
        def steal():
            while True: stolen.append(wake.recv(64)); os.write(2, b"stolen")
        threading.Thread(target=steal, daemon=True).start()
        x = 2
    """)  # fmt: skip
    # The thread is part of the snapshot: it sleeps there, and only the sleeper's main thread is awake to read.
    run = in_time(
        session, "if os.fork() == 0: wake.recv(64); os.write(2, b'stolen')\ntime.sleep(0.1); x = 3; os._exit(1)"
    )

    assert run.memory == "restored"
    assert "stolen" not in run.stderr
    assert attack(session, "x, stolen").text == "(2, [])"


# -- lies on the control socket --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "wire.Snapped(pid=1)",
        "wire.Snapped(pid=os.getpid())",
        "wire.Snapped(reason='no')",
        "wire.Woken(pid=1)",
        "wire.Woken(pid=os.getpid(), not_restored=['x'] * 1000)",
    ],
)
def test_snapped_and_woken_have_no_place_in_a_run(session: Session, message: str) -> None:
    run = in_time(session, f"from holdfast.kernel import wire\nget_ipython().sink.send({message})\ntime.sleep(20)")

    assert run.error is not None
    assert run.error.code == "killed"
    assert run.memory == "restored"
    assert_protected(session)


def test_an_answer_to_a_snapshot_that_was_given_up_costs_nothing_and_only_one_may_come(session: Session) -> None:
    session.run("x = 1")
    kernel = session._session._transport._session.computer.now.kernel
    kernel.owes_snapped = 1
    late = "from holdfast.kernel import wire\nget_ipython().sink.send(wire.Snapped(pid=1))\n"

    assert in_time(session, late + "x").text == "1"
    assert kernel.owes_snapped == 0
    assert in_time(session, late + "time.sleep(20)").error.code == "killed"
    assert in_time(session, "x").text == "1"


@pytest.mark.parametrize(
    "message",
    [
        "wire.Snapped(pid=1)",
        "wire.Snapped(pid=99999)",
        "wire.Snapped(pid=-1)",
        "wire.Snapped(pid=os.getpid())",
        "wire.Woken(pid=1)",
        "wire.Finished(turn=2, count=1)",
    ],
)
def test_a_thread_that_lies_between_runs_costs_protection_at_most(session: Session, message: str) -> None:
    """It sends all the time, so that its words arrive while the snapshot is asked for as well."""
    attack(session, f"""
        from holdfast.kernel import wire
        sink, forged, stop = get_ipython().sink, {message}, threading.Event()
        def lie():
            while not stop.wait(0.001): sink.send(forged)
        liar = threading.Timer(0.02, lie)
        liar.start()
    """)  # fmt: skip
    for _ in range(3):
        run = in_time(session, "time.sleep(0.01)")
        assert run.memory != "lost" or run.unprotected
    for _ in range(10):  # on a busy machine such a run may be killed for the lies; its snapshot has the thread as well
        if session.generation > 1 or in_time(session, "stop.set(); liar.join()").error is None:
            break


def test_a_kernel_that_says_snapped_and_takes_none_is_unprotected(session: Session) -> None:
    attack(session, """
        from holdfast.kernel import wire
        snapshots.__class__.take = lambda self: wire.Snapped(pid=12345, threads=0)
    """)  # fmt: skip
    run = attack(session, "x = 2; x")
    died = in_time(session, "os._exit(1)")

    assert run.unprotected
    assert (died.memory, died.generation) == ("lost", 2)


def test_a_child_may_pose_as_the_snapshot_and_gains_nothing(session: Session) -> None:
    """It is the guest's own code either way: confined, counted, and reported truly by the run after it."""
    attack(session, """
        from holdfast.kernel import framing, wire
        def take(self):
            pid = os.fork()
            if pid == 0:
                wake.send(b"asleep")
                wake.recv(64)
                control.send(framing.packets(wire.Woken(pid=os.getpid()))[0])
                os.execvp("sleep", ["sleep", "1000"])
            return wire.Snapped(pid=pid)
        snapshots.__class__.take = take
    """)  # fmt: skip
    attack(session, "x = 2")
    run = in_time(session, "os._exit(1)")

    assert run.memory == "restored" or run.unprotected
    in_time(session, "1", timeout=2)  # whoever answers now is not a kernel, and is found out


def test_a_child_that_keeps_the_control_socket_is_dead_before_the_wake(session: Session) -> None:
    run = in_time(session, """
        if os.fork() == 0:
            os.setsid()
            packet = b"\\0garbage"
            while True:
                try: control.send(packet, socket.MSG_DONTWAIT)
                except OSError: pass
        time.sleep(0.1)
        os._exit(1)
    """)  # fmt: skip

    assert run.memory == "restored"
    assert_protected(session)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_filling_the_reserve_on_purpose_costs_protection_and_no_more_than_the_reserve() -> None:
    with armed(memory="256M") as session:
        attack(session, "big = bytearray(b'x') * int(0.7 * (256 << 20))")
        for _ in range(3):
            run = in_time(session, "for i in range(0, len(big), 4096): big[i] = (big[i] + 1) % 256\nlen(big)")
            assert run.error is None or run.error.code == "out_of_memory"
            assert (run.peak_memory_bytes or 0) <= 1.5 * (256 << 20) + (32 << 20)
            if session.generation > 1:
                break


def test_a_full_session_can_still_be_snapshotted_or_says_that_it_cannot() -> None:
    with armed(memory="256M") as session:
        attack(session, "big = bytearray(b'x') * int(0.8 * (256 << 20)); shm = open('/dev/shm/x', 'wb')")
        in_time(session, "shm.write(b'x' * (20 << 20)); shm.flush()")
        run = in_time(session, "1 / 0")
        assert run.memory == "restored" or (run.memory == "lost" and run.unprotected)


# -- parking -----------------------------------------------------------------------------------------------------------


CHURN = """
stop = False
def breed():
    while not stop:
        try: thread = threading.Thread(target=lambda: None, daemon=True); thread.start(); thread.join()
        except RuntimeError: pass
for _ in range({breeders}): threading.Thread(target=breed, daemon=True).start()
x = 2
"""


def test_threads_that_come_and_go_all_the_time_are_kept_or_named(session: Session) -> None:
    attack(session, CHURN.format(breeders=4))
    for _ in range(10):
        run = in_time(session, "x = 3; os._exit(1)")
        assert run.memory == "restored" or (run.memory == "lost" and run.unprotected)
        if run.memory == "lost":
            break
        assert attack(session, "x").text == "2"


def test_threads_that_start_threads_for_ever_do_not_hang_the_host() -> None:
    with armed(processes=200) as session:
        in_time(session, """
            def multiply():
                for _ in range(2):
                    try: threading.Thread(target=multiply, daemon=True).start()
                    except RuntimeError: pass
                time.sleep(0.001)
            for _ in range(8): threading.Thread(target=multiply, daemon=True).start()
        """, timeout=10)  # fmt: skip
        for _ in range(3):
            run = in_time(session, "import os; os._exit(1)")
            assert run.memory == "restored" or run.unprotected


def test_a_handler_of_the_users_for_signal_33_does_not_stop_the_snapshot(session: Session) -> None:
    """Set by a raw system call, for libc refuses; ours is put back before each snapshot."""
    attack(session, """
        action = (ctypes.c_ulong * 4)(1, 0, 0, 0)  # SIG_IGN
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        x = 2
        print(call('rt_sigaction', 33, action, 0, 8))
    """)  # fmt: skip
    run = in_time(session, "x = 3; os._exit(1)")

    assert (run.memory, run.unprotected) == ("restored", None)
    assert attack(session, "x").text == "2"


def test_a_bad_handler_for_signal_33_kills_nobody_but_the_kernel(session: Session) -> None:
    attack(session, """
        action = (ctypes.c_ulong * 4)(0x1234, 0x04000004, 0x1234, 0)
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        print(call('rt_sigaction', 33, action, 0, 8))
    """)  # fmt: skip
    run = in_time(session, "x = 3; call('tgkill', os.getpid(), os.getpid(), 33); os._exit(1)")

    assert run.memory == "restored" or run.unprotected


def test_a_thread_that_blocks_signal_33_is_a_reason_and_not_a_hang(session: Session) -> None:
    attack(session, """
        ready = threading.Event()
        def deaf():
            print(call('rt_sigprocmask', 0, ctypes.byref(ctypes.c_ulong(2**64 - 1)), None, 8))
            ready.set()
            while True: time.sleep(1)
        threading.Thread(target=deaf, daemon=True).start()
        ready.wait()
        x = 2
    """)  # fmt: skip
    run = attack(session, "x")
    assert run.text == "2"
    assert "could not be parked" in (run.unprotected or "")
    died = in_time(session, "os._exit(1)")
    assert (died.memory, died.generation) == ("lost", 2)
    assert "could not be parked" in (died.unprotected or "")
    assert_protected(session)


def test_a_storm_of_signal_33_is_a_death_like_any_other(session: Session) -> None:
    """The signal is glibc's own, and glibc aborts a process that sends it to itself without need."""
    attack(session, """
        me = os.getpid()
        sleepers = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for _ in range(8)]
        for thread in sleepers: thread.start()
        x = 2
    """)  # fmt: skip
    for target in ("me", "sleepers[3].native_id"):
        run = in_time(
            session, f"x = 3\nfor _ in range(100): call('tgkill', me, {target}, 33)\ntime.sleep(0.1); os._exit(1)"
        )
        assert (run.memory, run.unprotected) == ("restored", None)
        assert attack(session, "x, all(thread.is_alive() for thread in sleepers)").text == "(2, True)"


def test_a_storm_of_signal_33_while_threads_are_parked_hangs_nobody(session: Session) -> None:
    """From a child, so that it is not glibc's: the sender's pid differs."""
    attack(session, """
        me = os.getpid()
        sleepers = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for _ in range(8)]
        for thread in sleepers: thread.start()
        x = 2
    """)  # fmt: skip
    for _ in range(5):
        run = in_time(session, """
            x = 3
            if os.fork() == 0:
                os.setsid()
                while True:
                    for thread in sleepers: call('tgkill', me, thread.native_id, 33)
        """)  # fmt: skip
        assert run.memory != "lost" or run.unprotected
        died = in_time(session, "os._exit(1)")
        assert died.memory == "restored" or died.unprotected
        if session.generation > 1:
            return


def test_a_kernel_without_a_free_pid_is_alive_and_says_if_it_is_unprotected() -> None:
    with armed(processes=64) as session:
        attack(session, """
            threads = []
            try:
                while True:
                    thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True); thread.start()
                    threads.append(thread)
            except RuntimeError: pass
        """)  # fmt: skip
        # The snapshot before is dropped first, and that leaves room for the next; threads may be quicker.
        assert attack(session, "x").text == "1"
        died = in_time(session, "os._exit(1)")
        assert died.memory == "restored" or (died.memory == "lost" and died.unprotected)
        session.reset()  # all of its threads came back, and with them there is no room for a process


def test_a_kernel_that_eats_its_descriptors_is_protected_or_says_why_not(session: Session) -> None:
    attack(session, "files = []\ntry:\n    while True: files.append(open('/dev/null'))\nexcept OSError: pass")
    run = attack(session, "x")
    died = in_time(session, "os._exit(1)")

    assert run.text == "1"
    assert died.memory == "restored" or (died.memory == "lost" and died.unprotected)


def test_a_kernel_with_a_thousand_odd_open_files_wakes_with_all(session: Session) -> None:
    attack(session, "files = [open('/dev/null') for _ in range(1500)]")

    assert in_time(session, "os._exit(1)").memory == "restored"
    assert attack(session, "sum(not f.closed and os.fstat(f.fileno()).st_rdev != 0 for f in files)").text == "1500"


# -- after a wake ------------------------------------------------------------------------------------------------------


def test_what_was_asked_of_a_kernel_that_died_before_it_read_it_is_done_once(session: Session) -> None:
    attack(session, "done = []")
    attack(session, "pass")
    time.sleep(0.5)  # asleep: it dies when it wakes, with the request before it
    session._session._transport._session.computer.kernel.kill()

    run = session.run("done.append(1); open('done.txt', 'a').write('1')", key="once")

    assert (run.status, run.memory, run.error) == ("committed", "kept", None)
    assert "SIGKILL" in run.kernel_replaced
    assert session.run("done.append(1); open('done.txt', 'a').write('1')", key="once").replayed
    assert attack(session, "done, open('done.txt').read()").text == "([1], '1')"


def test_a_woken_kernel_is_as_confined_as_the_one_before(session: Session) -> None:
    fields = ("Seccomp", "NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Uid", "Gid", "Groups")
    look = f"""
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        print({{name: status[name].split() for name in {fields!r}}})
        print(call('mount', 0, 0, 0, 0, 0), call('unshare', 0x10000000))
        print(call('ptrace', 0, 0, 0, 0), call('socket', 16, 3, 15))
    """
    before = attack(session, look).stdout
    for _ in range(3):
        assert in_time(session, "os._exit(1)").memory == "restored"
    after = attack(session, look).stdout

    assert "SUCCESS" not in after
    assert "'Seccomp': ['2']" in after
    assert "'CapBnd': ['0000000000000000']" in after
    assert after == before


def test_threads_of_a_woken_kernel_are_as_confined_as_it_is(session: Session) -> None:
    attack(session, """
        ask, answers = threading.Event(), []
        def look():
            ask.wait()
            answers.append([line for line in open("/proc/thread-self/status") if line.startswith("Seccomp:")])
            answers.append(call('mount', 0, 0, 0, 0, 0))
        thread = threading.Thread(target=look, daemon=True); thread.start()
    """)  # fmt: skip
    assert in_time(session, "os._exit(1)").memory == "restored"
    run = attack(session, "ask.set(); thread.join(10); answers")

    assert run.text is not None
    assert "Seccomp:\\t2" in run.text
    assert "SUCCESS" not in run.text


def test_a_woken_kernel_has_a_proc_of_its_own(session: Session) -> None:
    assert in_time(session, "os._exit(1)").memory == "restored"
    run = attack(session, """
        print(int(os.readlink("/proc/self")) == os.getpid(), len(open("/proc/self/maps").read()) > 100)
        print(len(os.listdir("/proc/self/fd")) > 3, call('prctl', 3, 0, 0, 0, 0), os.getsid(0) > 0)
        print(threading.get_native_id() == os.getpid(), open("/proc/self/mem", "rb").fileno() > 0)
    """)  # fmt: skip

    assert run.stdout == "True True\nTrue SUCCESS 1 True\nTrue True\n"


def test_a_woken_kernel_is_killed_first_when_memory_is_short(session: Session) -> None:
    """The snapshot steps back from the OOM killer; once it is the kernel, it must step forward again."""
    look = "open('/proc/self/oom_score_adj').read().strip()"
    before = attack(session, look).text
    assert in_time(session, "os._exit(1)").memory == "restored"

    assert attack(session, look).text == before


def test_snapshots_are_no_children_of_the_kernel(session: Session) -> None:
    run = attack(session, "print(tries(os.waitpid, -1, os.WNOHANG), tries(os.waitpid, snapshot_pid(), 0))")

    assert run.stdout == "ECHILD ECHILD\n"


def test_a_stray_does_not_outlive_a_rollback(session: Session) -> None:
    in_time(session, "import subprocess; subprocess.Popen(['sleep', '4321'], start_new_session=True); os._exit(1)")
    session.names()

    live = session._session._transport._session
    assert live.computer.now is not None
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in live.computer.now.cgroup.pids()]
    assert not [command for command in commands if b"4321" in command]
    assert len(commands) == 3, "pid 1, the kernel, its snapshot"


def test_one_sessions_snapshot_is_out_of_the_others_reach(session: Session) -> None:
    with armed() as other:
        attack(other, "for pid in others():\n    if pid > 1: os.kill(pid, 9)")
        assert_protected(session)


def test_the_host_is_left_with_no_descriptors_of_dead_snapshots(session: Session) -> None:
    in_time(session, "os.kill(-1, 9)")
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        in_time(session, "os.kill(-1, 9)")
        in_time(session, "1 / 0", mode="notebook")

    assert len(os.listdir("/proc/self/fd")) < fds + 20, "a spare session may have come; forty snapshots have not stayed"


# -- snapshots of earlier versions -----------------------------------------------------------------------------------


@pytest.fixture
def undoing() -> Iterator[Session]:
    """Beside the present snapshot, those of the beginning and of versions 1 and 2 sleep; x is the version's number."""
    with armed(undo=8) as session:
        attack(session, "x = 2")
        attack(session, "x = 3")
        session.names()
        yield session


def versions_asleep(session: Session) -> set[int]:
    session.names()
    asleep: set[int] = session._session._transport._session.computer.protection.kept.versions()
    return asleep


def assert_goes_back(session: Session, version: int) -> None:
    back = session.restore(ckpt_of(session, version))
    assert (back.memory, back.without_memory) == ("restored", None)
    assert attack(session, "x").text == str(version)


def assert_files_alone(session: Session, version: int) -> None:
    """Nothing comes back in silence that is not what it seems to be, and nothing is lost over it."""
    now = attack(session, "x").text
    back = session.restore(ckpt_of(session, version))
    assert (back.memory, back.without_memory) == ("kept", "its snapshot was killed")
    assert "x" in back.names_not_restored
    assert attack(session, "x").text == now


def ckpt_of(session: Session, version: int) -> str:
    return next(entry.ckpt for entry in session.history() if entry.version == version)


def test_every_kept_snapshot_is_as_closed_as_the_present_one(undoing: Session) -> None:
    run = attack(undoing, """
        asleep = [pid for pid in others() if pid > 1]
        print(len(asleep))
        for pid in asleep:
            for name in ("mem", "maps", "environ", "pagemap", "syscall", "fd", "cwd", "root"):
                for how in (os.listdir, os.readlink, lambda path: os.open(path, os.O_RDONLY)):
                    print(tries(how, f"/proc/{pid}/{name}"))
            print(call('ptrace', 16, pid, 0, 0), call('kcmp', pid, os.getpid(), 1, 0, 0))
            print(*(call('pidfd_getfd', os.pidfd_open(pid), fd, 0) for fd in range(16)))
            for number in (signal.SIGCONT, signal.SIGINT, signal.SIGTERM, 33): os.kill(pid, number)
    """)  # fmt: skip

    assert run.stdout.startswith("4\n"), "of the beginning, of versions 1 and 2, and the present one"
    assert "SUCCESS" not in run.stdout
    assert_goes_back(undoing, 2)


@pytest.mark.parametrize("how", ["os.kill(-1, 9)", "for pid in others():\n    if pid > 1: os.kill(pid, 9)"])
def test_killed_versions_come_back_as_files_alone(undoing: Session, how: str) -> None:
    attack(undoing, f"{how}\ntime.sleep(0.3)")

    assert_files_alone(undoing, 2)
    assert_protected(undoing)


def test_one_that_is_killed_costs_the_others_nothing(undoing: Session) -> None:
    attack(undoing, "os.kill(sorted(pid for pid in others() if pid > 1)[1], 9); time.sleep(0.3)")

    assert_files_alone(undoing, 1)
    assert_goes_back(undoing, 2)


@pytest.mark.parametrize("number", ["SIGSTOP", "SIGTERM", "SIGSEGV", "SIGPWR"])
def test_a_kept_snapshot_that_gets_signals_wakes_when_it_is_its_turn(undoing: Session, number: str) -> None:
    attack(undoing, f"for pid in others():\n    if pid > 1: os.kill(pid, signal.{number})")

    assert_goes_back(undoing, 2)


@pytest.mark.parametrize(
    "code",
    [
        "wake.send(b'wake')",
        "for _ in range(50): wake.send(b'wake'); wake.send(b'bed'); wake.send(b'asleep')",
        "tries(wake.sendmsg, [b'bed'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack('i', wake.fileno()))])",
        "wake.shutdown(socket.SHUT_RDWR)",
        "wake.close()",
        "os.dup2(os.open('/dev/null', os.O_RDWR), wake.fileno())",
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); os.dup2(a.fileno(), wake.fileno())",
        "wake.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 0, 1000))",
    ],
    ids=["wake", "many", "a bed", "shut down", "closed", "null", "another socket", "a time-out"],
)
def test_who_lies_in_a_bed_hears_nothing_of_the_socket_where_all_are_born(undoing: Session, code: str) -> None:
    attack(undoing, code)

    assert {1, 2} <= versions_asleep(undoing)
    assert_goes_back(undoing, 2)
    assert_goes_back(undoing, 1)


@pytest.mark.parametrize("says", ["pass", "bed.send(b'asleep')", "bed.send(b'x' * 100)"])
def test_a_stolen_bed_costs_the_snapshot_it_was_for_and_wakes_nobody(undoing: Session, says: str) -> None:
    """A thread of the kernel hears what is sent to the present snapshot, and Linux says that it is another."""
    attack(undoing, f"""
        stolen = []
        def steal():
            while True:
                word, fds, _, _ = socket.recv_fds(wake, 64, 4)
                for bed in map(lambda fd: socket.socket(fileno=fd), fds):
                    stolen.append(bed)
                    {says}
        threading.Thread(target=steal, daemon=True).start()
        x = 4
    """)  # fmt: skip
    attack(undoing, "x = 5")
    attack(undoing, "x = 6")
    run = in_time(undoing, "print(len(stolen)); x = 7; os._exit(1)")

    assert (run.memory, run.unprotected) == ("restored", None), (
        "who is not in a bed is not there to hear another's call"
    )
    assert versions_asleep(undoing) >= {undoing.version}
    back = undoing.restore(ckpt_of(undoing, 5))
    assert (back.memory, attack(undoing, "x").text) in (("restored", "5"), ("kept", "6"))


def test_a_bed_that_was_stolen_says_nothing_later(undoing: Session) -> None:
    """The host has closed it: there is nobody to lie to."""
    attack(undoing, """
        beds = []
        def steal():
            while True: beds.extend(socket.recv_fds(wake, 64, 4)[1])
        threading.Thread(target=steal, daemon=True).start()
    """)  # fmt: skip
    attack(undoing, "x = 5")
    said = attack(undoing, "print([tries(socket.socket(fileno=bed).send, b'asleep') for bed in beds])")

    assert "SUCCESS" not in said.stdout
    assert_protected(undoing)


def test_a_woken_kernel_has_no_bed_left_and_no_descriptor_too_many(undoing: Session) -> None:
    look = (
        "sorted((int(n), tries(os.readlink, f'/proc/self/fd/{n}').split(':')[0]) for n in os.listdir('/proc/self/fd'))"
    )
    before = attack(undoing, look).text
    for version in (2, 1, 2):
        assert_goes_back(undoing, version)

    assert attack(undoing, look).text == before


def test_a_woken_version_is_as_confined_as_any_kernel(undoing: Session) -> None:
    look = """
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        print({name: status[name].split() for name in ("Seccomp", "NoNewPrivs", "CapBnd", "CapEff", "Uid", "Gid")})
        print(open("/proc/self/oom_score_adj").read(), call('mount', 0, 0, 0, 0, 0))
    """
    before = attack(undoing, look).stdout
    assert_goes_back(undoing, 1)

    assert attack(undoing, look).stdout == before


def test_a_child_that_poses_as_a_version_is_found_out(undoing: Session) -> None:
    attack(undoing, """
        from holdfast.kernel import framing, wire
        def take(self):
            pid = os.fork()
            if pid == 0:
                wake.send(b"asleep")
                bed = socket.socket(fileno=socket.recv_fds(wake, 64, 1)[1][0])
                bed.send(b"asleep"); bed.recv(64)
                control.send(framing.packets(wire.Woken(pid=os.getpid()))[0])
                os.execvp("sleep", ["sleep", "1000"])
            return wire.Snapped(pid=pid)
        snapshots.__class__.take = take
        x = 4
    """)  # fmt: skip
    attack(undoing, "x = 5")
    undoing.restore(ckpt_of(undoing, 4))
    late = in_time(undoing, "1", timeout=2)  # whoever answers now is not a kernel
    assert late.error is None or late.error.code in ("killed", "timeout", "interrupted")


def test_versions_that_are_spoilt_wake_or_memory_is_said_to_be_lost(undoing: Session) -> None:
    attack(undoing, "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); x = 4")
    attack(undoing, "x = 5")
    attack(undoing, """
        import resource
        for pid in others():
            if pid > 1:
                for limit in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
                    tries(resource.prlimit, pid, limit, (1, 1))
    """)  # fmt: skip
    back = undoing.restore(ckpt_of(undoing, 4))

    if back.memory == "lost":
        assert (back.without_memory, undoing.generation) == ("its snapshot did not wake", 2)
        assert "x" in back.names_not_restored
        assert f"-g2-v{back.version}-" in back.ckpt == undoing.ckpt
    undoing.reset()


def test_the_host_is_left_with_no_descriptors_of_versions_that_were_killed(undoing: Session) -> None:
    for n in range(12):
        attack(undoing, f"x = {n}; os.kill(snapshot_pid(), 9)")
    for n in range(4):
        attack(undoing, f"x = {n}")
        attack(undoing, "os.kill(-1, 9)")
    attack(undoing, "x = 4")

    assert held_of_the_dead() <= 4, "sixteen snapshots have not stayed; of some it is not known yet that they ended"


def held_of_the_dead() -> int:
    """Descriptors of processes that have ended, in this process: Linux knows no number of theirs any more."""
    held = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            held += "\nPid:\t-1\n" in Path("/proc/self/fdinfo", name).read_text()
    return held
