"""What a careless host process hands down. The host here is a process of its own, with more than it should have:
secrets in its environment and in descriptors left open, generous limits, protection from the OOM killer, and a writable
file system mounted below /usr. Nothing of it may reach a guest.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SECRET = "inherited-secret-77aa"

HOST = """
import ctypes, json, os, resource, signal, sys
secret, home, env = sys.argv[1:4]
fd = os.open(secret, os.O_RDWR)
os.set_inheritable(fd, True)
os.set_inheritable(os.open(os.path.dirname(secret), os.O_RDONLY), True)
os.environ["API_KEY"] = open(secret).read()
os.chdir(os.path.dirname(secret))
os.umask(0)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if os.geteuid() == 0:
    for kind, value in (("RTPRIO", 50), ("NICE", 40), ("CORE", resource.RLIM_INFINITY)):
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (value, value))
        except ValueError:  # root in a container may lack CAP_SYS_RESOURCE
            pass
    try:
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-900")
    except OSError:
        pass
    os.setgroups([0, 4, 6, 27])
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0
    assert libc.mount(None, b"/", None, 0x4000 | 0x40000, None) == 0
    assert libc.mount(b"tmpfs", b"/usr/local/share", b"tmpfs", 0, b"mode=1777") == 0
from holdfast import Session
with Session(home=home, env=env, memory="256M") as session:
    print("ready", flush=True)
    for line in sys.stdin:
        run = session.run(json.loads(line))
        print(json.dumps([run.stdout, str(run.error) if run.error else None]), flush=True)
"""


@pytest.fixture(scope="module")
def ask(tools_for_module) -> Iterator[Callable[[str], str]]:
    """Runs code in a session of the careless host; what it printed."""
    tools = tools_for_module
    environments = sorted((tools.home() / "envs").glob("*/bin/python"))
    if not environments:
        pytest.skip("no environment has been built yet")
    with tempfile.TemporaryDirectory(prefix="holdfast-escape-") as directory:
        secret = Path(directory, "secret")
        secret.write_text(SECRET)
        command = [sys.executable, "-c", HOST, str(secret), f"{directory}/home", str(environments[0].parents[1])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as host:  # type: ignore[call-overload]
            assert host.stdout.readline() == "ready\n"

            def run(code: str) -> str:
                host.stdin.write(json.dumps(tools.PRELUDE + tools.dedent(code)) + "\n")
                host.stdin.flush()
                printed, error = json.loads(host.stdout.readline())
                assert error is None, error
                return str(printed).strip()

            yield run
            assert run("print(6 * 7)") == "42"
            host.stdin.close()
            host.wait(30)


@pytest.fixture(scope="module")
def tools_for_module() -> object:
    return sys.modules[next(name for name in sys.modules if name.endswith("escape.conftest"))]


def test_no_descriptor_of_the_host_comes_along(ask):
    printed = ask("""
        for name in os.listdir("/proc/self/fd"):
            print(tries(os.readlink, "/proc/self/fd/" + name))
    """)

    assert "secret" not in printed
    assert "holdfast-escape" not in printed


def test_no_secret_of_the_hosts_environment_comes_along(ask):
    printed = ask(f"""
        needle = {SECRET[:9]!r} + {SECRET[9:]!r}
        print(needle in str(os.environ), needle.encode() in reads("/proc/self/environ"), "API_KEY" in os.environ)
    """)

    assert printed == "False False False"


def test_the_working_directory_of_the_host_does_not_come_along(ask):
    assert ask('print(os.getcwd(), os.readlink("/proc/self/cwd"))') == "/mnt/data /mnt/data"


def test_a_right_to_real_time_does_not_come_along(ask):
    """A guest that may run ahead of every ordinary process can stop the machine."""
    printed = ask("""
        print(tries(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50)), tries(os.setpriority, 0, 0, -10))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    """)

    assert set(printed.split()) <= {"EPERM", "EACCES"}


def test_protection_from_the_oom_killer_does_not_come_along(ask):
    printed = ask("""
        print(tries(writes, "/proc/self/oom_score_adj", b"-900"), tries(writes, "/proc/self/oom_score_adj", b"-1"))
    """)

    assert printed == "EACCES EACCES"


def test_groups_do_not_come_along(ask):
    assert set(ask("print(*os.getgroups())").split()) <= ({"65534"} if os.geteuid() != 0 else set())


def test_a_right_to_dump_core_does_not_come_along(ask):
    assert ask("import resource; print(resource.getrlimit(resource.RLIMIT_CORE))") in ("(0, 0)", "(1, 1)")


def test_a_writable_mount_below_a_shared_directory_is_read_only_too(ask):
    printed = ask("""
        print(tries(os.open, "/usr/local/share/planted", os.O_CREAT | os.O_WRONLY),
              bool(os.statvfs("/usr/local/share").f_flag & os.ST_NOSUID))
    """)

    assert printed in ("EROFS True", "EACCES True")


def test_the_umask_of_the_host_does_not_come_along(ask):
    assert ask("print(oct(os.umask(0o22)))") in ("0o22", "0o27", "0o77")
