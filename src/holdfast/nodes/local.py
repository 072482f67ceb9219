"""This machine: one keeper, a zygote per environment, and kernels forked from them."""

import asyncio
import math
import os
import resource
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import anyio
import anyio.to_thread
import msgspec

from holdfast import durable
from holdfast.config import Limits
from holdfast.environments import Environment
from holdfast.errors import HoldfastError, KeeperLost, KernelStartFailed, SandboxUnavailable
from holdfast.home import Home
from holdfast.kernel import wire
from holdfast.kernel.client import Kernel
from holdfast.nodes.ids import IdBlock, claim_block
from holdfast.nodes.lines import Line, LineBroken
from holdfast.sandbox import cgroups, namespaces, shown
from holdfast.sandbox.cgroups.contract import DEATH_S
from holdfast.sandbox.mounts import SHARED
from holdfast.strays import discard

_START_TIMEOUT_S = 300.0
"""The zygote imports a gigabyte of libraries: seconds on most machines, minutes on a slow disk or starved processor."""
_FORK_TIMEOUT_S = 30.0
_REST_S = 0.5
"""To put a session to rest takes milliseconds."""
_PACKAGE = Path(__file__).parents[1]
_KEEPER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from holdfast.kernel.keeper import main; main()"


class Ids(msgspec.Struct, frozen=True):
    """Who a session is on this machine, as the zygote's user namespace numbers it."""

    kernel: int
    init: int
    file_owner: int | None
    """The host uid that its files must have; None where that is our own."""


class Incarnation(msgspec.Struct, frozen=True):
    """One kernel with the cgroup it lives in."""

    kernel: Kernel
    cgroup: cgroups.Cgroup
    meminfo: int
    """The file that it sees as /proc/meminfo."""
    cap_bytes: int
    keeper: int
    """The number of the keeper below which it lives."""
    listener: socket.socket | None = None
    """In its network, where it finds our proxy; None: it has no way out."""

    def show_memory(self) -> None:
        """Let it see what is free below its cap now."""
        used = self.cgroup.memory_pinned_bytes()
        os.pwrite(self.meminfo, shown.meminfo(self.cap_bytes, used_bytes=used), 0)

    async def end(self, *, patience_s: float = DEATH_S) -> None:
        """Kill all of it and leave nothing behind. Raises ProcessStuck."""
        self.kernel.close()
        os.close(self.meminfo)
        try:
            await discard(self.cgroup, patience_s=patience_s)
        finally:  # when nobody is left who could listen in our place
            if self.listener is not None:
                self.listener.close()


class _Zygote(NamedTuple):
    environment: Environment
    line: Line
    sessions_at: tuple[int, int]
    """Which directory it has as that of the sessions."""


class LocalNode:
    """Starts kernels on this machine."""

    def __init__(self, home: Home, tree: cgroups.Tree) -> None:
        self.tree = tree
        self._rest = anyio.Semaphore(2 * (os.cpu_count() or 1))
        self._at_work = 0
        self._home = home
        self._keeper: Line | None = None
        self._zygotes: dict[str, _Zygote] = {}
        self._starting = anyio.Lock()
        self._replacing = anyio.Lock()
        self._closed = False
        self._alive: int | None = None
        """Readable when the keeper has ended."""
        self._forked: WeakSet[cgroups.Cgroup] = WeakSet()
        """Of the sessions."""
        self._keeper_ends: list[float] = []
        """When keepers ended, in order. Keepers are counted, as a clock may be set back."""
        self._reviving: asyncio.Task[None] | None = None
        self.beyond_help = asyncio.Event()
        """The keeper ended, and no other could be started. Each request tries it again."""
        self._block: IdBlock | None = None
        self._second_id = namespaces.second_id(os.geteuid(), os.getegid()) is not None

    async def start(self) -> None:
        _raise_open_files_limit()
        if os.geteuid() == 0:
            self._block = claim_block(self._home.path)
        await self._bring_up_keeper()

    async def _bring_up_keeper(self) -> None:
        self._keeper, self._alive = await _start_keeper(self._home.logs, freezers=self.tree.freezers)
        asyncio.get_running_loop().add_reader(self._alive, self._note_keeper_end)
        try:
            await anyio.to_thread.run_sync(self.tree.adopt, self._keeper.peer_pid)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.close()  # else the keeper would live as long as we do
            if isinstance(error, cgroups.CgroupUnavailable):
                raise SandboxUnavailable(error.reason, hint=error.remedy) from error
            raise

    # -- the keeper's end ----------------------------------------------------------------------------------------

    @property
    def has_keeper(self) -> bool:
        """While it ends, processes below it may still have its socket open. Nobody else has its pipe."""
        return self._keeper is not None and self._alive is not None and not self._keeper.is_broken()

    def is_doomed(self, keeper: int) -> bool:
        """Whether this keeper has ended, so that what was forked below it ends too."""
        return keeper < len(self._keeper_ends)

    def keeper_ended_at(self, keeper: int) -> float | None:
        """None: it is there still."""
        if not self.has_keeper:
            self._note_keeper_end()
        return self._keeper_ends[keeper] if self.is_doomed(keeper) else None

    def _note_keeper_end(self) -> None:
        """Every process below it was killed with it. On cgroup v1 the frozen ones end only when they are thawed."""
        if self._alive is None:
            return
        self._forget_alive()
        self._keeper_ends.append(time.time())
        for cgroup in list(self._forked):
            with suppress(OSError):  # removed meanwhile
                cgroup.thaw()
        self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        """Have another keeper, and what sessions are forked from, before they are asked for."""
        environments = [zygote.environment for zygote in self._zygotes.values()]
        try:
            await self._living_keeper()
            for environment in environments:
                await self._zygote(environment)
        except (HoldfastError, OSError):
            if not self._closed and not self.has_keeper:
                self.beyond_help.set()

    async def _living_keeper(self) -> Line:
        """The keeper, or if that has ended another one."""
        async with self._replacing:
            if self._closed:
                raise KeeperLost("the keeper is gone", hint="open the home again")
            if not self.has_keeper:
                await self._replace_keeper()
            assert self._keeper is not None
            return self._keeper

    async def _replace_keeper(self) -> None:
        self._note_keeper_end()
        zygotes = [zygote.line for zygote in self._zygotes.values()]
        self._zygotes.clear()
        for line in (*zygotes, self._keeper):
            if line is not None:
                line.close()
        try:
            await self._bring_up_keeper()
        except (HoldfastError, OSError) as error:
            reason = error.message if isinstance(error, HoldfastError) else str(error)
            raise KeeperLost(
                f"the keeper ended, and with it every session's processes; no other could be started: {reason}",
                hint=f"see {self._home.logs / 'keeper.log'}, and run `holdfast doctor`; files and receipts are kept",
            ) from error

    def _forget_alive(self) -> None:
        if self._alive is not None:
            asyncio.get_running_loop().remove_reader(self._alive)
            os.close(self._alive)
            self._alive = None

    # -- sessions ------------------------------------------------------------------------------------------------

    def take_ids(self) -> Ids:
        if self._block is None:  # an ordinary user: he is 0 in the keeper's namespace, and owns the files himself
            return Ids(kernel=0, init=1 if self._second_id else 0, file_owner=None)
        kernel, init = self._block.take()
        return Ids(kernel=kernel, init=init, file_owner=kernel)

    def give_back_ids(self, ids: Ids) -> None:
        if self._block is not None:
            self._block.give_back(ids.kernel)

    async def warm(self, environment: Environment) -> None:
        """Have a zygote ready for this environment."""
        await self._zygote(environment)

    async def fork(
        self,
        environment: Environment,
        *,
        session: str,
        stage: str,
        ids: Ids,
        limits: Limits,
        shared: Path | None = None,
        past_proxy: tuple[str, ...] | None = None,
    ) -> Incarnation:
        """A new, confined kernel for a session whose directories, and those of the stage, exist. With `past_proxy` it
        has a listener for our proxy: see `wire.ForkSession`."""
        name = f"{session}-{secrets.token_hex(3)}"
        cgroup = self.tree.create(
            name,
            cgroups.Limits(
                memory_bytes=limits.memory_bytes,
                reserve_bytes=limits.snapshot_reserve_bytes,
                pids=limits.processes + limits.undo,  # who is kept asleep takes nobody's place
                cpus=limits.cpus,
            ),
        )
        request = wire.ForkSession(
            session=session, stage=stage, kernel_id=ids.kernel, init_id=ids.init, memory_bytes=limits.memory_bytes,
            processors=_processors(limits.cpus), shm_bytes=limits.memory_bytes // 2,
            file_bytes=limits.disk_bytes, open_files=limits.open_files,
            processes=limits.processes + limits.undo if self.tree.kind == "watchdog" else None,
            shared=self._shared(shared, SHARED, guest=ids.file_owner), past_proxy=past_proxy,
        )  # fmt: skip
        try:
            kernel, keeper, meminfo, listener = await self._fork_kernel(environment, request, cgroup)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await discard(cgroup)
            raise
        cgroup.attach(kernel.init_pid)
        self._forked.add(cgroup)
        return Incarnation(kernel, cgroup, meminfo, limits.memory_bytes, keeper, listener)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While a kernel has something to do."""
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    @property
    def has_time(self) -> bool:
        """One kernel is at work, and there is a processor for it beside ours: what we do meanwhile delays nobody."""
        return self._at_work == 1 and len(os.sched_getaffinity(0)) > 1

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """A place among those that are put to rest at a time: hundreds at once would each take longer than we are
        patient. Whoever keeps us waiting goes on without one, and keeps no other waiting."""
        await self._rest.acquire()
        with ExitStack() as place:
            place.callback(self._rest.release)
            overdue = asyncio.get_running_loop().call_later(_REST_S, place.close)
            place.callback(overdue.cancel)
            yield

    async def stage(
        self, kernel: Kernel, directory: Path, stage: str, *, shared: Path | None = None, guest: int | None = None
    ) -> None:
        """Mount another stage in a live session, which may be frozen. `Kernel.restage` tells its kernel.

        Refused, the session has the stage that it had; or, if that was lost on the way, it is dead.
        """
        if self._keeper is None or not self.has_keeper:  # and the session's kernel with it
            raise KernelStartFailed("the keeper is gone", hint="ask again: the session then gets another kernel")
        request = wire.Stage(
            directory=str(directory), stage=stage, shared=self._shared(shared, str(shared), guest=guest)
        )
        try:
            await self._keeper.ask(request, [kernel.init_handle()], timeout_s=_FORK_TIMEOUT_S)
        except (LineBroken, TimeoutError, ProcessLookupError) as error:
            raise KernelStartFailed(
                f"the stage could not be mounted: {error or type(error).__name__}",
                hint=f"see {self._home.logs / 'keeper.log'}, and run `holdfast doctor`",
            ) from error

    async def close(self) -> None:
        """End the keeper, and with it every process that was ever started here."""
        self._closed = True
        self._forget_alive()
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.wait([self._reviving])  # however it ended
        for line in (*(zygote.line for zygote in self._zygotes.values()), self._keeper):
            if line is not None:
                line.close()
        if self._keeper is not None:
            await anyio.to_thread.run_sync(_wait_gone, self._keeper.peer_pid)

    async def _fork_kernel(
        self, environment: Environment, request: wire.ForkSession, cgroup: cgroups.Cgroup
    ) -> tuple[Kernel, int, int, socket.socket | None]:
        kernel, guest_fds = _make_kernel()
        guest_fds += cgroup.join_fds()
        received: list[int] = []
        try:
            keeper, answer = await self._ask_zygote(environment, request, guest_fds)
            received += answer
            if len(received) != 1 + (request.past_proxy is not None):
                raise LineBroken(f"{len(received)} descriptors came with it")
            with anyio.fail_after(_FORK_TIMEOUT_S):
                await kernel.wait_ready()
        except BaseException as error:
            kernel.close()
            for fd in received:
                os.close(fd)
            if not isinstance(error, (OSError, LineBroken, TimeoutError)):
                raise
            raise KernelStartFailed(
                f"no kernel came up: {error or type(error).__name__}",
                hint=f"see {self._log_of(environment)}, and run `holdfast doctor`",
            ) from error
        finally:
            for fd in guest_fds:
                os.close(fd)
        meminfo, *listeners = received
        return kernel, keeper, meminfo, next(map(_listener, listeners), None)

    async def _ask_zygote(
        self, environment: Environment, request: wire.ForkSession, guest_fds: list[int]
    ) -> tuple[int, list[int]]:
        """The number of its keeper, and what it answers with."""
        zygote = await self._zygote(environment)
        try:
            try:
                keeper = len(self._keeper_ends)
                return keeper, await zygote.ask(request, guest_fds, timeout_s=_FORK_TIMEOUT_S)
            except LineBroken:
                # The zygote died: running sessions go on without it, and new ones come from its successor.
                zygote = await self._zygote(environment)
                keeper = len(self._keeper_ends)
                return keeper, await zygote.ask(request, guest_fds, timeout_s=_FORK_TIMEOUT_S)
        except TimeoutError:
            zygote.close()  # a late answer, with its listener, would be taken for the next session's
            raise

    async def _zygote(self, environment: Environment) -> Line:
        async with self._starting:
            zygote, sessions_at = self._zygotes.get(environment.prefix), self._find_sessions()
            # Another disk may be mounted there since, or none: a zygote has, and holds, the one that it started with.
            if zygote is None or zygote.line.is_broken() or zygote.sessions_at != sessions_at:
                if zygote is not None:
                    zygote.line.close()
                line = await self._start_zygote(environment)
                zygote = self._zygotes[environment.prefix] = _Zygote(environment, line, sessions_at)
            return zygote.line

    @durable.ours("looking for the sessions' directory")
    def _find_sessions(self) -> tuple[int, int]:
        found = os.stat(self._home.sessions)
        return found.st_dev, found.st_ino

    async def _start_zygote(self, environment: Environment) -> Line:
        keeper = await self._living_keeper()
        log = self._log_of(environment)
        here, there = _packet_pair()
        line = Line(here)
        with durable.ours("starting the zygote"), open(log, "wb") as log_file, there:  # noqa: ASYNC230 (once per zygote)
            request = wire.StartZygote(
                python=environment.base_python, prefix=environment.prefix, base_prefix=environment.base_prefix,
                root=str(self._home.root), sessions=str(self._home.sessions), package=str(_PACKAGE),
                shared=str(self._home.shared or ""),
            )  # fmt: skip
            try:
                await keeper.ask(request, [there.fileno(), log_file.fileno()], timeout_s=_FORK_TIMEOUT_S)
            except BaseException:
                line.close()
                raise
        try:
            await line.receive(timeout_s=_START_TIMEOUT_S)
        except (LineBroken, TimeoutError) as error:
            line.close()
            raise KernelStartFailed(
                f"the zygote did not come up: {_last_line(log) or error}",
                hint=f"see {log}, and run `holdfast doctor`",
            ) from error
        return line

    def _log_of(self, environment: Environment) -> Path:
        return self._home.logs / f"zygote-{Path(environment.prefix).name}.log"

    def _shared(self, directory: Path | None, path: str, *, guest: int | None) -> wire.Shared | None:
        """A session's shared directory, for the process that sees it under `path`."""
        identity = self._home.shared_identity
        if directory is None or identity is None:
            return None
        status = directory.stat()
        return wire.Shared(path=path, identity=identity, owner=(status.st_uid, status.st_gid), guest=guest)


def _listener(fd: int) -> socket.socket:
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


def _processors(cpus: float) -> int:
    """How many a session with this share is shown: no fraction, and none that the machine lacks.

    >>> _processors(0.5)
    1
    """
    return max(1, min(math.ceil(cpus), len(os.sched_getaffinity(0))))


def _raise_open_files_limit() -> None:
    """A session takes about a dozen descriptors; the soft limit of most systems would end at eighty sessions."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _start_keeper(logs: Path, *, freezers: str | None) -> tuple[Line, int]:
    """The line to it, and a descriptor that becomes readable when it ends."""
    with ExitStack() as ours, ExitStack() as theirs:
        here, there = _packet_pair()
        alive, held = os.pipe()
        line = Line(here)
        ours.callback(line.close)
        ours.callback(os.close, alive)
        theirs.callback(there.close)
        fds = [there.fileno(), held, os.pidfd_open(os.getpid())]
        if freezers is not None:
            fds.append(os.open(freezers, os.O_RDONLY | os.O_DIRECTORY))
        for fd in fds[1:]:
            theirs.callback(os.close, fd)
        control, pipe, host, *rest = map(str, fds)
        command = [sys.executable, "-I", "-c", _KEEPER, str(_PACKAGE.parent), control, host, *(rest or ["-1"]), pipe]
        with durable.ours("starting the keeper"), open(logs / "keeper.log", "wb") as log:  # noqa: ASYNC230 (once)
            await anyio.run_process(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=fds, check=False
            )
        theirs.close()
        try:
            await line.receive(timeout_s=_START_TIMEOUT_S)
        except (KernelStartFailed, LineBroken) as error:
            raise _why_no_keeper(error, logs) from error
        ours.pop_all()
    return line, alive


def _why_no_keeper(error: KernelStartFailed | LineBroken, logs: Path) -> HoldfastError:
    if isinstance(error, KernelStartFailed):
        return SandboxUnavailable(
            f"the sandbox's namespaces cannot be made: {error.message}",
            hint="run `holdfast doctor`: it says what is missing and how to get it",
        )
    return KernelStartFailed(
        f"the keeper did not come up: {_last_line(logs / 'keeper.log') or error}", hint=f"see {logs / 'keeper.log'}"
    )


def _make_kernel() -> tuple[Kernel, list[int]]:
    """The host's end, and the descriptors that the guest gets, in the order of `wire.ForkSession`."""
    control, guest_control = _packet_pair()
    reports, guest_reports = _packet_pair()
    wake, guest_wake = _packet_pair()
    trace, guest_trace = os.pipe()
    stdout, guest_stdout = os.pipe()
    stderr, guest_stderr = os.pipe()
    kernel = Kernel(control=control, reports=reports, wake=wake, trace=trace, stdout=stdout, stderr=stderr)
    guest_sockets = [sock.detach() for sock in (guest_control, guest_reports, guest_wake)]
    return kernel, [*guest_sockets, guest_trace, guest_stdout, guest_stderr]


def _packet_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _wait_gone(pid: int) -> None:
    """Until a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(5000)
    os.close(handle)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
