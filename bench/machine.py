"""What the numbers were measured on."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from holdfast.sandbox.cgroups import hierarchies

_PACKAGES = ("holdfast", "ipykernel", "jupyter-client", "ipython", "pandas", "numpy", "pyarrow")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    cores: int
    ram_bytes: int
    kernel: str
    cgroup: str
    user: str
    python: str
    packages: dict[str, str]
    load_before: float
    """One-minute load average when the run began: above zero, somebody else was at work."""

    def lines(self) -> list[str]:
        return [
            f"{self.cpu}, {self.cores} cores, {self.ram_bytes / 2**30:.0f} GiB RAM, load before {self.load_before:.2f}",
            f"Linux {self.kernel}, cgroup {self.cgroup}, as {self.user}, Python {self.python}",
            ", ".join(f"{name} {number}" for name, number in self.packages.items()),
        ]


def describe() -> Machine:
    return Machine(
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        ram_bytes=memory_kib("MemTotal") << 10,
        kernel=platform.release(),
        cgroup="v1" if "memory" in hierarchies.mounted().v1 else "v2",
        user="root" if os.geteuid() == 0 else "an ordinary user",
        python=".".join(map(str, sys.version_info[:3])),
        packages={name: version(name) for name in _PACKAGES},
        load_before=os.getloadavg()[0],
    )


def memory_kib(field: str) -> int:
    """A line of /proc/meminfo."""
    return int(_field("/proc/meminfo", field).split()[0])


def pss_bytes(pid: int) -> int:
    """A process's own memory, and its share of what it shares with others."""
    return int(_field(f"/proc/{pid}/smaps_rollup", "Pss").split()[0]) << 10


def private_bytes(pid: int) -> int:
    """What would come free if the process ended."""
    path = f"/proc/{pid}/smaps_rollup"
    return sum(int(_field(path, name).split()[0]) for name in ("Private_Clean", "Private_Dirty")) << 10


def children_of(pid: int) -> list[int]:
    return [child for child, parent in _parents().items() if parent == pid]


def descendants_of(pid: int) -> list[int]:
    parents = _parents()
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def _parents() -> dict[int, int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            # The name in the second field may hold anything, also ")".
            parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
    return parents


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
