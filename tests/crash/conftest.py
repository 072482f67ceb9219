"""A home for each test."""

from pathlib import Path

import pytest
from tests.lean import lean_home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return lean_home(tmp_path / "home")
