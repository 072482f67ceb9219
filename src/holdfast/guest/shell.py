"""IPython without a terminal: what a cell means."""

import builtins
import getpass
import sys
import warnings
from typing import Any

from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor
from traitlets.config import Config

from holdfast.guest.display import GuestDisplayHook, GuestDisplayPublisher, Nobody, Sink, mime, text
from holdfast.kernel import wire

_MAX_MESSAGE = 100_000


class InputUnavailable(RuntimeError):
    """`input()` where nobody can answer."""


class GuestShell(InteractiveShell):
    """An `InteractiveShell` whose outputs are messages to the host."""

    displayhook_class = GuestDisplayHook
    display_pub_class = GuestDisplayPublisher
    system = InteractiveShell.system_raw  # no pseudo-terminals in here
    sink: Sink = Nobody()
    raised: wire.Raised | None = None

    def init_virtualenv(self) -> None:
        pass

    def enable_gui(self, gui: str | None = None) -> None:
        pass

    def ask_exit(self) -> None:
        """`exit()` ends the cell and nothing but the cell."""
        raise SystemExit(0)

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: Any) -> None:
        lines = stb if isinstance(stb, list) else [str(stb)]
        self.raised = wire.Raised(
            name=text(getattr(etype, "__name__", str(etype))),
            message=text(_message(evalue))[:_MAX_MESSAGE],
            traceback=text("\n".join(lines))[-_MAX_MESSAGE:],
            kind="exception",
            line=self._line_of(evalue),
        )

    def show_usage_error(self, exc: BaseException) -> None:
        """A magic used wrongly: an error like any other, and not a line on stderr."""
        self._showtraceback(UsageError, exc, [f"UsageError: {exc}"])

    def execute(self, code: str) -> wire.Raised | None:
        """Run one cell; what ended it early, if anything did."""
        self.raised = None
        result = self.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return None
        if self.raised is None:
            self._showtraceback(type(error), error, [f"{type(error).__name__}: {_message(error)}"])
        raised = self.raised
        if raised is not None and isinstance(error, SyntaxError) and result.error_before_exec is not None:
            raised = wire.Raised(
                name=raised.name, message=raised.message, traceback=raised.traceback, kind="syntax",
                line=error.lineno,
            )  # fmt: skip
        return raised

    def complete_at(self, code: str, cursor: int) -> wire.Completed:
        with provisionalcompleter():
            found = list(rectify_completions(code, self.Completer.completions(code, cursor)))
        if not found:
            return wire.Completed(matches=[], start=cursor, end=cursor)
        matches = list(dict.fromkeys(text(item.text) for item in found))[:1000]
        return wire.Completed(matches=matches, start=found[0].start, end=found[0].end)

    def inspect_at(self, code: str, cursor: int, detail: int) -> wire.Inspected:
        try:
            found = self.object_inspect_mime(token_at_cursor(code, cursor), detail_level=detail)
        except KeyError:
            return wire.Inspected(data=wire.Mime())
        return wire.Inspected(data=mime(found))

    def forget(self) -> None:
        """As new: no names, no history, no counts."""
        self.reset(new_session=True)
        self.history_manager.reset(new_session=False)
        self.execution_count = 1
        self.raised = None

    def _line_of(self, error: BaseException) -> int | None:
        trace, line = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in self.compile._filename_map:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line


def make_shell() -> GuestShell:
    config = Config()
    config.HistoryManager.enabled = False  # it would start a thread
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 100
    config.InteractiveShell.banner1 = ""
    config.Completer.use_jedi = False  # imports half the world at the first Tab
    shell = GuestShell.instance(config=config)
    warnings.filterwarnings("ignore", message="To exit: use")
    sys.displayhook = shell.displayhook
    builtins.input = refuse_input
    getpass.getpass = refuse_input
    return shell  # type: ignore[no-any-return]


def refuse_input(prompt: object = "", *_: object, **__: object) -> str:
    """What `input()` does until a face offers stdin."""
    raise InputUnavailable(
        f"input({str(prompt)!r}) has nobody to answer it: this run offers no stdin. "
        "Put the value in a variable, or pass it as a file."
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the exception's own code
        return f"<{type(error).__name__} whose str() failed>"
