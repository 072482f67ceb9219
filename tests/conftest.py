"""What tests share: real sessions. `make test` prepares the guests' environment and names the home."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HOLDFAST_HOME", str(Path(__file__).parents[1] / ".home"))

from holdfast import Session


@pytest.fixture
def session() -> Iterator[Session]:
    """A fresh sandbox. The zygote behind it is shared by the whole test run."""
    with Session(memory="512M", timeout=30) as session:
        yield session
