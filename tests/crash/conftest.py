"""A guests' environment that starts quickly, and a home for each test."""

import re
import shutil
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from tests.crash.scenarios import UPSTREAM
from tests.upstream import Upstream, serving

from holdfast.config import default_home
from holdfast.environments.interpreter import NEEDED


@pytest.fixture(scope="session")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only what a guest cannot do without: a host is started for each crash, and imports what is there."""
    whole = next(path.resolve() for path in (default_home() / "envs").iterdir() if (path / "pyvenv.cfg").exists())
    target = tmp_path_factory.mktemp("environment") / "lean"
    target.parent.chmod(0o755)
    venv.create(target, symlinks=True)
    (source,), (place,) = whole.glob("lib/python*/site-packages"), target.glob("lib/python*/site-packages")
    for distribution in _needed(source):
        for file in distribution.files or []:
            if ".." not in file.parts and file.suffix != ".pyc":
                for path in (source / file, *(source / file).parent.glob(f"__pycache__/{file.stem}.*.pyc")):
                    copy = place / path.relative_to(source)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, copy)  # with its time, by which Python knows whose bytecode it is
    return target


def _needed(site_packages: Path) -> Iterator[Distribution]:
    known = {_plain(found.name): found for found in distributions(path=[str(site_packages)])}
    ahead = list(NEEDED.values())
    while ahead:
        found = known.pop(_plain(ahead.pop()), None)
        if found is not None:
            yield found
            ahead += [re.split(r"[^\w.-]", line)[0] for line in found.requires or [] if "extra ==" not in line]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="session", autouse=True)
def upstream() -> Iterator[Upstream]:
    """A server that hosts send to, and that knows what arrived when they are dead."""
    with serving() as upstream, pytest.MonkeyPatch.context() as patch:
        patch.setenv(UPSTREAM, upstream.at)
        yield upstream


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"
