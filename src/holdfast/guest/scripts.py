"""A whole file, run as `python file arguments…` would; or a notebook, cell by cell.

A script gets a module of its own as `__main__`. When it has ended, what Python does at exit is done: threads that are
no daemons are waited for, exit handlers run, and what is open is closed, so that all that it wrote is in its files.
None of that is done for one that failed: it is rolled back.
"""

import atexit
import builtins
import gc
import io
import linecache
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, TracebackType

import msgspec

from holdfast.guest import missing
from holdfast.guest.display import text
from holdfast.guest.shell import GuestShell
from holdfast.kernel import wire


def run(shell: GuestShell, code: str, script: wire.Script) -> wire.Raised | None:
    """What ended it early, if anything did."""
    sys.argv = [script.file, *script.arguments]
    sys.path[0] = os.path.dirname(script.file)
    atexit._clear()  # the zygote's: a kernel never ends in a way that would call them
    return _run_module(code, script.file) if script.cells is None else _run_cells(shell, script.cells)


def _run_cells(shell: GuestShell, cells: list[str]) -> wire.Raised | None:
    for number, cell in enumerate(cells, 1):
        raised = shell.execute(cell)
        if (result := shell.take_result()) is not None:
            shell.sink.send(result)  # it would wait for the end of the run
        if raised is not None:
            where = f"code cell {number} of {len(cells)}"
            heading = f"In {where}:\n"
            return msgspec.structs.replace(
                raised,
                message=f"{raised.message} ({where})",
                traceback=f"{heading}{raised.traceback}",
                blocks=[0, *(len(heading) + start for start in raised.blocks)][: wire.MAX_BLOCKS],
                kind=raised.kind if number == 1 else "exception",  # "syntax" says that nothing was started
            )
        if shell.exit_code is not None:  # 0: the notebook ends well here
            break
    return _told(_exit)


def _run_module(code: str, file: str) -> wire.Raised | None:
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    try:
        compiled = compile(code, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return msgspec.structs.replace(_raised(error, None), kind="syntax", line=getattr(error, "lineno", None))
    main = ModuleType("__main__")
    vars(main).update(__file__=file, __builtins__=builtins, __spec__=None, __loader__=None, __package__=None)
    sys.modules["__main__"] = main
    raised = _told(lambda: exec(compiled, vars(main)))  # noqa: S102 (what all of this is for)
    return raised or _told(lambda: _exit(main))


def _told(body: Callable[[], object]) -> wire.Raised | None:
    """Carry out code of the user's; what ended it early."""
    try:
        body()
    except SystemExit as error:
        return None if error.code in (None, 0) else _raised(error, None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        return _raised(error, trace)
    return None


def _raised(error: BaseException, trace: TracebackType | None) -> wire.Raised:
    name = type(error).__name__
    hint = missing.hint(error)
    try:
        message = str(error)
        shown = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    except Exception:  # the exception's own code
        message, shown = f"<{name} whose str() failed>", name
    return wire.Raised(
        name=text(name[:200]), message=text(wire.cut_end(message)), traceback=text(wire.cut_middle(shown)),
        kind="exception", line=trace.tb_lineno if trace else None, hint=hint,
    )  # fmt: skip


# -- as at the end of a process ----------------------------------------------------------------------------------


def _exit(main: ModuleType | None = None) -> None:
    _end_executors()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if (processes := sys.modules.get("multiprocessing.util")) is not None:
        processes._exit_function()
    logging.shutdown()
    if main is not None:
        vars(main).clear()
    gc.collect()
    for each in gc.get_objects():
        if isinstance(each, io.IOBase) and not isinstance(each, io.RawIOBase):
            with suppress(Exception):  # closed, or not to be written to
                each.flush()


def _end_executors() -> None:
    """Their workers wait for work for ever; Python ends them before it waits for threads."""
    for name in ("concurrent.futures.thread", "concurrent.futures.process"):
        if (module := sys.modules.get(name)) is not None:
            module._python_exit()
