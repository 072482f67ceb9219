"""Snapshots of earlier versions, kept asleep so that a session can go back to them (`Session(undo=…)`).

Each sleeper has the memory of one version, or of several: a kernel that was woken and put to rest again has the memory
of the version it comes from, and of the one that it is now. They are a courtesy, and whoever works goes first: they
sleep only while the whole session fits in three quarters of its cap, and under pressure, of memory or of disk, they are
the first to go, the oldest before the others.
"""

from holdfast.kernel.client import Kernel
from holdfast.kernel.happenings import Snapshot
from holdfast.sandbox.cgroups import Cgroup

_MOST_REASONS = 200
NO_ROOM = "its snapshot had to make room: memory or disk ran short"
_KILLED = "its snapshot was killed"
_NEVER = "no snapshot of it was taken"


class Kept:
    """Guards the snapshots of one kernel's earlier versions."""

    def __init__(self, kernel: Kernel, cgroup: Cgroup, *, undo: int, cap_bytes: int) -> None:
        self.undo = undo
        self.woken: frozenset[int] = frozenset()
        """The versions whose memory the kernel has, since it woke and until it runs anything."""
        self._kernel = kernel
        self._cgroup = cgroup
        self._level = cap_bytes // 4 * 3
        self._of: dict[Snapshot, frozenset[int]] = {}
        """The versions whose memory a snapshot is: of those in bed, and of the present one."""
        self._gone: dict[int, str] = {}
        """Versions whose memory cannot come back, the latest of them, and why."""

    @property
    def pids(self) -> set[int]:
        return {snapshot.pid for snapshot in self._kernel.beds.sleepers()}

    def versions(self) -> set[int]:
        """Those whose memory can be woken."""
        return {version for snapshot, of in self._of.items() if self._kernel.sleeps(snapshot) for version in of}

    def outlasting(self) -> set[int]:
        """Those of them that are there still when one version more is kept: the oldest may have to leave."""
        asleep = self._kernel.beds.sleepers()
        leaving = asleep[: max(0, len(asleep) + 1 - self.undo)]
        return self.versions() - {version for snapshot in leaving for version in self._of.get(snapshot, ())}

    def find(self, version: int) -> Snapshot | None:
        alive = (snapshot for snapshot, of in self._of.items() if version in of and self._kernel.sleeps(snapshot))
        return next(alive, None)

    def why_not(self, version: int) -> str:
        self._bury_the_killed()
        return self._gone.get(version, _NEVER)

    async def make_way(self, version: int) -> None:
        """Before a snapshot of this version is born: the present one is put to bed, unless it is the same again."""
        present = self._kernel.snapshot
        before = self._of.get(present, frozenset()) if present else frozenset()
        if not self.undo or present is None:
            return
        if not before or version in before:
            self.woken |= before
            self._of.pop(present, None)
            return
        await self.put_to_bed()
        while len(self._kernel.beds.sleepers()) > self.undo:
            await self.let_go(f"only the last {self.undo} versions are kept (undo={self.undo})")

    async def put_to_bed(self) -> None:
        present = self._kernel.snapshot
        if present is not None and not await self._kernel.put_to_bed():
            self._lose(present, _KILLED)

    async def born(self, version: int) -> None:
        """The present snapshot is of this version."""
        same, self.woken = self.woken, frozenset()
        if self.undo and self._kernel.snapshot is not None:
            self._of[self._kernel.snapshot] = same | {version}
            self._bury_the_killed()
            while self.pids and self._cgroup.memory_pinned_bytes() > self._level:
                await self.let_go()

    def wakes(self, snapshot: Snapshot | None) -> None:
        """It is the kernel now."""
        self.woken = self._of.pop(snapshot, frozenset()) if snapshot else frozenset()

    async def let_go(self, reason: str = NO_ROOM) -> bool:
        """Give up the oldest, whose memory is free when this returns. False: there is none."""
        for oldest in self._kernel.beds.sleepers():
            await self._kernel.beds.bury(oldest)
            self._lose(oldest, reason)
            return True
        return False

    async def let_go_of_all(self) -> bool:
        had_any = bool(self.pids)
        while await self.let_go():
            pass
        return had_any

    def _bury_the_killed(self) -> None:
        for snapshot in [snapshot for snapshot in self._of if not self._kernel.sleeps(snapshot)]:
            self._lose(snapshot, _KILLED)

    def _lose(self, snapshot: Snapshot, reason: str) -> None:
        self._gone |= dict.fromkeys(self._of.pop(snapshot, frozenset()), reason)
        while len(self._gone) > _MOST_REASONS:
            del self._gone[next(iter(self._gone))]
