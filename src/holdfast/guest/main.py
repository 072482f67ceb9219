"""The kernel's main loop: one request after the other, for ever."""

import builtins
import getpass
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import msgspec

from holdfast.guest import commands, namespace, outside, saving, scripts, validators
from holdfast.guest.channel import Channel
from holdfast.guest.display import text
from holdfast.guest.files import Noted, OpenFiles
from holdfast.guest.namespace import NamesSeen
from holdfast.guest.shell import GuestShell, refuse_input
from holdfast.guest.signals import IGNORE, SIGINT, set_handler, unblock
from holdfast.guest.snapshots import Snapshots, give_back
from holdfast.guest.streams import StandardStreams
from holdfast.guest.unfinished import Unfinished
from holdfast.kernel import framing, wire

_MEMORY = int(wire.MEMORY_SIGNAL)


class Guest:
    """Guards what must outlive whatever a cell does to its process: the channel and the standard streams."""

    def __init__(self, control: socket.socket, shell: GuestShell, snapshots: Snapshots, *, memory_bytes: int) -> None:
        self._channel = saving.install(Channel(control))
        self._shell = shell
        self._snapshots = snapshots
        self._memory_bytes = memory_bytes
        self._streams = StandardStreams(self._channel)
        self._files = OpenFiles()
        self._names = NamesSeen()
        self._unfinished = Unfinished()
        snapshots.disregard(control.fileno(), 1, 2)
        shell.sink = self._channel

    def serve(self) -> None:
        set_handler(SIGINT, IGNORE)
        set_handler(_MEMORY, IGNORE)
        give_back()
        self._shell.start_here()
        self._channel.send(wire.Ready(pid=os.getpid()))
        try:
            while (request := self._channel.receive()) is not None:
                if not isinstance(request, wire.Answer):  # to a cell that was interrupted just as it came
                    self._channel.send(self._answer(request))
        except OSError as error:
            os.write(2, f"the kernel lost its control socket ({error}): a cell closed it\n".encode())
            os._exit(1)

    def _answer(self, request: wire.HostRequest) -> wire.Message:
        match request:
            case wire.Execute():
                return self._execute(request)
            case wire.Shell():
                return self._run_command(request)
            case wire.Complete():
                nothing: wire.Message = wire.Completed(matches=[], start=request.cursor, end=request.cursor)
                return _or(nothing, lambda: self._shell.complete_at(request.code, request.cursor))
            case wire.Inspect():
                nothing = wire.Inspected(data=wire.Mime())
                return _or(nothing, lambda: self._shell.inspect_at(request.code, request.cursor, request.detail))
            case wire.ListNames():
                return _or(wire.Named(names={}), lambda: self._describe_names(bare=request.bare))
            case wire.TakeSnapshot():
                return self._take_snapshot()
            case wire.Restage():
                return wire.Restaged(not_reopened=self._follow_workspace())
            case wire.Verify():
                return self._verify(request)
            case wire.Answer() | wire.SavedReply() | wire.Taken():
                raise RuntimeError("an answer that nobody asked for")

    def _take_snapshot(self) -> wire.Snapped | wire.Woken:
        noted: list[Noted] = []
        with suppress(Exception):  # a cell may have patched `os`
            noted.append(self._files.note())
        taken = self._snapshots.take()
        if isinstance(taken, wire.Woken):
            left = self._follow_workspace(*noted)
            with suppress(Exception):  # a cell may have replaced what makes processes
                left += outside.handles(self._shell.user_ns)
            return msgspec.structs.replace(taken, not_restored=[*taken.not_restored, *left])
        if isinstance(taken, wire.Snapped) and taken.pid and not self._snapshots.warm:
            with suppress(Exception):  # a courtesy; user code may have replaced any part of it
                self._go_through_the_motions()
        return taken

    def _follow_workspace(self, noted: Noted | None = None) -> list[str]:
        try:
            return self._files.follow(noted)
        except Exception as error:  # a cell may have patched `os`, or taken /proc out of sight
            return [text(f"open files of the workspace: {type(error).__name__}: {error}")]

    def _go_through_the_motions(self) -> None:
        """Do what every cell does, without running one.

        After a snapshot every page is shared with it, and the first write to each costs a copy. Done here, in the
        caller's thinking time, the next cell does not pay for the pages that every cell writes to; and what it
        touches is learned (`_snapshot.c`), so that most snapshots need not do it.
        """
        self._interruptible(self._shell.touch_hot_pages)
        self._streams.restore()
        result = wire.Shown(kind="result", data=wire.Mime(text={"text/plain": "2"}))
        for message in (result, self._finished(0)):
            framing.packets(message)

    def _describe_names(self, *, bare: bool) -> wire.Named:
        return wire.Named(names=namespace.describe(self._shell.user_ns, self._shell.user_ns_hidden, bare=bare))

    def _execute(self, request: wire.Execute) -> wire.Finished:
        with self._input_from(self._ask if request.stdin else refuse_input), self._channel.cell():
            raised = self._interruptible(lambda: self._run(request))
        self._streams.restore()
        if raised is not None:
            self._channel.send(raised)
        threads, tasks = self._unfinished.fresh(self._shell.cell_loop.tasks())
        return self._finished(
            request.turn,
            count=self._shell.execution_count - 1,
            exit_code=self._shell.exit_code,
            threads=threads,
            tasks=tasks,
            result=self._shell.take_result(),
            next_input=self._shell.take_next_input(),
        )

    def _run(self, request: wire.Execute) -> wire.Raised | None:
        self._shell.kernel.begin(request.code, turn=request.turn, silent=request.silent)
        if request.script is None:
            return self._shell.execute(request.code, silent=request.silent, exit_is_error=request.exit_is_error)
        return scripts.run(self._shell, request.code, request.script)

    def _finished(self, turn: int, **facts: Any) -> wire.Finished:
        names, gone = self._names.changes(self._shell.user_ns, self._shell.user_ns_hidden)
        return wire.Finished(turn=turn, names=names, gone=gone, **facts)

    def _interruptible(self, body: Callable[[], wire.Raised | None]) -> wire.Raised | None:
        """The host's two signals are exceptions while the body runs and nothing at all before and after."""
        try:
            try:
                # A cell before may have blocked them; what is pending then is dropped, being ignored still.
                unblock((SIGINT, _MEMORY))
                set_handler(_MEMORY, self._run_short_of_memory)
                set_handler(SIGINT, signal.default_int_handler)
                return body()
            finally:
                set_handler(_MEMORY, IGNORE)
                set_handler(SIGINT, IGNORE)
        except (KeyboardInterrupt, MemoryError) as error:
            set_handler(_MEMORY, IGNORE)
            set_handler(SIGINT, IGNORE)
            return _error_of(error)

    def _run_short_of_memory(self, number: int, frame: FrameType | None) -> None:
        """Near the cap the host asks for this, so that a runaway cell ends as an exception and not by a kill."""
        set_handler(_MEMORY, IGNORE)  # once is enough
        cap = self._memory_bytes >> 20
        held = outside.own_memory_bytes() >> 20
        raise MemoryError(
            f"this session's memory is nearly used up (the kernel itself holds {held} MiB, the cap is {cap} MiB): "
            "read the data in chunks, keep fewer copies (del, inplace), or give the session more memory"
        )

    def _run_command(self, request: wire.Shell) -> wire.Finished:
        codes: list[int] = []

        def body() -> wire.Raised | None:
            try:
                codes.append(commands.call(request.command))
            except Exception as error:  # no process is left to start, a NUL in the command, a patched `subprocess`
                return _error_of(error)
            return None

        raised = self._interruptible(body)
        if raised is not None:
            self._channel.send(raised)
        # As a shell would say it: death by signal n is 128 + n.
        exit_code = next((code if code >= 0 else 128 - code for code in codes), None)
        return self._finished(request.turn, exit_code=exit_code)

    def _verify(self, request: wire.Verify) -> wire.Finished:
        failures: list[str] = []

        def body() -> wire.Raised | None:
            for failure in validators.run(request.probes, self._shell.user_ns):
                failures.append(failure)  # one by one: what is known when it is interrupted stays known
            return None

        raised = self._interruptible(body)
        self._streams.restore()  # an assertion may print
        if raised is not None:
            self._channel.send(raised)
            failures += [f"{raised.name}: {raised.message}"] * (len(request.probes) - len(failures))
        return wire.Finished(turn=request.turn, failures=failures)

    def _ask(self, prompt: object = "", *, password: bool = False) -> str:
        self._channel.send(wire.Asked(prompt=text(str(prompt)[-wire.MAX_PROMPT :]), password=password))
        answer = self._channel.receive()
        if not isinstance(answer, wire.Answer):
            raise EOFError("no answer came")
        return answer.text

    def _ask_password(self, prompt: object = "Password: ", *_: object, **__: object) -> str:
        return self._ask(prompt, password=True)

    @contextmanager
    def _input_from(self, source: Callable[..., str]) -> Iterator[None]:
        """`input` is looked up as a builtin, so it is set anew for each cell, whatever the last one did to it."""
        builtins.input = source
        getpass.getpass = source if source is refuse_input else self._ask_password
        yield


def _or(nothing: wire.Message, question: Callable[[], wire.Message]) -> wire.Message:
    """The answer, or nothing: code of the user's (`__dir__`, `__sizeof__`) runs on the way and may fail anyhow."""
    try:
        return question()
    except BaseException:
        return nothing


def _error_of(error: BaseException) -> wire.Raised:
    name = type(error).__name__
    return wire.Raised(name=name, message=text(str(error)), traceback=text(f"{name}: {error}"), kind="exception")
