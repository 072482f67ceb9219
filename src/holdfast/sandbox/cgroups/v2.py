"""cgroup v2: one directory per session.

    <top>/holdfast/<owner>/<session>             where the top is ours to write (root)
    <top>/holdfast-<uid>/<owner>/<session>       where root has delegated one, and we are inside
    <scope>/<session>                            a scope from the user's systemd (module `scoped`)
    <delegated cgroup>/<owner>/<session>         where a service manager or a container gave us ours

A cgroup that limits its children must hold no process itself. So where ours holds only us, we move
into a leaf of it (`host`); where it holds others, they are not ours to move, and we refuse.

An ordinary user may move processes only within what was delegated to him. So the keeper, whose
children join sessions, lives in a leaf beside them (`keeper`).
"""

import contextlib
import errno
import os
import select
import time

from holdfast.sandbox.cgroups import delegation, kernfs
from holdfast.sandbox.cgroups.contract import (
    CPU_PERIOD_US,
    DEATH_S,
    Cgroup,
    CgroupUnavailable,
    Limits,
    MemoryWatch,
    Tree,
    Unkillable,
    check_name,
    machine_has_swap,
)
from holdfast.sandbox.cgroups.hierarchies import V2_CONTROLLERS, Hierarchies, Hierarchy

KEEPER = "keeper"
_HOST = "host"
_CACHE_THAT_STAYS = 8 << 20
"""What Linux leaves of the cache of files, however short memory is: pages that are being written, or are in use."""


def has_place(tree: Hierarchy, uid: int) -> bool:
    """Whether somebody has set a place aside for us, so that nobody need be asked for one."""
    return _ours(tree.top) or _inside_given(tree, uid)


def open_tree(owner: str, found: Hierarchies, tree: Hierarchy, uid: int) -> "V2Tree":
    if _ours(tree.top):
        _enable_children(tree.top)
        os.makedirs(shared := f"{tree.top}/holdfast", exist_ok=True)
        return V2Tree(owner, _prepared(shared, owner), keeper_leaf=False)
    given = delegation.directory(tree.top, uid)
    parent = given if _inside_given(tree, uid) else _nearest_of_ours(tree)
    if parent is None:
        raise CgroupUnavailable(
            f"user {uid} may not create cgroups that his processes could enter",
            remedy=delegation.remedy(found, uid),
        )
    return V2Tree(owner, _prepared(parent, owner), keeper_leaf=True)


def _inside_given(tree: Hierarchy, uid: int) -> bool:
    given = delegation.directory(tree.top, uid)
    return tree.own.startswith(f"{given}/") and _ours(given)


def _nearest_of_ours(tree: Hierarchy) -> str | None:
    """The nearest cgroup around us that is ours and could limit children."""
    place = tree.own
    while place.startswith(tree.top) and _ours(place):
        if set(kernfs.pids_in(place)) <= {os.getpid()} and _offers_all(place):
            return place
        place = os.path.dirname(place)
    return None


def _ours(directory: str) -> bool:
    files = (f"{directory}/{name}" for name in ("cgroup.procs", "cgroup.subtree_control"))
    return kernfs.writable(directory, *files)


def _offers_all(directory: str) -> bool:
    return set(V2_CONTROLLERS) <= set(kernfs.read(f"{directory}/cgroup.controllers").split())


def _prepared(parent: str, owner: str) -> str:
    _enable_children(parent)
    os.makedirs(directory := f"{parent}/{owner}", exist_ok=True)
    enable_sessions(directory)
    return directory


def enable_sessions(directory: str) -> None:
    """Let this directory limit the sessions below it, or say why it cannot."""
    _enable_children(directory)
    if not os.path.exists(f"{directory}/cgroup.freeze"):
        raise CgroupUnavailable("this kernel cannot freeze a cgroup", remedy="boot Linux 5.2 or newer")
    if not os.path.exists(f"{directory}/memory.swap.max") and machine_has_swap():
        raise CgroupUnavailable(
            "this kernel does not count swap and the machine has some: the memory cap would not be hard",
            remedy="sudo swapoff -a  # or boot with the kernel parameter swapaccount=1",
        )


def _enable_children(directory: str) -> None:
    wanted = set(V2_CONTROLLERS)
    control = f"{directory}/cgroup.subtree_control"
    if wanted <= set(kernfs.read(control).split()):
        return
    if missing := wanted - set(kernfs.read(f"{directory}/cgroup.controllers").split()):
        raise CgroupUnavailable(
            f"{directory} does not offer: {', '.join(sorted(missing))}",
            remedy=delegation.controllers_remedy(directory, missing),
        )
    try:
        kernfs.write(control, delegation.ENABLE)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _move_ourselves_down(directory)
        kernfs.write(control, delegation.ENABLE)


def _move_ourselves_down(directory: str) -> None:
    inside = set(kernfs.pids_in(directory))
    if inside != {os.getpid()}:
        raise CgroupUnavailable(
            f"{directory} holds processes ({len(inside)}), so the kernel lets it limit no children",
            remedy=delegation.vacate_command(directory),
        )
    os.makedirs(leaf := f"{directory}/{_HOST}", exist_ok=True)
    kernfs.write(f"{leaf}/cgroup.procs", os.getpid())


class V2Tree(Tree):
    kind = "v2"

    def __init__(self, owner: str, directory: str, *, keeper_leaf: bool) -> None:
        super().__init__(owner)
        self._directory = directory
        self._keeper_leaf = keeper_leaf

    def adopt(self, pid: int) -> None:
        if self._keeper_leaf:
            os.makedirs(leaf := f"{self._directory}/{KEEPER}", exist_ok=True)
            kernfs.write(f"{leaf}/cgroup.procs", pid)
            self._live.add(KEEPER)

    def create(self, name: str, limits: Limits) -> "V2Cgroup":
        if check_name(name) in (KEEPER, _HOST):
            raise ValueError(f"reserved: {name!r}")
        os.mkdir(path := f"{self._directory}/{name}")
        cgroup = V2Cgroup(name, path, self)
        try:
            cgroup.limit(limits)
        except BaseException:
            cgroup.remove()
            raise
        self._live.add(name)
        return cgroup

    def existing(self) -> list[str]:
        # A keeper that outlived its host is a left-over too, until we have adopted our own.
        return [name for name in kernfs.children_of(self._directory) if name not in self._live]

    def sweep(self) -> None:
        for name in self.existing():
            sweep_one(f"{self._directory}/{name}", self)

    def remove(self) -> None:
        kernfs.remove(f"{self._directory}/{KEEPER}")
        kernfs.remove(self._directory)
        if os.path.basename(parent := os.path.dirname(self._directory)) == "holdfast":
            kernfs.remove_if_unused(parent)


def sweep_one(path: str, tree: Tree) -> None:
    cgroup = V2Cgroup(os.path.basename(path), path, tree)
    cgroup.kill_all()
    cgroup.remove()


class V2Cgroup(Cgroup):
    def __init__(self, name: str, path: str, tree: Tree) -> None:
        self.name = name
        self._path = path
        self._tree = tree
        # Frozen and thawed at every run: worth two descriptors per session.
        self._freeze_fd = os.open(f"{path}/cgroup.freeze", os.O_WRONLY | os.O_CLOEXEC)
        self._events_fd = os.open(f"{path}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        self._watch_fd = -1
        self._peak = _Peak(path)

    def limit(self, limits: Limits) -> None:
        self.set_memory(limits.memory_bytes + limits.reserve_bytes)
        if limits.reserve_bytes:
            self.allow(limits.memory_bytes)
        # memory.oom.group stays 0, as in every new cgroup: the snapshot must outlive the kernel.
        kernfs.write_if_present(f"{self._path}/memory.swap.max", 0)
        kernfs.write(f"{self._path}/pids.max", limits.pids)
        kernfs.write(f"{self._path}/cpu.weight", limits.cpu_weight)
        if quota_us := limits.cpu_quota_us:
            kernfs.write(f"{self._path}/cpu.max", f"{quota_us} {CPU_PERIOD_US}")
            kernfs.write_if_present(f"{self._path}/cpu.max.burst", quota_us)

    def set_memory(self, memory_bytes: int) -> None:
        kernfs.write(f"{self._path}/memory.max", memory_bytes)

    def memory_pinned_bytes(self) -> int:
        stat = kernfs.read(f"{self._path}/memory.stat")
        can_go = kernfs.keyed(stat, "file") - kernfs.keyed(stat, "shmem") + kernfs.keyed(stat, "slab_reclaimable")
        return self.memory_now_bytes() - can_go

    def allow(self, memory_bytes: int) -> None:
        # Not a wall but deep mud: whoever allocates above it is made to sleep, longer and longer.
        kernfs.write(f"{self._path}/memory.high", memory_bytes)

    def watch_memory(self, *, soft_bytes: int, cap_bytes: int) -> MemoryWatch:
        self.allow(soft_bytes)
        fd = self._watch_fd = os.open(f"{self._path}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        kernfs.read_kept(fd)
        return MemoryWatch(fd, select.EPOLLPRI, lambda: kernfs.read_kept(fd), soft_bytes)

    def is_held_up(self) -> bool:
        level = kernfs.read(f"{self._path}/memory.high").strip()
        # Not by what is in use: the cache of files fills whatever room there is, and Linux takes it back for whoever
        # wants more. Held up is who finds nothing left to take back.
        return level != "max" and self.memory_pinned_bytes() >= int(level) - _CACHE_THAT_STAYS

    def join_fds(self) -> list[int]:
        return [kernfs.open_procs(self._path)]

    def pids(self) -> list[int]:
        return kernfs.pids_in(self._path)

    def kill_all(self, *, deadline_s: float = DEATH_S) -> None:
        try:
            kernfs.write(f"{self._path}/cgroup.kill", 1)
        except FileNotFoundError:  # before Linux 5.14
            return super().kill_all(deadline_s=deadline_s)
        if not self._wait_event("populated", 0, deadline_s):
            raise Unkillable(self.pids(), [])

    def freeze(self) -> None:
        os.pwrite(self._freeze_fd, b"1", 0)

    def thaw(self) -> None:
        os.pwrite(self._freeze_fd, b"0", 0)

    def wait_frozen(self, timeout_s: float) -> bool:
        return self._wait_event("frozen", 1, timeout_s)

    def _wait_event(self, key: str, value: int, timeout_s: float) -> bool:
        give_up_at = time.monotonic() + timeout_s
        changed = select.poll()
        changed.register(self._events_fd, select.POLLPRI)
        # Read before each poll: the kernel reports changes since the last read.
        while kernfs.keyed(kernfs.read_kept(self._events_fd), key) != value:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return False
            changed.poll(left_s * 1000 + 1)
        return True

    def memory_now_bytes(self) -> int:
        return self._peak.sample()

    def memory_peak_bytes(self) -> int:
        return self._peak.highest()

    def reset_peak(self) -> bool:
        return self._peak.reset()

    def oom_kills(self) -> int:
        # Counted where the victim was, whichever limit was hit. Not memory.events.local: a session
        # has no cgroups below it, so they agree, and this one exists on every kernel.
        return kernfs.keyed(kernfs.read(f"{self._path}/memory.events"), "oom_kill")

    def cpu_seconds(self) -> float:
        return kernfs.keyed(kernfs.read(f"{self._path}/cpu.stat"), "usage_usec") / 1e6

    def close(self) -> None:
        self._peak.close()
        for fd in (self._freeze_fd, self._events_fd, self._watch_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._freeze_fd = self._events_fd = self._watch_fd = -1

    def remove(self) -> None:
        self.close()
        kernfs.remove(self._path)
        self._tree.forget(self.name)


class _Peak:
    """Most memory in use since the last reset, as exactly as this kernel allows.

    Linux 6.12 resets memory.peak for the descriptor that asks, and only for it. From 5.19 on the
    file exists but never falls: then a peak above the one at the reset is exact, and below it the
    highest sample stands in. Before 5.19 there are only samples.
    """

    def __init__(self, path: str) -> None:
        self._file = f"{path}/memory.peak"
        self._current = f"{path}/memory.current"
        self._fd = -1
        self._at_reset = 0
        self._sampled = 0

    def sample(self) -> int:
        now = int(kernfs.read(self._current))
        self._sampled = max(self._sampled, now)
        return now

    def highest(self) -> int:
        recorded = self._recorded()
        if recorded is not None and (self._fd >= 0 or recorded > self._at_reset):
            return recorded
        self.sample()
        return self._sampled

    def _recorded(self) -> int | None:
        try:
            return int(kernfs.read_kept(self._fd) if self._fd >= 0 else kernfs.read(self._file))
        except FileNotFoundError:
            return None

    def reset(self) -> bool:
        self._sampled = 0
        try:
            if self._fd < 0:
                self._fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
            os.pwrite(self._fd, b"reset", 0)
        except OSError:  # no such file, not writable, or not yet resettable
            self.close()
            self._at_reset = self._recorded() or 0
            return False
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
