"""One cell after the other, and the session around them."""

import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import anyio
import msgspec

from holdfast import __version__, environments
from holdfast.blocking import Session
from holdfast.cli import homes
from holdfast.cli.interrupting import interrupting
from holdfast.cli.progress import rich_report
from holdfast.cli.repl import cells, commands
from holdfast.cli.repl.answers import Answers
from holdfast.cli.screen import Screen, images
from holdfast.cli.terminal import Writer, print_json
from holdfast.config import home_path
from holdfast.errors import HoldfastError, InvalidSetting
from holdfast.model import Run
from holdfast.visible import visible_lines

if TYPE_CHECKING:  # cells from a pipe do without it
    from holdfast.cli.repl.prompt import Prompt


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    settings: dict[str, Any]
    session: str | None = None
    """A kept session to go on in; it is kept again."""
    keep: bool = False
    save: Path | None = None
    as_json: bool = False

    @property
    def keeps(self) -> bool:
        return self.keep or self.session is not None

    @property
    def home(self) -> Path:
        return home_path(self.settings["home"])


class Ended(Exception):
    """A signal came while nothing ran."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number


def repl(asked: Asked) -> int:
    """Cells from whatever stdin is; returns the exit code."""
    typed = sys.stdin.isatty()
    if typed and asked.as_json:
        raise InvalidSetting("--json is for cells from a pipe", hint="leave it out at a terminal")
    with _signals_end_it():
        session = open_session(asked)
        desk = _Desk(session, asked)
        try:
            return desk.converse() if typed else desk.read()
        except Ended as ended:
            return ended.code
        finally:
            session.close(keep=asked.keeps)


def open_session(asked: Asked) -> Session:
    """At the home's server, so that others may use the home meanwhile; which memory cap is there is its choice."""
    shared = asked.settings["memory_cap"] == "cgroup"
    with rich_report() as report:
        if shared and asked.settings["env"] is None and environments.find(asked.home) is None:
            anyio.run(lambda: environments.ensure(asked.home, report=report))  # here, where somebody sees how far it is
        resume = None if asked.session is None else homes.resolve(asked.home, asked.session)
        return Session(**asked.settings, resume=resume, keep=asked.keeps, report=report, shared=shared)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """SIGTERM and a closed terminal end the session in order, also while nothing runs."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _piped() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidSetting(
            f"what came from the pipe is no text: {error.reason} at byte {error.start:,}",
            hint=f"write cells in {error.encoding}, and keep data in files",
        ) from error


def _lines(stream: TextIO) -> Callable[[str], None]:
    """Writes what we say ourselves. It may name what the guest has named."""
    writer = Writer(stream)
    return lambda text: writer.line(visible_lines(text))


class _Desk:
    """One open session and whoever sits before it."""

    def __init__(self, session: Session, asked: Asked) -> None:
        self._session = session
        self._asked = asked
        self._say = _lines(sys.stderr)
        self._images: Path | None = None

    # -- a terminal --------------------------------------------------------------------------------------------

    def converse(self) -> int:
        from holdfast.cli.repl.prompt import Prompt

        self._greet()
        prompt = Prompt(self._session, self._asked.home)
        while (text := self._typed(prompt)) is not None and not cells.is_end(text):
            try:
                self._carry_out(text)
            except KeyboardInterrupt:  # a cell is interrupted elsewhere
                self._say("interrupted")
            except HoldfastError as error:
                self._say(f"holdfast: {error}")
        self._part()
        return 0

    def _typed(self, prompt: "Prompt") -> str | None:
        """A cell; None is the end. What cannot even be asked here has ended: that is not for the next prompt."""
        try:
            return prompt.ask()
        except KeyboardInterrupt:  # what was typed is dropped
            return ""
        except EOFError:
            return None

    def _greet(self) -> None:
        info = self._session.info()
        self._say(f"holdfast {__version__} · session {info.id} · {info.mode} mode · :help; exit or Ctrl-D ends it")
        if self._asked.session is not None:
            self._say(self._session.recover().text)

    def _part(self) -> None:
        if self._asked.keeps:
            self._say(f"kept; go on with holdfast repl --session {self._session.id}")
        elif self._session.files():
            self._say("ended, and its files with it; --keep keeps them")

    def _carry_out(self, text: str) -> None:
        if cells.is_command(text):
            for line in commands.carry_out(self._session, text):
                self._say(line)
        elif text.strip():
            self._run(text)

    # -- a pipe ------------------------------------------------------------------------------------------------

    def read(self) -> int:
        """Cell by cell, up to the first that fails."""
        try:
            return self._read()
        finally:
            if self._asked.keeps:
                self._part()

    def _read(self) -> int:
        for cell in cells.split(_piped()):
            if cells.is_end(cell):
                return 0
            if cells.is_command(cell):
                for line in commands.carry_out(self._session, cell):
                    (self._say if self._asked.as_json else _lines(sys.stdout))(line)
            elif code := self._run(cell):
                return code
        return 0

    # -- one cell ----------------------------------------------------------------------------------------------

    def _run(self, code: str) -> int:
        with interrupting(self._session) as stop:
            screen = Screen(stop)
            run = self._run_quietly(code) if self._asked.as_json else self._run_shown(code, screen)
            self._keep_images(run, screen)
            result = screen.exit_code(run)
        if stop.number in (signal.SIGTERM, signal.SIGHUP):
            raise Ended(stop.number)
        return result

    def _run_quietly(self, code: str) -> Run:
        run = self._session.run(code)
        print_json(run)
        return run

    def _run_shown(self, code: str, screen: Screen) -> Run:
        with Answers(screen) if sys.stdin.isatty() else contextlib.nullcontext() as answers:
            run = self._session.run(
                code,
                on_stdout=screen.stdout,
                on_stderr=screen.stderr,
                on_display=screen.display,
                on_input=answers.ask if answers else None,
            )
        screen.conclude(run, recovery=True)
        return run

    def _keep_images(self, run: Run, screen: Screen) -> None:
        if any(images(display) for display in run.displays):
            screen.keep_images(run, self._image_directory(), quiet=self._asked.as_json)

    def _image_directory(self) -> Path:
        if self._images is None:
            named = self._asked.save
            self._images = named or Path(tempfile.mkdtemp(prefix=f"holdfast-{self._session.id}-"))
        return self._images
