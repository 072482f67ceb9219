"""A home is opened: by whoever becomes its owner, for long (`open_service`) or for a moment.

1. The lock is ours: whatever is there belongs to an owner that is gone.
2. What still runs of it is killed (`strays.sweep`).
3. What it left unsettled is settled, by the journal alone; what it left behind is removed. A journal that lost commits
   settles nothing: the home is not served until the user says so (`accept_loss`).
4. The keeper starts.
"""

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from holdfast import durable, evidence, strays, underway, verify
from holdfast.books import Books, delete
from holdfast.config import Settings
from holdfast.errors import DiskFailed, FilesLost, HoldfastError, JournalLost, SandboxUnavailable, SessionHalted
from holdfast.home import Home, acquire, acquire_shared, is_session_id, signing_key
from holdfast.journal import Journal
from holdfast.nodes.local import LocalNode
from holdfast.records import Settled
from holdfast.repair import Repair, repair
from holdfast.resources.workspace import MOVED, remove_tree
from holdfast.retention import forget_manifests
from holdfast.sandbox import cgroups
from holdfast.service import Service
from holdfast.settling import settle_open
from holdfast.signing import SigningKey
from holdfast.store import accidents
from holdfast.store.rows import DropSession, PutSession, SessionRow
from holdfast.store.sqlite import Store
from holdfast.verify import missing_manifests

_log = logging.getLogger("holdfast.home")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


async def open_service(settings: Settings) -> Service:
    """Own a home, settle what a killed owner left unsettled, sweep what it left behind, and start the keeper."""
    home = _acquire(settings)
    journal: Journal | None = None
    try:
        tree = cgroups.find(home.id, memory_cap=settings.memory_cap)
        await strays.sweep(tree)
        key = await anyio.to_thread.run_sync(signing_key, home.parent)
        journal = await anyio.to_thread.run_sync(_open_journal, home)
        await _settle_all(home, journal, key)
        node = LocalNode(home, tree)
        await node.start()
    except BaseException as error:
        if journal is not None:
            await journal.close()
        home.release()
        if isinstance(error, cgroups.CgroupUnavailable):
            raise SandboxUnavailable(error.reason, hint=error.remedy) from error
        raise
    return Service(home, node, journal, key)


async def settle_shared(settings: Settings) -> dict[str, str]:
    """Finish what a killed owner of a shared directory left, and nothing else. Returns how each run that had not ended
    has ended; one that could not be settled is `unsettled`, or `halted` if it cannot be at all."""
    async with _settling(settings) as (home, journal, key):
        runs = await journal.read(lambda store: store.unsettled())
        await _settle_all(home, journal, key)
        ended = await journal.read(lambda store: {run: _end_of(store, session, run) for session, run in runs})
        if home.shared is not None and "unsettled" not in ended.values():
            underway.leave(home.parent, home.shared)  # while it is ours: the next entry is of a job that lives
        return ended


async def repair_home(settings: Settings, session: str | None = None) -> list[Repair]:
    """Own a home for a moment, settle what a killed owner left, and repair one session or all."""
    async with _settling(settings) as (home, journal, key):
        await _settle_all(home, journal, key, say=False)
        await journal.close()
        with closing(Store(home.journal, read_only=True)) as store:
            rows = [row.id for row in store.sessions() if session in (None, row.id)]
            return [repair(store, each, home.path, public=key.public, shared=home.shared) for each in rows]


@asynccontextmanager
async def _settling(settings: Settings) -> AsyncIterator[tuple[Home, Journal, SigningKey]]:
    """A home that is ours for a moment, without a keeper; nothing of its last owner runs any more."""
    with _owned(settings) as home:
        with suppress(cgroups.CgroupUnavailable):  # then nothing of it can be left
            tree = cgroups.find(home.id, memory_cap=settings.memory_cap)
            await strays.sweep(tree)
            await anyio.to_thread.run_sync(tree.remove)
        key = await anyio.to_thread.run_sync(signing_key, home.parent)
        async with _closing(await anyio.to_thread.run_sync(_open_journal, home)) as journal:
            yield home, journal, key


def _end_of(store: Store, session: str, run: str) -> str:
    for record in store.records(run):
        if isinstance(record, Settled):
            return record.status
    row = store.session(session)
    return "halted" if row is not None and row.halted else "unsettled"


async def drop_kept(settings: Settings, session_id: str) -> None:
    """Delete a kept session's files and books where nobody owns the home; nothing else is touched."""
    with _owned(settings) as home:
        async with _closing(await anyio.to_thread.run_sync(_open_journal, home)) as journal:
            await delete(journal, home.workspace(session_id))


async def accept_loss(settings: Settings) -> list[str]:
    """Go on with a home whose journal is lost, with what is there. Returns what was done, in sentences. No file of a
    session is removed: sessions that the journal does not know are in `lost+found`, and one that is not what its
    receipts say is stopped."""
    with _owned(settings) as home:
        key = await anyio.to_thread.run_sync(signing_key, home.parent)
        told = await anyio.to_thread.run_sync(_accept_journal, home)
        async with _closing(Journal(home.journal)) as journal:
            rows = await journal.read(lambda store: store.sessions())
            problems = await journal.read(lambda store: _problems(store, home, key, rows if told else []))
            for row, problem in problems:
                halted = msgspec.structs.replace(row, halted=f"the journal had lost commits: {problem}")
                await journal.append(PutSession(session=row.id, row=halted))
                told.append(f"session {row.id} is stopped: {problem}. Its files are as they were")
            return told + await anyio.to_thread.run_sync(_sweep, home, {row.id for row in rows})


def _accept_journal(home: Home) -> list[str]:
    """The journal that is there from now on counts; one that cannot be read is set aside, and another begins."""
    why = _what_is_lost(home)
    if not why:
        return []
    accidents.seen_path(home.journal).unlink(missing_ok=True)
    if home.journal.exists() and not _what_is_lost(home):
        return [f"{why}. It counts as it is, from now on"]
    for file in accidents.files_of(home.journal):
        if file.exists():
            _set_aside(home, file)
    return [f"{why}. A new one begins"]


def _what_is_lost(home: Home) -> str:
    try:
        _refuse_younger_journal(home)
        Store(home.journal).close()
    except (JournalLost, SessionHalted) as error:
        return error.message.removesuffix(accidents.UNCHANGED)
    return ""


def _problems(store: Store, home: Home, key: SigningKey, rows: list[SessionRow]) -> list[tuple[SessionRow, str]]:
    """Sessions that are not what their receipts say, and the first thing that is wrong of each."""
    looked_at = [row for row in rows if not row.halted and not home.workspace(row.id).is_gone()]
    reports = [verify.check(evidence.from_home(store, row.id, home.path, public=key.public)) for row in looked_at]
    return [(row, report.problem) for row, report in zip(looked_at, reports, strict=True) if not report.ok]


@contextmanager
def _owned(settings: Settings) -> Iterator[Home]:
    home = _acquire(settings)
    try:
        yield home
    finally:
        home.release()


def _acquire(settings: Settings) -> Home:
    return acquire(settings.home) if settings.workspace is None else acquire_shared(settings.workspace, settings.home)


@asynccontextmanager
async def _closing(journal: Journal) -> AsyncIterator[Journal]:
    try:
        yield journal
    finally:
        await journal.close()


def _open_journal(home: Home) -> Journal:
    """Raises JournalLost where it is not what this home acknowledged. Nothing is changed then."""
    _refuse_younger_journal(home)
    try:
        return Journal(home.journal)
    except SessionHalted as error:
        raise accidents.lost(home.journal, error.message) from error


def _refuse_younger_journal(home: Home) -> None:
    """Sessions cannot be older than the journal: it was there when the first of them began."""
    if not home.journal.exists() or not home.journal.stat().st_size:
        accidents.refuse_if_gone(home.journal)
        kept = [path.name for path in home.sessions.iterdir() if _has_content(home, path.name)]
        if kept:
            raise accidents.lost(home.journal, f"it is not there, and {len(kept)} sessions are ({', '.join(kept[:5])})")


def _has_content(home: Home, name: str) -> bool:
    return is_session_id(name) and home.workspace(name).has_content()


async def _settle_all(home: Home, journal: Journal, key: SigningKey, *, say: bool = True) -> None:
    """We hold the lock, so whatever is here belongs to an owner that is gone: nothing of it runs any more."""
    known = {row.id: row for row in await journal.read(lambda store: store.sessions())}
    for session, row in list(known.items()):
        workspace = home.workspace(session)
        if workspace.is_removed():  # its owner was killed while it deleted the session
            with suppress(DiskFailed):  # there is no room for it: the next start writes it down
                await journal.append(DropSession(session=session))
                del known[session]
        elif not row.halted:
            await _settle_session(Books(journal, key, workspace, row=row))
        if say and (lost := await journal.read(partial(_lost, home, session))):
            _log.warning(
                "session %s: the manifests of %d versions are gone, of version %d first; `holdfast repair %s` renders "
                "them again", session, len(lost), lost[0], home.shared or session,
            )  # fmt: skip
    await anyio.to_thread.run_sync(_sweep, home, set(known))


def _lost(home: Home, session: str, store: Store) -> list[int]:
    if not is_session_id(session) or home.workspace(session).is_gone():
        return []
    return missing_manifests(store, session, home.path, shared=home.shared)


async def _settle_session(books: Books) -> None:
    """One that cannot be trusted, or not be reached now, must not keep the others from their owner."""
    try:
        books.workspace.refuse_foreign()  # who is refused has no other session there
    except OSError:
        return
    try:
        await anyio.to_thread.run_sync(books.workspace.mend)
        await books.load()
        await settle_open(books)
        await anyio.to_thread.run_sync(_clear_up, books)
    except FilesLost as error:  # they may come back, with a backup or a disk; who resumes the session is told
        _log.warning("%s", error)
    except HoldfastError as error:
        books.halt(error)
        await books.journal.wait_written(books.session)
    except OSError:  # nothing is lost, and whoever resumes it is told
        pass


def _clear_up(books: Books) -> None:
    """A manifest is written before the record of its version. Not every run that was cut short in between has left a
    stage."""
    forget_manifests(books)
    books.workspace.sweep()


def _sweep(home: Home, known: set[str]) -> list[str]:
    """Remove sessions that never got as far as a record, what is left of deleted ones, and a key that was not finished.
    What has content and is in no record is set aside, and named. What has not the name of a session is none of ours."""
    if home.shared is None:
        durable.sweep(home.keys)
    told = list[str]()
    for directory in home.sessions.iterdir():
        session = directory.name.removeprefix(MOVED)
        if session in known or not is_session_id(session):
            continue
        with suppress(OSError):  # the next owner tries it again
            if session == directory.name and _has_content(home, session):
                told.append(f"session {session} is not in the journal: its files are in {_set_aside(home, directory)}")
                _log.warning("%s", told[-1])
            else:
                remove_tree(directory)
    return told


def _set_aside(home: Home, path: Path) -> Path:
    """Into `lost+found`, under a name that is free."""
    place = home.path / accidents.LOST
    place.mkdir(mode=0o700, exist_ok=True)
    target = accidents.free_name(place, path.name)
    with (
        durable.closing_fd(os.open(path.parent, _DIRECTORY)) as source,
        durable.closing_fd(os.open(place, _DIRECTORY | os.O_NOFOLLOW)) as directory,
    ):
        durable.rename_new(path.name, target.name, src_dir=source, dst_dir=directory)
        durable.sync_directory(directory)
        durable.sync_directory(source)
    return target
