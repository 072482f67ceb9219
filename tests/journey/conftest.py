"""What the journeys share beside real sessions."""

from pathlib import Path

import pytest

from holdfast.config import default_home


@pytest.fixture(scope="session")
def guest_environment() -> Path:
    """The guests' environment that is built already, for homes of a test's own."""
    return next(path.resolve() for path in (default_home() / "envs").iterdir() if (path / "pyvenv.cfg").exists())
