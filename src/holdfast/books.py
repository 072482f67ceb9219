"""A session's books: its place in the store, its files on disk, its chain of receipts. They outlive every kernel.

All that ends a run goes through `settle` (in `settling`); what is here keeps the state that it leads to.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import anyio.to_thread
import msgspec

from holdfast import durable, manifest, versions
from holdfast.api import is_call
from holdfast.blobs.local import LocalBlobs
from holdfast.config import Limits, written_versions
from holdfast.errors import DiskRefused, HoldfastError, SessionHalted
from holdfast.journal import Journal
from holdfast.records import AnyRecord, Change, Lost, Planned, Settled, Verified, requests_sent
from holdfast.resources.restoring import not_kept, plan_restore, undo
from holdfast.resources.workspace import Workspace
from holdfast.signing import SigningKey
from holdfast.state import State, forgotten, with_names
from holdfast.store.connection import SyncFailed
from holdfast.store.rows import AnyWrite, Append, DropSession, PutLost, PutNames, PutSession, SessionRow
from holdfast.store.sqlite import Store

T = TypeVar("T")
Watcher = Callable[[Planned | Settled | Lost], None]
_log = logging.getLogger("holdfast.home")
_MOST_NAMED = 100
_MANY = 1_000
"""Files or changes; the event loop goes through fewer of them in about a millisecond."""
_LOOKED_BACK = 50
"""Runs, after a restart, among which those that sent something and came to nothing are sought."""
MOST_TOLD = 1_000
"""Requests that may have happened; the latest."""


class Books:
    """Guards what is durable of one session."""

    def __init__(self, journal: Journal, key: SigningKey, workspace: Workspace, *, row: SessionRow) -> None:
        self.session = row.id
        self.journal = journal
        self.key = key
        self.workspace = workspace
        self.blobs = LocalBlobs(workspace.path / "blobs")
        self.row = row
        self.state = State(session=row.id, generation=row.generation, version=row.version)
        self.losses: list[Lost] = []
        self.open: dict[str, list[AnyRecord]] = {}
        """The records of runs that are not settled."""
        self.executed: set[str] = set()
        """Of those, the runs whose code has ended: the journal hears of it together with what was verified."""
        self.recent: list[tuple[int, Sequence[Change]]] = []
        """What the latest versions changed in the files, oldest first: how to walk back."""
        self.files_version = 0
        """The version that changed files last."""
        self.oldest = 0
        """The earliest version whose files can be brought back."""
        self.manifests = [manifest.digest({})]
        """Of the version before the kept ones and of each of these, oldest first."""
        self.grown = False
        """There are more old contents than when `retention` looked last."""
        self.calls: list[str] | None = None
        """Runs whose answers are kept for a while (`retention`), oldest first; None: nobody has looked yet."""
        self.may_have_happened: list[str] = []
        """Requests that left in runs that were rolled back, since code was committed last."""
        self.halted: str = row.halted
        self.stopped: HoldfastError | None = None
        """Why nothing runs here until the session is opened again; or, if the disk was full, until it is not."""
        self.missing: list[str] = []
        """Committed files that were deleted on the host before the session was resumed: its next run names them."""
        self.watchers: list[Watcher] = []
        """Whoever wants to know of each run that begins, each that is settled, and each loss of memory."""

    async def load(self) -> None:
        """All of it from the store: after a restart of the host."""

        def read(store: Store) -> tuple[State, list[Lost], dict[str, list[AnyRecord]]]:
            files = store.files(self.session)
            state = State(
                session=self.session,
                generation=self.row.generation,
                version=self.row.version,
                files=files,
                names=store.names(self.session),
                head=self.row.head,
                receipts=self.row.receipts,
            )
            open_runs = {run: store.records(run) for _, run in store.unsettled(self.session)}
            return with_digest(state), store.losses(self.session), open_runs

        row: SessionRow | None = await self.journal.read(lambda store: store.session(self.session))
        self.row = row or self.row
        self.journal.count_from(self.session, self.row.journal_bytes)
        self.state, self.losses, self.open = await self.journal.read(read)
        self.files_version = await self.journal.read(lambda store: versions.last_changed(store, self.session))
        self.recent, self.oldest, self.manifests = await self.journal.read(self._walk_back)
        self.may_have_happened = await self.journal.read(self._sent_in_vain)

    @property
    def kept_versions(self) -> int:
        """Of those that changed files; the others cost nothing and are not counted. See `versions`."""
        return written_versions(self.row.settings) or Limits().versions

    def _walk_back(self, store: Store) -> tuple[list[tuple[int, Sequence[Change]]], int, list[str]]:
        """What the latest versions changed in the files, and where that leads: to the oldest version all of whose
        contents are kept. Between there and now some may lack one that was changed on the host. And the manifests
        of all, kept or not."""
        recent, files = list[tuple[int, Sequence[Change]]](), dict(self.state.files)
        oldest, far, manifests = self.files_version, 0, list[str]()
        for row, changes in versions.latest(store, self.session, most=self.kept_versions):
            recent.append((row.version, changes))
            manifests.append(row.manifest_sha256)
            files = undo(files, changes)
            if not not_kept(plan_restore(self.state.files, files), self.blobs):
                oldest, far = versions.last_changed(store, self.session, row.version - 1), len(recent)
        return recent[:far][::-1], oldest, [manifest.digest(files), *manifests[::-1]]

    def _sent_in_vain(self, store: Store) -> list[str]:
        """By the latest runs: those that came to nothing, up to one that did not."""
        found = list[str]()
        for run in store.runs(self.session, limit=_LOOKED_BACK, newest_first=True):
            records = store.records(run)
            if is_code_committed(records):
                break
            if records and isinstance(records[-1], Settled):  # of others it is known when they are settled
                found = [*requests_sent(records), *found]
        return found[-MOST_TOLD:]

    def count_sent(self, records: Sequence[AnyRecord]) -> None:
        """Of a run that is settled."""
        if is_code_committed(records):
            self.may_have_happened = []
        else:
            self.may_have_happened = [*self.may_have_happened, *requests_sent(records)][-MOST_TOLD:]

    async def reload(self) -> None:
        """After a write failed: what the journal has, and that memory was lost meanwhile, if it was."""
        unwritten = self.losses
        await self.load()
        with suppress(DiskRefused):  # the failure of a write that nobody waited for is told to the next: here
            await self.journal.append(PutSession(session=self.session, row=self.row))
        for lost in unwritten[len(self.losses) :]:
            self._raise_generation(lost)

    async def find_missing(self) -> None:
        """Look for all committed files: what nobody reads would be missed in silence."""
        self.missing = await anyio.to_thread.run_sync(lambda: self.workspace.intact.missing(self.state.files))
        if self.missing:
            _log.warning(
                "session %s: %d committed files are gone, the first is %s; `holdfast verify %s` says more",
                self.session, len(self.missing), self.missing[0], self.session,
            )  # fmt: skip

    def take_missing(self) -> list[str]:
        """Once; the names of some, if there are many."""
        missing, self.missing = self.missing, []
        return missing[:_MOST_NAMED]

    def note(self, *records: AnyRecord) -> list[Append]:
        """Remember records of this process's own runs; returns what writes them."""
        for record in records:
            self.open.setdefault(record.run, []).append(record)
            if isinstance(record, Planned):
                self.tell(record)
            elif isinstance(record, Settled):
                self._count_call(record.run)
        return [Append(session=self.session, record=record) for record in records]

    def _count_call(self, run: str) -> None:
        planned = self.open[run][0]
        if self.calls is not None and isinstance(planned, Planned) and is_call(planned.card.key):
            self.calls.append(run)

    def tell(self, news: Planned | Settled | Lost) -> None:
        for watcher in list(self.watchers):
            watcher(news)

    def row_for(self, state: State) -> SessionRow:
        return msgspec.structs.replace(
            self.row, generation=state.generation, version=state.version, ckpt=str(state.ckpt()), head=state.head,
            receipts=state.receipts, halted=self.halted, journal_bytes=self.journal.kept_bytes(self.session),
        )  # fmt: skip

    def register(self) -> None:
        """Make the session known; durable with the first run that is."""
        self.row = self.row_for(self.state)
        self.journal.append_nowait(PutSession(session=self.session, row=self.row))

    def adopt(self, state: State) -> None:
        """A settled run led here."""
        self.state, self.row = state, self.row_for(state)

    def begin(self) -> None:
        """The first kernel is up."""
        self.state = msgspec.structs.replace(self.state, generation=1)
        self.row = self.row_for(self.state)

    def remember(self, version: int, changes: Sequence[Change]) -> None:
        """So that one can walk back over this version, if it changed files."""
        if not versions.change_files(changes):
            return
        self.files_version = version
        self.recent.append((version, changes))
        self.manifests.append(self.state.manifest_sha256)
        self.grown = True

    def lose_memory(self, cause: str, *, run: str | None = None) -> Lost:
        """The generation rises: memory is no continuation of what it was."""
        state = self.state
        lost = Lost(
            at=time.time(), generation=state.generation + 1, cause=cause, run=run, names=sorted(state.live())[:10_000]
        )
        self._raise_generation(lost)
        return lost

    def _raise_generation(self, lost: Lost) -> None:
        self.losses.append(lost)
        gone = forgotten(self.state.names)
        state = with_names(self.state, bound={}, gone=gone)
        self.adopt(msgspec.structs.replace(state, generation=lost.generation))
        writes: list[AnyWrite] = [
            PutLost(session=self.session, lost=lost),
            PutSession(session=self.session, row=self.row),
        ]
        self.journal.append_nowait(*writes, *([PutNames(session=self.session, gone=gone)] if gone else []))
        self.tell(lost)

    def halt(self, error: HoldfastError) -> None:
        """Nothing more runs here. What is damaged stays so, until somebody has looked; a disk that failed left all
        behind that was written down, and whoever opens the session next settles it."""
        if not isinstance(error, SessionHalted):
            self.stopped = error
            return
        self.halted = self.halted or error.message
        self.row = msgspec.structs.replace(self.row, halted=self.halted)
        self.journal.append_nowait(PutSession(session=self.session, row=self.row))

    async def recall(self, run: str) -> list[AnyRecord]:
        """A run's records as the journal has them, after a write of some failed; what lingers is written first."""
        await self.journal.wait_tried(self.session)
        records = await self.read(lambda store: store.records(run))
        if records and not isinstance(records[-1], Settled):
            self.open[run] = records
        else:
            self.open.pop(run, None)
        return records

    async def may_be_verified(self, run: str, error: BaseException) -> bool:
        """Whether a run that failed with this is to be published. Where the sync failed of the commit that says so,
        nobody knows: all stays as it is, and whoever opens the session next finds it there or not."""
        if not any(isinstance(record, Verified) for record in self.open.get(run, ())):
            return False
        if isinstance(error, SyncFailed):
            return True
        return any(isinstance(record, Verified) for record in await self.recall(run))

    def staged(self) -> set[str]:
        """Layers that verified runs have still to be published from."""
        noted = (record for records in self.open.values() for record in records)
        return {record.stage for record in noted if isinstance(record, Verified)}

    def refuse_if_halted(self) -> None:
        if self.stopped is not None:
            raise self.stopped
        if self.halted:
            raise SessionHalted(
                f"session {self.session} is stopped: {self.halted}",
                hint=f"`holdfast verify {self.session}` names what is wrong; its files are as they are",
            )

    def why_full(self, limits: Limits) -> str:
        """Whether the journal holds as much of this session as it may, in words; empty: it does not. A user's own
        directory is his to fill."""
        held, limit = self.journal.kept_bytes(self.session), limits.journal_bytes
        if held <= limit or self.workspace.shared is not None:
            return ""
        return f"the journal holds {held >> 20:,} MiB of this session's runs, and its limit is {limit >> 20:,} MiB"

    async def read(self, query: Callable[[Store], T]) -> T:
        return await self.journal.read(query)

    async def out_of_the_loop(self, work: Callable[[], T], *, size: int) -> T:
        """Work on `size` files or changes: a few are quicker done here; many would keep every other session waiting."""
        return await self.in_thread(work) if size > _MANY else work()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Work on the disk, which takes its time. Raises `DiskFailed` where the disk fails; damage that the work finds
        stops the session."""
        try:
            with durable.ours("work on the session's files"):
                return await anyio.to_thread.run_sync(work)
        except SessionHalted as error:
            self.halt(error)
            raise


async def delete(journal: Journal, workspace: Workspace) -> None:
    """Delete a session: its files first, which may make the room that the journal needs."""
    await anyio.to_thread.run_sync(workspace.remove)
    await journal.append(DropSession(session=workspace.path.name))
    await anyio.to_thread.run_sync(workspace.forget_removal)


def is_code_committed(records: Sequence[AnyRecord]) -> bool:
    """Whether these are of code that ran and was kept; what the host does to files itself sends nothing."""
    planned = next((record for record in records if isinstance(record, Planned)), None)
    return (
        planned is not None
        and planned.kind in ("cell", "command")
        and any(isinstance(record, Settled) and record.status in ("committed", "kept") for record in records)
    )


def with_digest(state: State) -> State:
    lines = manifest.Lines.of(state.files)
    return msgspec.structs.replace(state, lines=lines, manifest_sha256=lines.sha256())
