"""Limits that no cgroup keeps: looked at while a run goes on, and ended by a kill when they are passed."""

import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import anyio.to_thread

from holdfast import durable
from holdfast.config import Limits
from holdfast.errors import DiskFailed, DiskLimit, disk_failed
from holdfast.kernel.outcomes import Stop
from holdfast.resources.measuring import Restless, Usage, measure, plus
from holdfast.resources.workspace import Workspace
from holdfast.sandbox import procfs
from holdfast.sandbox.cgroups import Cgroup

_LOOK_AGAIN_BYTES = 32 << 20
_LOOK_AGAIN_FILES = 5_000
_WROTE_BYTES = 1 << 20
_BUFFERS_BYTES = 64 << 10
"""Python's files write 8 KiB, or a block of their file system, at a time."""
_WROTE_FILES = 100
_LOOK_ANYWAY_S, _OF_ITS_TIME = 1.0, 50
"""As long as anybody writes or deletes: every second, unless a look takes more than one part in fifty of that."""
_BETWEEN_RUNS = 10
"""After each run that wrote a byte; but a walk of a large disk takes longer than such a run, and others wait for it."""
_CROWD = 16
"""More processes than these are held still for every look. Each that forks at the time keeps whoever lists its mappings
waiting, and hundreds that fork without end kept a look, and with it the deadline of their run, waiting for minutes."""
Still = Callable[[], AbstractAsyncContextManager[None]]
"""Nothing of the session moves meanwhile, if that can be had without waiting for long."""
MakeRoom = Callable[[], Awaitable[bool]]
"""Gives up what is only kept to go back to; False if there is nothing of the kind."""


class DiskGuard:
    """Keeps a session's disk within its limits.

    Walking the workspace at every tick would cost more than most cells. The file system's own counters are free to
    read: when they have fallen by a noticeable amount the workspace is measured, and in any case between two runs. What
    others delete meanwhile hides what is written here: as long as the counters move it is measured from time to time,
    and at the end what lies in the run's layer counts, whatever they say. So a session can pass its limit by about what
    it writes between two looks. Whoever does is killed, and may clean up in the next run; whoever goes on instead to
    twice the limit has no next run.

    Who moves things about while they are measured is not counted right: in all but the looks in between the session is
    held still. What cannot be counted at all ends the run, and the next ones too, until the kernel and the snapshot are
    gone that hold it.
    """

    def __init__(
        self, workspace: Workspace, pids: Callable[[], list[int]], limits: Limits, *, make_room: MakeRoom, still: Still
    ) -> None:
        self._make_room = make_room
        self._still = still
        self._workspace = workspace
        self._pids = pids
        self._limits = limits
        self._seen: tuple[int, int] | None = None
        self._usage = Usage(size_bytes=0, files=0)
        self._is_countable = True
        self._look_at = 0.0
        """When to look, and to hold the session still for it, if anything was written or deleted."""
        self._look_anyway_at = 0.0
        """The same between two runs, as long as there is plenty of room."""

    @durable.ours("looking how much room is left")
    def has_no_room(self) -> bool:
        """Whether the host's disk is full by now."""
        return is_full(self._workspace.path)

    def shortage(self) -> DiskFailed | None:
        """What the host's disk refuses, in the state that it is in now: less room than the session was promised, or
        any write. To be asked when code has failed, before what it wrote is taken back."""
        try:
            self._workspace.try_writing()
        except DiskFailed as error:
            cause = error.__cause__
            return disk_failed("a run's write", cause) if isinstance(cause, OSError) else error
        status = os.statvfs(self._workspace.path)
        few_bytes = status.f_bavail * status.f_frsize < self.left_bytes
        few_files = status.f_files > 0 and status.f_favail < self._limits.disk_files - self._usage.files
        if few_bytes or few_files:
            return disk_failed("a run's write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return None

    async def __call__(self) -> Stop | None:
        """The guard: looked at while a run goes on."""
        free_bytes, free_files = self._free()
        seen_bytes, seen_files = self._seen or (free_bytes, free_files)
        near = seen_bytes - free_bytes < min(_LOOK_AGAIN_BYTES, self._limits.disk_bytes // 4)
        near &= seen_files - free_files < min(_LOOK_AGAIN_FILES, self._limits.disk_files // 4)
        is_due = self._seen != (free_bytes, free_files) and time.monotonic() >= self._look_at
        if near and not is_due:
            return None
        return await self._measure(still=is_due or len(self._pids()) > _CROWD, goes_on=True)

    async def at_end(self, stage: Path) -> Stop | None:
        """When a run is over: it may have been quicker than the ticks."""
        return await self._measure() if self.has_written() or await self._holds_much(stage) else None

    async def _holds_much(self, stage: Path) -> bool:
        """What others delete meanwhile hides from the counters what the run wrote."""
        try:
            staged = await anyio.to_thread.run_sync(measure, [stage])
        except Restless:
            return True
        wrote = staged.written_bytes >= _WROTE_BYTES or staged.files >= _WROTE_FILES
        return wrote or bool(self._excess(plus(self._usage, staged)))

    def _excess(self, usage: Usage, *, before: Usage | None = None) -> str:
        """Which limit is passed, in words; empty: none. What was beyond its limit `before` may stay as it is."""
        limits, before = self._limits, before or Usage(size_bytes=0, files=0)
        if usage.size_bytes > max(limits.disk_bytes, before.size_bytes):
            return _too_large(usage, limits.disk_bytes)
        if usage.files > max(limits.disk_files, before.files):
            return f"the session holds {usage.files:,} files, and its limit is {limits.disk_files:,}"
        if usage.list_bytes > max(limits.list_bytes, before.list_bytes):
            return (
                f"the session's {usage.files:,} files have paths so long that a list of them takes "
                f"{usage.list_bytes >> 10:,} KiB, and its limit is {limits.list_bytes >> 10:,} KiB"
            )
        return ""

    def refuse_what_passes(self, stage: Path) -> None:
        """For files that come from outside. Raises DiskLimit if with them the session passes a limit."""
        if excess := self._excess(plus(self._usage, measure([stage])), before=self._usage):
            raise DiskLimit(excess, hint="remove files first, or open a session with a larger disk=…")

    def has_written(self) -> bool:
        """Whether there is noticeably less room than at the last look, or that one could not count."""
        if not self._is_countable:
            return True
        free_bytes, free_files = self._free()
        seen_bytes, seen_files = self._seen or (free_bytes + _WROTE_BYTES, free_files)
        return seen_bytes - free_bytes >= _WROTE_BYTES or seen_files - free_files >= _WROTE_FILES

    async def take_stock(self) -> None:
        """In the caller's thinking time: what many small runs wrote adds up."""
        if self._seen != self._free() and (time.monotonic() >= self._look_anyway_at or self._is_half_full()):
            await self._measure()

    def _is_half_full(self) -> bool:
        return bool(self._excess(plus(self._usage, self._usage)))

    @property
    def left_bytes(self) -> int:
        """What may still be written, as of the last look."""
        return max(0, self._limits.disk_bytes - self._usage.size_bytes)

    def refuse_if_hopeless(self) -> None:
        usage, limits = self._usage, self._limits
        if (
            usage.size_bytes > 2 * limits.disk_bytes
            or usage.files > 2 * limits.disk_files
            or usage.list_bytes > 2 * limits.list_bytes
        ):
            raise DiskLimit(
                f"the session's disk holds more than twice what it may: its limit is {limits.disk_bytes >> 20:,} MiB, "
                f"{limits.disk_files:,} files, and {limits.list_bytes >> 10:,} KiB for a list of them",
                hint="close the session; open one with a larger disk=…",
            )

    async def _measure(self, *, still: bool = True, goes_on: bool = False) -> Stop | None:
        self._seen = self._free()
        before = self._usage
        try:
            usage = await self._look(still=still)
            if usage.size_bytes > self._limits.disk_bytes and await self._make_room():
                usage = await self._look(still=still)
        except procfs.TooLong:
            with suppress(Restless):
                await self._look(of_processes=False)
            return _stop(
                "the session maps files under so many or so long names that what they hold cannot be counted (if they "
                "were mapped by an earlier run, reset() lets go of them)"
            )
        except Restless:  # it could not be held still at once; at its end the run answers for it
            stop = _stop("the session moves its directories about so that what they hold cannot be counted")
            return None if goes_on else stop
        excess = self._excess(usage, before=before)
        return _stop(excess) if excess else None

    async def _look(self, *, still: bool = True, of_processes: bool = True) -> Usage:
        began = time.monotonic()
        self._is_countable = False
        pids = self._pids() if of_processes else []
        self._usage = await self._count(pids, still=still)
        now = time.monotonic()
        self._look_anyway_at = now + _BETWEEN_RUNS * (now - began)
        if still:
            self._look_at = now + max(_LOOK_ANYWAY_S, _OF_ITS_TIME * (now - began))
        self._is_countable = of_processes
        return self._usage

    async def _count(self, pids: list[int], *, still: bool) -> Usage:
        if not still:
            with suppress(Restless):
                return await anyio.to_thread.run_sync(self._workspace.usage, pids)
        async with self._still():
            return await anyio.to_thread.run_sync(self._workspace.usage, pids)

    @durable.ours("looking how much room is left")
    def _free(self) -> tuple[int, int]:
        status = os.statvfs(self._workspace.path)
        return status.f_bfree * status.f_frsize, status.f_ffree


class MemoryWatchdog:
    """Stands in for the hard cap where there is no cgroup. A burst between two samples can pass it."""

    def __init__(self, cgroup: Cgroup, limits: Limits, *, make_room: MakeRoom) -> None:
        self._make_room = make_room
        self._cgroup = cgroup
        self._cap_mib = limits.memory_bytes >> 20

    async def __call__(self) -> Stop | None:
        if not self._cgroup.over_cap() or (await self._make_room() and not self._cgroup.over_cap()):
            return None
        held = self._cgroup.memory_peak_bytes() >> 20
        message = f"the run needed more than its memory cap of {self._cap_mib} MiB (the watchdog saw {held} MiB)"
        return Stop(reason="out_of_memory", message=message, at_once=True)


def is_full(directory: Path | str) -> bool:
    """Whether a file system has so little room that a file's buffers may have found none."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize < _BUFFERS_BYTES


def _too_large(usage: Usage, limit_bytes: int) -> str:
    held, limit, written = usage.size_bytes >> 20, limit_bytes >> 20, usage.written_bytes >> 20
    if usage.written_bytes > limit_bytes:
        return f"the session's disk holds {held:,} MiB, and its limit is {limit:,} MiB"
    return (
        f"the session's files have an apparent size of {held:,} MiB, of which {written:,} MiB are written and the rest "
        f"are holes, and its limit is {limit:,} MiB: holes count, as the host hashes them too"
    )


def _stop(message: str) -> Stop:
    return Stop(reason="disk_limit", message=message, at_once=True)
