"""What tests of the Jupyter kernel share: homes of their own, and a look at what is left when all is over."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 60


def make_home(place: Path) -> Path:
    """With the environments of the shared one."""
    home = place / "home"
    home.mkdir()
    (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
    return home


def jupyter_places(place: Path) -> dict[str, str]:
    """Jupyter's own directories, in none of which a user's are: variables of the environment."""
    return {
        "JUPYTER_PATH": str(place / "share" / "jupyter"),
        "JUPYTER_DATA_DIR": str(place / "data"),
        "JUPYTER_RUNTIME_DIR": str(place / "runtime"),
        "JUPYTER_CONFIG_DIR": str(place / "config"),
        "IPYTHONDIR": str(place / "ipython"),
    }


def end_server(home: Path) -> None:
    """It would end by itself, half a minute after the last kernel."""
    if (home / "socket").exists():
        owner = int((home / "lock").read_text().split()[-1])
        os.kill(owner, signal.SIGTERM)
        assert wait_until(lambda: not Path("/proc", str(owner)).exists())


def processes_of(home: Path) -> list[int]:
    """The kernel and its keeper, which carry the home's name in their environment: all else ends with the keeper."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if str(home).encode() in environment:
                found.append(int(entry.name))
    return found


def left_behind(home: Path) -> list[str]:
    """Processes, cgroups and sessions of a home, but for this test's own process."""
    name = (home / "id").read_text().strip()
    cgroups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if name in path]
    sessions = [str(path) for path in (home / "sessions").iterdir()]
    return [*map(str, set(processes_of(home)) - {os.getpid()}), *cgroups, *sessions]


def wait_until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()
