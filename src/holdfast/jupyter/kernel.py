"""Jupyter's protocol on one side, a session in notebook mode on the other.

`ipykernel.kernelbase.Kernel` speaks the protocol. Requests are taken one after the other in the main thread's event
loop, which never blocks: the code runs in the sandbox, and is watched in the engine's thread. The control channel has a
thread of its own; what it asks for (interrupt, shutdown) is done in the main thread.

The number of a cell is IPython's own, the `n` of `Out[n]`. It goes back with memory when a cell is taken back.
"""

import asyncio
import json
import platform
import sys
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import zmq
from ipykernel._version import kernel_protocol_version
from ipykernel.kernelbase import Kernel
from IPython.core.inputtransformer2 import TransformerManager

from holdfast import __version__
from holdfast.client import AsyncSession
from holdfast.errors import HoldfastError
from holdfast.jupyter import history, messages
from holdfast.jupyter.desk import Desk
from holdfast.jupyter.outlet import Outlet
from holdfast.jupyter.outputs import Outputs
from holdfast.model import Event, Run

_EXPRESSIONS = "application/vnd.holdfast.expressions+json"
_STDIN_S = 0.02
_UNSENDABLE = (ValueError, TypeError, RecursionError, OverflowError)
"""What encoding as JSON may raise over what a guest made."""
T = TypeVar("T")
Content = dict[str, Any]


class HoldfastKernel(Kernel):
    """One notebook."""

    implementation = "holdfast"
    implementation_version = __version__
    banner = f"Holdfast {__version__}: Python in a sandbox, where every cell is a transaction."
    language_info = {  # noqa: RUF012 (a trait of the base class)
        "name": "python",
        "version": platform.python_version(),
        "mimetype": "text/x-python",
        "codemirror_mode": {"name": "ipython", "version": sys.version_info.major},
        "pygments_lexer": "ipython3",
        "nbconvert_exporter": "python",
        "file_extension": ".py",
    }
    msg_types = [*Kernel.msg_types, "comm_open", "comm_msg", "comm_close"]  # noqa: RUF012
    _execute_sleep = 0.0  # it waits for printing threads of this process, and there are none

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self._desk: Desk = traits["parent"].desk
        self._history = history.History()
        self._generation = 0
        self._about_last: Content = {}
        self._display_ids: set[str] = set()

    def start(self) -> None:
        super().start()
        self.io_loop.add_callback(self._desk.open_ahead)

    @property
    def kernel_info(self) -> Content:
        """Not the base's: it has no subshells and no debugger to offer, and looks for one."""
        return {
            "protocol_version": kernel_protocol_version,
            "implementation": self.implementation,
            "implementation_version": self.implementation_version,
            "language_info": self.language_info,
            "banner": self.banner,
            "help_links": self.help_links,
            "supported_features": [],
        }

    # -- cells -------------------------------------------------------------------------------------------------

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> Content:
        count, self._about_last = self.execution_count, {}
        reply: Content = {"execution_count": count, "payload": [], "user_expressions": {}}
        try:
            with self._desk.at_work():
                session = await self._desk.session()
                run = await self._run(session, code, silent=silent, allow_stdin=allow_stdin)
                if run.error is None and user_expressions:
                    reply["user_expressions"] = await _evaluate(session, user_expressions)
        except Exception as error:  # the edge of the process: a cell that gets no reply would be busy for ever
            if not isinstance(error, HoldfastError):
                self.log.exception("a cell could not be run")
            self.execution_count = count - (not silent)
            return {**reply, **self._failed(messages.of_refusal(error), silent=silent)}
        if store_history and not silent:
            self._history.add(count, code, run.text)
        reply["payload"] = messages.payload(run)
        if run.error is None:
            return {**reply, "status": "ok"}
        return {**reply, **self._failed(messages.of_error(run.error), silent=silent)}

    async def _run(self, session: AsyncSession, code: str, *, silent: bool, allow_stdin: bool) -> Run:
        parent, ident = self.get_parent("shell"), self._get_shell_context_var(self._shell_parent_ident)
        count, before = self.execution_count, self.execution_count - (not silent)
        inert = self._desk.chosen.inert

        def send(kind: str, content: Content) -> bool:
            return self._publish(kind, content, parent)

        def publish(events: Iterable[Event]) -> None:
            outputs.add(messages.of_events(events, session=session.id, count=count, inert=inert))

        async def typed(prompt: str, password: bool) -> str:
            outlet.flush()
            outputs.release()
            return await self._typed(prompt, password, parent=parent, ident=ident)

        async def ask(prompt: str, password: bool) -> str:
            """Called in the engine's thread; the socket is this one's."""
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(typed(prompt, password), loop))

        loop, outlet, outputs = asyncio.get_running_loop(), Outlet(publish), Outputs(send, self._display_ids)
        try:
            run = await session.run(
                code,
                silent=silent,
                on_event=None if silent else outlet.hear,
                on_input=ask if allow_stdin else None,
            )
        except BaseException:
            outlet.flush()
            outputs.release()
            raise
        self.execution_count = _next_number(run, before)
        self._about_last = messages.of_run(run)
        outlet.flush()
        outputs.settle(messages.of_receipt(run))
        await self._tell_of_losses(session, run, silent=silent)
        return run

    async def _tell_of_losses(self, session: AsyncSession, run: Run, *, silent: bool) -> None:
        """A visible note when the cell was taken back, or memory was lost before it ran."""
        text, known = messages.note(run), self._generation
        self._generation = run.generation
        if not text and known and run.generation > known:
            text = f"Holdfast started a new kernel before this cell.\n{(await session.recover()).text}"
        if text and not silent:
            note = messages.of_note(text, run, inert=self._desk.chosen.inert)
            self._publish("display_data", note, self.get_parent("shell"))

    def _failed(self, error: Content, *, silent: bool) -> Content:
        if not silent:
            self._publish("error", error, self.get_parent("shell"))
        return {"status": "error", **error}

    def _publish(self, kind: str, content: Content, parent: Content) -> bool:
        """Whether it could be sent. Once the run is settled each message, also one of an error, says so itself."""
        assert self.session is not None
        about = {messages.OURS: self._about_last} if self._about_last else None
        try:
            self.session.send(self.iopub_socket, kind, content, parent=parent, ident=self._topic(kind), metadata=about)
        except _UNSENDABLE as error:
            said = {"name": "stderr", "text": f"an output that cannot be sent as JSON was left out: {error}\n"}
            self.session.send(self.iopub_socket, "stream", said, parent=parent, ident=self._topic("stream"))
            return False
        return True

    def finish_metadata(self, parent: Content, metadata: Content, reply_content: Content) -> Content:
        """The last word about a run."""
        about, self._about_last = self._about_last, {}
        return {**metadata, messages.OURS: about} if about else metadata

    async def _typed(self, prompt: str, password: bool, *, parent: Content, ident: Any) -> str:
        """What the user types after `input()`. An interrupt cancels it."""
        assert self.session is not None
        while self.session.recv(self.stdin_socket, mode=zmq.NOBLOCK)[1] is not None:
            pass  # an answer to a question that was interrupted
        question = {"prompt": prompt, "password": password}
        sent = self.session.send(self.stdin_socket, "input_request", question, parent, ident=ident)
        while True:
            _, answer = self.session.recv(self.stdin_socket, mode=zmq.NOBLOCK)
            if answer is not None and _is_meant(answer, sent):
                return str(answer["content"].get("value", ""))
            await asyncio.sleep(_STDIN_S)

    def _abort_queues(self, subshell_id: str | None = None) -> None:
        """After an error: the cells that wait already are not run.

        Each waits for the lock, first come first served. So who takes it last knows that they are through.
        """

        async def stop_aborting() -> None:
            async with self._main_asyncio_lock:
                self._aborting = False

        self._aborting = True
        if self.shell_stream is not None:
            self.shell_stream.flush(zmq.POLLIN)
        self.io_loop.add_callback(stop_aborting)

    # -- questions ---------------------------------------------------------------------------------------------

    async def do_complete(self, code: str, cursor_pos: int) -> Content:
        try:
            found = await (await self._desk.session()).complete(code, cursor_pos)
        except HoldfastError as error:
            return {"status": "error", **messages.of_refusal(error)}
        return {
            "status": "ok", "matches": found.matches, "cursor_start": found.start, "cursor_end": found.end,
            "metadata": {},
        }  # fmt: skip

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Iterable[str] = ()
    ) -> Content:
        try:
            data = await (await self._desk.session()).inspect(code, cursor_pos, detail=detail_level)
        except HoldfastError as error:
            return {"status": "error", **messages.of_refusal(error)}
        return {
            "status": "ok",
            "found": bool(data),
            "data": messages.bundle(data, inert=self._desk.chosen.inert),
            "metadata": {},
        }

    async def do_is_complete(self, code: str) -> Content:
        try:
            status, indent = TransformerManager().check_complete(code)
        except (ValueError, RecursionError, MemoryError):  # a NUL, or more brackets than a parser takes
            return {"status": "invalid"}
        return {"status": status, "indent": " " * (indent or 0)} if status == "incomplete" else {"status": status}

    async def do_history(
        self,
        hist_access_type: str,
        output: bool,
        raw: bool,
        session: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        n: int | None = None,
        pattern: str | None = None,
        unique: bool = False,
    ) -> Content:
        match hist_access_type:
            case "range":
                lines = self._history.range(start, stop)
            case "search":
                lines = self._history.search(pattern, n, unique=unique)
            case _:
                lines = self._history.tail(n)
        return {"status": "ok", "history": history.told(lines, output=output)}

    # -- comms: there are none ---------------------------------------------------------------------------------

    def comm_open(self, stream: Any, ident: Any, parent: Content) -> None:
        """As the protocol wants it where nobody knows the target."""
        self._publish("comm_close", {"comm_id": parent["content"].get("comm_id", ""), "data": {}}, parent)

    def comm_msg(self, stream: Any, ident: Any, parent: Content) -> None:
        pass

    def comm_close(self, stream: Any, ident: Any, parent: Content) -> None:
        pass

    # -- control: called in the control thread -----------------------------------------------------------------

    async def interrupt_request(self, stream: Any, ident: Any, parent: Content) -> None:
        assert self.session is not None
        self._begin_in_main_thread(self._desk.interrupt())
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    async def do_shutdown(self, restart: bool) -> Content:
        await asyncio.wrap_future(self._begin_in_main_thread(self._desk.close()))
        return {"status": "ok", "restart": restart}

    def _begin_in_main_thread(self, work: Coroutine[Any, Any, T]) -> Any:
        loop: asyncio.AbstractEventLoop = self.io_loop.asyncio_loop  # type: ignore[attr-defined]
        return asyncio.run_coroutine_threadsafe(work, loop)

    def _process_children(self) -> list[Any]:
        """Ours are ended by `Desk.close`, and hold sandboxes: nobody signals them."""
        return []

    def pre_handler_hook(self) -> None:
        """Not the base's: it makes SIGINT an exception wherever the event loop happens to be."""

    def post_handler_hook(self) -> None:
        pass


def _next_number(run: Run, before: int) -> int:
    """The number goes back with memory. Nothing is taken back of a cell that does not parse, and IPython counts it."""
    if run.memory == "kept" or (run.error is not None and run.error.code == "syntax"):
        return run.count
    return before if run.memory == "restored" else 0


def _is_meant(answer: Content, question: Any) -> bool:
    """Many front ends say which question they answer."""
    number = question["header"]["msg_id"]
    return bool(answer["parent_header"].get("msg_id", number) == number)


async def _evaluate(session: AsyncSession, expressions: dict[str, str]) -> Content:
    """`user_expressions`: IPython has a function for it, and its answer comes as a display."""
    shell, wanted = "__import__('IPython').get_ipython()", repr(json.dumps(expressions))
    answer = f"{shell}.user_expressions(__import__('json').loads({wanted}))"
    run = await session.run(f"{shell}.display_pub.publish({{{_EXPRESSIONS!r}: {answer}}})", silent=True)
    return messages.expressions(run.displays, _EXPRESSIONS)
