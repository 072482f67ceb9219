"""An ordinary user on a machine with a real systemd: root's tests, in a service, about a user who logs in.

Logging in goes through PAM (`su -l`), so that logind makes the session's scope and starts the user's manager, as for
anybody. `unattended` is the same user as cron would start him: in root's cgroup, with no variable of a login.

The guests' environment is the tests' own: nothing to import but IPython.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.sandbox.cgroups import delegation, hierarchies

NAME = "holdfast-vm"
CLONE = Path(__file__).parents[3]
TOP = Path("/sys/fs/cgroup")
PATIENCE_S = 600

pytestmark = pytest.mark.timeout(900)

# Prints where the kernel lives, and how a run ended that took more than its cap.
SESSION = f"""
import json, os, sys
from holdfast import HoldfastError, Session
told = {{}}
try:
    with Session(memory="192M", timeout=120, env={sys.prefix!r}) as session:
        told["sum"] = session.run("kept = 41; kept + 1").text
        computer = session._session._transport._session.computer
        told["cgroup"] = computer.now.cgroup._path
        told["memory.max"] = int(open(told["cgroup"] + "/memory.max").read())
        told["error"] = session.run("taken = bytearray(1 << 30)").error.message
        told["after"] = session.run("kept").text
        if "die" in sys.argv:
            print(json.dumps(told), flush=True)
            os.kill(os.getpid(), 9)
except HoldfastError as error:
    told["refused"] = [error.code, error.message, error.hint]
print(json.dumps(told))
"""

# What the doctor says of cgroups, without the rest of it.
CGROUPS = """
import json
from holdfast.sandbox.probe import cgroups
print(json.dumps({found.name: [found.ok, found.detail, found.remedy] for found in cgroups.findings()}))
"""


@pytest.fixture(scope="module")
def uid() -> int:
    return int(subprocess.check_output(["id", "-u", NAME]))


@pytest.fixture(scope="module", autouse=True)
def _home() -> None:
    Path("/disk/user").mkdir()
    subprocess.run(["chown", NAME, "/disk/user"], check=True)
    Path("/disk/session.py").write_text(SESSION)


@pytest.fixture
def _no_manager(uid: int) -> Iterator[None]:
    subprocess.run(["loginctl", "disable-linger", NAME], check=True)
    subprocess.run(["loginctl", "terminate-user", NAME], check=False)
    subprocess.run(["systemctl", "stop", f"user@{uid}.service"], check=True)
    wait_for(lambda: not Path(f"/run/user/{uid}/systemd/private").exists())
    yield
    let_linger(uid)


def words(*arguments: str) -> str:
    settings = ["HOLDFAST_HOME=/disk/user/home", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"]
    return f"cd {CLONE}; " + shlex.join(["env", *settings, sys.executable, *arguments])


def logged_in(*arguments: str) -> subprocess.CompletedProcess[str]:
    """By PAM: a session of logind's, with the user's manager beside it."""
    return completed(["su", "-l", NAME, "-c", words(*arguments)])


def unattended(*arguments: str, uid: int) -> subprocess.CompletedProcess[str]:
    """In the cgroup of whoever starts him, and with none of a login's variables."""
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", "-i", f"PATH={os.defpath}"]
    return completed([*become, "sh", "-c", words(*arguments)])


def completed(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def diagnosed(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in told(done)["findings"]}


def wait_for(condition: Any) -> None:
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


def scopes(uid: int) -> list[str]:
    return [place.name for place in Path(delegation.scopes_directory(str(TOP), uid)).glob("holdfast-*.scope")]


def assert_capped(session: dict[str, Any]) -> None:
    assert session.get("refused") is None
    assert session["sum"] == "42"
    assert session["memory.max"] < 512 << 20
    assert "192 MiB" in session["error"]
    assert "the kernel was killed" in session["error"]
    assert session["after"] == "41"


def test_a_login_gets_a_scope_where_sessions_are_capped_and_of_which_a_killed_host_leaves_nothing(uid: int) -> None:
    session = told(logged_in("/disk/session.py", "die"))

    assert_capped(session)
    assert session["cgroup"].startswith(f"{delegation.scopes_directory(str(TOP), uid)}/holdfast-")
    wait_for(lambda: scopes(uid) == [])


def test_the_doctor_of_a_login_finds_a_strict_sandbox_in_a_scope() -> None:
    done = logged_in("-m", "holdfast.cli.main", "doctor", "--json")

    found = diagnosed(done)
    assert done.returncode == 0
    assert found["cgroup of our own"]["detail"] == "made in a scope of your systemd, entered, frozen, removed"
    assert found["memory cap"]["detail"].startswith("killed at 32 MiB")


def test_who_was_not_logged_in_asks_the_manager_that_lingers(uid: int) -> None:
    let_linger(uid)

    ok, detail, _ = told(unattended("-c", CGROUPS, uid=uid))["cgroup of our own"]

    assert (ok, detail) == (True, "made in a scope of your systemd, entered, frozen, removed")


@pytest.mark.usefixtures("_no_manager")
def test_without_a_manager_he_is_refused_with_the_command_that_then_works(uid: int) -> None:
    command = delegation.command(hierarchies.mounted(), uid)

    refused = told(unattended("/disk/session.py", uid=uid))["refused"]
    doctor = unattended("-m", "holdfast.cli.main", "doctor", "--json", uid=uid)

    assert refused[0] == "sandbox_unavailable"
    assert refused[2] == command
    assert doctor.returncode == 1
    found = diagnosed(doctor)
    assert [name for name, finding in found.items() if finding["required"] and finding["ok"] is False] == [
        "cgroup of our own"
    ]
    assert found["cgroup of our own"]["remedy"].splitlines()[0] == command

    # As pasted into his shell, but that root stands in for sudo.
    delegated = command.removeprefix("sudo ")
    become = f"exec setpriv --reuid={uid} --regid={uid} --clear-groups env -i PATH={os.defpath}"
    user = f"{words('/disk/session.py')} && {words('-c', CGROUPS)}"
    done = completed(["sh", "-c", f"{delegated} && {become} sh -c {shlex.quote(user)}"])

    assert done.returncode == 0, done.stderr
    session, findings = map(json.loads, done.stdout.splitlines())
    assert_capped(session)
    assert session["cgroup"].startswith(f"{delegation.directory(str(TOP), uid)}/")
    assert (findings["cgroup of our own"][0], findings["memory cap"][0]) == (True, True)


def test_a_manager_that_was_given_no_cpu_controller_is_told_apart_and_the_command_gives_it(uid: int) -> None:
    """As systemd was until version 252; the remedy is root's, as it is printed."""
    drop_in = Path("/etc/systemd/system/user@.service.d/10-old.conf")
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text("[Service]\nDelegate=\nDelegate=pids memory\n")
    restart_manager(uid)

    ok, detail, remedy = told(unattended("-c", CGROUPS, uid=uid))["cgroup of our own"]

    assert (ok, detail.rpartition("does not offer: ")[2]) == (False, "cpu")
    subprocess.run(["sh", "-c", remedy.splitlines()[0].removeprefix("sudo ")], check=True)
    restart_manager(uid)
    ok, detail, _ = told(unattended("-c", CGROUPS, uid=uid))["cgroup of our own"]
    assert ok, detail


def let_linger(uid: int) -> None:
    subprocess.run(["loginctl", "enable-linger", NAME], check=True)
    # Waits until it is there, after one that may just be ending.
    subprocess.run(["systemctl", "start", f"user@{uid}.service"], check=True)


def restart_manager(uid: int) -> None:
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "restart", f"user@{uid}.service"], check=True)
