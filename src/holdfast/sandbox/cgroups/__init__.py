"""Session cgroups: the hard cap on memory and processes, the share of CPU, the freezer, the killing.

`find` picks what this machine has: cgroup v2, cgroup v1, or, only where the caller names it himself,
a watchdog that samples. It never settles for less than was asked.

    tree = find("home-1f2e")
    tree.sweep()                                 # what a crashed host has left
    tree.adopt(keeper_pid)
    cgroup = tree.create("s-1", Limits(memory_bytes=2**30, pids=256, cpus=2.0))
    fds = cgroup.join_fds()                      # the session's first process writes "0" to each
"""

import os
from typing import Literal

from holdfast.sandbox.cgroups import delegation, hierarchies, v1, v2
from holdfast.sandbox.cgroups.contract import (
    Cgroup,
    CgroupUnavailable,
    Killed,
    Kind,
    Limits,
    MemoryWatch,
    Tree,
    Unkillable,
    check_name,
)
from holdfast.sandbox.cgroups.scoped import ScopedTree
from holdfast.sandbox.cgroups.watchdog import WatchdogCgroup, WatchdogTree

__all__ = [
    "Cgroup",
    "CgroupUnavailable",
    "Killed",
    "Kind",
    "Limits",
    "MemoryWatch",
    "Tree",
    "Unkillable",
    "WatchdogCgroup",
    "WatchdogTree",
    "find",
]


def find(owner: str, *, memory_cap: Literal["cgroup", "watchdog"] = "cgroup", uid: int | None = None) -> Tree:
    """The owner's tree. `memory_cap="watchdog"` samples instead, for machines where no cgroup can be had."""
    check_name(owner)
    if memory_cap == "watchdog":
        return WatchdogTree(owner)
    return _find_cgroup(owner, os.geteuid() if uid is None else uid)


def _find_cgroup(owner: str, uid: int) -> Tree:
    found = hierarchies.mounted()
    # Where v1 has the memory controller, a v2 tree beside it is an empty shell.
    if "memory" in found.v1:
        return v1.open_tree(owner, found, uid)
    if found.v2 is None:
        raise CgroupUnavailable(
            "no cgroup hierarchy with a memory controller is mounted",
            remedy=f"sudo mount -t cgroup2 none /sys/fs/cgroup  # in a container: {delegation.IN_A_CONTAINER}",
        )
    # systemd comes before a cgroup that merely happens to be writable: all of a login is, and it
    # belongs to systemd.
    if not v2.has_place(found.v2, uid) and delegation.user_manager_present(uid):
        return ScopedTree(owner, found.v2.top, uid)
    return v2.open_tree(owner, found, found.v2, uid)
