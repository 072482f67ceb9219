"""What tests share: real sessions. `make test` prepares the guests' environment and names the home."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HOLDFAST_HOME", str(Path(__file__).parents[1] / ".home"))
# A shell starts what runs in its background with SIGINT ignored, and so Python finds it; tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _home_of_worker(shared: Path, worker: str) -> Path:
    """A home has one owner: each worker of pytest-xdist has its own, with the one environment in it."""
    home = shared / "workers" / worker
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "envs").exists():
        (home / "envs").symlink_to(shared / "envs")
    return home


if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["HOLDFAST_HOME"] = str(_home_of_worker(Path(os.environ["HOLDFAST_HOME"]), worker))

from tests.lean import lean_environment, lean_home  # noqa: E402 (after its home is named)

from holdfast import Session  # noqa: E402


class Server:
    """`holdfast serve`, a process of its own with a home of its own."""

    def __init__(self, home: Path, *arguments: str) -> None:
        if not home.exists():
            lean_home(home)
        self.home = home
        self.token = secrets.token_hex(16)
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "holdfast.cli.main", "serve", "--home", home, "--port", "0",
                "--token", self.token, "--json", *arguments,
            ],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.communicate()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module that says `TRANSPORTS = True` has its tests run twice: against this process, and against a server."""
    both = getattr(metafunc.module, "TRANSPORTS", False) and os.environ.get("HOLDFAST_TRANSPORTS") != "embedded"
    if "where" in metafunc.fixturenames and both:
        looks_inside = metafunc.definition.get_closest_marker("embedded")
        marks = [pytest.mark.skip(reason=looks_inside.args[0])] if looks_inside else []
        metafunc.parametrize("where", ["embedded", pytest.param("remote", marks=marks)], indirect=True)


@pytest.fixture
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `Session` is to be told, to be of this process, or at a server of this worker's."""
    if getattr(request, "param", "embedded") == "embedded":
        return {}
    server: Server = request.getfixturevalue("server")
    return {"url": server.url, "token": server.token}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`holdfast serve` with a home of its own, for the whole test run."""
    home = tmp_path_factory.mktemp("server") / "home"
    home.mkdir()
    (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
    with Server(home) as server:
        yield server


@pytest.fixture(scope="session")
def serving() -> Callable[..., Server]:
    """A server of a test's own."""
    return Server


@pytest.fixture(scope="session")
def lean() -> Path:
    """An environment that a zygote is quick to warm up: for tests that start one of their own and import nothing."""
    return lean_environment()


@pytest.fixture
def session(where: dict[str, Any]) -> Iterator[Session]:
    """A fresh sandbox. The zygote behind it is shared by the whole test run."""
    with Session(memory="512M", timeout=30, **where) as session:
        yield session
