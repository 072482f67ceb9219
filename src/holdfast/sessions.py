"""A live session: one workspace, one kernel at a time, one request at a time.

Between requests the session's cgroup is frozen: nothing runs in the background. A kernel that dies is replaced at
once by a fresh one with the next generation; files stay.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec

from holdfast.config import Limits
from holdfast.environments import Environment
from holdfast.errors import InvalidSetting, KernelStartFailed, SessionClosed
from holdfast.guards import DiskGuard, MemoryWatchdog
from holdfast.kernel import wire
from holdfast.kernel.client import Died, Gone
from holdfast.kernel.conduct import Ask, Conduct, Emit, Guard, Outcome, Stop
from holdfast.kernel.output import RunOutput, forget_oldest_logs, log_file
from holdfast.model import Completions, MemoryCap, Name, Run, RunError, ShellResult, Stray, StreamName
from holdfast.nodes.local import Ids, Incarnation, LocalNode
from holdfast.recovery import Memory, explain
from holdfast.resources.workspace import Workspace

_QUICK_S = 10.0
"""For what the guest answers by itself: names, completions."""
Reply = TypeVar("Reply", wire.Named, wire.Completed, wire.Inspected)


class LiveSession:
    """Guards one session's state."""

    def __init__(
        self, node: LocalNode, environment: Environment, *, id: str, ids: Ids, workspace: Workspace, limits: Limits
    ) -> None:
        self.id = id
        self.generation = 0
        self.limits = limits
        self.workspace = workspace
        self._node = node
        self._environment = environment
        self._ids = ids
        self._turn = anyio.Lock()
        self._now: Incarnation | None = None
        self._conduct: Conduct | None = None
        self._disk_guard = DiskGuard(workspace, self._pids, limits)
        self._closed = False

    @property
    def memory_cap(self) -> MemoryCap:
        return "watchdog" if self._node.tree.kind == "watchdog" else "cgroup"

    async def start(self) -> None:
        await anyio.to_thread.run_sync(lambda: self.workspace.create(owner=self._ids.file_owner))
        await self._renew()

    async def run(self, code: str, *, timeout_s: float, emit: Emit | None = None, ask: Ask | None = None) -> Run:
        """Execute one cell to its end."""
        if len(code.encode(errors="replace")) > self.limits.code_bytes:
            raise InvalidSetting(
                f"the cell is larger than {self.limits.code_bytes:,} bytes",
                hint="put data in a file under /mnt/data and read it from there",
            )
        run_id = _new_id("run")
        async with self._awake() as incarnation:
            request = wire.Execute(code=code, stdin=ask is not None)
            conduct, outcome, error, strays, peak = await self._carry_out(
                incarnation, run_id, request, timeout_s=timeout_s, emit=emit, ask=ask
            )
            return Run(
                id=run_id,
                session=self.id,
                status="ok" if error is None else "failed",
                generation=self.generation,
                count=outcome.finished.count if outcome.finished else 0,
                text=conduct.shelf.result,
                stdout=conduct.output.text("stdout"),
                stderr=conduct.output.text("stderr"),
                dropped_bytes=conduct.output.dropped_bytes,
                displays=conduct.shelf.displays,
                dropped_displays=conduct.shelf.dropped,
                error=error,
                strays=strays,
                duration_s=outcome.duration_s,
                peak_memory_bytes=peak,
                memory_cap=self.memory_cap,
            )

    async def shell(self, command: str, *, timeout_s: float, emit: Emit | None = None) -> ShellResult:
        """Run a command line in the sandbox."""
        run_id = _new_id("cmd")
        async with self._awake() as incarnation:
            conduct, outcome, error, strays, _ = await self._carry_out(
                incarnation, run_id, wire.Shell(command=command), timeout_s=timeout_s, emit=emit, ask=None
            )
            return ShellResult(
                id=run_id,
                exit_code=outcome.finished.exit_code if outcome.finished else None,
                stdout=conduct.output.text("stdout"),
                stderr=conduct.output.text("stderr"),
                error=error,
                strays=strays,
                duration_s=outcome.duration_s,
            )

    async def names(self) -> dict[str, Name]:
        named = await self._ask_guest(wire.ListNames(), wire.Named)
        return {
            name: Name(type=value.type, approx_bytes=max(0, value.approx_bytes))
            for name, value in (named.names if named else {}).items()
        }

    async def complete(self, code: str, cursor: int) -> Completions:
        reply = await self._ask_guest(wire.Complete(code=code, cursor=cursor), wire.Completed)
        if reply is None:
            return Completions(matches=[], start=cursor, end=cursor)
        return Completions(matches=reply.matches, start=reply.start, end=reply.end)

    async def inspect(self, code: str, cursor: int, detail: int) -> dict[str, str | bytes]:
        reply = await self._ask_guest(wire.Inspect(code=code, cursor=cursor, detail=detail), wire.Inspected)
        return reply.data.merged() if reply else {}

    async def output(self, run_id: str, stream: StreamName) -> bytes:
        """All that a run printed, as far as it is still kept."""
        path = log_file(self.workspace.logs / _checked(run_id), stream)
        return await anyio.to_thread.run_sync(lambda: path.read_bytes() if path.exists() else b"")

    def interrupt(self) -> bool:
        """Ask the running cell to end. False if nothing runs."""
        if self._conduct is None:
            return False
        self._conduct.stop(Stop(reason="interrupted", message="the run was interrupted"))
        return True

    async def reset(self) -> None:
        """Purge memory, end every process, wipe the namespace. Files stay; the generation rises."""
        self.interrupt()
        async with self._turn:
            self._refuse_if_closed()
            await self._renew()

    async def close(self) -> None:
        """End the session: kernel, processes, cgroup, files."""
        self.interrupt()
        async with self._turn:
            if self._closed:
                return
            self._closed = True
            with anyio.CancelScope(shield=True):
                await self._end_kernel()
                await anyio.to_thread.run_sync(self.workspace.remove)
                self._node.give_back_ids(self._ids)

    # -- one request -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[Incarnation]:
        """The session's turn: thawed while it lasts, frozen after."""
        async with self._turn:
            self._refuse_if_closed()
            incarnation = self._now
            if incarnation is None:  # its replacement could not be started; try again
                incarnation = await self._renew()
            incarnation.cgroup.thaw()
            try:
                yield incarnation
            finally:
                if self._now is not None:
                    self._now.cgroup.freeze()

    async def _carry_out(
        self,
        incarnation: Incarnation,
        run_id: str,
        request: wire.Message,
        *,
        timeout_s: float,
        emit: Emit | None,
        ask: Ask | None,
    ) -> tuple[Conduct, Outcome, RunError | None, list[Stray], int | None]:
        """Conduct a request to its end and clear up after it."""
        cgroup = incarnation.cgroup
        output = RunOutput(
            self.workspace.logs / run_id, output_bytes=self.limits.output_bytes, log_bytes=self.limits.log_bytes
        )
        conduct = Conduct(incarnation.kernel, output, self.limits, emit=emit, ask=ask)
        peak_is_exact = cgroup.reset_peak()
        self._conduct = conduct
        try:
            outcome = await conduct.run(request, timeout_s=timeout_s, guards=self._guards(incarnation))
        except BaseException:
            # The caller is gone (cancelled), or its callback failed: the cell ends with it.
            with anyio.CancelScope(shield=True):
                gave_up = Stop(reason="interrupted", message="the caller gave up")
                await self._clear_up(incarnation, await conduct.abandon(gave_up))
            raise
        finally:
            self._conduct = None
            output.close()
        outcome = await self._check_disk(outcome)
        peak = cgroup.memory_peak_bytes()
        memory = Memory(oom_kills=cgroup.oom_kills(), peak_bytes=peak, cap_bytes=self.limits.memory_bytes)
        error = explain(outcome, memory)
        strays = await self._clear_up(incarnation, outcome)
        return conduct, outcome, error, strays, peak if peak_is_exact else None

    def _guards(self, incarnation: Incarnation) -> list[Guard]:
        guards: list[Guard] = [self._disk_guard]
        if self.memory_cap == "watchdog":
            guards.append(MemoryWatchdog(incarnation.cgroup))
        return guards

    async def _check_disk(self, outcome: Outcome) -> Outcome:
        """A cell may have been over before anybody looked: what it wrote counts all the same."""
        stop = await self._disk_guard() if outcome.finished else None
        return outcome if stop is None else msgspec.structs.replace(outcome, stop=stop, finished=None)

    async def _clear_up(self, incarnation: Incarnation, outcome: Outcome) -> list[Stray]:
        """Name and kill what the request left; replace the kernel if it is lost."""
        strays = await self._strays(incarnation, outcome)
        if outcome.finished is None:
            await self._renew_or_wait()
        if outcome.duration_s > 0.1:  # nothing that is over sooner prints enough to matter
            forget_oldest_logs(self.workspace.logs, keep_bytes=4 * self.limits.log_bytes)
        return strays

    async def _strays(self, incarnation: Incarnation, outcome: Outcome) -> list[Stray]:
        kernel, cgroup = incarnation.kernel, incarnation.cgroup
        keep = {kernel.pid, kernel.init_pid} if outcome.finished else set[int]()
        killed = []
        if set(cgroup.pids()) - keep:
            killed = await anyio.to_thread.run_sync(lambda: cgroup.kill_except(keep))
        own = {kernel.pid, kernel.init_pid}
        processes = [Stray(kind="process", name=k.command, outcome="killed") for k in killed if k.pid not in own]
        threads = outcome.finished.threads if outcome.finished else []
        return processes + [Stray(kind="thread", name=name, outcome="frozen") for name in threads]

    async def _ask_guest(self, request: wire.Message, kind: type[Reply]) -> Reply | None:
        """A question that the guest answers by itself, without running a cell."""
        async with self._awake() as incarnation:
            await incarnation.kernel.send(request)
            with anyio.move_on_after(_QUICK_S):
                while True:
                    for event in await incarnation.kernel.wait(None):
                        if isinstance(event, kind):
                            return event
                        if isinstance(event, (Died, Gone)):
                            await self._renew_or_wait()
                            return None
            # It did not answer: threads or hooks of the user's hold it. It is not to answer later out of turn.
            await self._renew_or_wait()
            return None

    # -- kernels -----------------------------------------------------------------------------------------------

    async def _renew(self) -> Incarnation:
        """A fresh kernel in place of the present one, if any."""
        await self._end_kernel()
        self._now = await self._node.fork(self._environment, session=self.id, ids=self._ids, limits=self.limits)
        self.generation += 1
        self._now.cgroup.freeze()
        return self._now

    async def _renew_or_wait(self) -> None:
        """A run's result is not lost because no new kernel could be started; the next request tries again."""
        try:
            await self._renew()
        except KernelStartFailed:
            self._now = None

    async def _end_kernel(self) -> None:
        incarnation, self._now = self._now, None
        if incarnation is not None:
            with anyio.CancelScope(shield=True):
                await incarnation.end()

    def _pids(self) -> list[int]:
        return self._now.cgroup.pids() if self._now else []

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SessionClosed(f"session {self.id} is closed", hint="open a new session")


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(6)}"


def _checked(run_id: str) -> str:
    """An id becomes a file name."""
    if not run_id.replace("_", "").isalnum():
        raise InvalidSetting(f"{run_id!r} is not the id of a run", hint="take it from run.id")
    return run_id
