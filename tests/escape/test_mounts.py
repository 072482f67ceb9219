"""What is mounted and unmounted on the host while sessions live: no guest sees it, and no process of ours holds it.

The host is a process of its own in a mount namespace of its own whose mounts are shared, as systemd's are: what would
spread does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lean import lean_home

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")

HOST = """
import json, os, subprocess, sys
from pathlib import Path
from holdfast import HoldfastError, Session
from holdfast.sandbox import linux

home, propagation = Path(sys.argv[1]), int(sys.argv[2])
linux.unshare(linux.CLONE_NEWNS)
linux.mount(None, "/", flags=linux.MS_REC | propagation)

def mount(path, name):
    path.mkdir(exist_ok=True)
    linux.mount(name, str(path), "tmpfs", options="size=8m")

def held(name):  # numbers of devices are used again
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if name in (process / "mountinfo").read_text():
                found.append((process / "comm").read_text().strip())
        except OSError:
            pass
    return found

told = {}
"""
SHARED, PRIVATE = 1 << 20, 1 << 18


def host(home: Path, code: str, *, propagation: int) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", f"{HOST}{code}\nprint(json.dumps(told))", home, str(propagation)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("propagation", [SHARED, PRIVATE])
def test_a_disk_that_is_unmounted_is_held_by_no_process_of_ours(tmp_path: Path, propagation: int) -> None:
    code = """
mount(home.parent / "disk", "marked-disk")
with Session(home=home, memory="256M") as s:
    s.run("open('f', 'w').write('f')")
    s.names()
    told["before"] = len(held("marked-disk"))
    linux.unmount(str(home.parent / "disk"))
    told["after"] = held("marked-disk")
    told["read"] = s.run("open('f').read()").text
"""
    told = host(lean_home(tmp_path / "home"), code, propagation=propagation)

    assert told["before"], "the host itself has it"
    assert (told["after"], told["read"]) == ([], "'f'")


def test_what_the_host_mounts_later_no_guest_sees_and_the_reverse(tmp_path: Path) -> None:
    code = """
own = len(Path("/proc/self/mountinfo").read_text().splitlines())
with Session(home=home, memory="256M") as s:
    s.run("import os; open('f', 'w').write('f')")
    s.names()
    told["leaked"] = len(Path("/proc/self/mountinfo").read_text().splitlines()) - own
    mount(Path("/usr/local/share"), "marked-share")
    Path("/usr/local/share/secret").write_text("secret")
    told["guest"] = s.run("os.path.exists('/usr/local/share/secret')").text
"""
    assert host(lean_home(tmp_path / "home"), code, propagation=SHARED) == {"leaked": 0, "guest": "False"}


def test_another_disk_for_the_sessions_is_used_and_the_one_before_let_go(tmp_path: Path) -> None:
    code = """
mount(home / "sessions", "marked-old")
s = Session(home=home, memory="256M")
s.run("open('f', 'w').write('f')")
s.names()
linux.unmount(str(home / "sessions"), linux.MNT_DETACH)
try:
    s.run("1")
except HoldfastError as error:
    told["refused"] = [error.code, "unmounted" in error.message]
try:
    s.close(keep=True)
except HoldfastError as error:
    told["closed"] = error.code
mount(home / "sessions", "marked-new")
with Session(home=home, memory="256M") as s:
    told["run"] = s.run("open('f', 'w').write('f'); 1").text
    told["held"] = held("marked-old")
"""
    told = host(lean_home(tmp_path / "home"), code, propagation=PRIVATE)

    assert told == {"refused": ["files_lost", True], "closed": "disk_failed", "run": "1", "held": []}
