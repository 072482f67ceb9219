"""`kit.save` inside: asks the host over the kernel's own channel, from whatever thread.

The host answers each `Saving` with one `SavedReply`, in order, on the socket that also carries its requests. A cell
that prints after it has shown something asks in the same way whether that has arrived: they go different ways. Whoever
waits first reads for all: a reply that the main loop gets goes to the thread that saves, a request that such a thread
gets goes to the main loop. So it does not matter whether the main loop is inside a cell, in `input()`, or idle.

An interrupt waits until the host has answered: raised in between it could swallow the reply, and the next one who
saves would take it for his own.

A process that a cell forked has a copy of the socket and must not use it: two would read one stream. The kernel is
the process that said `Ready` or `Woken` last.
"""

import os
import signal
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from os import getpid  # ours, whatever a cell makes of `os.getpid`
from signal import signal as set_handler
from types import FrameType
from typing import TypeVar

from holdfast import paths
from holdfast.guest.channel import Channel
from holdfast.kernel import wire
from holdfast.kit import inside

_MAIN = get_ident()
_RAISING = (signal.SIGINT, wire.MEMORY_SIGNAL)
"""The signals that are exceptions while a cell runs."""
T = TypeVar("T")


class SharedChannel:
    """A `Channel` on which replies to savers and requests to the main loop find their own way."""

    def __init__(self, channel: Channel, *, root: bytes) -> None:
        self._channel = channel
        self._root = os.path.join(root, b"")
        self._kernel = getpid()
        self._arrived = threading.Condition()
        self._reader: int | None = None
        """The thread that reads for all."""
        self._hung_up = False
        self._requests: deque[wire.HostRequest] = deque()
        self._replies: deque[wire.SavedReply | wire.Taken] = deque()
        self._saving = threading.Lock()
        self._in_cell = False
        self.behind = False
        """The cell has shown something, which may arrive after what it prints now: see `catch_up`."""

    def send(self, message: wire.Message) -> None:
        if isinstance(message, (wire.Ready, wire.Woken)):
            self._become_kernel()
        self._channel.send(message)
        if self._in_cell and isinstance(message, (wire.Shown, wire.Cleared)):
            self.behind = True

    @contextmanager
    def cell(self) -> Iterator[None]:
        """While one runs, the host reads all that is sent, and answers."""
        self._in_cell, self.behind = True, False
        try:
            yield
        finally:
            self._in_cell = self.behind = False

    def catch_up(self) -> None:
        """Wait until the host has what the cell has shown. A thread's own pace is nobody's order."""
        if not (self.behind and get_ident() == _MAIN and getpid() == self._kernel):
            return
        if self._saving.acquire(blocking=False):  # else a thread is saving, or we are, in a handler of the user's
            try:
                with _signals_deferred():
                    self.behind = False
                    self._channel.send(wire.Printing())
                    self._wait(self._replies)
            finally:
                self._saving.release()

    def receive(self) -> wire.HostRequest | None:
        """The next request; None when the host has hung up."""
        return self._wait(self._requests)

    def save(self, files: list[bytes], step: str) -> str:
        """Why the files were not saved; empty: they are durable."""
        if getpid() != self._kernel:
            raise RuntimeError("this process was forked by the kernel: call kit.save in the kernel itself")
        if len(files) > wire.MAX_PATHS:
            raise ValueError(f"{len(files):,} files are too many to save at once: at most {wire.MAX_PATHS:,} a call")
        names = [self._below_root(file) for file in files]
        with _signals_deferred(), self._saving:
            self._channel.send(wire.Saving(paths=names, step=step))
            reply = self._wait(self._replies)
        return reply.refused if isinstance(reply, wire.SavedReply) else "the host has hung up"

    def _below_root(self, file: bytes) -> str:
        if not file.startswith(self._root):
            raise ValueError(f"{os.fsdecode(file)} is not in /mnt/data: only files there can be saved")
        return paths.to_text(file.removeprefix(self._root))

    def _become_kernel(self) -> None:
        """In a woken copy a request may lie that the kernel died of, or before; and a thread may still wait for a reply
        that went to it."""
        self._kernel = getpid()
        with self._arrived:
            self._channel.forget_unread()
            self._requests.clear()
            if self._saving.locked() and not self._replies:
                self._replies.append(wire.SavedReply(refused="the kernel was restored while this call waited"))
                self._arrived.notify_all()

    def _wait(self, box: deque[T]) -> T | None:
        while True:
            with self._arrived:
                # Our own name there is left over from an interrupt.
                while not box and not self._hung_up and self._reader not in (None, get_ident()):
                    self._arrived.wait()
                if box or self._hung_up:
                    return box.popleft() if box else None
                self._reader = get_ident()
            try:
                self._sort(self._channel.receive())
            finally:
                with self._arrived:
                    self._reader = None
                    self._arrived.notify_all()

    def _sort(self, message: wire.HostRequest | None) -> None:
        with self._arrived:
            if message is None:
                self._hung_up = True
            elif not isinstance(message, (wire.SavedReply, wire.Taken)):
                self._requests.append(message)
            elif self._saving.locked():  # else nobody waits for it
                self._replies.append(message)


def install(channel: Channel, *, root: bytes = b"/mnt/data") -> SharedChannel:
    """Let `kit.save` go through a kernel's channel. From now on all others must use what this returns."""
    shared = SharedChannel(channel, root=root)
    inside.provide_save(shared.save)
    return shared


@contextmanager
def _signals_deferred() -> Iterator[None]:
    if get_ident() != _MAIN:  # Python handles signals in the main thread only
        yield
        return
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    handlers = {number: set_handler(number, remember) for number in _RAISING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            set_handler(number, handler)
        if pending and callable(first := handlers[signal.Signals(pending[0])]):
            first(pending[0], None)
