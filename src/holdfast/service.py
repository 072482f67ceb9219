"""An open home, verb by verb: every face calls these. `opening` is how it comes to be open."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from holdfast import environments, strays
from holdfast.api import SessionInfo
from holdfast.books import Books, delete
from holdfast.computer import Computer
from holdfast.config import MIN_MEMORY_BYTES, Limits, read_settings, written_settings
from holdfast.departures import NOBODY, past_proxy
from holdfast.egress.allowed import AllowList
from holdfast.environments import Environment, Report
from holdfast.errors import DiskFailed, HoldfastError, InvalidSetting, SessionUnknown, TooManySessions
from holdfast.home import Home
from holdfast.journal import Journal
from holdfast.model import Mode
from holdfast.nodes.local import LocalNode
from holdfast.sessions import LiveSession
from holdfast.settling import settle_open
from holdfast.signing import SigningKey
from holdfast.store.rows import SessionRow
from holdfast.store.sqlite import Store

_log = logging.getLogger("holdfast")
_SPARE_DELAY_S = 0.05
"""Not at once: the caller's first run comes first."""
_RESTARTED = "the host was restarted, and memory ended with it"
_NEW_JOB = "each job begins with empty memory"
_LATE = "its session ended before it could be settled"


class _Kind(msgspec.Struct, frozen=True):
    """What a kernel is started with, and cannot be given later: sessions of one kind may take each other's place."""

    environment: Environment
    limits: Limits
    past_proxy: tuple[str, ...] | None
    """See `wire.ForkSession`."""


class Service:
    """An open home: its node, its environments, its sessions."""

    def __init__(self, home: Home, node: LocalNode, journal: Journal, key: SigningKey) -> None:
        self.home = home
        self.node = node
        self.journal = journal
        self.key = key
        self._sessions: dict[str, LiveSession] = {}
        self._environments: dict[str, Environment] = {}
        self._spares: dict[_Kind, LiveSession] = {}
        self._refilling: asyncio.Task[None] | None = None
        self._choosing = anyio.Lock()
        self._coming: Counter[str] = Counter()
        """Sessions that are being created, by owner."""
        self._resuming: set[str] = set()
        self._dropping: set[str] = set()

    async def create_session(
        self,
        *,
        limits: Limits,
        allowed: AllowList = NOBODY,
        mode: Mode = "strict",
        env: str | Path | None = None,
        report: Report | None = None,
        owner: str = "",
        keep: bool = False,
        at_most: int | None = None,
    ) -> LiveSession:
        """A session with an empty workspace and a warm kernel. `allowed` is whom it may reach. `owner` is whose it is,
        among those who share this service, and `at_most` how many of his there may be; `keep`: it outlives the
        service."""
        if limits.memory_bytes < MIN_MEMORY_BYTES:
            raise InvalidSetting(
                f"memory of {limits.memory_bytes:,} bytes is too little for a kernel",
                hint=f"give it at least {MIN_MEMORY_BYTES >> 20}M",
            )
        self._coming[owner] += 1
        try:
            await self._refuse_if_too_many(owner, at_most)
            environment = await self._environment(env, report)
            kind = _Kind(environment, limits, past_proxy(allowed))
            session = await self._take_spare(kind) or await self._start_session(kind)
            self._sessions[session.id] = session
        finally:
            self._coming[owner] -= 1
        session.allow(allowed)
        session.mode = mode
        settings = {**written_settings(limits, mode, env), "owner": owner, "keep": keep}
        session.books.row = msgspec.structs.replace(session.books.row, settings=settings)
        session.books.register()
        self._refill(kind)
        return session

    async def resume_session(
        self, session_id: str, *, allowed: AllowList = NOBODY, report: Report | None = None, keep: bool = False
    ) -> LiveSession:
        """A session that an earlier owner of this home left: its files as committed, its memory empty. Whom it may
        reach is said anew by whoever resumes it."""
        self._refuse_if_dropping(session_id)
        if session_id in self._sessions or session_id in self._resuming:
            raise InvalidSetting(f"session {session_id} is open already", hint="use it where it is open")
        self._resuming.add(session_id)
        try:
            return await self._resume(session_id, allowed, report, keep=keep)
        finally:
            self._resuming.discard(session_id)

    async def _resume(self, session_id: str, allowed: AllowList, report: Report | None, *, keep: bool) -> LiveSession:
        row = await self.journal.read(lambda store: store.session(session_id))
        workspace = self.home.workspace(session_id)
        if row is None or workspace.is_removed():  # deleted, and the journal does not have it yet
            raise unknown(session_id)
        await anyio.to_thread.run_sync(workspace.mend)
        limits, mode, env = read_settings(row.settings)
        environment = await self._environment(env, report)
        books = Books(self.journal, self.key, workspace, row=row)
        await books.load()
        books.refuse_if_halted()
        await settle_open(books, reason=_LATE)  # what could not be settled when the home was opened
        await books.find_missing()
        session = await self._bring_up(books, _Kind(environment, limits, past_proxy(allowed)), cause=_RESTARTED)
        session.allow(allowed)
        session.mode = mode
        self._sessions[session_id] = session
        if keep:
            books.row = msgspec.structs.replace(books.row, settings={**books.row.settings, "keep": True})
            books.register()
        return session

    async def _start_session(self, kind: "_Kind") -> LiveSession:
        session_id = secrets.token_hex(5)
        row = SessionRow(id=session_id, created_at=time.time(), generation=0, version=0, settings={})
        books = Books(self.journal, self.key, self.home.workspace(session_id), row=row)
        return await self._bring_up(books, kind)

    async def shared_books(self) -> Books:
        """Of the one session that a shared directory has."""
        rows = await self.journal.read(lambda store: store.sessions())
        new = SessionRow(id=secrets.token_hex(5), created_at=time.time(), generation=0, version=0, settings={})
        row = rows[0] if rows else new
        books = Books(self.journal, self.key, self.home.workspace(row.id), row=row)
        if not rows:
            await anyio.to_thread.run_sync(lambda: books.workspace.create(owner=None))
            await anyio.to_thread.run_sync(books.workspace.sync)
            books.register()
        await books.load()
        books.refuse_if_halted()
        await settle_open(books, reason=_LATE)  # what could not be settled when the home was opened
        return books

    async def bring_up_shared(
        self,
        books: Books,
        *,
        limits: Limits,
        allowed: AllowList = NOBODY,
        env: str | Path | None = None,
        report: Report | None = None,
    ) -> LiveSession:
        """A kernel in a shared directory, with empty memory each time."""
        environment = await self._environment(env, report)
        books.row = msgspec.structs.replace(
            books.row, settings={**written_settings(limits, "strict", env), "owner": "", "keep": True}
        )
        kind, cause = _Kind(environment, limits, past_proxy(allowed)), _NEW_JOB if books.state.generation else ""
        session = await self._bring_up(books, kind, cause=cause)
        session.allow(allowed)
        books.register()
        self._sessions[session.id] = session
        return session

    async def environment(self, env: str | Path | None, report: Report | None = None) -> Environment:
        """The Python that sessions would run."""
        return await self._environment(env, report)

    async def _bring_up(self, books: Books, kind: "_Kind", *, cause: str = "") -> LiveSession:
        ids = self.node.take_ids()
        computer = Computer(
            self.node, kind.environment, session=books.session, ids=ids, workspace=books.workspace, limits=kind.limits,
            past_proxy=kind.past_proxy,
        )  # fmt: skip
        session = LiveSession(books, computer)
        try:
            await anyio.to_thread.run_sync(lambda: books.workspace.prepare(owner=ids.file_owner))
            syncing = asyncio.create_task(anyio.to_thread.run_sync(books.workspace.sync))  # a fork takes as long
            try:
                await session.start(cause=cause)
            finally:
                await syncing
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.close(keep=bool(cause))
            raise
        return session

    def _refill(self, kind: "_Kind") -> None:
        """Have the next session ready before it is asked for, started while the caller is busy with this one."""
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._start_spare(kind))

    async def _take_spare(self, kind: "_Kind") -> LiveSession | None:
        """The session that is ready, unless its directory went since: a disk may have been unmounted."""
        spare = self._spares.pop(kind, None)
        if spare is None or not spare.workspace.is_gone():
            return spare
        with suppress(DiskFailed):
            await spare.close()
        return None

    async def _start_spare(self, kind: "_Kind") -> None:
        await anyio.sleep(_SPARE_DELAY_S)
        for other in [kept for kept in self._spares if kept != kind]:
            await self._spares.pop(other).close()
        if kind not in self._spares:
            with suppress(HoldfastError, OSError):  # whoever asks for a session will be told
                self._spares[kind] = await self._start_session(kind)

    async def end_session(self, session: LiveSession, *, keep: bool = False) -> None:
        """End a session; kept, its files and books stay, and it can be resumed."""
        with anyio.CancelScope(shield=True):
            try:
                await session.close(keep=keep)
            finally:
                if self._sessions.get(session.id) is session:  # it may have been resumed meanwhile
                    del self._sessions[session.id]

    # -- the sessions there are ---------------------------------------------------------------------------------

    def live(self, session_id: str) -> LiveSession:
        """One that has a kernel."""
        if (session := self._sessions.get(session_id)) is None:
            raise SessionUnknown(f"no session {session_id!r} is open here", hint="`holdfast ps` lists the kept ones")
        return session

    def is_live(self, session_id: str) -> bool:
        return session_id in self._sessions

    @property
    def live_sessions(self) -> list[LiveSession]:
        return list(self._sessions.values())

    async def list_sessions(self) -> list[SessionInfo]:
        """Live and kept, in order of creation."""

        def read(store: Store) -> list[tuple[SessionRow, float]]:
            return [(row, store.changed_at(row)) for row in store.sessions()]

        rows = {row.id: (row, at) for row, at in await self.journal.read(read)}
        for session in self._sessions.values():  # one that is new may not be written down yet
            _, at = rows.get(session.id, (session.books.row, session.books.row.created_at))
            rows[session.id] = (session.books.row, at)
        infos = [self._info(row, at) for row, at in rows.values()]
        return sorted(infos, key=lambda info: (info.created_at, info.id))

    async def session_info(self, session_id: str) -> SessionInfo:
        books = await self.books(session_id)
        at = await self.journal.read(lambda store: store.changed_at(books.row))
        return self._info(books.row, at)

    async def books(self, session_id: str) -> Books:
        """Of a session, live or kept: what can be known of it without a kernel."""
        if session_id in self._sessions:
            return self._sessions[session_id].books
        row = await self.journal.read(lambda store: store.session(session_id))
        if row is None:
            raise unknown(session_id)
        books = Books(self.journal, self.key, self.home.workspace(session_id), row=row)
        await books.load()
        return books

    async def drop_session(self, session_id: str) -> None:
        """End a session and delete its files and books, also one that is only kept."""
        if session_id in self._sessions:
            await self.end_session(self._sessions[session_id])
            return await self.journal.wait_written(session_id)
        if session_id in self._resuming:
            raise InvalidSetting(f"session {session_id} is being resumed", hint="ask again when it is open")
        self._refuse_if_dropping(session_id)
        self._dropping.add(session_id)
        try:
            books = await self.books(session_id)
            await delete(self.journal, books.workspace)
        finally:
            self._dropping.discard(session_id)

    def _refuse_if_dropping(self, session_id: str) -> None:
        if session_id in self._dropping:
            raise InvalidSetting(f"session {session_id} is being deleted", hint="open a new session")

    async def _refuse_if_too_many(self, owner: str, at_most: int | None) -> None:
        if at_most is None:
            return
        rows = await self.journal.read(lambda store: store.sessions())
        kept = sum(row.id not in self._sessions and row.settings.get("owner") == owner for row in rows)
        live = sum(session.books.row.settings.get("owner") == owner for session in self._sessions.values())
        if kept + live + self._coming[owner] > at_most:
            raise TooManySessions(
                f"{kept + live} sessions are there, and {at_most} is the most",
                hint="end one that is not needed any more",
            )

    def _info(self, row: SessionRow, changed_at: float) -> SessionInfo:
        live = self._sessions.get(row.id)
        running = next(iter(live.books.open), None) if live else None
        halted = row.halted or (live and live.books.stopped)
        limits, mode, _ = read_settings(row.settings)
        return SessionInfo(
            id=row.id, state="halted" if halted else "kept" if live is None else "running" if running else "ready",
            version=row.version, generation=row.generation, ckpt=row.ckpt, mode=mode, created_at=row.created_at,
            changed_at=changed_at, limits=msgspec.structs.asdict(limits), owner=str(row.settings.get("owner") or ""),
            memory_bytes=live.memory_bytes() if live else None, running=running,
            egress=live.computer.way.allowed.texts() if live else [],
        )  # fmt: skip

    async def end_spares(self) -> None:
        """End what waits for the next session; it starts anew when one is asked for."""
        while self._spares:
            await self._spares.popitem()[1].close()

    async def prepare(self, env: str | Path | None = None, report: Report | None = None) -> None:
        """Have the environment built and its zygote warm, so that the first session starts as fast as any."""
        await self.node.warm(await self._environment(env, report))

    async def close(self) -> None:
        """End every session and give up the home. Nothing is left: no process, mount, cgroup or workspace."""
        with anyio.CancelScope(shield=True):
            if self._refilling is not None:
                self._refilling.cancel()
                await asyncio.wait([self._refilling])  # however it ended
            async with AsyncExitStack() as steps:  # each is taken, whatever becomes of the one before
                steps.callback(self.home.release)
                steps.push_async_callback(self.journal.close)
                steps.push_async_callback(strays.remove, self.node.tree)
                steps.push_async_callback(self.node.close)
                for session in [*self._sessions.values(), *self._spares.values()]:
                    keep = bool(session.books.row.settings.get("keep"))
                    steps.push_async_callback(self._end_at_last, session, keep=keep)

    async def _end_at_last(self, session: LiveSession, *, keep: bool) -> None:
        """A disk that takes nothing any more must not make a failure of the end: the next owner of the home settles
        and sweeps what is left there."""
        try:
            await self.end_session(session, keep=keep)
        except DiskFailed as error:
            _log.warning("files of session %s are left to the next owner of the home: %s", session.id, error.message)

    async def _environment(self, env: str | Path | None, report: Report | None) -> Environment:
        key = str(env or "")
        async with self._choosing:
            if key not in self._environments:
                home = self.home.parent
                self._environments[key] = (
                    await environments.inspect(env) if env else await environments.ensure(home, report=report)
                )
        return self._environments[key]


def unknown(session_id: str) -> SessionUnknown:
    """Whoever may not see a session is told the same as if there were none: in these words."""
    return SessionUnknown(f"no session {session_id!r} is in this home", hint="`holdfast ps` lists them")
