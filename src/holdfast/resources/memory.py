"""A kernel's memory: the snapshot it can fall back to, and what happens when it nears its cap.

The cap binds the kernel's *own* memory. While a snapshot sleeps, every page that the kernel rewrites exists twice;
those copies are nobody's fault and are paid from a reserve. How large they are is known exactly: they are the pages
that only the snapshot maps any more. Pages of files are not among them, though a snapshot may be the last to map one:
nobody rewrote them, and a guest could map what it likes, have a snapshot taken, and unmap it again, to seem smaller
than it is. Nor are those of the zygote's image (`_image.c`), which is a file too.

Past nine tenths of the cap the cell gets a MemoryError, once, and a little room so that it gets as far as raising it.
At the cap it is held up (v1: whoever faults waits; v2: is slowed down) and looked at:

    own memory below the cap   the copies are to blame: room from the reserve; when that is used up, the snapshot is
                               dropped and the run goes on unprotected
    above it                   killed; the snapshot takes its place

Snapshots of earlier versions (`kept`) go before any of that: past nine tenths of the cap, one after the other.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio.to_thread

from holdfast.kernel import wire
from holdfast.kernel.client import Kernel
from holdfast.kernel.outcomes import Stop
from holdfast.resources.kept import Kept
from holdfast.sandbox import procfs
from holdfast.sandbox.cgroups import Cgroup
from holdfast.strays import kill_left

_SNAPSHOT_S = 5.0
_WAKE_S = 10.0
_NAMES_S = 10.0
_HEED_S, _HEED_CPU_S = 0.5, 0.1
"""How long a warned cell has to raise before a second look counts against it, and how much of the processor: where many
wait for one, it may not have had its turn yet."""
_HEED_AT_MOST_S = 10.0
"""Whoever takes so long waits for something else."""
_DROPPED = "memory ran short, and the snapshot had to make room"


class Protection:
    """Guards one kernel's snapshot and its cap."""

    def __init__(self, kernel: Kernel, cgroup: Cgroup, *, cap_bytes: int, reserve_bytes: int, undo: int = 0) -> None:
        self.kept = Kept(kernel, cgroup, undo=undo, cap_bytes=cap_bytes)
        self._unprotected: str | None = "the kernel is new: there is nothing to protect yet"
        self._kernel = kernel
        self._cgroup = cgroup
        self._cap = cap_bytes
        self._ceiling = cap_bytes + reserve_bytes
        self._soft = cap_bytes // 10 * 9
        self._slack = max(16 << 20, cap_bytes // 16)
        watch = cgroup.watch_memory(soft_bytes=self._soft, cap_bytes=cap_bytes)
        self._resting = self._allowed = watch.resting_bytes if watch else cap_bytes
        self._warned: tuple[float, float] | None = None
        """When, and what of the processor the session had used by then."""
        self._had_grace = False
        self.pinned = False
        """The snapshot is never given up: under pressure the run dies instead."""
        self._dying = 0
        """A child that was killed for its size; its memory is on its way back."""
        if watch is not None:
            kernel.watch_memory(watch)

    @property
    def unprotected(self) -> str | None:
        """Why there is no snapshot to fall back to."""
        return self._unprotected or (None if self._kernel.has_snapshot() else "the snapshot was killed")

    @property
    def keep(self) -> set[int]:
        """Processes that are no strays."""
        snapshot = self._kernel.snapshot
        return {self._kernel.pid, self._kernel.init_pid} | ({snapshot.pid} if snapshot else set()) | self.kept.pids

    async def renew(self, version: int) -> None:
        """Take a snapshot of the kernel as it is now, at this version, in place of the one before."""
        await self.kept.make_way(version)
        self._unprotected = await self._kernel.take_snapshot(_SNAPSHOT_S)
        await self.kept.born(version)
        self._warned, self._had_grace = None, False
        with suppress(OSError):  # EBUSY: still above it; the next run begins with what it has
            self._allow(self._resting)

    async def roll_back(self, between: Callable[[], Awaitable[None]]) -> wire.Woken | None:
        """Put the snapshot in the kernel's place. None: there is none, or it did not come up; memory is lost.

        `between` is done when the one is dead and the other has not yet woken.
        """
        if not self._kernel.has_snapshot():
            return None
        self._kernel.kill()
        keep = self.keep - {self._kernel.pid}
        await kill_left(self._cgroup, keep=keep)
        await between()
        self.kept.wakes(self._kernel.snapshot)
        woken = await self._kernel.wake_snapshot(_WAKE_S)
        if woken is None:
            self._unprotected = "the snapshot did not wake"
        return woken

    async def go_back(self, version: int, between: Callable[[], Awaitable[None]]) -> wire.Woken | None:
        """Put the snapshot of an earlier version in the kernel's place; the present one sleeps on. None: as above."""
        self._kernel.kill()  # before the thaw: nothing of the user's runs any more
        self._cgroup.thaw()
        keep = self.keep - {self._kernel.pid}
        await kill_left(self._cgroup, keep=keep)
        await self.kept.put_to_bed()
        snapshot = self.kept.find(version)
        if snapshot is None:
            return None
        await between()
        self.kept.wakes(snapshot)
        return await self._kernel.wake_snapshot(_WAKE_S, kept=snapshot)

    async def __call__(self) -> Stop | None:
        """The guard: looked at when memory is short, and at every tick."""
        held_up = self._cgroup.is_held_up()
        if (self._cgroup.memory_pinned_bytes() < self._soft and not held_up) or self._dying in self._cgroup.pids():
            return None
        now = self._cgroup.memory_now_bytes()
        while self.kept.pids and self._cgroup.memory_pinned_bytes() >= self._soft:
            await self.kept.let_go()
        # In this order: what is copied between the two looks counts for the cell, and never against it.
        pinned = self._cgroup.memory_pinned_bytes()
        copies = await self._copies()
        own = pinned - copies
        hog = self._larger_child() if own >= self._soft else None
        if own >= self._soft and hog is None and self._warned is None:
            self._warn(now)
        if own >= self._cap and hog is not None:
            self._dying = hog
            self._cgroup.kill_one(hog)
            return None
        if not held_up:
            return self._out_of_memory(own) if own >= self._cap and self._did_not_heed() else None
        # A process that is held up cannot raise anything: whoever is above the cap gets room to do so, once.
        may_go_on = own < self._cap or not self._had_grace
        self._had_grace = self._had_grace or own >= self._cap
        return None if may_go_on and await self._make_room(now, copies) else self._out_of_memory(own)

    def _warn(self, now: int) -> None:
        """With some room before: a thread that waits for a lock takes its signal at once and writes it to its stack. At
        the cap a page of it that the snapshot shares cannot be copied, and the kernel would die of SIGSEGV."""
        self._warned = time.monotonic(), self._cgroup.cpu_seconds()
        self._allow(max(self._allowed, min(max(self._cap, now) + self._slack, self._ceiling)))
        self._kernel.ask_location()  # once it is held up it cannot answer
        self._kernel.warn_of_memory()

    def _did_not_heed(self) -> bool:
        if self._warned is None:
            return False
        wall_s, cpu_s = time.monotonic() - self._warned[0], self._cgroup.cpu_seconds() - self._warned[1]
        return wall_s > (_HEED_S if cpu_s > _HEED_CPU_S else _HEED_AT_MOST_S)

    def _larger_child(self) -> int | None:
        """Whoever took more than the kernel itself goes first, as the system's own choice would be."""
        sizes = {pid: anonymous_bytes(pid) for pid in self._cgroup.pids() if pid not in self.keep}
        hog = max(sizes, key=lambda pid: sizes[pid], default=None)
        return None if hog is None or sizes[hog] <= anonymous_bytes(self._kernel.pid) else hog

    def _out_of_memory(self, own: int) -> Stop:
        held, cap = own >> 20, self._cap >> 20
        message = f"the run needed more than its memory cap of {cap} MiB (it held {held} MiB and asked for more)"
        return Stop(reason="out_of_memory", message=message, at_once=True)

    async def _copies(self) -> int:
        snapshot = self._kernel.snapshot
        return 0 if snapshot is None else await anyio.to_thread.run_sync(private_bytes, snapshot.pid)

    async def _make_room(self, now: int, copies: int) -> bool:
        """From the reserve; and when that is used up, by giving up the snapshot."""
        wanted = max(self._cap, now) + self._slack
        if wanted <= self._ceiling:
            self._allow(wanted)
        elif await self.kept.let_go_of_all():
            pass
        elif self._kernel.snapshot is not None and copies > 0 and not self.pinned:
            await self._kernel.drop_snapshot()
            self._unprotected = _DROPPED
        else:
            return False
        return True

    def _allow(self, memory_bytes: int) -> None:
        if memory_bytes != self._allowed:
            self._cgroup.allow(memory_bytes)
            self._allowed = memory_bytes


async def names_of(kernel: Kernel) -> dict[str, wire.Name]:
    """The names in a kernel's memory; none if it does not answer."""
    with anyio.move_on_after(_NAMES_S):
        await kernel.send(wire.ListNames(bare=True))
        named = await kernel.expect(wire.Named)
        return named.names if named else {}
    return {}


def anonymous_bytes(pid: int) -> int:
    """Memory that belongs to no file; 0 if the process is gone."""
    return procfs.sizes_bytes(f"/proc/{pid}/status", b"RssAnon", b"RssShmem")


def private_bytes(pid: int) -> int:
    """Memory that only this process maps, and that is no file's; 0 if it is gone, or nobody can say."""
    with suppress(PermissionError):
        of_files = procfs.alone_in_file_bytes(pid)  # first: what a cell unmaps meanwhile does not count against it
        private = procfs.sizes_bytes(f"/proc/{pid}/smaps_rollup", b"Private_Clean", b"Private_Dirty")
        return 0 if of_files is None else max(0, private - of_files)
    return 0
