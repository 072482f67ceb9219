"""A home for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.scenarios import UPSTREAM
from tests.lean import lean_home
from tests.upstream import Upstream, serving


@pytest.fixture(scope="session", autouse=True)
def upstream() -> Iterator[Upstream]:
    """A server that hosts send to, and that knows what arrived when they are dead."""
    with serving() as upstream, pytest.MonkeyPatch.context() as patch:
        patch.setenv(UPSTREAM, upstream.at)
        yield upstream


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return lean_home(tmp_path / "home")
