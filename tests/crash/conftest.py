"""A home for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.hosts import Host
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


@pytest.fixture(autouse=True)
def _no_host_outlives_its_test() -> Iterator[None]:
    """Of a test that failed: its pipes would be told of in whatever test comes next."""
    yield
    for host in list(Host.living):
        host.kill()
