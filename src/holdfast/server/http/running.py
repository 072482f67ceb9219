"""Runs that go on while their clients come and go.

1. A run is a task of the server's own. A client attends it: by reading its events, or by waiting for its result.
2. When the last one is gone, there is a grace for somebody to come back, by the run's id or with the same key. Then
   it is given up: interrupted and settled, as its mode has it. Nothing runs on unattended.
3. Its events are kept for a while after its end.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import msgspec

from holdfast import api, verbs
from holdfast.errors import HoldfastError, InvalidSetting, RateLimited, RunAbandoned, ServerStopping, of_disk
from holdfast.model import Displayed, DisplaysCleared, Event, Output, Run
from holdfast.records import Lost, Planned, Settled
from holdfast.requests import RunRequest, check_text, refuse_nonsense, weight
from holdfast.server.doors import problems
from holdfast.server.doors.metrics import Metrics
from holdfast.server.http.feeds import Feed
from holdfast.sessions import LiveSession

REMEMBERED_S = 60.0
"""How long the events of a run that has ended are kept."""
REMEMBERED_BYTES = 64 << 20
"""Of all runs that have ended together."""
MOST_WAITING = 100
"""Runs that may wait for their turn in one session."""
MOST_WAITING_BYTES = 32 << 20
"""Of what they ask for, together."""

_log = logging.getLogger("holdfast.server")


class LiveRun:
    """One run under way, or not long over."""

    def __init__(self, session: LiveSession, request: RunRequest, *, stdin: bool, grace_s: float) -> None:
        self.id = request.run
        self.session = session
        self.request = request
        self.feed = Feed()
        self.error: HoldfastError | None = None
        """Why it was refused, if it was."""
        self.result: Run | None = None
        self.begun = asyncio.Event()
        """It has its turn; or it is over."""
        self._grace_s = grace_s
        self._stdin = stdin
        self._asked: tuple[int, asyncio.Future[str]] | None = None
        self._answered: int | None = None
        """The number of the question that was answered last."""
        self._attending = 0
        self._giving_up: asyncio.TimerHandle | None = None
        self._why = ""
        self._settled: Settled | None = None
        """What the journal says of its end."""
        self._scope = anyio.CancelScope()
        self._deadline = float("inf")
        self.feed.add(api.Began(number=0, run=self.id, session=session.id))

    # -- the run ---------------------------------------------------------------------------------------------------

    async def carry_out(self) -> None:
        """To its end, whatever end that is."""
        self.session.books.watchers.append(self._hear)
        try:
            with self._scope:
                self._settle(await self._run())
            if self._scope.cancelled_caught:
                self._refuse(self._abandoned())
        except HoldfastError as error:
            self._refuse(error)
        except Exception as error:  # a mistake of ours ends this run, and nothing else
            failure = of_disk(error)
            if failure is None:
                self._refuse_by_mistake(error)
            else:
                self._refuse(failure)
        finally:
            self.session.books.watchers.remove(self._hear)
            self.begun.set()
            self._stop_giving_up()

    async def _run(self) -> Run:
        return await verbs.run(self.session, self.request, emit=self._emit, ask=self._ask if self._stdin else None)

    def _hear(self, news: Planned | Settled | Lost) -> None:
        if isinstance(news, Lost) or news.run != self.id:
            return
        if isinstance(news, Planned):
            self._begin()
        else:
            self._settled = news

    def _begin(self) -> None:
        if not self.begun.is_set():
            self._deadline = time.monotonic() + self.request.timeout_s
            self.begun.set()

    async def _emit(self, event: Event) -> None:
        self._begin()
        await self.feed.wait_room(_numbered(event, 0), attended=lambda: self._attending > 0, until=self._deadline)
        self.feed.add(_numbered(event, self.feed.next))

    async def _ask(self, prompt: str, password: bool) -> str:
        number, answer = self.feed.next, asyncio.get_running_loop().create_future()
        self._asked = number, answer
        self.feed.add(api.Asked(number=number, prompt=prompt, password=password))
        try:
            return str(await answer)
        finally:
            self._asked = None

    def answer(self, answer: api.Answer) -> None:
        """To an `Asked` event; each is answered once. Who did not hear that he was may send it again."""
        check_text(answer.text)
        if answer.number == self._answered:
            return
        if self._asked is None or self._asked[0] != answer.number or self._asked[1].done():
            raise InvalidSetting(f"no question of number {answer.number} waits", hint="answer the last `asked` event")
        self._asked[1].set_result(answer.text)
        self._answered = answer.number

    def _settle(self, run: Run) -> None:
        self.result = run
        self.feed.add(api.Settled(number=self.feed.next, run=run))

    def _refuse(self, error: HoldfastError) -> None:
        self.error = error
        told = msgspec.to_builtins(problems.problem_of(error))
        self.feed.add(api.Refused(number=self.feed.next, problem=told))

    def _abandoned(self) -> RunAbandoned:
        """Code may end before it is asked to, and a notebook keeps what an interrupted cell has done."""
        settled = self._settled
        if settled is None:
            return RunAbandoned(self._why, hint="nothing of it stays: run it again when you mean it")
        if settled.status == "rolled_back":
            return RunAbandoned(self._why, hint="it was rolled back: run it again when you mean it")
        return RunAbandoned(
            f"{self._why}; what it had done by then was {settled.status}, as version {settled.version}",
            hint=f"GET …/runs/{self.id} says more: look before you run it again",
        )

    def _refuse_by_mistake(self, error: Exception) -> None:
        _log.exception("run %s of session %s", self.id, self.session.id)
        told = f"the server failed: {type(error).__name__}; its log says more under {self.id}"
        self._refuse(HoldfastError(told, hint="look at the log"))

    def forget_request(self) -> None:
        """It is over: what is kept for those who come back are its events. A refusal's frames have the request too."""
        self.request = RunRequest(code="", key=self.request.key, run=self.id)
        if self.error is not None:
            self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None

    # -- its clients -----------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.feed.ended

    @property
    def ending(self) -> bool:
        """It was told to end: who asks with its key from now on is to have an attempt of his own."""
        return not self.feed.held_back

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While a client is there."""
        self._attending += 1
        self._stop_giving_up()
        try:
            yield
        finally:
            self._attending -= 1
            if not self._attending and not self.over:
                why = f"nobody listened for {self._grace_s:g} s"
                self._giving_up = asyncio.get_running_loop().call_later(self._grace_s, self.give_up, why)

    def give_up(self, why: str) -> None:
        """Interrupted and settled; if it was rolled back, the same request may run again, also with the same key."""
        self._why = why
        self.feed.let_go()
        self._scope.cancel()

    def interrupt(self) -> bool:
        """Ask it to end; one that waits for its turn will not begin. False: it is over."""
        if self.over:
            return False
        if not self.begun.is_set():
            self.give_up("it was interrupted before it began")
            return True
        self.feed.let_go()
        return self.session.interrupt()

    def _stop_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


class Runs:
    """Guards the runs of a server: those under way, and those whose events are still kept."""

    def __init__(self, metrics: Metrics, *, grace_s: float) -> None:
        self._metrics = metrics
        self._grace_s = grace_s
        self._runs: dict[tuple[str, str], LiveRun] = {}
        self._tasks: dict[LiveRun, asyncio.Task[None]] = {}
        self._ended: deque[tuple[float, LiveRun]] = deque()
        self._ended_bytes = 0
        self._forgetting: asyncio.TimerHandle | None = None
        self._stopping = False

    def find(self, session_id: str, run: str) -> LiveRun | None:
        return self._runs.get((session_id, run))

    def start(self, session: LiveSession, request: RunRequest, *, stdin: bool) -> LiveRun:
        """A run; or the one that goes on already for the same request, if it has the same key or is the same plan."""
        refuse_nonsense(request, session.limits)  # before anything is kept of it
        if (same := self._same(session, request)) is not None:
            return same
        if self._stopping:
            raise ServerStopping("the server is stopping", hint="send it again when it is back")
        self._refuse_if_crowded(session, request)
        run = LiveRun(session, request, stdin=stdin, grace_s=self._grace_s)
        self._runs[session.id, run.id] = run
        task = asyncio.create_task(run.carry_out(), name=f"holdfast {run.id}")
        self._tasks[run] = task
        task.add_done_callback(lambda _: self._over(run))
        return run

    def _same(self, session: LiveSession, request: RunRequest) -> LiveRun | None:
        if (same := self._runs.get((session.id, request.run))) is not None:
            return same
        if request.key is None or request.rehearse:
            return None
        for run in self._tasks:
            wanted = run.request
            if run.ending or run.session is not session or wanted.rehearse:  # which commits nothing for anybody
                continue
            if wanted.key == request.key and wanted.digest() == request.digest():
                return run
        return None

    def _refuse_if_crowded(self, session: LiveSession, request: RunRequest) -> None:
        waiting = [run.request for run in self._tasks if run.session is session and not run.begun.is_set()]
        size_bytes = sum(weight(each) for each in [request, *waiting])
        if len(waiting) >= MOST_WAITING or (waiting and size_bytes > MOST_WAITING_BYTES):
            raise RateLimited(
                f"{len(waiting)} runs wait in this session already",
                hint="wait for one of them to end, or open another session",
                retry_after_s=1.0,
            )

    def _over(self, run: LiveRun) -> None:
        del self._tasks[run]
        if run.result is not None:
            code = run.result.error.code if run.result.error else ""
            self._metrics.run_ended(status=run.result.status, seconds=run.result.duration_s, code=code)
        run.forget_request()
        self._ended.append((time.monotonic(), run))
        self._ended_bytes += run.feed.size_bytes
        self._forget_old()

    def _forget_old(self) -> None:
        """By age and by size, the oldest first; then again when the next is of age."""
        now = time.monotonic()
        while self._ended and (self._ended[0][0] + REMEMBERED_S <= now or self._is_too_much()):
            _, run = self._ended.popleft()
            self._ended_bytes -= run.feed.size_bytes
            self._runs.pop((run.session.id, run.id), None)
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = (
            asyncio.get_running_loop().call_later(self._ended[0][0] + REMEMBERED_S - now, self._forget_old)
            if self._ended
            else None
        )

    def _is_too_much(self) -> bool:
        return self._ended_bytes > REMEMBERED_BYTES and len(self._ended) > 1

    def interrupt(self, session: LiveSession) -> bool:
        """What runs in a session; those that wait for their turn go on waiting."""
        for run in self._tasks:
            if run.session is session and run.begun.is_set():
                run.feed.let_go()  # from now on its output does not wait for readers
        return session.interrupt()

    async def stop(self, grace_s: float, *, at_once: Callable[[], bool] = lambda: False) -> None:
        """No new ones; those under way end, or are given up at the deadline."""
        self._stopping = True
        give_up_at = time.monotonic() + grace_s
        while self._tasks and time.monotonic() < give_up_at and not at_once():
            await asyncio.wait(self._tasks.values(), timeout=0.1)
        for run in list(self._tasks):
            run.give_up("the server stopped")
        if self._tasks:
            await asyncio.wait(self._tasks.values())


def _numbered(event: Event, number: int) -> api.RunEvent:
    match event:
        case Output():
            return api.Printed(number=number, stream=event.stream, text=event.text)
        case Displayed():
            return api.Shown(number=number, display=event.display, update=event.update, result=event.result)
        case DisplaysCleared():
            return api.Cleared(number=number, wait=event.wait)
