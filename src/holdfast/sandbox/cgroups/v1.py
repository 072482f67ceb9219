"""cgroup v1: one directory per session in each of several hierarchies.

    <hierarchy>/holdfast/<owner>/<session>          where the top is ours to write (root)
    <hierarchy>/holdfast-<uid>/<owner>/<session>    where root has delegated one to us
    <our own cgroup>/holdfast/<owner>/<session>     where only our own cgroup is ours to write

The top is preferred to our own cgroup: a login or a service is elsewhere after each start, and what
a crashed host has left is only found where its path does not change.
"""

import errno
import os
import select
import time

from holdfast.sandbox.cgroups import delegation, kernfs
from holdfast.sandbox.cgroups.contract import (
    DEATH_S,
    Cgroup,
    CgroupUnavailable,
    Limits,
    MemoryWatch,
    Tree,
    check_name,
    machine_has_swap,
)
from holdfast.sandbox.cgroups.hierarchies import V1_CONTROLLERS, Hierarchies, Hierarchy

_CAP = "memory.limit_in_bytes"
_SOCKET_BUFFERS_BYTES = 16 << 20
_CAP_WITH_SWAP = "memory.memsw.limit_in_bytes"


def open_tree(owner: str, found: Hierarchies, uid: int) -> "V1Tree":
    if missing := [name for name in V1_CONTROLLERS if name not in found.v1]:
        raise CgroupUnavailable(
            f"cgroup v1 is in use, but without: {', '.join(missing)}",
            remedy=delegation.mount_command(missing),
        )
    directories, denied = {}, []
    for name in V1_CONTROLLERS:
        if parent := _parent_in(found.v1[name], uid):
            directories[name] = f"{parent}/{owner}"
        else:
            denied.append(name)
    if denied:
        raise CgroupUnavailable(
            f"user {uid} may not create cgroups for: {', '.join(denied)}",
            remedy=delegation.remedy(found, uid),
        )
    return V1Tree(owner, directories)


def _parent_in(hierarchy: Hierarchy, uid: int) -> str | None:
    shared = f"{hierarchy.top}/holdfast"
    delegated = delegation.directory(hierarchy.top, uid)
    for parent, must_be_writable in (
        (shared, shared if os.path.isdir(shared) else hierarchy.top),
        (delegated, delegated),
        (f"{hierarchy.own}/holdfast", hierarchy.own),
    ):
        if kernfs.writable(must_be_writable):
            return parent
    return None


class V1Tree(Tree):
    kind = "v1"

    def __init__(self, owner: str, by_controller: dict[str, str]) -> None:
        super().__init__(owner)
        self._by_controller = by_controller
        self._directories = list(dict.fromkeys(by_controller.values()))
        self.freezers = by_controller["freezer"]
        for directory in self._directories:
            _make(os.path.dirname(directory))
            _make(directory)
        memory = by_controller["memory"]
        if not os.path.exists(f"{memory}/{_CAP_WITH_SWAP}") and machine_has_swap():
            raise CgroupUnavailable(
                "this kernel does not count swap and the machine has some: the memory cap would not be hard",
                remedy="sudo swapoff -a  # or boot with the kernel parameter swapaccount=1",
            )

    def create(self, name: str, limits: Limits) -> "V1Cgroup":
        self._make_everywhere(check_name(name))
        cgroup = self._open(name)
        try:
            cgroup.limit(limits)
        except BaseException:
            cgroup.remove()
            raise
        self._live.add(name)
        return cgroup

    def _make_everywhere(self, name: str) -> None:
        made: list[str] = []
        try:
            for directory in self._directories:
                os.mkdir(path := f"{directory}/{name}")
                made.append(path)
                _inherit(path)
        except BaseException:
            for path in made:
                kernfs.remove(path)
            raise

    def _open(self, name: str) -> "V1Cgroup":
        by_controller = {key: f"{path}/{name}" for key, path in self._by_controller.items()}
        return V1Cgroup(name, by_controller, self)

    def existing(self) -> list[str]:
        # A host that died while it created or removed one has left it in some hierarchies only.
        found = {name for directory in self._directories for name in kernfs.children_of(directory)}
        return sorted(found - self._live)

    def sweep(self) -> None:
        for name in self.existing():
            for directory in self._directories:
                _make(f"{directory}/{name}")  # completed, so that one way of killing serves all
            cgroup = self._open(name)
            cgroup.kill_all()
            cgroup.remove()

    def remove(self) -> None:
        for directory in self._directories:
            kernfs.remove(directory)
            if os.path.basename(parent := os.path.dirname(directory)) == "holdfast":
                kernfs.remove_if_unused(parent)


def _make(directory: str) -> None:
    try:
        os.mkdir(directory)
    except FileExistsError:
        return
    _inherit(directory)


def _inherit(directory: str) -> None:
    """Settings that old kernels, or a cpuset mounted with the rest, leave empty in a new cgroup."""
    usage = f"{directory}/memory.use_hierarchy"
    if os.path.exists(usage) and kernfs.read(usage).strip() == "0":
        kernfs.write(usage, 1)
    for name in ("cpuset.cpus", "cpuset.mems"):
        if os.path.exists(f"{directory}/{name}"):
            kernfs.write(f"{directory}/{name}", kernfs.read(f"{os.path.dirname(directory)}/{name}"))


class V1Cgroup(Cgroup):
    def __init__(self, name: str, by_controller: dict[str, str], tree: V1Tree) -> None:
        self.name = name
        self._tree = tree
        self._directories = list(dict.fromkeys(by_controller.values()))
        self._memory = by_controller["memory"]
        self._pids = by_controller["pids"]
        self._cpu = by_controller["cpu"]
        self._cpuacct = by_controller["cpuacct"]
        self._freezer = by_controller["freezer"]
        self._watch_fd = -1
        # Of use at every run: the two files that are worth a descriptor per session.
        self._state_fd = os.open(f"{self._freezer}/freezer.state", os.O_RDWR | os.O_CLOEXEC)
        self._peak_fd = os.open(f"{self._memory}/memory.max_usage_in_bytes", os.O_RDWR | os.O_CLOEXEC)

    def limit(self, limits: Limits) -> None:
        self.set_memory(limits.memory_bytes)
        # Socket buffers have a counter of their own here, and without a limit nobody pays for them.
        kernfs.write_if_present(f"{self._memory}/memory.kmem.tcp.limit_in_bytes", _SOCKET_BUFFERS_BYTES)
        kernfs.write(f"{self._pids}/pids.max", limits.pids)
        kernfs.write(f"{self._cpu}/cpu.shares", max(2, limits.cpu_weight * 1024 // 100))
        if limits.cpu_quota_us:
            self._set_quota(limits.cpu_quota_us)

    def _set_quota(self, quota_us: int) -> None:
        try:
            kernfs.write(f"{self._cpu}/cpu.cfs_quota_us", quota_us)
        except OSError as error:
            # EINVAL: a cgroup above us has less than that, and its quota binds us anyway.
            if error.errno != errno.EINVAL:
                raise
            return
        kernfs.write_if_present(f"{self._cpu}/cpu.cfs_burst_us", quota_us)

    def set_memory(self, memory_bytes: int) -> None:
        # The kernel wants memory <= memory and swap at every moment in between.
        files = [f"{self._memory}/{_CAP}", f"{self._memory}/{_CAP_WITH_SWAP}"]
        if memory_bytes > int(kernfs.read(files[0])):
            files.reverse()
        for path in files:
            if path.endswith(_CAP):
                kernfs.write(path, memory_bytes)
            else:
                kernfs.write_if_present(path, memory_bytes)

    def join_fds(self) -> list[int]:
        return [kernfs.open_procs(directory) for directory in self._directories]

    def pids(self) -> list[int]:
        return kernfs.pids_in(self._freezer)

    def kill_all(self, *, deadline_s: float = DEATH_S) -> None:
        # In any hierarchy: a process may have been caught while it was joining them.
        self._kill(self._everyone, (), deadline_s)

    def _everyone(self) -> list[int]:
        return list({pid for directory in self._directories for pid in kernfs.pids_in(directory)})

    def freeze(self) -> None:
        os.pwrite(self._state_fd, b"FROZEN", 0)

    def thaw(self) -> None:
        os.pwrite(self._state_fd, b"THAWED", 0)

    def wait_frozen(self, timeout_s: float) -> bool:
        # No event tells; reading makes the kernel look again.
        give_up_at = time.monotonic() + timeout_s
        pause_s = 0.0001
        while (state := kernfs.read_kept(self._state_fd)) != "FROZEN\n":
            if state == "THAWED\n" or time.monotonic() > give_up_at:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.005)
        return True

    def memory_now_bytes(self) -> int:
        return int(kernfs.read(f"{self._memory}/memory.usage_in_bytes"))

    def memory_peak_bytes(self) -> int:
        return int(kernfs.read_kept(self._peak_fd))

    def reset_peak(self) -> bool:
        os.pwrite(self._peak_fd, b"0", 0)
        return True

    def memory_pinned_bytes(self) -> int:
        stat = kernfs.read(f"{self._memory}/memory.stat")
        return self.memory_now_bytes() - kernfs.keyed(stat, "cache") + kernfs.keyed(stat, "shmem")

    def watch_memory(self, *, soft_bytes: int, cap_bytes: int) -> MemoryWatch:
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # 1: whoever faults above the cap waits for memory, or for our SIGKILL, instead of being killed.
        kernfs.write(f"{self._memory}/memory.oom_control", 1)
        self._register(event, "memory.oom_control", "")
        self._register(event, "memory.usage_in_bytes", str(soft_bytes))
        self._watch_fd = event
        return MemoryWatch(event, select.EPOLLIN, lambda: os.eventfd_read(event), cap_bytes)

    def _register(self, event: int, name: str, argument: str) -> None:
        fd = os.open(f"{self._memory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            kernfs.write(f"{self._memory}/cgroup.event_control", f"{event} {fd} {argument}".strip())
        finally:
            os.close(fd)

    def is_held_up(self) -> bool:
        return kernfs.keyed(kernfs.read(f"{self._memory}/memory.oom_control"), "under_oom") == 1

    def oom_kills(self) -> int:
        return kernfs.keyed(kernfs.read(f"{self._memory}/memory.oom_control"), "oom_kill")

    def cpu_seconds(self) -> float:
        return int(kernfs.read(f"{self._cpuacct}/cpuacct.usage")) / 1e9

    def close(self) -> None:
        for fd in (self._state_fd, self._peak_fd, self._watch_fd):
            if fd >= 0:
                os.close(fd)
        self._state_fd = self._peak_fd = self._watch_fd = -1

    def remove(self) -> None:
        self.close()
        for directory in self._directories:
            kernfs.remove(directory)
        self._tree.forget(self.name)
