"""The product, verb by verb. Every face calls these; `open_service` wires the parts."""

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from holdfast import environments
from holdfast.config import MIN_MEMORY_BYTES, Limits, Settings
from holdfast.environments import Environment, Report
from holdfast.errors import HoldfastError, InvalidSetting, SandboxUnavailable
from holdfast.home import Home, acquire
from holdfast.model import Mode
from holdfast.nodes.local import LocalNode
from holdfast.resources.workspace import Workspace, remove_tree
from holdfast.sandbox import cgroups
from holdfast.sessions import LiveSession

_SPARE_DELAY_S = 0.05
"""Not at once: the caller's first run comes first."""


class Service:
    """An open home: its node, its environments, its sessions."""

    def __init__(self, home: Home, node: LocalNode) -> None:
        self.home = home
        self.node = node
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
        self._refill(environment, limits)
        return session

    async def _start_session(self, environment: Environment, limits: Limits) -> LiveSession:
        session_id = secrets.token_hex(5)
        session = LiveSession(
            self.node, environment, id=session_id, ids=self.node.take_ids(),
            workspace=Workspace(self.home.sessions / session_id), limits=limits,
        )  # fmt: skip
        try:
            await session.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.close()
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

    async def end_session(self, session: LiveSession) -> None:
        self._sessions.pop(session.id, None)
        await session.close()

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
    """Own a home, sweep what a killed owner left in it, and start the keeper."""
    home = acquire(settings.home)
    try:
        tree = cgroups.find(home.id, memory_cap=settings.memory_cap)
        await anyio.to_thread.run_sync(_sweep, home, tree)
        node = LocalNode(home, tree)
        await node.start()
    except cgroups.CgroupUnavailable as error:
        home.release()
        raise SandboxUnavailable(error.reason, hint=error.remedy) from error
    except BaseException:
        home.release()
        raise
    return Service(home, node)


def _sweep(home: Home, tree: cgroups.Tree) -> None:
    """We hold the lock, so whatever is here belongs to an owner that is gone."""
    tree.sweep()
    for directory in home.sessions.iterdir():
        remove_tree(directory)
