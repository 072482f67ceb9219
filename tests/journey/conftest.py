"""What the journeys share beside real sessions."""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import Session
from holdfast.config import default_home


@pytest.fixture(scope="session")
def guest_environment() -> Path:
    """The guests' environment that is built already, for homes of a test's own."""
    return next(path.resolve() for path in (default_home() / "envs").iterdir() if (path / "pyvenv.cfg").exists())


@pytest.fixture(scope="session")
def npm() -> Callable[..., Path]:
    """Clients in another language: installs packages once, by whoever comes first; returns where npm put them."""
    place = Path(__file__).parents[2] / ".home"

    def install(name: str, *packages: str) -> Path:
        if not place.is_dir():
            pytest.skip("only in a clone that make has set up: who runs a client makes no difference to it")
        prefix, wanted = place / name, " ".join(packages)
        prefix.mkdir(exist_ok=True)
        with (prefix / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            installed = prefix / "installed"
            if not installed.exists() or installed.read_text() != wanted:
                # One by one: a package's own installation may need the one before.
                environment = os.environ | {"PATH": f"{prefix}/node_modules/.bin:{os.environ['PATH']}"}
                command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", prefix]
                for package in packages:
                    subprocess.run([*command, package], check=True, timeout=600, env=environment)
                installed.write_text(wanted)
        return prefix / "node_modules"

    return install


@pytest.fixture(scope="session")
def inside() -> Callable[[Session], Path]:
    """Where the host sees what a session sees: the root of its kernel."""

    def root(session: Session) -> Path:
        now = session._session._transport._session.computer.now
        assert now is not None
        return Path(f"/proc/{now.kernel.pid}/root")

    return root


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Make a directory a file system of 24 MB."""
    mounted: list[Path] = []

    def small(path: Path, *, options: str = "size=24m") -> Path:
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", path], check=True)
        mounted.append(path)
        return path

    yield small
    for path in reversed(mounted):
        subprocess.run(["umount", path], check=True)
