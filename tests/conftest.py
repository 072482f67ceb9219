"""What tests share: real sessions. `make test` prepares the guests' environment and names the home."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HOLDFAST_HOME", str(Path(__file__).parents[1] / ".home"))


def _home_of_worker(shared: Path, worker: str) -> Path:
    """A home has one owner: each worker of pytest-xdist has its own, with the one environment in it."""
    home = shared / "workers" / worker
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "envs").exists():
        (home / "envs").symlink_to(shared / "envs")
    return home


if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["HOLDFAST_HOME"] = str(_home_of_worker(Path(os.environ["HOLDFAST_HOME"]), worker))

from holdfast import Session  # noqa: E402 (after its home is named)


@pytest.fixture
def session() -> Iterator[Session]:
    """A fresh sandbox. The zygote behind it is shared by the whole test run."""
    with Session(memory="512M", timeout=30) as session:
        yield session
