"""Which cgroup hierarchies are mounted, where, and where in each of them we are.

From /proc/self/mountinfo and /proc/self/cgroup, never from well-known paths: v1 controllers may be
mounted together (`cpu,cpuacct`), a container may see a part of the tree, and a hybrid machine has
an empty v2 tree beside v1.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

# All of them are required. Without a CPU quota one session starves the others, and cpuacct, which
# limits nothing, is the only one to tell what a run has cost. The freezer of v2 is no controller.
V1_CONTROLLERS = ("memory", "pids", "freezer", "cpu", "cpuacct")
V2_CONTROLLERS = ("cpu", "memory", "pids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    controllers: frozenset[str]
    """Empty for v2, which names its controllers in each directory."""
    top: str
    """Topmost directory that we can see."""
    own: str
    """Directory of our own cgroup; `top` if ours lies outside of what we can see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchies:
    v1: dict[str, Hierarchy]
    """By controller; those mounted together share one value."""
    v2: Hierarchy | None


def mounted() -> Hierarchies:
    return parse(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def parse(mountinfo: str, membership: str) -> Hierarchies:
    places = _places(membership)
    v1: dict[str, Hierarchy] = {}
    v2: Hierarchy | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        _, _, _, root, top, *_ = map(_unescape, left.split(" "))
        controllers = frozenset(options.split(",")) & places.keys() if kind == "cgroup" else frozenset[str]()
        own = _below(top, root, places.get(min(controllers, default=""), "/"))
        found = Hierarchy(controllers=controllers, top=top, own=own)
        if kind == "cgroup2":
            v2 = v2 or found
        # The first mount wins: later ones are bind mounts of it.
        for controller in controllers:
            v1.setdefault(controller, found)
    return Hierarchies(v1=v1, v2=v2)


def _places(membership: str) -> dict[str, str]:
    """Our cgroup's path by controller; that of v2 has the name ""."""
    places = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        places.update(dict.fromkeys(controllers.split(","), path))
    return places


def _below(top: str, root: str, place: str) -> str:
    relative = os.path.relpath(place, root)
    outside = relative == "." or relative.startswith("..")
    return top if outside else f"{top}/{relative}"


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def v2_place_of(pid: int) -> str:
    """A process's path in the v2 hierarchy."""
    return _places(Path(f"/proc/{pid}/cgroup").read_text())[""]
