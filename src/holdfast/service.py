"""The product, verb by verb. Every face calls these; `open_service` wires the parts."""

import asyncio
import secrets
import time
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from holdfast import durable, environments
from holdfast.books import Books
from holdfast.computer import Computer
from holdfast.config import MIN_MEMORY_BYTES, Limits, Settings
from holdfast.environments import Environment, Report
from holdfast.errors import HoldfastError, InvalidSetting, SandboxUnavailable, SessionUnknown
from holdfast.home import Home, acquire
from holdfast.journal import Journal
from holdfast.model import Mode
from holdfast.nodes.local import LocalNode
from holdfast.resources.workspace import Workspace, remove_tree
from holdfast.sandbox import cgroups
from holdfast.sessions import LiveSession
from holdfast.settling import settle_open
from holdfast.signing import SigningKey
from holdfast.store.rows import DropSession, SessionRow

_SPARE_DELAY_S = 0.05
"""Not at once: the caller's first run comes first."""
_RESTARTED = "the host was restarted, and memory ended with it"


class Service:
    """An open home: its node, its environments, its sessions."""

    def __init__(self, home: Home, node: LocalNode, journal: Journal, key: SigningKey) -> None:
        self.home = home
        self.node = node
        self.journal = journal
        self.key = key
        self._sessions: dict[str, LiveSession] = {}
        self._environments: dict[str, Environment] = {}
        self._spares: dict[tuple[str, Limits], LiveSession] = {}
        self._refilling: asyncio.Task[None] | None = None
        self._choosing = anyio.Lock()

    async def create_session(
        self, *, limits: Limits, mode: Mode = "strict", env: str | Path | None = None, report: Report | None = None
    ) -> LiveSession:
        """A session with an empty workspace and a warm kernel."""
        if limits.memory_bytes < MIN_MEMORY_BYTES:
            raise InvalidSetting(
                f"memory of {limits.memory_bytes:,} bytes is too little for a kernel",
                hint=f"give it at least {MIN_MEMORY_BYTES >> 20}M",
            )
        environment = await self._environment(env, report)
        session = self._spares.pop((environment.prefix, limits), None) or await self._start_session(environment, limits)
        session.mode = mode
        self._sessions[session.id] = session
        session.books.row = msgspec.structs.replace(session.books.row, settings=_settings(limits, mode, env))
        session.books.register()
        self._refill(environment, limits)
        return session

    async def resume_session(self, session_id: str, *, report: Report | None = None) -> LiveSession:
        """A session that an earlier owner of this home left: its files as committed, its memory empty."""
        if session_id in self._sessions:
            raise InvalidSetting(f"session {session_id} is open already", hint="use it where it is open")
        row = await self.journal.read(lambda store: store.session(session_id))
        if row is None:
            raise SessionUnknown(f"no session {session_id!r} is in this home", hint="`holdfast sessions` lists them")
        limits, mode, env = _read_settings(row.settings)
        environment = await self._environment(env, report)
        books = Books(self.journal, self.key, Workspace(self.home.sessions / session_id), row=row)
        await books.load()
        books.refuse_if_halted()
        await settle_open(books)  # what could not be settled when the home was opened
        session = await self._bring_up(books, environment, limits, cause=_RESTARTED)
        session.mode = mode
        self._sessions[session_id] = session
        return session

    async def _start_session(self, environment: Environment, limits: Limits) -> LiveSession:
        session_id = secrets.token_hex(5)
        row = SessionRow(id=session_id, created_at=time.time(), generation=0, version=0, settings={})
        books = Books(self.journal, self.key, Workspace(self.home.sessions / session_id), row=row)
        return await self._bring_up(books, environment, limits)

    async def _bring_up(
        self, books: Books, environment: Environment, limits: Limits, *, cause: str = ""
    ) -> LiveSession:
        ids = self.node.take_ids()
        computer = Computer(
            self.node, environment, session=books.session, ids=ids, workspace=books.workspace, limits=limits
        )
        session = LiveSession(books, computer)
        try:
            await anyio.to_thread.run_sync(lambda: books.workspace.prepare(owner=ids.file_owner))
            await session.start(cause=cause)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.close(keep=bool(cause))
            raise
        return session

    def _refill(self, environment: Environment, limits: Limits) -> None:
        """Have the next session ready before it is asked for, started while the caller is busy with this one."""
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._start_spare(environment, limits))

    async def _start_spare(self, environment: Environment, limits: Limits) -> None:
        key = environment.prefix, limits
        await anyio.sleep(_SPARE_DELAY_S)
        for other in [kept for kept in self._spares if kept != key]:
            await self._spares.pop(other).close()
        if key not in self._spares:
            with suppress(HoldfastError):  # whoever asks for a session will be told
                self._spares[key] = await self._start_session(environment, limits)

    async def end_session(self, session: LiveSession, *, keep: bool = False) -> None:
        """End a session; kept, its files and books stay, and it can be resumed."""
        self._sessions.pop(session.id, None)
        await session.close(keep=keep)

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
                with suppress(asyncio.CancelledError):
                    await self._refilling
            for session in [*self._sessions.values(), *self._spares.values()]:
                await self.end_session(session)
            await self.node.close()
            await anyio.to_thread.run_sync(self.node.tree.remove)
            await self.journal.close()
            self.home.release()

    async def _environment(self, env: str | Path | None, report: Report | None) -> Environment:
        key = str(env or "")
        async with self._choosing:
            if key not in self._environments:
                self._environments[key] = (
                    await environments.inspect(env) if env else await environments.ensure(self.home.path, report=report)
                )
        return self._environments[key]


async def open_service(settings: Settings) -> Service:
    """Own a home, settle what a killed owner left unsettled, sweep what it left behind, and start the keeper."""
    home = acquire(settings.home)
    journal: Journal | None = None
    try:
        tree = cgroups.find(home.id, memory_cap=settings.memory_cap)
        await anyio.to_thread.run_sync(tree.sweep)
        key = await anyio.to_thread.run_sync(SigningKey.load_or_create, home.keys)
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


async def _settle_all(home: Home, journal: Journal, key: SigningKey) -> None:
    """We hold the lock, so whatever is here belongs to an owner that is gone: nothing of it runs any more."""
    known = {row.id: row for row in await journal.read(lambda store: store.sessions())}
    for session, row in known.items():
        workspace = Workspace(home.sessions / session)
        if not workspace.path.is_dir():  # its owner was killed while it deleted the session
            journal.append_nowait(DropSession(session=session))
        elif not row.halted:
            await _settle_session(Books(journal, key, workspace, row=row))
    await anyio.to_thread.run_sync(_sweep, home, set(known))


async def _settle_session(books: Books) -> None:
    await books.load()
    try:
        await settle_open(books)
    except HoldfastError as error:  # one session that cannot be trusted must not keep the others from their owner
        books.halt(error)
        await books.journal.wait_written()
        return
    await anyio.to_thread.run_sync(books.workspace.sweep)


def _sweep(home: Home, known: set[str]) -> None:
    """Sessions that never got as far as a record, and a key that was not finished."""
    durable.sweep(home.keys)
    for directory in home.sessions.iterdir():
        if directory.name not in known:
            remove_tree(directory)


def _settings(limits: Limits, mode: Mode, env: str | Path | None) -> dict[str, int | float | str | None]:
    return {**msgspec.structs.asdict(limits), "mode": mode, "env": None if env is None else str(env)}


def _read_settings(settings: dict[str, int | float | str | None]) -> tuple[Limits, Mode, str | None]:
    kept = {name: value for name, value in settings.items() if name in Limits.__struct_fields__}
    mode: Mode = "notebook" if settings.get("mode") == "notebook" else "strict"
    env = settings.get("env")
    return msgspec.convert(kept, Limits), mode, None if env is None else str(env)
