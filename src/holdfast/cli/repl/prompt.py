"""The line that is typed: history, completion, colours, and what the prompt tells."""

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.lexers import PygmentsLexer
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from holdfast.api import SessionInfo
from holdfast.blocking import Session
from holdfast.cli.repl import cells, commands
from holdfast.cli.sizes import short
from holdfast.errors import HoldfastError, SessionClosed

_STYLE = Style.from_dict({"prompt": "ansicyan", "bottom-toolbar": "noreverse ansibrightblack"})


class Prompt:
    """Asks for one cell after the other."""

    def __init__(self, session: Session, home: Path) -> None:
        self._session = session
        self._prompt: PromptSession[str] = PromptSession(
            multiline=True,
            history=FileHistory(_private(home / "repl-history")),
            completer=_Names(session),
            complete_while_typing=False,  # each question wakes the kernel
            complete_in_thread=True,
            complete_style=CompleteStyle.MULTI_COLUMN,
            lexer=PygmentsLexer.from_filename("cell.py"),
            key_bindings=_keys(),
            prompt_continuation=lambda width, line, wrapped: "… ".rjust(width)[-width:],
            style=_STYLE,
        )

    def ask(self) -> str:
        """A cell, or EOFError (Ctrl-D), or KeyboardInterrupt (Ctrl-C: what was typed is dropped). HoldfastError: there
        is no session any more."""
        info = self._session.info()
        if info.state == "kept":
            raise SessionClosed(
                f"session {info.id} was ended elsewhere, and is kept",
                hint=f"go on with holdfast repl --session {info.id}",
            )
        return self._prompt.prompt(
            FormattedText([("class:prompt", prompt_text(info))]),
            bottom_toolbar=f" {info.ckpt} · generation {info.generation} · {info.mode} · :help",
        )


def prompt_text(info: SessionInfo) -> str:
    """Version, and memory in use against the cap: `v12 · 210M/1G › `."""
    return f"v{info.version} · {short(info.memory_bytes)}/{short(info.limits.get('memory_bytes'))} › "


class _Names(Completer):
    """What could stand at the cursor, as the kernel knows it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text, at = document.text, document.cursor_position
        if cells.is_command(text):
            typed = text[:at].lstrip()
            found = [each for each in commands.candidates(self._session, text) if each.startswith(typed)]
            return [Completion(each, start_position=-len(typed)) for each in found]
        try:
            told = self._session.complete(text, at)
        except HoldfastError:  # a menu is no place for it; the next run says what is wrong
            return []
        # The guest's words: what would not stand in a line is none.
        matches = [match for match in told.matches if match.isprintable()]
        return [Completion(match, start_position=min(0, told.start - at)) for match in matches]


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        before, after = buffer.document.text_before_cursor, buffer.document.text_after_cursor
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None
        elif not after.strip() and cells.is_complete(before):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n" + cells.indentation(before))

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def force(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("tab", filter=has_focus(DEFAULT_BUFFER))
    def tab(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not buffer.document.current_line_before_cursor.strip():
            buffer.insert_text("    ")
        elif buffer.complete_state:
            buffer.complete_next()
        else:
            buffer.start_completion(insert_common_part=True)

    return keys


def _private(path: Path) -> str:
    """What was typed may hold secrets: for nobody else to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return str(path)
