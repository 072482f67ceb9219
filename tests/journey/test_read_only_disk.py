"""A disk that went read-only: every face says so, nobody's code is blamed, and the server still ends in order.

The sessions lie on a disk of their own, because Linux refuses to make one read-only that holds an open journal.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.lean import lean_home

from holdfast import Session
from holdfast.errors import DiskReadOnly

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
WRITES = "open('b.txt', 'w').write('b')"


@pytest.fixture
def home(tmp_path: Path, mount: Callable[..., Path]) -> Path:
    home = lean_home(tmp_path / "home")
    mount(home / "sessions")
    return home


@contextmanager
def read_only(home: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", home / "sessions"], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", home / "sessions"], check=True)


def left_of(home: Path) -> list[str]:
    """Mounts below a home and cgroups of it that are there still."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    mine = [path for path in mounts if path.startswith(f"{home}/") and path != f"{home}/sessions"]
    name = (home / "id").read_text().strip()
    return [*mine, *(str(path) for path in Path("/sys/fs/cgroup").glob(f"**/*{name}*"))]


def test_every_way_in_says_that_the_disk_is_read_only(home: Path, serving: Callable[..., Any]) -> None:
    with serving(home) as server, Session(url=server.url, token=server.token, memory="256M") as session:
        session.run("kept = [7]")
        session.names()  # all that the run left to do is done
        with read_only(home):
            with pytest.raises(DiskReadOnly, match=r"the disk is read-only .*Read-only file system: 'b.txt'"):
                session.run(WRITES, key="once")
            with pytest.raises(DiskReadOnly):
                session.write("c.txt", "c")
            answers = [_new_session(server) for _ in range(3)]  # the first may be one that was ready before
            assert {answer["code"] for answer in answers if "code" in answer} == {"disk_read_only"}
            assert all(answer["hint"] for answer in answers[1:])

        assert session.run(WRITES, key="once").status == "committed"
        assert session.run("kept, open('b.txt').read()").text == "([7], 'b')"
        assert "code" not in _new_session(server)


def _new_session(server: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {server.token}"}
    answered: dict[str, Any] = httpx2.post(f"{server.url}/v1/sessions", json={"memory": "256M"}, headers=headers).json()
    return answered


def test_a_server_on_a_read_only_disk_ends_in_order_and_leaves_nothing(home: Path, serving: Callable[..., Any]) -> None:
    with serving(home) as server:
        assert "code" not in _new_session(server)
        with read_only(home):
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            assert left_of(home) == []

    with serving(home) as server:  # the next owner removes what could not be removed
        assert "code" not in _new_session(server)
        assert len(list((home / "sessions").iterdir())) <= 2


def test_the_command_line_tells_of_it_without_a_traceback(home: Path, mount: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "holdfast.cli.main", "exec", "--home", str(home), "--json", "1 + 1"]
    with read_only(home):
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "disk_read_only")
    assert "Traceback" not in done.stderr
