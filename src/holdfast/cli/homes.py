"""A home as commands meet it: the journal, which may be read beside whoever owns it; and the server, if it has one.

Questions that change nothing are put to the journal and work always. What is only known to the living (memory in use,
the run that is under way) and what changes a session takes the server, or that nobody owns the home.
"""

import asyncio
import difflib
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import SessionUnknown
from holdfast.home import HIDDEN, JOURNAL, SOCKET
from holdfast.store import accidents
from holdfast.store.sqlite import Store

if TYPE_CHECKING:  # a command that finds no server does without it, and starts quickly
    from holdfast.transports.connection import Connection

T = TypeVar("T")


@contextmanager
def reading(home: Path) -> Iterator[Store | None]:
    """The journal, in one state; None where nothing ever ran."""
    if not (home / JOURNAL).exists():
        accidents.refuse_if_gone(home / JOURNAL)
        yield None
        return
    with closing(Store(home / JOURNAL, read_only=True)) as store, store.view():
        yield store


def owner(home: Path) -> str | None:
    """Who has the home open, as far as its lock's text tells."""
    try:
        text = (home / "lock").read_text().strip()
        alive = text.startswith("process ") and os.path.exists(f"/proc/{int(text.split()[1])}")
    except (OSError, ValueError, IndexError):
        return None
    return text if alive else None


def ask(home: Path, question: "Callable[[Connection], Awaitable[T]]") -> T | None:
    """Put a question to the home's server; None if it has none."""
    from holdfast import shared

    async def carry_out() -> T | None:
        if (socket := await shared.find(home)) is None:
            return None
        from holdfast.transports.connection import Connection

        connection = Connection(f"unix:{socket}")
        try:
            return await question(connection)
        finally:
            await connection.close()

    return asyncio.run(carry_out()) if (home / SOCKET).exists() else None


def locate(home: Path, typed: str) -> tuple[Path, str]:
    """The same; or, of a directory that jobs were run in, its own home and the one session in that."""
    own = Path(typed).expanduser() / HIDDEN
    if (own / JOURNAL).exists() and (known := session_ids(own)):
        return own.resolve(), known[0]
    return home, resolve(home, typed)


def resolve(home: Path, typed: str) -> str:
    """The id of the session that is meant: it may be cut short as long as it is the only one."""
    known = session_ids(home)
    if typed in known:
        return typed
    begun = [each for each in known if typed and each.startswith(typed)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise SessionUnknown(f"{typed!r} could be {len(begun)} sessions", hint=f"which: {', '.join(begun[-5:])}?")
    alike = difflib.get_close_matches(typed, known, n=1)
    latest = f"the latest are {', '.join(known[-5:])}; `holdfast ps` lists all" if known else "`holdfast ps` lists them"
    hint = f"did you mean {alike[0]}?" if alike else latest
    raise SessionUnknown(f"no session {typed!r} is in {home}", hint=hint)


def session_ids(home: Path) -> list[str]:
    """Oldest first."""
    with reading(home) as store:
        return [row.id for row in store.sessions()] if store else []
