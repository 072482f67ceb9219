"""`holdfast exec`: one cell, one sandbox, one exit code."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from holdfast.cli.progress import rich_report
from holdfast.cli.terminal import Writer, silence
from holdfast.client import Session
from holdfast.errors import InvalidSetting
from holdfast.model import Display, Run, RunError

_EXIT_CODES = {"timeout": 124, "out_of_memory": 137, "killed": 137, "interrupted": 130}
_BROKEN_PIPE = 141
_SUFFIXES = {"image/svg+xml": "svg", "image/jpeg": "jpg"}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    code: str
    settings: dict[str, Any]
    save: Path | None = None
    as_json: bool = False


def run_cell(cell: Cell) -> int:
    """Run it and print what came of it; returns the exit code."""
    with rich_report() as report:
        session = Session(**cell.settings, report=report)
    with session, _interrupting(session) as stop:
        screen = _Screen(stop)
        if cell.as_json:
            run = session.run(cell.code)
            sys.stdout.write(msgspec.json.encode(run).decode() + "\n")
        else:
            run = session.run(cell.code, on_stdout=screen.stdout, on_stderr=screen.stderr, on_display=screen.display)
            screen.conclude(run)
        screen.keep_images(run, cell)
    if screen.broken:
        return _BROKEN_PIPE
    if stop.number is not None:
        return 128 + stop.number
    return 0 if run.error is None else _EXIT_CODES.get(run.error.code, 1)


class _Stop:
    """Ends the cell, once, from a signal handler or a callback: neither may wait."""

    def __init__(self, session: Session) -> None:
        self.number: int | None = None
        self._session = session
        self._over = threading.Event()
        self._asked = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:  # a second time: whoever asks twice means at once
            raise KeyboardInterrupt
        self.number = number
        self.ask()

    def ask(self) -> None:
        if not self._asked:
            self._asked = True
            threading.Thread(target=self._interrupt, daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _interrupt(self) -> None:
        # The cell may not have begun yet.
        while not self._over.is_set() and not self._session.interrupt():
            time.sleep(0.02)


@contextmanager
def _interrupting(session: Session) -> Iterator[_Stop]:
    stop = _Stop(session)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        stop.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Screen:
    """Where the run's output goes, as it comes."""

    def __init__(self, stop: _Stop) -> None:
        self._out = Writer(sys.stdout)
        self._err = Writer(sys.stderr)
        self._stop = stop
        self.broken = False

    def stdout(self, text: str) -> None:
        if self.broken:
            return
        try:
            self._out.write(text)
        except BrokenPipeError:  # the reader has seen enough (`| head`), so nobody needs the rest
            self.broken = True
            silence(sys.stdout)
            self._stop.ask()

    def stderr(self, text: str) -> None:
        self._err.write(text)

    def display(self, display: Display) -> None:
        """Text is shown; what a terminal cannot show gets a line when the run is over."""
        text = display.data.get("text/plain")
        if isinstance(text, str) and not _images(display) and not self.broken:
            self._line(text)

    def _line(self, text: str) -> None:
        try:
            self._out.line(text)
        except BrokenPipeError:
            self.broken = True
            silence(sys.stdout)

    def conclude(self, run: Run) -> None:
        for display in run.displays:
            if not display.data.keys() & {"text/plain"} and not _images(display):
                kinds = ", ".join(sorted(display.data)) or "nothing"
                self._err.line(f"[a display of {kinds}: --json has it]")
        if run.dropped_displays:
            self._err.line(f"[{run.dropped_displays:,} displays past the limit were dropped]")
        for stray in run.strays:
            self._err.line(f"[left behind by the cell and {stray.outcome}: {stray.kind} {stray.name}]")
        if run.error is not None and not self.broken:
            self._explain(run.error)

    def _explain(self, error: RunError) -> None:
        if error.traceback:
            self._err.line(error.traceback)
        if error.code not in ("exception", "syntax"):
            self._err.line(f"{error.name}: {error.message}")
        if error.hint:
            self._err.line(f"hint: {error.hint}")

    def keep_images(self, run: Run, cell: Cell) -> None:
        for display in run.displays:
            for kind, data in _images(display).items():
                raw = data.encode() if isinstance(data, str) else data
                what = f"{kind}, {len(raw):,} bytes"
                if cell.save is not None:
                    self._err.line(f"[{what}: saved as {_saved(cell.save, kind, raw)}]")
                elif not cell.as_json:
                    self._err.line(f"[{what}: keep it with --save DIR]")


def _images(display: Display) -> dict[str, str | bytes]:
    return {kind: data for kind, data in display.data.items() if kind.startswith("image/")}


def _saved(directory: Path, kind: str, data: bytes) -> Path:
    """Write under the first number that is free: what is there stays. The kind is the guest's word, so not a path."""
    suffix = _SUFFIXES.get(kind) or "".join(filter(str.isalnum, kind.removeprefix("image/")))[:8]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        number = 1
        while (path := directory / f"display-{number}.{suffix}").exists():
            number += 1
        path.write_bytes(data)
    except OSError as error:
        raise InvalidSetting(
            f"the image cannot be saved in {directory}: {error.strerror}", hint="name another directory: --save DIR"
        ) from error
    return path
