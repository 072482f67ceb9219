"""What a person sees of a run: its output as it comes, and what became of it."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.cli.interrupting import Stop
from holdfast.cli.terminal import Writer, silence
from holdfast.errors import InvalidSetting
from holdfast.model import Display, Recovery, Run, RunError
from holdfast.visible import visible, visible_lines

_EXIT_CODES = {
    "timeout": 124, "out_of_memory": 137, "disk_limit": 137, "killed": 137, "kernel_lost": 137, "interrupted": 130,
}  # fmt: skip
_BROKEN_PIPE = 141
_MOST_LINES = 10
_ERASE = "\r\x1b[2K"
_SUFFIXES = {"image/svg+xml": "svg", "image/jpeg": "jpg"} | {
    f"image/{kind}": kind for kind in ("png", "gif", "webp", "bmp", "tiff", "avif")
}


class Screen:
    """Where the run's output goes, as it comes."""

    def __init__(self, stop: Stop) -> None:
        self._out = Writer(sys.stdout)
        self._err = Writer(sys.stderr)
        self._stop = stop
        self._alone = threading.RLock()
        self._status = ""
        self.broken = False

    def stdout(self, text: str) -> None:
        if self.broken:
            return
        try:
            with self._no_status():
                self._out.write(text)
        except BrokenPipeError:  # the reader has seen enough (`| head`), so nobody needs the rest
            self.broken = True
            silence(sys.stdout)
            self._stop.ask()

    def stderr(self, text: str) -> None:
        with self._no_status():
            self._err.write(text)

    def status(self, text: str) -> None:
        """A line that is drawn over by whatever comes next; only for a terminal."""
        with self._alone:
            if text == self._status or not (self._err.at_line_start and self._out.at_line_start):
                return
            sys.stderr.write(f"{_ERASE}{visible(text)}")
            sys.stderr.flush()
            self._status = text

    @contextmanager
    def _no_status(self) -> Iterator[None]:
        with self._alone:
            if self._status:
                sys.stderr.write(_ERASE)
                sys.stderr.flush()
                self._status = ""
            yield

    def display(self, display: Display) -> None:
        """Text is shown; what a terminal cannot show gets a line when the run is over."""
        text = display.data.get("text/plain")
        if isinstance(text, str) and not images(display) and not self.broken:
            self._line(text)

    def _line(self, text: str) -> None:
        try:
            with self._no_status():
                self._out.line(text)
        except BrokenPipeError:
            self.broken = True
            silence(sys.stdout)

    def conclude(self, run: Run, *, recovery: bool = False, explain: bool = True) -> None:
        """What is left to say; with `recovery`, how a run was taken back is told in its words. Who tells that himself
        wants nothing explained but where it was."""
        for display in run.displays:
            if not display.data.keys() & {"text/plain"} and not images(display):
                kinds = ", ".join(sorted(display.data)) or "nothing"
                self.line(f"[a display of {visible(kinds)}: --json has it]")
        if run.dropped_displays:
            self.line(f"[{run.dropped_displays:,} displays past the limit were dropped]")
        if run.kernel_replaced:
            self.line(f"[it had another kernel: {visible(run.kernel_replaced)}]")
        for stray in run.strays:
            self.line(f"[left behind by the cell and {stray.outcome}: {stray.kind} {visible(stray.name)}]")
        refused = [line for line in run.egress if line.startswith("refused")]
        for line in refused[:_MOST_LINES]:
            self.line(f"[egress {line}]")
        if run.error is not None and not self.broken:
            self._explain(run.error if explain else _where(run.error), told=run.recovery if recovery else None)

    def _explain(self, error: RunError, *, told: Recovery | None) -> None:
        if error.traceback:
            self.line(error.traceback)
        if told is not None:  # it names cause and remedy
            self.line(told.text)
            return
        if error.code not in ("exception", "syntax"):
            self.line(f"{visible(error.name)}: {error.message}")
        if error.hint:
            self.line(f"hint: {error.hint}")

    def line(self, text: str) -> None:
        """What we say ourselves goes beside the run's output, not into it. It may name what the guest has named."""
        with self._no_status():
            self._err.line(visible_lines(text))

    def exit_code(self, run: Run) -> int:
        if self.broken:
            return _BROKEN_PIPE
        if self._stop.number is not None:
            return 128 + self._stop.number
        return 0 if run.error is None else _EXIT_CODES.get(run.error.code, 1)

    def keep_images(self, run: Run, directory: Path | None, *, quiet: bool = False) -> None:
        for display in run.displays:
            for kind, data in images(display).items():
                raw = data.encode() if isinstance(data, str) else data
                what = f"{visible(kind)}, {len(raw):,} bytes"
                if directory is not None:
                    self.line(f"[{what}: saved as {saved(directory, kind, raw)}]")
                elif not quiet:
                    self.line(f"[{what}: keep it with --save DIR]")


def in_short(label: str, lines: Sequence[str]) -> Iterator[str]:
    """The first of them, each on a line of its own."""
    yield from (f"{label:<8} {line}" for line in lines[:_MOST_LINES])
    if len(lines) > _MOST_LINES:
        yield f"{label:<8} and {len(lines) - _MOST_LINES:,} more: --json has them"


def _where(error: RunError) -> RunError:
    return RunError(code="exception", name=error.name, message="", traceback=error.traceback)


def images(display: Display) -> dict[str, str | bytes]:
    return {kind: data for kind, data in display.data.items() if kind.startswith("image/")}


def saved(directory: Path, kind: str, data: bytes) -> Path:
    """Write under the first number that is free: what is there stays. The kind is the guest's word: it becomes no part
    of a name that a tool of the user's might obey (`image/desktop`)."""
    suffix = _SUFFIXES.get(kind, "image")
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
