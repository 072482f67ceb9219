"""The process boundary: pid 1, the host's processes, and what a run leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENTRIES = (
    "mem", "maps", "smaps", "environ", "root", "cwd", "exe", "fd", "fdinfo", "ns/mnt", "ns/pid", "ns/net", "ns/user",
    "stack", "syscall", "auxv", "cmdline", "mountinfo", "status", "pagemap", "map_files", "task/1/mem", "oom_score_adj",
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_pid_1_shows_nothing_of_itself(probe, entry):
    printed = probe(f"""
        path = "/proc/1/{entry}"
        print(tries(os.open, path, os.O_RDONLY), tries(os.open, path, os.O_RDWR), tries(os.readlink, path),
              tries(os.listdir, path))
    """)

    assert set(printed.split()) <= {"ENOENT", "EACCES", "EPERM", "ENOTDIR", "EISDIR"}


def test_proc_lists_only_the_sessions_own_processes(probe, target, tools):
    printed = probe("""
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        print(sorted(int(n) for n in os.listdir("/proc") if n.isdigit()) == sorted({os.getpid(), child.pid}))
        child.kill(); child.wait()
    """)

    assert printed == "True"


def test_a_process_of_the_host_is_neither_seen_nor_signalled(probe):
    # In a group of its own: ours may be group 1, where we are a container's first process, and that means everybody.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as victim:
        printed = probe(f"""
            import signal
            answers = [tries(os.kill, pid, signal.SIGKILL) for pid in ({victim.pid}, {os.getpid()}, {os.getppid()})]
            answers += [tries(os.pidfd_open, {victim.pid}), tries(os.killpg, {victim.pid}, 9),
                        tries(reads, "/proc/{victim.pid}/environ"),
                        call("rt_sigqueueinfo", {victim.pid}, 9, bytes(128))]
            print(*answers)
        """)
        alive = victim.poll() is None
        victim.communicate(b"\n")

    assert set(printed.split()) <= {"ESRCH", "ENOENT", "EPERM"}
    assert alive


def test_a_priority_for_everybody_of_one_user_reaches_nobody_outside(attack):
    """An ordinary user's guest has his host uid: these calls look for processes by it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        before = os.getpriority(os.PRIO_PROCESS, victim.pid), os.getpriority(os.PRIO_PROCESS, 0)
        attack("tries(os.setpriority, os.PRIO_USER, 0, 19); call('ioprio_set', 3, 1000, 3 << 13)")
        after = os.getpriority(os.PRIO_PROCESS, victim.pid), os.getpriority(os.PRIO_PROCESS, 0)
        disk = subprocess.run(["ionice", "-p", str(victim.pid)], capture_output=True, text=True, check=False).stdout
        victim.communicate(b"\n")

    assert after == before
    assert "idle" not in disk


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGRTMAX])
def test_a_signal_does_not_end_pid_1(session, attack, number):
    attack(f"""
        import time
        tries(os.kill, 1, {int(number)})
        call("tgkill", 1, 1, {int(number)})
        time.sleep(0.1)
    """)

    assert session.run("6 * 7").text == "42"
    assert session.generation == 1, "pid 1 lives, and its session with it"


def test_a_signal_to_everybody_spares_pid_1_and_the_host(session, attack):
    attack("""
        import subprocess
        subprocess.Popen(["sleep", "60"])
        tries(os.kill, -1, 9)
    """)

    assert session.generation == 1


def test_a_signal_to_every_number_ends_at_most_the_guest_itself(session, tools):
    session.run(tools.PRELUDE + "for pid in range(1, 70_000):\n    if pid != os.getpid(): tries(os.kill, pid, 9)")

    assert session.run("6 * 7").text == "42"


def test_a_guest_that_kills_itself_is_replaced(session):
    run = session.run("import os; os.kill(os.getpid(), 9)")

    assert run.error is not None
    assert "SIGKILL" in run.error.message
    assert run.memory == "restored"


def test_limits_of_pid_1_that_the_guest_may_touch_end_its_own_session_at_most(session, tools):
    """Where guest and pid 1 share a uid Linux lets one set the other's limits."""
    session.run(
        tools.PRELUDE
        + """
import resource, subprocess
for kind in ("NOFILE", "CPU", "AS", "STACK", "SIGPENDING"):
    tries(resource.prlimit, 1, getattr(resource, "RLIMIT_" + kind), (0, 0))
tries(os.sched_setaffinity, 1, {0})
for _ in range(50):
    subprocess.Popen(["sh", "-c", "true &"]).wait()
"""
    )

    assert session.run("6 * 7").text == "42"
    session.reset()  # pid 1 may still die of them


def test_the_kernel_holds_its_streams_its_channels_and_nothing_else(probe):
    printed = probe("""
        for name in sorted(os.listdir("/proc/self/fd"), key=int):
            try:
                print(os.readlink("/proc/self/fd/" + name).split(":")[0])
            except OSError:
                pass  # the listing's own
    """)

    kinds = printed.split()
    assert set(kinds) <= {"/dev/null", "pipe", "socket"}
    assert kinds.count("socket") == 2, "the control socket, and the one on which snapshots sleep"
    assert len(kinds) <= 9


def test_a_program_that_the_guest_starts_inherits_its_streams_and_nothing_else(target, tools):
    result = target.shell("ls -l /proc/self/fd | awk '{print $NF}' | sed 's/:.*//'")

    assert set(result.stdout.split()) <= {"0", "/dev/null", "pipe", "/proc/self/fd"} | set(
        line for line in result.stdout.split() if line.startswith("/proc/")
    )
    assert "socket" not in result.stdout
    tools.assert_works(target)


def test_a_second_handle_on_a_stream_is_not_a_way_to_the_host(probe):
    printed = probe("""
        import fcntl
        for fd in (0, 1, 2):
            path = f"/proc/self/fd/{fd}"
            print(tries(os.listdir, path + "/.."), tries(os.open, path + "/../../../1/root", os.O_RDONLY))
    """)

    assert "SUCCESS <" not in printed
    assert "root" not in printed


def test_a_daemon_does_not_outlive_its_run(session, attack, tools):
    attack("""
        import subprocess
        subprocess.run(["sh", "-c", "setsid nohup sleep 1234 >/dev/null 2>&1 & disown; setsid sh -c 'sleep 1234 &' &"])
    """)

    assert commands(session, tools).count("sleep") == 0


def test_a_sibling_of_the_kernel_does_not_outlive_its_run(session, attack, tools):
    """CLONE_PARENT makes a child of pid 1, where the host's own snapshots live."""
    attack("""
        import time
        if call("clone", 0x8000 | 17, 0, 0, 0, 0) == "SUCCESS 0":
            os.execv("/usr/bin/sleep", ["sleep", "1234"])
        time.sleep(0.2)
    """)

    assert commands(session, tools).count("sleep") == 0


def test_threads_do_not_run_on_between_runs(session, attack, tools):
    attack("""
        import threading, time
        def count():
            while True:
                open("/mnt/data/beat", "a").write("x")
                time.sleep(0.001)
        threading.Thread(target=count, daemon=True).start()
        time.sleep(0.1)
    """)
    beat = tools.inside(session) / "mnt/data/beat"
    session.names()  # waits for the snapshot that is taken after the reply
    time.sleep(0.3)
    before = beat.stat().st_size
    time.sleep(0.3)

    assert beat.stat().st_size == before > 0


def commands(session, tools) -> str:
    return " ".join(Path(f"/proc/{pid}/comm").read_text() for pid in tools.host_pids(session))


def test_a_crash_wakes_no_helper_of_the_host(session, tmp_path):
    """A core pattern that pipes to a program ignores RLIMIT_CORE = 0: the host's root would run it on the guest's
    word. Only the limit 1 keeps it from starting."""
    if os.geteuid() != 0:
        assert session.run("import resource; resource.getrlimit(resource.RLIMIT_CORE)").text in ("(1, 1)",)
        return
    pattern, marker, helper = Path("/proc/sys/kernel/core_pattern"), tmp_path / "woken", tmp_path / "helper"
    helper.write_text(f"#!/bin/sh\necho woken > {marker}\ncat >/dev/null\n")
    helper.chmod(0o755)
    before = pattern.read_text()
    try:
        pattern.write_text(f"|{helper} %p")
        run = session.run("import ctypes; ctypes.string_at(0)")
    finally:
        pattern.write_text(before)

    assert run.error is not None
    assert "SIGSEGV" in run.error.message
    assert not marker.exists()


def test_a_process_that_cannot_be_interrupted_ends_with_its_session(session, tools):
    """Stopped, ignoring everything, in a group of its own, with a child that waits in vfork."""
    session.run(
        tools.PRELUDE
        + """
import signal, subprocess
code = "import os, signal as s; [s.signal(n, s.SIG_IGN) for n in (1, 2, 3, 13, 15, 17)]; os.kill(os.getpid(), 19)"
for _ in range(5):
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
if call("clone", 0x4000 | 0x8000 | 17, 0, 0, 0, 0) == "SUCCESS 0":
    signal.pause()
""",
        timeout=2,
    )

    assert session.run("6 * 7").text == "42"
    session.reset()
    assert len(tools.host_pids(session)) == 2
