"""One run, from its plan to its end: PLAN, EXECUTE, VERIFY, COMMIT; or a rollback of memory and files.

    plan       the Run Card; journal `Planned`
    execute    the code, on a staged layer, under a deadline; journal `Executed`
    verify     frozen: what changed is read and hashed, what was declared is checked, staged data is made durable;
               journal `Verified`, the point of no return
    settle     published, sealed, the next version; or rolled back, and a recovery says why

The caller may go away at any moment: from the end of the code on nothing is cancelled any more.
"""

import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, Unpack

import anyio
import msgspec

from holdfast import checks, durable, once, planning, recovery
from holdfast.causes import in_short, keeps_memory, with_fate
from holdfast.computer import Computer
from holdfast.departures import Departures
from holdfast.errors import DiskFailed, DiskFull, DiskRefused, HoldfastError, RehearsalUnavailable, as_told
from holdfast.executions import Aftermath, Execution, met_disk
from holdfast.facts import facts_of
from holdfast.faults import crashpoint
from holdfast.inputs import Read, read_for_lost_names, refuse_missing
from holdfast.kernel.conduct import Ask, Emit, Meanwhile, nothing
from holdfast.model import Mode, Run, RunError
from holdfast.notes import Notes
from holdfast.plans import Plan
from holdfast.receipts import as_seen
from holdfast.records import Change, Executed, Saved, Verified
from holdfast.requests import RunRequest, refuse_nonsense, to_guest
from holdfast.resources.descent import Parts
from holdfast.resources.handles import databases, let_go
from holdfast.resources.publish import prepare
from holdfast.results import (
    Ending,
    blocked_error,
    executed,
    in_data,
    lost_error,
    names_after,
    result,
    verification_error,
)
from holdfast.retention import forget_manifests
from holdfast.savepoints import Savepoints
from holdfast.sessions import LiveSession, new_id
from holdfast.settling import RolledBack, Settlement, results, settle, settle_at_once, state_after, write_manifest
from holdfast.state import State, work_of
from holdfast.statements import statement
from holdfast.verification import Verdict, changed_outside, is_declared, touched, try_out, verify

Kept = Literal["committed", "kept"]


async def run(session: LiveSession, request: RunRequest, *, emit: Emit | None = None, ask: Ask | None = None) -> Run:
    """Execute a request exactly as planned, to its end."""
    refuse_nonsense(request, session.limits)
    if request.key is None:
        async with session.turn() as computer:
            return await _Transaction(session, computer, request, once.Attempt()).run(emit, ask)
    async with session.once.turn(request.key):
        recorded, attempt = await once.earlier_answer(session.books, request)
        if recorded is not None:
            return recorded
        async with session.turn() as computer:
            if attempt.number > 1:  # one that had no end, because the disk was full, has one now: so began the turn
                recorded, attempt = await once.earlier_answer(session.books, request)
                if recorded is not None:
                    return recorded
            return await _Transaction(session, computer, request, attempt).run(emit, ask)


class _Transaction:
    """One run under way."""

    def __init__(self, session: LiveSession, computer: Computer, request: RunRequest, attempt: once.Attempt) -> None:
        self.session = session
        self.books = session.books
        self.computer = computer
        self.request = request
        self.mode: Mode = "notebook" if request.kind == "command" else request.mode or session.mode
        self.id = request.run or new_id("run" if request.kind == "cell" else "cmd")
        self.plan = Plan(session, request, run=self.id, attempt=attempt)
        self.before = self.books.state
        notes = Notes(self.books, recall=self.plan.recall)
        self.saves = Savepoints(self.books, computer, notes, run=self.id, publication=request.publication)
        self.departures = Departures(notes, self.id, planned=self.plan.noted.wait, before=attempt.may_have_happened)
        self.undone: list[str] = []
        """Files that a rollback took back."""
        self.done: Executed | None = None
        self.given_up: BaseException | None = None
        """Why the caller does not get what came of it: he went away, or his callback failed."""
        self.is_back = True
        """Memory and files are as before: nothing has begun yet, or all of it was taken back."""
        self.back: Aftermath | None = None
        """What became of memory, if that is as before already though the code was to run."""
        self.replaced = ""
        """How and when a kernel ended that nothing of this run had begun on."""

    async def run(self, emit: Emit | None, ask: Ask | None) -> Run:
        """All of it, in order."""
        try:
            with durable.ours("the run"):  # what the caller's own callbacks raise is not raised here: see `given_up`
                ended = await self._to_its_end(emit, ask)
        except BaseException as error:  # whatever it was that we did wrong, no run is left without an end
            with anyio.CancelScope(shield=True):
                await self._give_up(error)
            raise
        finally:
            self.books.executed.discard(self.id)
            if self.id not in self.books.open:
                self.session.endings.pop(self.id, None)
        if self.given_up is not None:
            raise self.given_up
        if ended.receipt is not None:  # it is told for good
            self.session.kernel_replaced, self.session.has_untold_loss = "", False
        return ended

    async def _to_its_end(self, emit: Emit | None, ask: Ask | None) -> Run:
        await recovery.refuse_if_moved(self.books, self.request.expect)
        await refuse_missing(self.books, self.request.inputs)
        self.plan.outside = self.books.take_missing() + await changed_outside(self.books, self.computer)
        if self.request.rehearse:
            await self.plan.make()
            return await self._rehearse(emit)
        if (self.request.preflight or self.session.preflight) == "block" or self.session.has_untold_loss:
            if (rest := self.plan.begin(watched=emit is not None)) is not None:
                await rest
            if (refusal := self._refusal()) is not None:
                with anyio.CancelScope(shield=True):
                    return await self._end_rolled_back(None, *refusal)
        execution = await self._execute(emit, ask, meanwhile=lambda: self._meanwhile(watched=emit is not None))
        self.given_up = execution.given_up
        crashpoint("run.executed")
        self.books.executed.add(self.id)
        if not self.plan.is_noted:  # a fault of ours, and nothing that ran without a plan stays
            raise execution.given_up or RuntimeError("a run without a plan")
        with anyio.CancelScope(shield=True):
            ended = await self._decide(execution)
        return ended

    def _refusal(self) -> tuple[RunError, Aftermath] | None:
        """Why code is not started whose plan is made. Nobody has told the caller yet that memory was lost: code that
        needs what was in it has not failed by itself."""
        death = self.session.kernel_replaced or "the kernel ended between two runs"
        if self.session.has_untold_loss and (lost := planning.lost_names(self.plan.card, self.books.state)):
            return lost_error(death, lost), Aftermath(memory="lost", unprotected=death)
        if (self.request.preflight or self.session.preflight) != "block":
            return None
        missing = planning.missing(self.plan.card)
        return (blocked_error(missing), Aftermath(memory="kept")) if missing else None

    def _meanwhile(self, *, watched: bool) -> Coroutine[Any, Any, None] | None:
        """The plan. And, where nobody else wants the time, a first try of what the end takes: it is in no cache any
        more, and costs three times what it does the second time."""
        rest = self.plan.begin(watched=watched)
        if rest is None and self.computer.try_looking_around():
            self.books.key.sign(b"")
        return rest

    # -- execute -----------------------------------------------------------------------------------------------

    async def _execute(self, emit: Emit | None, ask: Ask | None, *, meanwhile: Meanwhile = nothing) -> Execution:
        execution = await self._try_to_execute(emit, ask, meanwhile)
        # A thread that an earlier run left may have read the request without Linux counting it, and sent something.
        may_begin_anew = execution.outcome.is_unstarted and execution.given_up is None and not self.departures.sent
        if may_begin_anew and await self._has_another_kernel(execution):
            execution = await self._try_to_execute(emit, ask, nothing)
        return self.departures.explained(execution)

    async def _has_another_kernel(self, execution: Execution) -> bool:
        """The kernel died before it had read the request: nothing has run, and it is no fault of the code's. With what
        the snapshot remembers the run can begin anew; with empty memory it would fail for another reason."""
        assert execution.error is not None
        was_pristine = self.computer.pristine
        with anyio.CancelScope(shield=True):
            self.back = await self.session.roll_back(alive=False, cause=in_short(execution.error), run=self.id)
            self.is_back = True
            self.replaced = execution.error.message.rstrip(".")
            if self.back.memory == "lost" or self.computer.now is None:
                return False
            if not was_pristine:
                await self.computer.protect(self.before.version)
        return True

    async def _try_to_execute(self, emit: Emit | None, ask: Ask | None, meanwhile: Meanwhile) -> Execution:
        self.is_back, self.back = False, None
        told = to_guest(self.request, turn=self.computer.next_turn(), stdin=ask is not None, mode=self.mode)
        return await self.computer.execute(
            self.id, told, timeout_s=self.request.timeout_s, emit=emit, ask=ask, on_save=self.saves.save,
            meanwhile=meanwhile, is_followed=self._is_tried, departures=self.departures,
        )  # fmt: skip

    # -- the end -----------------------------------------------------------------------------------------------

    def _is_tried(self, error: RunError | None) -> bool:
        """Whether what was declared is tried after such an end of the code."""
        return is_declared(self.request) and (error is None or (error.code != "syntax" and self._leaves_as_is(error)))

    async def _decide(self, execution: Execution) -> Run:
        self._refuse_for_the_disk(execution)
        error, begun = execution.error, execution.outcome.begun
        if execution.outcome.finished is None or (error is not None and begun and not self._leaves_as_is(error)):
            assert error is not None
            return await self._roll_back(execution, error)
        if error is not None and (error.code == "syntax" or not begun):  # nothing was started
            self.is_back, unprotected = True, self.computer.protection.unprotected
            untouched = Aftermath(memory="restored", unprotected=unprotected)
            return await self._end_rolled_back(execution, with_fate(error, "restored", None), untouched)
        tried, verdict = await self._verify(execution)
        self.plan.outside += [path for path in verdict.strange if path not in self.plan.outside]
        crashpoint("run.verified")
        if tried.error is not error or not verdict.passed:
            return await self._roll_back(tried, tried.error or verification_error(verdict.checks), verdict)
        return await self._commit(tried, verdict)

    def _refuse_for_the_disk(self, execution: Execution) -> None:
        """Raises DiskFailed if the code failed, or may have lost what it wrote, for our disk's sake."""
        self.computer.staging.refuse_if_gone()
        met = met_disk(execution) if execution.outcome.begun else ""
        if met and not self.computer.has_full_shm() and (fault := self.computer.disk.shortage()):
            raise type(fault)(f"{fault.message}; the code met it: {met}", hint=fault.hint)
        # A file that is let go of without close() loses what it could not write, and Python tells nobody.
        if self.computer.disk.has_no_room() and self.computer.staging.has_changes():
            raise DiskFull(
                "the disk is full: what the run wrote may not be all there",
                hint="free space where the home is, then run it again",
            )

    async def _verify(self, execution: Execution) -> tuple[Execution, Verdict]:
        """What was declared is tried first, and that can end as badly as the code itself."""
        probed, tried = await try_out(self.books, self.computer, self.request, execution, self.departures)
        self.given_up = tried.given_up
        if tried.error is not execution.error:
            return tried, Verdict(checks=probed)
        within_s = self.request.timeout_s - tried.outcome.duration_s
        return tried, await verify(self.books, self.computer, self.request, self.plan.card, probed, within_s=within_s)

    def _leaves_as_is(self, error: RunError) -> bool:
        """Whether nothing is to be taken back. That nothing ran of it a guest can say of any cell: we look as well."""
        believed = error.code != "syntax" or self.plan.reading.syntax is not None
        return believed and keeps_memory(error, self.mode)

    async def _give_up(self, error: BaseException) -> None:
        """We failed, and not the code. What is not verified is rolled back. What is, or may be, will be published by
        the session's next request, or whoever opens it next, and nothing runs in it until then."""
        fault = as_told(error)
        if self.plan.is_noted and self.id not in self.books.open:
            return  # it has ended, and only its answer failed
        if await self.books.may_be_verified(self.id, error):
            fault = as_told(error, verified=self.id)
            self.books.halt(fault)
            await self.computer.end_kernel()
            if isinstance(error, Exception) and fault is not error:
                raise fault from error
            return
        if not self.is_back:
            await self._force_back(fault)
        with suppress(DiskFailed):
            await self.session.sweep()  # it may be its layer that fills the disk
            await self.books.in_thread(lambda: forget_manifests(self.books))
        if self.plan.is_noted:
            await self._settle_given_up(fault)

    async def _force_back(self, fault: HoldfastError) -> None:
        try:
            await self.session.roll_back(alive=False, cause=fault.message, run=self.id)
        except Exception:  # of a kernel that nobody can take back nothing is kept; the next turn starts another
            await self.computer.end_kernel()

    async def _settle_given_up(self, fault: HoldfastError) -> None:
        try:
            await self.plan.recall()
            if self.id in self.books.open:
                await self.computer.hold()  # what was saved is moved into the files below its layer
                if not isinstance(fault, DiskRefused):  # it may be what was to be said that failed
                    self.session.endings.pop(self.id, None)
                how = self.session.endings.setdefault(self.id, RolledBack(reason=fault.message, blame="system"))
                settlement = await settle(self.books, self.id, **how)
                self.session.published = self.session.published or bool(settlement.saved)
        except Exception as again:  # nothing runs here before somebody has settled it
            self.books.halt(as_told(again))
            with suppress(HoldfastError):
                await self.books.recall(self.id)  # what was not written down is none of the next owner's business
        if isinstance(fault, DiskFailed) and not isinstance(fault, DiskRefused):
            self.books.halt(fault)

    # -- forward -----------------------------------------------------------------------------------------------

    async def _commit(self, execution: Execution, verdict: Verdict) -> Run:
        done = executed(self.id, execution, execution.error, kernel_replaced=self._kernel_replaced())
        told = execution.outcome.finished
        size = work_of(self.before, verdict.changes, [*told.names, *told.gone] if told else [])
        verified, after, ended = await self.books.out_of_the_loop(
            lambda: self._drawn_up(execution, verdict, done), size=size
        )
        settlement = await self._write_down(done, verified, after, ended)
        self.computer.pristine = False
        noted = checks.from_late_changes(settlement.theirs)
        seen = await self.books.out_of_the_loop(lambda: as_seen(settlement.receipt), size=size)
        return msgspec.structs.replace(ended, receipt=seen, checks=[*ended.checks, *noted])

    def _drawn_up(self, execution: Execution, verdict: Verdict, done: Executed) -> tuple[Verified, State, Run]:
        """What is verified, with its receipt; where it leads; and what the caller is told."""
        finished = execution.outcome.finished
        status: Kept = "kept" if execution.error is not None or (finished and finished.exit_code) else "committed"
        names = names_after(self.plan.reading, execution, self.before.live(), run=self.id)
        verified = Verified(
            run=self.id, at=time.time(), status=status, version=self.before.version + 1,
            stage=self.computer.staging.name, changes=verdict.changes, names=names, receipt=b"",
        )  # fmt: skip
        after = state_after(self.before, verified)
        facts = msgspec.structs.replace(
            facts_of(self.plan.record, done, self.before, after),
            status=status,
            changes=in_data(verdict.changes),
            checks=verdict.checks,
            saved=self.saves.steps,
            egress=self.departures.log,
        )
        verified = msgspec.structs.replace(verified, receipt=statement(facts))
        kept = Aftermath(
            memory="kept", unprotected=self.computer.protection.unprotected, not_restored=self.computer.not_reopened
        )
        ended = self._result(
            execution,
            Ending(
                status=status, version=after.version, generation=after.generation, ckpt=str(after.ckpt()),
                aftermath=kept, error=execution.error and with_fate(execution.error, "kept", kept.unprotected),
                changes=verdict.changes, names=names, checks=verdict.checks, saved=self.saves.paths,
                outside=self.plan.outside, egress=self.departures.log, may_have_happened=self.departures.before,
            ),
        )  # fmt: skip
        return verified, after, ended

    async def _write_down(self, done: Executed, verified: Verified, after: State, ended: Run) -> Settlement:
        size = len(verified.changes)
        answer = await self.books.out_of_the_loop(lambda: once.encode(ended, self.request), size=size)
        if not verified.changes:
            return await settle_at_once(self.books, self.plan.record, verified, done, after=after, result=answer)
        same_inode = await self.books.in_thread(lambda: self._prepare(verified.changes, after))
        crashpoint("run.prepared")
        await self.books.journal.append(*self.books.note(done, verified), *results(self.books, self.id, answer))
        crashpoint("run.point_of_no_return")
        self.session.published, self.computer.staging.same_inode = True, same_inode
        return await settle(self.books, self.id, same_inode=same_inode)

    def _prepare(self, changes: list[Change], after: State) -> frozenset[Parts]:
        """What is staged lasts, and nobody can write to it any more; returns what must keep its inode."""
        stage = self.computer.staging.path
        kept = databases(stage, changes) if not self.session.single_use else frozenset()
        let_go(stage, changes, but=kept)
        self.computer.workspace.hand_over(self.computer.staging.name, changes)
        prepare(stage, changes)
        write_manifest(self.books, after)  # if there is no room for it, that is known while there is a way back
        return kept

    # -- back --------------------------------------------------------------------------------------------------

    async def _roll_back(self, execution: Execution, error: RunError, verdict: Verdict | None = None) -> Run:
        alive = execution.outcome.finished is not None
        self.undone = await touched(self.books, self.computer)
        aftermath = self.back or await self.session.roll_back(alive=alive, cause=in_short(error), run=self.id)
        self.is_back = True
        if not alive and execution.outcome.begun:
            aftermath = msgspec.structs.replace(aftermath, discarded=self.plan.reading.binds)
        has_kernel = self.computer.now is not None
        error = with_fate(error, aftermath.memory, aftermath.unprotected, has_kernel=has_kernel)
        return await self._end_rolled_back(execution, error, aftermath, verdict)

    async def _end_rolled_back(
        self, execution: Execution | None, error: RunError, aftermath: Aftermath, verdict: Verdict | None = None
    ) -> Run:
        verdict = verdict or Verdict()
        if execution is not None:
            self.done = executed(self.id, execution, error, kernel_replaced=self._kernel_replaced())
            self.books.journal.append_soon(*self.books.note(self.done))
        if any(isinstance(record, Saved) for record in self.books.open[self.id]):
            await self.computer.hold()  # what was saved is moved into the files below its layer
        state, sent = self.books.state, self.departures.may_have_happened
        read = await read_for_lost_names(self.books) if aftermath.memory == "lost" else Read()
        ended = self._result(
            execution,
            Ending(
                status="rolled_back", version=state.version, generation=state.generation, ckpt=str(state.ckpt()),
                aftermath=aftermath, error=error, checks=verdict.checks, outside=self.plan.outside,
                egress=self.departures.log, may_have_happened=sent,
            ),
        )  # fmt: skip

        def answer(state: State, saved: list[str], theirs: list[str]) -> bytes:
            nonlocal ended
            gave_way = []
            if state.files is not self.before.files:
                gave_way = sorted(self.before.files.keys() - state.files.keys() - {*theirs})
            told = recovery.of_rollback(
                state, self.id, error, aftermath, undone=self.undone, saved=saved, gave_way=gave_way, sent=sent,
                read=read,
            )  # fmt: skip
            noted = [*verdict.checks, *checks.from_late_changes(theirs)]
            ended = msgspec.structs.replace(
                ended, recovery=told, ckpt=told.ckpt, version=told.version, saved=saved, checks=noted
            )
            return once.encode(ended, self.request)

        settlement = await self._settle_back(
            # Code that was not even started has not failed, and its key is free.
            reason=in_short(error), blame="system" if execution is None or execution.is_from_outside else "user",
            checks=verdict.checks, refused=self.departures.refused, answer=answer,
        )  # fmt: skip
        if settlement.saved or settlement.theirs:
            self.session.published = True
        return msgspec.structs.replace(ended, receipt=as_seen(settlement.receipt))

    async def _settle_back(self, **how: Unpack[RolledBack]) -> Settlement:
        try:
            return await settle(self.books, self.id, **how)
        except DiskRefused:
            self.session.endings[self.id] = how
            await self.session.sweep()  # it may be the run's own layer that fills the disk, and that is done with
            await self.plan.recall()  # a cell that filled it at once left no room for its plan
            if self.done is not None and Executed not in map(type, self.books.open[self.id]):
                self.books.journal.append_soon(*self.books.note(self.done))
            return await settle(self.books, self.id, **how)

    # -- rehearsal ---------------------------------------------------------------------------------------------

    async def _rehearse(self, emit: Emit | None) -> Run:
        """The same on live state, and then back, whatever came of it. No record of it is made."""
        protection = self.computer.protection
        if protection.unprotected and not self.computer.pristine:
            raise RehearsalUnavailable(
                f"memory could not be brought back afterwards: {protection.unprotected}",
                hint="run it for real, or run something small first so that a snapshot can be taken",
            )
        self.saves.refuse("a rehearsal keeps nothing")
        self.departures.withheld = "this is a rehearsal, which sends nothing"
        protection.pinned = True
        try:
            execution = await self._execute(emit, None)
            self.given_up = execution.given_up
            with anyio.CancelScope(shield=True):
                ended = await self._take_back(execution)
        finally:
            protection.pinned = False
        return ended

    async def _take_back(self, execution: Execution) -> Run:
        verdict, cause = Verdict(), "a rehearsal lost its snapshot"
        try:
            self._refuse_for_the_disk(execution)
            if execution.outcome.finished is not None and execution.outcome.begun:
                execution, verdict = await self._verify(execution)
        finally:
            alive = execution.outcome.finished is not None
            aftermath = self.back or await self.session.roll_back(alive=alive, cause=cause, run=self.id)
            self.is_back = True
        names = names_after(self.plan.reading, execution, self.before.live(), run=self.id)
        state = self.books.state
        return self._result(
            execution,
            Ending(
                status="rehearsed", version=state.version, generation=state.generation, ckpt=str(state.ckpt()),
                aftermath=aftermath, error=execution.error, changes=verdict.changes, names=names,
                checks=verdict.checks, outside=self.plan.outside, egress=self.departures.log,
            ),
        )  # fmt: skip

    def _result(self, execution: Execution | None, ending: Ending) -> Run:
        return result(
            self.plan.card, execution, ending, memory_cap=self.computer.memory_cap,
            kernel_replaced=self._kernel_replaced(),
        )  # fmt: skip

    def _kernel_replaced(self) -> str:
        """How and when kernels ended since the run before, this run's first one included."""
        return "; ".join(filter(None, (self.session.kernel_replaced, self.replaced)))
