"""A live session: one workspace, one kernel at a time, one request at a time.

After each request, while the caller thinks, a snapshot of the kernel is taken; then the session's cgroup is frozen,
and nothing runs in the background. A run that fails is rolled back: its kernel is killed, and the snapshot takes its
place. If there is no snapshot to fall back to, a fresh kernel with the next generation does; files stay in either case.
"""

import asyncio
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
from holdfast.kernel.client import Kernel
from holdfast.kernel.conduct import Ask, Conduct, Emit, Guard, Outcome, Stop
from holdfast.kernel.output import RunOutput, forget_oldest_logs, log_file
from holdfast.model import (
    Completions,
    Memory,
    MemoryCap,
    Mode,
    Name,
    Run,
    RunError,
    ShellResult,
    Stray,
    StreamName,
)
from holdfast.nodes.local import Ids, Incarnation, LocalNode
from holdfast.recovery import Evidence, bound_names, explain, keeps_memory, with_fate
from holdfast.resources.memory import Protection
from holdfast.resources.workspace import Workspace
from holdfast.sandbox.cgroups import Cgroup

_QUICK_S = 10.0
"""For what the guest answers by itself: names, completions."""
Reply = TypeVar("Reply", wire.Named, wire.Completed, wire.Inspected)


class LiveSession:
    """Guards one session's state."""

    def __init__(
        self,
        node: LocalNode,
        environment: Environment,
        *,
        id: str,
        ids: Ids,
        workspace: Workspace,
        limits: Limits,
        mode: Mode = "strict",
    ) -> None:
        self.id = id
        self.mode = mode
        self.generation = 0
        self.limits = limits
        self.workspace = workspace
        self._node = node
        self._environment = environment
        self._ids = ids
        self._turn = anyio.Lock()
        self._now: Incarnation | None = None
        self._protection: Protection
        self._pristine = True
        """Nothing has run yet that a rollback would have to keep: a fresh kernel is as good as a snapshot."""
        self._conduct: Conduct | None = None
        self._settling: asyncio.Task[None] | None = None
        self._disk_guard = DiskGuard(workspace, self._pids, limits)
        self._closed = False

    @property
    def memory_cap(self) -> MemoryCap:
        return "watchdog" if self._node.tree.kind == "watchdog" else "cgroup"

    async def start(self) -> None:
        await anyio.to_thread.run_sync(lambda: self.workspace.create(owner=self._ids.file_owner))
        await self._renew()

    async def run(
        self,
        code: str,
        *,
        timeout_s: float,
        mode: Mode | None = None,
        emit: Emit | None = None,
        ask: Ask | None = None,
    ) -> Run:
        """Execute one cell to its end."""
        _check_text(code)
        if len(code.encode()) > self.limits.code_bytes:
            raise InvalidSetting(
                f"the cell is larger than {self.limits.code_bytes:,} bytes",
                hint="put data in a file under /mnt/data and read it from there",
            )
        run_id = _new_id("run")
        async with self._awake() as incarnation:
            request = wire.Execute(turn=_next_turn(incarnation), code=code, stdin=ask is not None)
            result = await self._carry_out(
                incarnation, run_id, request, timeout_s=timeout_s, mode=mode or self.mode, emit=emit, ask=ask
            )
        conduct, outcome, aftermath = result.conduct, result.outcome, result.aftermath
        return Run(
            id=run_id,
            session=self.id,
            status="ok" if result.error is None else "failed",
            generation=self.generation,
            memory=aftermath.memory,
            discarded=aftermath.discarded if outcome.finished else sorted(bound_names(code)),
            not_restored=aftermath.not_restored,
            unprotected=aftermath.unprotected,
            count=outcome.finished.count if outcome.finished else 0,
            text=conduct.shelf.result,
            stdout=conduct.output.text("stdout"),
            stderr=conduct.output.text("stderr"),
            dropped_bytes=conduct.output.dropped_bytes,
            displays=conduct.shelf.displays,
            dropped_displays=conduct.shelf.dropped,
            error=result.error,
            strays=result.strays,
            duration_s=outcome.duration_s,
            peak_memory_bytes=result.peak_bytes,
            memory_cap=self.memory_cap,
        )

    async def shell(self, command: str, *, timeout_s: float, emit: Emit | None = None) -> ShellResult:
        """Run a command line in the sandbox. It touches no variable, so only a lost kernel is rolled back."""
        _check_text(command)
        run_id = _new_id("cmd")
        async with self._awake() as incarnation:
            result = await self._carry_out(
                incarnation,
                run_id,
                wire.Shell(turn=_next_turn(incarnation), command=command),
                timeout_s=timeout_s,
                mode="notebook",
                emit=emit,
                ask=None,
            )
        outcome, output = result.outcome, result.conduct.output
        return ShellResult(
            id=run_id,
            exit_code=outcome.finished.exit_code if outcome.finished else None,
            stdout=output.text("stdout"),
            stderr=output.text("stderr"),
            error=result.error,
            strays=result.strays,
            duration_s=outcome.duration_s,
        )

    async def names(self) -> dict[str, Name]:
        named = await self._ask_guest(wire.ListNames(), wire.Named)
        return {
            name: Name(type=value.type, approx_bytes=max(0, value.approx_bytes))
            for name, value in (named.names if named else {}).items()
        }

    async def complete(self, code: str, cursor: int) -> Completions:
        _check_text(code)
        reply = await self._ask_guest(wire.Complete(code=code, cursor=cursor), wire.Completed)
        if reply is None:
            return Completions(matches=[], start=cursor, end=cursor)
        return Completions(matches=reply.matches, start=reply.start, end=reply.end)

    async def inspect(self, code: str, cursor: int, detail: int) -> dict[str, str | bytes]:
        _check_text(code)
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
            await self._wait_settled()
            await self._renew()

    async def close(self) -> None:
        """End the session: kernel, processes, cgroup, files."""
        self.interrupt()
        async with self._turn:
            if self._closed:
                return
            self._closed = True
            with anyio.CancelScope(shield=True):
                await self._wait_settled()
                await self._end_kernel()
                await anyio.to_thread.run_sync(self.workspace.remove)
                self._node.give_back_ids(self._ids)

    # -- one request -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _awake(self, *, changes_memory: bool = True) -> AsyncIterator[Incarnation]:
        """The session's turn: thawed while it lasts; afterwards, without the caller, protected and frozen again."""
        async with self._turn:
            self._refuse_if_closed()
            await self._wait_settled()
            self._disk_guard.refuse_if_hopeless()
            incarnation = self._now
            if incarnation is None:  # its replacement could not be started; try again
                incarnation = await self._renew()
            elif self._pristine and not incarnation.kernel.is_alive():  # nothing is lost with it
                incarnation = await self._renew(same_generation=True)
            incarnation.cgroup.thaw()
            try:
                yield incarnation
            finally:
                self._settling = asyncio.create_task(self._settle(changes_memory=changes_memory))

    async def _settle(self, *, changes_memory: bool) -> None:
        """What a turn leaves to do, hidden in the caller's thinking time."""
        if self._now is None:
            return
        if changes_memory and not self._pristine:
            await self._protection.renew()
        self._now.cgroup.freeze()
        await self._disk_guard.take_stock()

    async def _wait_settled(self) -> None:
        settling, self._settling = self._settling, None
        if settling is not None:
            await asyncio.shield(settling)

    async def _carry_out(
        self,
        incarnation: Incarnation,
        run_id: str,
        request: wire.Execute | wire.Shell,
        *,
        timeout_s: float,
        mode: Mode,
        emit: Emit | None,
        ask: Ask | None,
    ) -> "_Result":
        """Conduct a request to its end, clear up after it, and roll it back if it failed."""
        cgroup = incarnation.cgroup
        output = RunOutput(
            self.workspace.logs / run_id, output_bytes=self.limits.output_bytes, log_bytes=self.limits.log_bytes
        )
        conduct = Conduct(incarnation.kernel, output, self.limits, emit=emit, ask=ask)
        peak_is_exact, oom_kills = cgroup.reset_peak(), cgroup.oom_kills()
        self._conduct = conduct
        try:
            outcome = await conduct.run(request, timeout_s=timeout_s, guards=self._guards(incarnation))
        except BaseException:
            # The caller is gone (cancelled), or its callback failed: the cell ends with it.
            with anyio.CancelScope(shield=True):
                gave_up = Stop(reason="interrupted", message="the caller gave up")
                outcome = await conduct.abandon(gave_up)
                await self._clear_up(incarnation, outcome)
                await self._after(outcome, explain(outcome, self._evidence(cgroup, oom_kills)), mode)
            raise
        finally:
            self._conduct = None
            output.close()
        outcome = await self._check_disk(outcome)
        evidence = self._evidence(cgroup, oom_kills)
        error = explain(outcome, evidence)
        strays = await self._clear_up(incarnation, outcome)
        aftermath = await self._after(outcome, error, mode)
        return _Result(
            conduct=conduct,
            outcome=outcome,
            error=None if error is None else with_fate(error, aftermath.memory, aftermath.unprotected),
            strays=strays,
            peak_bytes=evidence.peak_bytes if peak_is_exact else None,
            aftermath=aftermath,
        )

    def _guards(self, incarnation: Incarnation) -> list[Guard]:
        guards: list[Guard] = [self._disk_guard]
        guards.append(
            MemoryWatchdog(incarnation.cgroup, self.limits) if self.memory_cap == "watchdog" else self._protection
        )
        return guards

    def _evidence(self, cgroup: Cgroup, oom_kills_before: int) -> Evidence:
        return Evidence(
            oom_kills=cgroup.oom_kills() - oom_kills_before,
            peak_bytes=cgroup.memory_peak_bytes(),
            cap_bytes=self.limits.memory_bytes,
        )

    async def _check_disk(self, outcome: Outcome) -> Outcome:
        """A cell may have been over before anybody looked: what it wrote counts all the same."""
        stop = await self._disk_guard.at_end() if outcome.finished else None
        return outcome if stop is None else msgspec.structs.replace(outcome, stop=stop, finished=None)

    async def _clear_up(self, incarnation: Incarnation, outcome: Outcome) -> list[Stray]:
        """Name and kill what the request left."""
        cgroup, keep, killed = incarnation.cgroup, self._protection.keep, []
        if set(cgroup.pids()) - keep:
            killed = await anyio.to_thread.run_sync(lambda: cgroup.kill_except(keep))
        if outcome.printed:
            forget_oldest_logs(self.workspace.logs, keep_bytes=4 * self.limits.log_bytes)
        threads = [name[:200] for name in outcome.finished.threads[:100]] if outcome.finished else []
        return [Stray(kind="process", name=_plain(process.command), outcome="killed") for process in killed] + [
            Stray(kind="thread", name=name, outcome="frozen") for name in threads
        ]

    async def _after(self, outcome: Outcome, error: RunError | None, mode: Mode) -> "_Aftermath":
        """What becomes of memory."""
        unprotected = self._protection.unprotected
        if outcome.finished is not None and (error is None or keeps_memory(error, mode)):
            if error is None or error.code != "syntax":
                self._pristine = False
            return _Aftermath(
                memory="restored" if error and error.code == "syntax" else "kept", unprotected=unprotected
            )
        return await self._roll_back(alive=outcome.finished is not None)

    async def _roll_back(self, *, alive: bool) -> "_Aftermath":
        assert self._now is not None
        kernel, was_pristine = self._now.kernel, self._pristine
        before = await _names_of(kernel) if alive else {}
        woken = None if was_pristine else await self._protection.roll_back()
        if woken is not None:
            after = await _names_of(kernel)
            taken_back = [n for n, value in before.items() if n not in after or after[n].address != value.address]
            return _Aftermath(memory="restored", discarded=sorted(taken_back), not_restored=woken.not_restored)
        unprotected = None if was_pristine else self._protection.unprotected
        try:
            await self._renew(same_generation=was_pristine)
        except KernelStartFailed:  # a run's result is not lost with it; the next request tries again
            self._now = None
        return _Aftermath(
            memory="restored" if was_pristine else "lost", discarded=sorted(before), unprotected=unprotected
        )

    async def _ask_guest(self, request: wire.Message, kind: type[Reply]) -> Reply | None:
        """A question that the guest answers by itself, without running a cell."""
        async with self._awake(changes_memory=False) as incarnation:
            reply = await _question(incarnation.kernel, request, kind)
            if reply is None:
                # It died, or threads or hooks of the user's hold it; it is not to answer later out of turn.
                await self._roll_back(alive=False)
            return reply

    # -- kernels -----------------------------------------------------------------------------------------------

    async def _renew(self, *, same_generation: bool = False) -> Incarnation:
        """A fresh kernel in place of the present one, if any."""
        await self._end_kernel()
        self._now = await self._node.fork(self._environment, session=self.id, ids=self._ids, limits=self.limits)
        self._protection = Protection(
            self._now.kernel,
            self._now.cgroup,
            cap_bytes=self.limits.memory_bytes,
            reserve_bytes=self.limits.snapshot_reserve_bytes,
        )
        self._pristine = True
        self.generation += 0 if same_generation else 1
        self._now.cgroup.freeze()
        return self._now

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


class _Aftermath(msgspec.Struct, frozen=True, kw_only=True):
    """What became of memory."""

    memory: Memory
    discarded: list[str] = []
    not_restored: list[str] = []
    unprotected: str | None = None


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    conduct: Conduct
    outcome: Outcome
    error: RunError | None
    strays: list[Stray]
    peak_bytes: int | None
    aftermath: _Aftermath


async def _question(kernel: Kernel, request: wire.Message, kind: type[Reply]) -> Reply | None:
    with anyio.move_on_after(_QUICK_S):
        await kernel.send(request)
        return await kernel.expect(kind)
    return None


async def _names_of(kernel: Kernel) -> dict[str, wire.Name]:
    named = await _question(kernel, wire.ListNames(bare=True), wire.Named)
    return named.names if named else {}


def _plain(command: str) -> str:
    """A command as its user knows it: a fork of the kernel has the zygote's command line."""
    return "python (a fork of the kernel)" if "holdfast.kernel.zygote" in command else command


def _next_turn(incarnation: Incarnation) -> int:
    incarnation.kernel.turn += 1
    return incarnation.kernel.turn


def _check_text(code: str) -> None:
    try:
        code.encode()
    except UnicodeEncodeError as error:
        raise InvalidSetting(
            f"the code is no text: {error.reason} at character {error.start:,}",
            hint="remove the lone surrogate (decode the bytes it came from with errors='replace')",
        ) from error


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(6)}"


def _checked(run_id: str) -> str:
    """An id becomes a file name."""
    if not run_id.replace("_", "").isalnum():
        raise InvalidSetting(f"{run_id!r} is not the id of a run", hint="take it from run.id")
    return run_id
