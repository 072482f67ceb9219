"""What the journeys share beside real sessions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Session
from holdfast.config import default_home


@pytest.fixture(scope="session")
def guest_environment() -> Path:
    """The guests' environment that is built already, for homes of a test's own."""
    return next(path.resolve() for path in (default_home() / "envs").iterdir() if (path / "pyvenv.cfg").exists())


@pytest.fixture(scope="session")
def inside() -> Callable[[Session], Path]:
    """Where the host sees what a session sees: the root of its kernel."""

    def root(session: Session) -> Path:
        now = session._session._transport._session.computer.now
        assert now is not None
        return Path(f"/proc/{now.kernel.pid}/root")

    return root
