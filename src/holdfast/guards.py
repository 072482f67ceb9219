"""Limits that no cgroup keeps: looked at while a run goes on, and ended by a kill when they are passed."""

import os
from collections.abc import Callable

import anyio.to_thread

from holdfast.config import Limits
from holdfast.kernel.conduct import Stop
from holdfast.resources.workspace import Workspace, unlinked_bytes
from holdfast.sandbox.cgroups import Cgroup

_LOOK_AGAIN_BYTES = 32 << 20
_LOOK_AGAIN_FILES = 5_000


class DiskGuard:
    """Keeps a session's disk within its limits.

    Walking the workspace at every tick would cost more than most cells. The file system's own counters are free to
    read: only when they have fallen by a noticeable amount is the workspace measured, so a session can pass its
    limit by about what it writes between two ticks.
    """

    def __init__(self, workspace: Workspace, pids: Callable[[], list[int]], limits: Limits) -> None:
        self._workspace = workspace
        self._pids = pids
        self._limits = limits
        self._seen = (0, 0)

    async def __call__(self) -> Stop | None:
        free_bytes, free_files = self._free()
        self._seen = max(self._seen[0], free_bytes), max(self._seen[1], free_files)
        if (
            self._seen[0] - free_bytes < min(_LOOK_AGAIN_BYTES, self._limits.disk_bytes // 4)
            and self._seen[1] - free_files < min(_LOOK_AGAIN_FILES, self._limits.disk_files // 4)
        ):  # fmt: skip
            return None
        self._seen = free_bytes, free_files
        return await anyio.to_thread.run_sync(self.measure)

    def measure(self) -> Stop | None:
        usage = self._workspace.usage()
        size = usage.size_bytes + unlinked_bytes(self._pids())
        if size > self._limits.disk_bytes:
            used, limit = size >> 20, self._limits.disk_bytes >> 20
            return _stop(f"the session's disk holds {used:,} MiB, and its limit is {limit:,} MiB")
        if usage.files > self._limits.disk_files:
            return _stop(f"the session holds {usage.files:,} files, and its limit is {self._limits.disk_files:,}")
        return None

    def _free(self) -> tuple[int, int]:
        status = os.statvfs(self._workspace.path)
        return status.f_bfree * status.f_frsize, status.f_ffree


class MemoryWatchdog:
    """Stands in for the hard cap where there is no cgroup. A burst between two samples can pass it."""

    def __init__(self, cgroup: Cgroup, limits: Limits) -> None:
        self._cgroup = cgroup
        self._cap_mib = limits.memory_bytes >> 20

    async def __call__(self) -> Stop | None:
        if not self._cgroup.over_cap():
            return None
        held = self._cgroup.memory_peak_bytes() >> 20
        message = f"the run needed more than its memory cap of {self._cap_mib} MiB (the watchdog saw {held} MiB)"
        return Stop(reason="out_of_memory", message=message, at_once=True)


def _stop(message: str) -> Stop:
    return Stop(reason="killed", message=message, at_once=True)
