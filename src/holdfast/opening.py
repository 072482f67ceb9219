"""A home is opened: by whoever becomes its owner, for long (`open_service`) or for a moment.

1. The lock is ours: whatever is there belongs to an owner that is gone.
2. What still runs of it is killed (`strays.sweep`).
3. What it left unsettled is settled, by the journal alone; what it left behind is removed.
4. The keeper starts.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial

import anyio.to_thread

from holdfast import durable, strays, underway
from holdfast.books import Books
from holdfast.config import Settings
from holdfast.errors import HoldfastError, SandboxUnavailable
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
from holdfast.store.rows import DropSession
from holdfast.store.sqlite import Store
from holdfast.verify import missing_manifests

_log = logging.getLogger("holdfast.home")


async def open_service(settings: Settings) -> Service:
    """Own a home, settle what a killed owner left unsettled, sweep what it left behind, and start the keeper."""
    home = _acquire(settings)
    journal: Journal | None = None
    try:
        tree = cgroups.find(home.id, memory_cap=settings.memory_cap)
        await strays.sweep(tree)
        key = await anyio.to_thread.run_sync(signing_key, home.parent)
        journal = Journal(home.journal)
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
        async with _journal(home) as journal:
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
        async with _journal(home) as journal:
            await anyio.to_thread.run_sync(home.workspace(session_id).remove)
            await journal.append(DropSession(session=session_id))


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
async def _journal(home: Home) -> AsyncIterator[Journal]:
    journal = Journal(home.journal)
    try:
        yield journal
    finally:
        await journal.close()


async def _settle_all(home: Home, journal: Journal, key: SigningKey, *, say: bool = True) -> None:
    """We hold the lock, so whatever is here belongs to an owner that is gone: nothing of it runs any more."""
    known = {row.id: row for row in await journal.read(lambda store: store.sessions())}
    for session, row in known.items():
        workspace = home.workspace(session)
        if workspace.is_gone():  # its owner was killed while it deleted the session
            journal.append_nowait(DropSession(session=session))
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
        books.workspace.manifests.mkdir(mode=0o700, exist_ok=True)  # its texts can be rendered again (`repair`)
        books.workspace.refuse_foreign()  # who is refused has no other session there
    except OSError:
        return
    try:
        await books.load()
        await settle_open(books)
        await anyio.to_thread.run_sync(_clear_up, books)
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


def _sweep(home: Home, known: set[str]) -> None:
    """Sessions that never got as far as a record, what is left of deleted ones, and a key that was not finished. What
    has not the name of one is none of ours, whatever it does there."""
    if home.shared is None:
        durable.sweep(home.keys)
    for directory in home.sessions.iterdir():
        if directory.name not in known and is_session_id(directory.name.removeprefix(MOVED)):
            with suppress(OSError):  # the next owner tries it again
                remove_tree(directory)
