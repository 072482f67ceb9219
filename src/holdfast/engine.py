"""The process's engine: a thread with an event loop, and the homes that this process has open.

It starts with the first session and ends with the process. Sessions come and go within it, so that only the first
one of a process waits for a zygote to warm up.
"""

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio

from holdfast.config import Settings
from holdfast.errors import HoldfastError, InvalidSetting
from holdfast.opening import open_service
from holdfast.service import Service

T = TypeVar("T")
Verb = Callable[[], Coroutine[Any, Any, T]]
_LOOK_UP_S = 0.5
"""A signal that comes when a thread is just about to wait is not noticed before it does something: it looks up now and
then."""
_FAREWELL_S = 5.0
"""For telling servers, when the process ends, that its sessions there end too."""


class Elsewhere(Protocol):
    """A session of this process's that is at a server."""

    async def end(self) -> None: ...


class _Engine:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_report)
        self._opening = anyio.Lock()
        self._services: dict[Path, tuple[Settings, Service]] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self.elsewhere: set[Elsewhere] = set()
        self._thread = threading.Thread(target=self._run, name="holdfast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        with contextlib.closing(self.loop):
            self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())

    def start(self, verb: Verb[T], future: "Future[T]") -> None:
        """Not by anyio's portal: that makes the caller wait until its task has started, one thread's wake-up more."""
        self.loop.call_soon_threadsafe(self._begin, verb, future)

    def _begin(self, verb: Verb[T], future: "Future[T]") -> None:
        task = self.loop.create_task(_carry_out(verb, future))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def service(self, settings: Settings) -> Service:
        async with self._opening:
            if settings.home not in self._services:
                self._services[settings.home] = settings, await open_service(settings)
            known, service = self._services[settings.home]
        if known != settings:
            raise InvalidSetting(
                f"this process has {settings.home} open with memory_cap={known.memory_cap!r}",
                hint="use one memory_cap per home, or another home=",
            )
        return service

    def close(self) -> None:
        """Give up every home, whatever is still under way: a process that ends waits for nobody."""
        try:
            closing: Future[None] = Future()
            self.start(self._close_services, closing)
            closing.result()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    async def _close_services(self) -> None:
        async with contextlib.AsyncExitStack() as steps:  # each is taken, whatever becomes of the one before
            steps.push_async_callback(self._wait_for_the_rest)
            while self._services:
                _, (_, service) = self._services.popitem()
                steps.push_async_callback(service.close)
            with anyio.move_on_after(_FAREWELL_S):
                for session in list(self.elsewhere):
                    with contextlib.suppress(HoldfastError):
                        await session.end()

    async def _wait_for_the_rest(self) -> None:
        ending = self._under_way - {asyncio.current_task()}
        if ending:
            await asyncio.wait(ending)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What failed where nobody waits for it. Not that a socket had something just when whoever waited for that was
    cancelled: anyio asks the loop to end his wait, and it was ended."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


async def _carry_out(verb: Verb[T], future: "Future[T]") -> None:
    try:
        result = await verb()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):  # cancelled: nobody waits for it
            future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        with contextlib.suppress(InvalidStateError):
            future.set_result(result)


def _ending_with(future: "Future[T]", verb: Verb[T]) -> Verb[T]:
    """Cancelled with the future; by a scope, so that what is shielded stays shielded."""

    async def carry_out() -> T:
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            future.add_done_callback(lambda done: loop.call_soon_threadsafe(scope.cancel) if done.cancelled() else None)
            return await verb()
        raise asyncio.CancelledError

    return carry_out


_engine: _Engine | None = None
_left_behind: list[_Engine | None] = []
_starting = threading.Lock()


def start(verb: Verb[T], future: "Future[T]") -> None:
    """Have the engine carry out a verb. Who makes the future has it also where Ctrl-C comes in the midst of this, when
    the verb may have begun."""
    _running().start(verb, future)


def wait(verb: Verb[T]) -> T:
    """The same, and wait for it. Ctrl-C ends it."""
    future: Future[T] = Future()
    try:
        start(_ending_with(future, verb), future)
        return outcome(future)
    except KeyboardInterrupt:
        future.cancel()
        raise


def outcome(future: "Future[T]") -> T:
    """Its result, when it is there. Ctrl-C is heard meanwhile."""
    while True:
        try:
            future.exception(timeout=_LOOK_UP_S)
        except TimeoutError:  # a verb's own is returned there, not raised
            continue
        return future.result()


async def run(verb: Verb[T]) -> T:
    """The same, without blocking the caller's event loop."""
    future: Future[T] = Future()
    start(_ending_with(future, verb), future)
    return await asyncio.wrap_future(future)


def call(function: Callable[[], T]) -> T:
    """Call a function in the engine's thread."""

    async def called() -> T:
        return function()

    return wait(called)


def owns(home: Path) -> bool:
    """Whether this process has the home open; to be called inside the engine."""
    return home in _running()._services


def keep(session: Elsewhere) -> None:
    """It is to end with this process, unless it ends before; to be called inside the engine."""
    _running().elsewhere.add(session)


def forget(session: object) -> None:
    _running().elsewhere.discard(session)


async def service(settings: Settings) -> Service:
    """The service of a home; to be awaited inside the engine."""
    return await _running().service(settings)


def shut_down() -> None:
    """Close every home of this process. Happens by itself when the process ends."""
    global _engine
    with _starting:
        engine, _engine = _engine, None
    if engine is not None:
        engine.close()


def _running() -> _Engine:
    global _engine
    with _starting:
        if _engine is None:
            _engine = _Engine()
        return _engine


def _forget() -> None:
    """A forked child has no engine: the thread stayed behind."""
    global _engine, _starting
    # Kept, not dropped: its finalizer would wait for a thread that this process does not have.
    _left_behind.append(_engine)
    _engine, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
atexit.register(shut_down)
