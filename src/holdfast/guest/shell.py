"""IPython without a terminal: what a cell means."""

import asyncio
import builtins
import fnmatch
import getpass
import importlib.util
import itertools
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec
import traitlets
from IPython.core import formatters
from IPython.core.async_helpers import get_asyncio_loop
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.error import UsageError
from IPython.core.formatters import DisplayFormatter
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.prefilter import PrefilterManager
from IPython.utils.text import LSString, SList
from IPython.utils.tokenutil import token_at_cursor
from traitlets.config import Config

from holdfast.guest import commands, missing
from holdfast.guest.display import GuestDisplayHook, GuestDisplayPublisher, Nobody, Sink, mime, text
from holdfast.guest.event_loop import CellLoop
from holdfast.guest.namespace import type_name
from holdfast.guest.notebook_kernel import NotebookKernel
from holdfast.guest.shortcuts import PlainLines, PlainTransformers, PlainValues, awaits, ended
from holdfast.kernel import wire

_MAX_NAME = 200
_DEEP = 200
_SMALL_BYTES = 32 << 10
_INPUTS_NAMED = 200
"""How many cells' texts have a name (`_i7`); `In` has them all. A namespace that only grows makes each cell slower."""
_EXCEPTION_ONLY = "An exception has occurred, use %tb to see the full traceback.\n"
"""IPython's own words."""
_NOT_COMPILED = (SyntaxError, ValueError, OverflowError)
"""What `compile` raises; a NUL in the code is a ValueError before Python 3.11.4."""
T = TypeVar("T")


class _NoEvents:
    """Stands in for IPython's event manager where nobody is to be told."""

    def trigger(self, event: str, *args: object, **kwargs: object) -> None:
        pass


_NO_EVENTS = _NoEvents()


class InputUnavailable(RuntimeError):
    """`input()` where nobody can answer."""


class GuestHistory(HistoryManager):
    """With the last inputs as plain attributes, and not traits: they are written with each cell."""

    _i = _ii = _iii = _i00 = ""

    def get_tail(
        self, n: int | None = 10, raw: bool = True, output: bool = False, include_latest: bool = False
    ) -> list[Any]:
        """The last lines; IPython would look in a database, which there is not."""
        lines = list(self._get_range_session(raw=raw, output=output))
        return lines[: None if include_latest else -1][-(n or 10) :]

    def search(
        self,
        pattern: str = "*",
        raw: bool = True,
        search_raw: bool = True,
        output: bool = False,
        n: int | None = None,
        unique: bool = False,
    ) -> list[Any]:
        """Lines that a glob fits, the latest `n` of them; if unique, of equal ones the latest."""
        sought = self.input_hist_raw if search_raw else self.input_hist_parsed
        lines = self._get_range_session(raw=raw, output=output)
        found = [line for line in lines if fnmatch.fnmatchcase(sought[line[1]], pattern)]
        if unique:
            found = sorted({sought[line[1]]: line for line in found}.values(), key=lambda line: line[1])
        return found[-n:] if n else found

    def reset(self, new_session: bool = True) -> None:
        super().reset(new_session)
        self.output_hist_reprs.clear()


class GuestShell(InteractiveShell):
    """An `InteractiveShell` whose outputs are messages to the host."""

    displayhook_class = GuestDisplayHook
    display_pub_class = GuestDisplayPublisher
    sink: Sink = Nobody()
    # Plain attributes here, and not traits: they are read twenty times a cell.
    execution_count = 1
    history_manager: Any = None
    kernel: Any = traitlets.Any()  # a trait, for plotly asks `has_trait("kernel")`
    last_execution_succeeded = True
    last_execution_result: Any = None

    def __init__(self, **settings: Any) -> None:
        self.shown: list[tuple[BaseException, wire.Raised]] = []
        self._results: list[wire.Shown] = []
        """At most one, that has not been sent yet."""
        self._depth = 0
        self.exit_code: int | None = None
        """With which the last cell ended itself, as the exit code of a process would be; None if it did not."""
        self._next_input: wire.NextInput | None = None
        self._shows_value = False
        self._not_shown: wire.Raised | None = None
        """What the value of the last cell's last expression raised when it was to be shown."""
        super().__init__(**settings)
        self.cell_loop = CellLoop(lambda: self._depth > 0)
        self.kernel = NotebookKernel(self)
        self.transformers = PlainTransformers()
        self.input_transformer_manager = self.transformers
        # In place of IPython's two, which number the lines from the first that is not empty.
        self.transformers.cleanup_transforms[:2] = [dedent]
        self.transformers.begin()
        self.lines = PlainLines(cast(PrefilterManager, self.prefilter_manager))
        cast(GuestDisplayHook, self.displayhook).values = PlainValues(cast(DisplayFormatter, self.display_formatter))

    def get_parent(self) -> dict[str, Any]:
        """The request that is under way, as in ipykernel."""
        parent: dict[str, Any] = self.kernel.get_parent()
        return parent

    def init_virtualenv(self) -> None:
        pass

    def init_history(self) -> None:
        self.history_manager = GuestHistory(shell=self, parent=self)
        self.configurables.append(self.history_manager)

    def init_user_ns(self) -> None:
        """IPython's names, and those of every `__main__`: `multiprocessing` reads them, after `%reset` too."""
        super().init_user_ns()
        self.user_ns.update(__spec__=None, __loader__=None, __package__=None, __doc__=None)

    def start_here(self) -> None:
        """The directory that `%cd -` leads back to is the one that the first cell begins in."""
        self.history_manager.dir_hist[:] = [Path.cwd()]

    def enable_gui(self, gui: str | None = None) -> None:
        pass

    def system(self, cmd: str) -> None:
        """`!cmd`. Without a pseudo-terminal; an interrupt ends the cell, where IPython's own goes on with it."""
        self.sink.catch_up()
        self.user_ns["_exit_code"] = commands.call(self.var_expand(cmd, depth=1))

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """`x = !cmd`."""
        with tempfile.TemporaryFile() as file:
            self.user_ns["_exit_code"] = commands.call(self.var_expand(cmd, depth=depth + 1), output=file)
            file.seek(0)
            output = file.read().decode(errors="replace")
        return SList(output.splitlines()) if split else LSString(output)

    def ask_exit(self) -> None:
        """`exit()` ends the cell and nothing but the cell."""
        raise SystemExit(0)

    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """As IPython does it, except that the cell is always the first frame and that nothing is printed here."""
        try:
            kind, error, trace = self._get_exc_info(exc_tuple)
        except ValueError:
            print("No traceback available to show.", file=sys.stderr)
            return
        hint, has_no_text = _name_what_was_shown(error, trace, self.user_ns)
        hint = hint or missing.hint(error)
        if isinstance(error, UsageError):
            self.show_usage_error(error)
        elif isinstance(error, SyntaxError) and not running_compiled_code:
            self.showsyntaxerror(filename)
        elif exception_only:
            self._showtraceback(kind, error, [_EXCEPTION_ONLY, f"{_summary(error)}\n"])
        else:
            self._showtraceback(kind, error, self._render(kind, error, trace, tb_offset))
        if hint:
            shown, raised = self.shown.pop()
            raised = msgspec.structs.replace(raised, hint=hint)
            self.shown.append((shown, raised))
            if self._shows_value and has_no_text:
                self._not_shown = self._not_shown or raised

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: Any) -> None:
        whole, blocks = _in_blocks([str(block) for block in stb] if isinstance(stb, list) else [str(stb)])
        raised = wire.Raised(
            name=text(getattr(etype, "__name__", str(etype))[:_MAX_NAME]),
            message=text(wire.cut_end(self._message_of(evalue))),
            traceback=text(whole),
            kind="exception",
            line=self._line_of(evalue),
            blocks=blocks,
        )
        self.shown.append((evalue, raised))

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """For the history. IPython would format all of it a second time, and fall over a broken `__str__`."""
        return {"ename": type(exception).__name__, "evalue": _message(exception), "traceback": []}

    def show_usage_error(self, exc: BaseException) -> None:
        """A magic used wrongly: an error like any other, and not a line on stderr."""
        self._showtraceback(UsageError, exc, [f"UsageError: {exc}"])

    def run_cell(self, *arguments: Any, **options: Any) -> Any:
        """Also called by cells themselves."""
        self._depth += 1
        try:
            return super().run_cell(*arguments, **options)
        finally:
            self._depth -= 1

    def transform_cell(self, raw_cell: str) -> str:
        """Most cells stay as they are, and that is soon seen."""
        if self.lines.leaves(raw_cell) and self.transformers.leaves(raw_cell) and not self.input_transformers_post:
            return ended(raw_cell)
        return cast(str, super().transform_cell(raw_cell))

    def should_run_async(self, raw_cell: str, *, transformed_cell: Any = None, **more: Any) -> bool:
        """IPython compiles it to see that."""
        if transformed_cell is not None and not awaits(transformed_cell):
            return False
        return bool(super().should_run_async(raw_cell, transformed_cell=transformed_cell, **more))

    def show(self, message: wire.Message) -> None:
        """Tell the host at once, after whatever it has not been told yet."""
        if (result := self.take_result()) is not None:
            self.sink.send(result)
        self.sink.send(message)

    def show_result(self, result: wire.Shown) -> None:
        """The value of a cell's last expression is nearly always its last word: it goes with the reply."""
        is_last = self._depth == 1 and self.ast_node_interactivity == "last_expr"
        if is_last and result.data.size() <= _SMALL_BYTES and not self._results:
            self._results.append(result)
        else:
            self.show(result)

    def take_result(self) -> wire.Shown | None:
        """What goes with the reply."""
        try:
            return self._results.pop()
        except IndexError:
            return None

    @contextmanager
    def showing_value(self) -> Iterator[None]:
        """Around the looks of a value: if its `__repr__` raises there, the cell ends as an error."""
        before, self._shows_value = self._shows_value, True
        try:
            yield
        finally:
            self._shows_value = before

    def set_next_input(self, s: str, replace: bool = False) -> None:
        """Offer text for the next cell: the caller gets it with the reply. The last one counts."""
        if len(s) > wire.MAX_NEXT_INPUT:
            print(f"not offered as the next cell: its {len(s):,} characters are too many", file=sys.stderr)
        else:
            self._next_input = wire.NextInput(text=text(str(s)), replace=bool(replace))

    def take_next_input(self) -> wire.NextInput | None:
        offered, self._next_input = self._next_input, None
        return offered

    def execute(self, code: str, *, silent: bool = False, exit_is_error: bool = False) -> wire.Raised | None:
        """Run one cell; what ended it early, if anything did."""
        self.shown.clear()
        self.exit_code = self._next_input = self._not_shown = None
        self.user_ns.pop(f"_i{self.execution_count - _INPUTS_NAMED}", None)
        result = self.run_cell(code, store_history=not silent, silent=silent)
        self.cell_loop.give_a_moment()
        self._end_script_thread()
        error = result.error_before_exec or result.error_in_exec
        own = [raised for shown, raised in self.shown if shown is error]
        for shown, raised in self.shown:
            if shown is not error and raised is not self._not_shown:  # %tb, or a hook that failed after the cell
                print(raised.traceback, file=sys.stderr)
        self.shown.clear()
        if isinstance(error, SystemExit):
            self.exit_code = _exit_code(error)
        if error is None:
            return self._not_shown
        if self.exit_code == 0 and not exit_is_error:
            return None
        if not own:
            self._showtraceback(type(error), error, [_summary(error)])
            own = [self.shown.pop()[1]]
        if isinstance(result.error_before_exec, _NOT_COMPILED):
            return msgspec.structs.replace(own[-1], kind="syntax", line=getattr(error, "lineno", None))
        return own[-1]

    def touch_hot_pages(self) -> None:
        """IPython's part of going through the motions of a cell."""
        events, transformers, sink = self.events, self.ast_transformers, self.sink
        # What the user has hooked in must not notice.
        self.events, self.ast_transformers, self.sink = cast(Any, _NO_EVENTS), [], Nobody()
        try:
            self.run_cell("2", silent=True, store_history=False)
            self.displayhook.compute_format_data(2)
        finally:
            self.events, self.ast_transformers, self.sink = events, transformers, sink

    def complete_at(self, code: str, cursor: int) -> wire.Completed:
        with provisionalcompleter():
            found = list(rectify_completions(code, self.Completer.completions(code, cursor)))
        if not found:
            return wire.Completed(matches=[], start=cursor, end=cursor)
        start, words = found[0].start, [item.text for item in found]
        if code[start : start + 1] == "." and all(word.startswith(".") for word in words):
            start, words = start + 1, [word[1:] for word in words]
        matches = list(dict.fromkeys(text(word) for word in words if len(word) <= _MAX_NAME))[:1000]
        return wire.Completed(matches=matches, start=start, end=found[0].end)

    def inspect_at(self, code: str, cursor: int, detail: int) -> wire.Inspected:
        try:
            found = self.object_inspect_mime(token_at_cursor(code, cursor), detail_level=detail)
        except KeyError:
            return wire.Inspected(data=wire.Mime())
        return wire.Inspected(data=mime(found))

    def forget(self) -> None:
        """As new: no names, no history, no counts, no event loop."""
        self.reset(new_session=True)
        if self.history_manager is not None:
            self.history_manager.reset(new_session=False)
        self.execution_count = 1
        self.shown.clear()
        self._results.clear()
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        # Its epoll would be closed behind its back in each fork, and its number be something else's.
        self.cell_loop.close()

    def _render(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, offset: int | None
    ) -> list[str]:
        # Out of memory, IPython's form is too dear: it parses each library file on the way.
        if not (isinstance(error, (SyntaxError, MemoryError)) or _holds_group(error) or _is_deep(trace)):
            try:
                if hasattr(error, "_render_traceback_"):
                    return [str(line) for line in error._render_traceback_()]
                return list(self.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=offset))
            except Exception:  # noqa: S110 (the exception's own code; Python's plain form copes with more)
                pass
        return ["".join(traceback.format_exception(kind, error, self._from_cell(trace))).rstrip()]

    def _from_cell(self, trace: TracebackType | None) -> TracebackType | None:
        """Without the frames above the user's code, which are ours and IPython's."""
        below = trace
        while below is not None and below.tb_frame.f_code.co_filename not in self.compile._filename_map:
            below = below.tb_next
        return below or trace

    def _end_script_thread(self) -> None:
        """`%%bash` and its kin leave a thread with an event loop behind: nothing that the user started."""
        magics = self.magics_manager.registry.get("ScriptMagics")
        if hasattr(magics, "stop_event_loop") and not any(
            thread.name.startswith("asyncio-waitpid") for thread in threading.enumerate()
        ):
            magics.stop_event_loop()

    def _message_of(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError) and error.filename in self.compile._filename_map:
            return f"{error.msg} (line {error.lineno})"
        return _message(error)

    def _line_of(self, error: BaseException) -> int | None:
        """Of the cell that ran, which comes first: further in may be functions of earlier cells."""
        trace, line, cell = error.__traceback__, None, None
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if cell is None and name in self.compile._filename_map:
                cell = name
            if name == cell:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line


GuestShell.__name__ = GuestShell.__qualname__ = "ZMQInteractiveShell"
"""By this name rich, pandas, tqdm and others know that a front end shows what they show, and not a terminal."""


def make_shell() -> GuestShell:
    config = Config()
    config.IPKernelApp = Config()  # many libraries look for this section to see that they run in a notebook
    config.HistoryManager.enabled = False  # it would start a thread
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 100
    config.InteractiveShell.banner1 = ""
    config.Completer.use_jedi = False  # imports half the world at the first Tab
    shell = GuestShell.instance(config=config)
    shell.loop_runner = run_to_end
    shell.cell_loop.install()
    for name in ("pip", "uv"):
        _use_command(shell, name)
    warnings.filterwarnings("ignore", message="To exit: use")
    # The host ends it after each run, as it ends every process; `multiprocessing` starts another.
    warnings.filterwarnings("ignore", message="resource_tracker: process died unexpectedly")
    sys.displayhook = shell.displayhook
    builtins.input = refuse_input
    getpass.getpass = refuse_input
    return shell


def _use_command(shell: GuestShell, name: str) -> None:
    """`%pip` in an environment without the module `pip`: as `!pip`, which says what to do instead."""
    own = shell.find_line_magic(name)  # IPython's table may hold a stand-in, which would find the one below

    def magic(line: str) -> None:
        if importlib.util.find_spec(name) is None:
            shell.system(f"{name} {line}")
        else:
            own(line)

    cast(Any, shell).register_magic_function(magic, magic_name=name)


def dedent(lines: list[str]) -> list[str]:
    """Take off the first line's indent, and keep the line numbers; only a cell magic has to come first."""
    start = next((number for number, line in enumerate(lines) if line.strip()), 0)
    first = lines[start] if lines else ""
    indent = first[: len(first) - len(first.lstrip())]
    lines = [line.removeprefix(indent) for line in lines]
    return lines[start:] if first.lstrip().startswith("%%") else lines


def run_to_end(cell: Coroutine[Any, Any, T]) -> T:
    """Run a cell that awaits. One that is interrupted ends: it must not go on when the next one awaits."""
    loop: asyncio.AbstractEventLoop = get_asyncio_loop()
    task = loop.create_task(cell)
    while True:
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            if task.done():
                raise
            task.cancel()


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


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {_message(error)}"


def _name_what_was_shown(error: BaseException, trace: TracebackType | None, names: dict[str, Any]) -> tuple[str, bool]:
    """If a value's own code failed when it was to be shown: which value, as a note on the error and as a hint; and
    whether it is left without a text. One that only has no HTML is shown all the same."""
    if trace is None or trace.tb_frame.f_code.co_filename != formatters.__file__:
        return "", False
    found = trace.tb_frame.f_locals  # of the frame in which IPython catches it; there are two forms of that
    formatter, value = ([found["self"], *found["args"]] if "self" in found else found["args"])[:2]
    variable = next((name for name, held in list(names.items()) if held is value and not name.startswith("_")), None)
    what = (
        f"the variable `{variable}`, of type {type_name(value)}," if variable else f"a value of type {type_name(value)}"
    )
    has_no_text = formatter.print_method == "_repr_pretty_"
    said = f"{what} could not be shown: its {'__repr__' if has_no_text else formatter.print_method} failed"
    with suppress(Exception):  # the exception's own code
        error.add_note(said)
    return said, has_no_text


def _in_blocks(blocks: list[str]) -> tuple[str, list[int]]:
    """The traceback as one text, and where in it each block begins; of one that is cut, no blocks."""
    whole = "\n".join(blocks)
    if len(whole) > wire.MAX_TEXT or len(blocks) > wire.MAX_BLOCKS:
        return wire.cut_middle(whole), []
    return whole, [0, *itertools.accumulate(len(block) + 1 for block in blocks[:-1])]


def _exit_code(error: SystemExit) -> int:
    """As Python would leave a process."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _is_deep(trace: TracebackType | None) -> bool:
    """Endless recursion: IPython takes milliseconds a frame, Python's own form folds what repeats."""
    for _ in range(_DEEP):
        if trace is None:
            return False
        trace = trace.tb_next
    return True


def _holds_group(error: BaseException | None) -> bool:
    """IPython cannot format these."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BaseExceptionGroup):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
