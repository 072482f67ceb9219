"""A session's disposable computer: one kernel at a time, its snapshot, and the layer that its files are staged on.

It executes, protects, freezes and rolls back, and knows nothing of journals: whether a run is kept or rolled back is
decided above. Rolled back, memory and files return together: the kernel is killed, a fresh layer is laid over the
committed files, and the snapshot takes the kernel's place. Without a snapshot a new kernel does, and memory is lost.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from holdfast.causes import Evidence, between_runs, explain, of_keeper
from holdfast.config import Limits
from holdfast.departures import Departures, WayOut
from holdfast.environments import Environment
from holdfast.errors import HoldfastError, ProcessStuck
from holdfast.executions import Aftermath, Execution, Gauges, gauge
from holdfast.guards import DiskGuard, MemoryWatchdog, is_full
from holdfast.kernel import wire
from holdfast.kernel.client import Kernel
from holdfast.kernel.conduct import Ask, Conduct, Emit, Meanwhile, nothing
from holdfast.kernel.outcomes import Guard, Outcome, Stop
from holdfast.kernel.output import RunOutput, forget_oldest_logs
from holdfast.kernel.saves import OnSave
from holdfast.kernel.stops import IsFollowed, Stops, never
from holdfast.model import MemoryCap
from holdfast.nodes.local import Ids, Incarnation, LocalNode
from holdfast.pace import Pace
from holdfast.resources.memory import Protection, names_of
from holdfast.resources.publish import discard
from holdfast.resources.staging import Staging
from holdfast.resources.workspace import Workspace
from holdfast.sandbox.cgroups.contract import DEATH_S
from holdfast.strays import kill_left, strays

_LAST_TRY_S = 1.0
"""For the end of a kernel one of whose processes is known not to die."""
_STILL_S = 0.2
"""For a running session to freeze. On cgroup v1 whoever waits for memory does not, and only a guard gives him some."""
_DYING_S = 2.0
"""For a process that was killed while it was frozen to end when it is thawed."""
_TOLD_S = 0.5
"""For the first process to tell how the kernel ended."""
_QUICK_S = 10.0
"""For what the guest answers by itself: names, completions, re-opening its files."""


class Computer:
    """Guards the processes and the layer of one session."""

    def __init__(
        self, node: LocalNode, environment: Environment, *, session: str, ids: Ids, workspace: Workspace,
        limits: Limits, past_proxy: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        self.environment = environment
        self.ids = ids
        self.limits = limits
        self.workspace = workspace
        self._pace = Pace()
        self.way = WayOut(past_proxy)
        self.staging = Staging(workspace)
        self.now: Incarnation | None = None
        self.protection: Protection
        self.pristine = True
        """Nothing has run yet that a rollback would have to keep: a fresh kernel is as good as a snapshot."""
        self.disk = DiskGuard(workspace, self.pids, limits, make_room=self._make_room, still=self._still)
        self.not_reopened: list[str] = []
        """Files that were open at the last commit and could not be opened again: `Run.not_restored`."""
        self._session = session
        self._node = node
        self.stops = Stops()
        self._at_rest = False
        """Frozen until the next turn."""
        self._seen_alive = 0.0
        """When the kernel was alive for sure."""
        self.died = ""
        """How and when the kernel ended that is not there any more, if not by us."""
        self._is_guarded = False
        """It had a snapshot when it was put to rest."""
        self._gauges: Gauges | None = None
        """As the next run finds them, if somebody has looked."""
        self._stuck = False
        """A process of this kernel outlived its kill: nobody waits for it again."""
        self._haunted = False
        """So did one of an earlier kernel: it has our ids still, and nobody else is to get them."""

    @property
    def memory_cap(self) -> MemoryCap:
        return "watchdog" if self._node.tree.kind == "watchdog" else "cgroup"

    @property
    def kernel(self) -> Kernel:
        assert self.now is not None
        return self.now.kernel

    # -- kernels -----------------------------------------------------------------------------------------------

    async def renew(self) -> Incarnation:
        """A fresh kernel in place of the present one, if any, on a fresh layer."""
        await self.end_kernel()
        await self.staging.lay()
        self.now = await self._node.fork(
            self.environment, session=self._session, ids=self.ids, limits=self.limits, stage=self.staging.name,
            shared=self.workspace.shared, past_proxy=self.way.past_proxy,
        )  # fmt: skip
        self.protection = Protection(
            self.now.kernel, self.now.cgroup, cap_bytes=self.limits.memory_bytes,
            reserve_bytes=self.limits.snapshot_reserve_bytes, undo=self.limits.undo,
        )  # fmt: skip
        self.pristine, self._gauges = True, None
        self._seen_alive, self._is_guarded, self.died = time.time(), False, ""
        self.freeze()
        return self.now

    async def end_kernel(self) -> None:
        incarnation, self.now = self.now, None
        patience_s, self._stuck = _LAST_TRY_S if self._stuck else DEATH_S, False
        if incarnation is not None:
            with anyio.CancelScope(shield=True):
                try:
                    await incarnation.end(patience_s=patience_s)
                except ProcessStuck:
                    self._haunted = True

    async def close(self) -> None:
        """End the kernel, every process and the cgroup. Files stay."""
        await self.end_kernel()
        if not self._haunted:
            self._node.give_back_ids(self.ids)

    # -- one request -------------------------------------------------------------------------------------------

    async def execute(
        self,
        run_id: str,
        request: wire.Execute | wire.Shell,
        *,
        timeout_s: float,
        emit: Emit | None = None,
        ask: Ask | None = None,
        on_save: OnSave | None = None,
        meanwhile: Meanwhile = nothing,
        is_followed: IsFollowed = never,
        departures: Departures | None = None,
    ) -> Execution:
        """Conduct a request to its end, whatever end that is, and clear up after it. `meanwhile` is called, in any
        case and once, when the kernel has it, and done when this returns. `is_followed` says whether more of the run is
        to come after such an end."""
        output = RunOutput(
            self.workspace.logs, run_id, output_bytes=self.limits.output_bytes, log_bytes=self.limits.log_bytes
        )
        conduct = Conduct(
            self.kernel, output, self.limits, run=run_id, pace=self._pace, emit=emit, ask=ask, on_save=on_save
        )
        async with self._way_out(departures):
            return await self._carry_out(conduct, request, timeout_s=timeout_s, meanwhile=meanwhile, then=is_followed)

    async def probe(
        self, execution: Execution, probes: list[wire.Probe], *, timeout_s: float, departures: Departures | None = None
    ) -> Execution:
        """Have the guest try what a caller declared: as a part of the same run, in what is left of its time."""
        request = wire.Verify(turn=self.next_turn(), probes=probes)
        after = execution.conduct.successor()
        async with self._way_out(departures):
            return await self._carry_out(after, request, timeout_s=timeout_s, meanwhile=nothing, then=never)

    def _way_out(self, departures: Departures | None) -> AbstractAsyncContextManager[None]:
        """Open while code of the user's runs, and closed before anybody looks at what it did."""
        return self.way.open(self.now.listener if self.now else None, departures)

    async def _carry_out(
        self, conduct: Conduct, request: wire.Conducted, *, timeout_s: float, meanwhile: Meanwhile, then: IsFollowed
    ) -> Execution:
        assert self.now is not None
        cgroup = self.now.cgroup
        gauges, self._gauges = self._gauges or gauge(cgroup), None
        given_up = None
        self.stops.begin(conduct)
        self.protection.kept.woken = frozenset()
        try:
            with self._node.at_work():
                outcome = await conduct.run(
                    request, timeout_s=timeout_s, guards=self._guards(), wake=self.thaw, meanwhile=meanwhile,
                    eager=self._node.has_time,
                )  # fmt: skip
        except BaseException as error:
            given_up = error
            self.thaw()  # it may not have come to that, and who is frozen does not end
            with anyio.CancelScope(shield=True):
                outcome = await conduct.abandon(Stop(reason="interrupted", message="the caller gave up"))
        finally:
            self.stops.end()
            conduct.output.close()
        self._seen_alive = time.time()
        self.stops.expect(given_up is None and outcome.finished is not None and then(explain(outcome)))
        if outcome.finished is None or self.look_around():
            with anyio.CancelScope(shield=True):
                outcome = await self._check_disk(outcome)
                try:
                    killed = await kill_left(cgroup, keep=self.protection.keep)
                except ProcessStuck as error:
                    self._stuck, killed, given_up = True, [], given_up or error
                    stop = Stop(reason="killed", message=error.message, at_once=True)
                    outcome = msgspec.structs.replace(outcome, finished=None, stop=stop)
        else:
            killed = []
        if outcome.printed:
            forget_oldest_logs(self.workspace.logs, keep_bytes=4 * self.limits.log_bytes)
        oom_kills = 0 if outcome.finished else cgroup.oom_kills() - gauges.oom_kills
        peak_bytes = cgroup.memory_peak_bytes()
        finished = outcome.finished
        evidence = Evidence(
            oom_kills=oom_kills, peak_bytes=peak_bytes, cap_bytes=self.limits.memory_bytes,
            keeper_ended_at=None if finished else self._keeper_ended_at(),
        )  # fmt: skip
        return Execution(
            conduct=conduct,
            outcome=outcome,
            error=explain(outcome, evidence),
            strays=strays(killed, finished.threads if finished else [], finished.tasks if finished else []),
            peak_bytes=peak_bytes if gauges.peak_is_exact else None,
            given_up=given_up,
        )

    def look_around(self) -> bool:
        """Whether there is anything to clear up or to measure: a process that is left, something on the disk."""
        left = set(self.pids()) - self.protection.keep
        return bool(left) or self.staging.has_changes() or self.disk.has_written()

    def try_looking_around(self) -> bool:
        """The same for a first time, if there is time for it: its kernel is the only one at work on this machine, and
        does not need our processor. Nothing comes of it; and in a directory of the user's, where to look may take
        opening what the guest has closed, we wait until he is still."""
        if not self._node.has_time or self.workspace.shared is not None:
            return False
        with suppress(OSError):
            self.look_around()
        return True

    def has_full_shm(self) -> bool:
        """Whether /dev/shm is full, which is the session's own memory: code meets that in the words of a full disk."""
        assert self.now is not None
        with suppress(OSError):  # the kernel died, or this user may not look there
            return is_full(f"/proc/{self.now.kernel.pid}/root/dev/shm")
        return False

    def next_turn(self) -> int:
        """Requests are numbered, so that a belated reply ends no other."""
        self.kernel.turn += 1
        return self.kernel.turn

    def resting(self) -> AbstractAsyncContextManager[None]:
        """A place among those that are put to rest at a time, on this machine."""
        return self._node.resting()

    # -- afterwards --------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        self._at_rest = True
        if self.now is not None and not self._let_die(self.now):
            self.now.cgroup.freeze()
            self._gauges = gauge(self.now.cgroup)
            self._is_guarded = self.now.kernel.has_snapshot()
            if self.memory_cap == "cgroup":  # to add it up from its processes takes milliseconds
                with suppress(OSError):
                    self.now.show_memory()
            if not self.now.kernel.is_lost():
                self._seen_alive = time.time()

    def _let_die(self, incarnation: Incarnation) -> bool:
        """If its keeper has ended: frozen, what is left of it would keep its memory, and the keeper from ending."""
        if is_doomed := self._node.is_doomed(incarnation.keeper):
            incarnation.cgroup.thaw()
        return is_doomed

    def is_hurt(self) -> bool:
        """Whether its kernel, or the snapshot beside it, was ended while it was at rest. On cgroup v1 a frozen process
        that was killed lives until it is thawed: it runs nothing any more, and counts as dead."""
        if self.now is None:
            return True
        kernel = self.now.kernel
        lost = kernel.is_lost() or (self._is_guarded and not kernel.has_snapshot())
        dies_late = self._at_rest and self._node.tree.freezers is not None
        return lost or (dies_late and bool(kernel.doomed()))

    async def find_death(self) -> str | None:
        """How and when the kernel ended that was at rest; None: it did not. Afterwards all that was to die is dead."""
        if self.now is None:
            return None
        kernel = self.now.kernel
        doomed = kernel.doomed()
        self.thaw()
        await kernel.wait_dead(doomed, _DYING_S)
        await kernel.wait_told(_TOLD_S)
        kernel.note_deaths()
        if not kernel.is_lost() and kernel.pid not in kernel.doomed():
            return None
        return self._death()

    def _keeper_ended_at(self) -> float | None:
        """If the kernel ended with it."""
        return None if self.now is None else self._node.keeper_ended_at(self.now.keeper)

    def _death(self) -> str:
        kernel = self.kernel
        if (at := self._keeper_ended_at()) is not None:
            return of_keeper(at)
        lost_init = kernel.lost_init()
        return between_runs(kernel.note_deaths(), lost_init=lost_init, after=self._seen_alive, found=time.time())

    async def give_up_kernel(self) -> None:
        """End a kernel that is not fit for another run; if it was dead already, it is known of what."""
        if self.now is not None and (
            self._keeper_ended_at() is not None or self.now.kernel.is_lost() or self.now.kernel.doomed()
        ):
            await self.now.kernel.wait_told(_TOLD_S)
            self.died = self._death()
        await self.end_kernel()

    async def hold(self, patience_s: float = _QUICK_S) -> bool:
        """Freeze, and wait until nothing moves: only then are its files what they are. False: something goes on."""
        if self.now is None or self._stuck:
            return self.now is None
        incarnation, cgroup = self.now, self.now.cgroup
        cgroup.freeze()
        stands_still = cgroup.wait_frozen(0) or await anyio.to_thread.run_sync(cgroup.wait_frozen, patience_s)
        return self._let_die(incarnation) or stands_still

    def thaw(self) -> None:
        self._at_rest = False
        if self.now is not None:
            self.now.cgroup.thaw()

    async def roll_back(self, *, alive: bool) -> Aftermath:
        """Memory and files as they were when the last snapshot was taken; memory may be lost instead."""
        assert self.now is not None
        kernel, was_pristine = self.now.kernel, self.pristine
        self.thaw()  # who is frozen neither answers nor dies
        before = await names_of(kernel) if alive and kernel.is_alive() else {}
        woken, unprotected = (None, None) if was_pristine or self._stuck else await self._wake()
        if woken is not None:
            await self.staging.note_untouched()
            after = await names_of(kernel)
            taken_back = [n for n, value in before.items() if n not in after or after[n].address != value.address]
            return Aftermath(memory="restored", discarded=sorted(taken_back), not_restored=woken.not_restored)
        try:
            await self._follow(self.staging.path, self.renew)
        except HoldfastError:  # a run's result is not lost with it; the next request tries again
            self.now = None
            self.staging.leave()  # it may be what fills the disk
        return Aftermath(
            memory="restored" if was_pristine else "lost", discarded=sorted(before), unprotected=unprotected
        )

    async def _wake(self) -> tuple[wire.Woken | None, str | None]:
        """The snapshot, on a fresh layer; or why memory is lost. It never wakes on the layer that was to go: what
        it wrote there from then on nobody would see."""
        try:
            woken = await self.protection.roll_back(self._fresh_layer)
        except HoldfastError as error:
            self._stuck = isinstance(error, ProcessStuck)
            return None, error.message
        return woken, self.protection.unprotected

    async def restage(self) -> None:
        """After the layer was published: a fresh one over the files, and the guest's open files on it."""
        if self.now is None:
            return
        await self.staging.lay()
        await self._mount_stage(self.now.kernel)
        self.thaw()
        restaged = await self.now.kernel.restage(_QUICK_S)
        if restaged is None or await self.staging.holds_committed_files():
            return await self.give_up_kernel()
        self.not_reopened = restaged.not_reopened
        await self.staging.note_untouched()

    async def protect(self, version: int) -> None:
        """A snapshot of the kernel as it is now, at this version. What nothing has run in needs none, but to go back
        to."""
        if self.now is not None and (self.limits.undo or not self.pristine):
            self.thaw()  # what was looked at and found unchanged was left frozen
            await self.protection.renew(version)

    async def go_back(self, version: int) -> Aftermath:
        """Memory as it was at a version whose snapshot sleeps, over the files that are committed now."""
        woken = None
        with suppress(HoldfastError):
            woken = await self.protection.go_back(version, self._next_layer)
        self.not_reopened = []
        if woken is not None:
            await self.staging.note_untouched()
            return Aftermath(memory="restored", not_restored=woken.not_restored)
        with suppress(HoldfastError):  # the next request tries again
            await self.renew()
        return Aftermath(memory="lost")

    @property
    def has_woken(self) -> bool:
        """The kernel was a snapshot, and has none itself."""
        return self.now is not None and bool(self.protection.kept.woken)

    # -- parts -------------------------------------------------------------------------------------------------

    async def _fresh_layer(self) -> None:
        """Between the kernel's death and the snapshot's waking: what the run wrote is not under it any more."""
        if self.staging.is_gone() or self.staging.has_changes():
            await self._follow(self.staging.path, self._next_layer)

    async def _follow(self, dead: Path, lay: Callable[[], Awaitable[object]]) -> None:
        """Lay another layer; if that is refused, once more without the dead one, which may be what leaves no room."""
        try:
            await lay()
        except HoldfastError:
            with suppress(OSError):  # a process that outlived its kill may still write there; or the disk refuses it
                await anyio.to_thread.run_sync(discard, dead)
            await lay()

    async def _next_layer(self) -> None:
        if self.now is not None:
            await self.staging.lay()
            await self._mount_stage(self.now.kernel)

    async def _make_room(self) -> bool:
        """What is kept only to go back to may hold files that are nobody's any more."""
        if self.now is None or not self.protection.kept.pids:
            return False
        at_rest = self._at_rest
        self.thaw()  # who is frozen does not die
        try:
            return await self.protection.kept.let_go_of_all()
        finally:
            if at_rest:
                self.freeze()

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        at_rest = self._at_rest
        try:
            await self.hold(_STILL_S)
            yield
        finally:
            if not at_rest:
                self.thaw()

    async def _mount_stage(self, kernel: Kernel) -> None:
        workspace = self.workspace
        guest = self.ids.file_owner
        await self._node.stage(kernel, workspace.path, self.staging.name, shared=workspace.shared, guest=guest)

    def _guards(self) -> list[Guard]:
        assert self.now is not None
        memory: Guard = (
            MemoryWatchdog(self.now.cgroup, self.limits, make_room=self._make_room)
            if self.memory_cap == "watchdog"
            else self.protection
        )
        return [self.disk, memory]

    async def _check_disk(self, outcome: Outcome) -> Outcome:
        """A cell may have been over before anybody looked: what it wrote counts all the same."""
        stop = await self.disk.at_end(self.staging.path) if outcome.finished else None
        return outcome if stop is None else msgspec.structs.replace(outcome, stop=stop, finished=None)

    def pids(self) -> list[int]:
        return self.now.cgroup.pids() if self.now else []
