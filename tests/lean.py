"""A guests' environment with only what a guest cannot do without.

Where pandas and its like are installed a zygote imports them first, and that costs it two seconds of the processor.
One zygote serves the sessions of a whole test run; but tests that start hosts, commands or servers of their own start a
zygote with each, and most of their cells import nothing.
"""

import fcntl
import re
import shutil
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from holdfast.config import default_home
from holdfast.environments.interpreter import NEEDED

_home = default_home()  # now: tests name other homes later


def lean_envs() -> Path:
    """What homes of tests have for their `envs`: the managed environment, lean. Made by whoever comes first."""
    whole = next(path.resolve() for path in (_home / "envs").iterdir() if (path / "pyvenv.cfg").exists())
    place = (_home.parents[1] if _home.parent.name == "workers" else _home) / "lean"
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "envs" / whole.name / "environment.json").exists():
            shutil.rmtree(place / "envs", ignore_errors=True)
            _copy(whole, place / "envs" / whole.name)
    return place / "envs"


def lean_home(path: Path) -> Path:
    """A new home there."""
    path.mkdir()
    (path / "envs").symlink_to(lean_envs())
    return path


def lean_environment() -> Path:
    """The same, for whoever names an environment himself."""
    return next(path for path in lean_envs().iterdir() if (path / "pyvenv.cfg").exists())


def _copy(whole: Path, target: Path) -> None:
    venv.create(target, symlinks=True)
    (source,), (place,) = whole.glob("lib/python*/site-packages"), target.glob("lib/python*/site-packages")
    for distribution in _needed(source):
        for file in distribution.files or []:
            if ".." not in file.parts and file.suffix != ".pyc":
                for path in (source / file, *(source / file).parent.glob(f"__pycache__/{file.stem}.*.pyc")):
                    copy = place / path.relative_to(source)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, copy)  # with its time, by which Python knows whose bytecode it is
    shutil.copy2(whole / "environment.json", target)  # last: this is what makes it one that is finished


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
