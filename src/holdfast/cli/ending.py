"""`holdfast reset` and `holdfast end`: what changes a session from outside.

A live session is its owner's: the server does it. A kept one has no kernel; it is deleted here, by becoming the home's
owner for a moment.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from holdfast.cli import homes, ps
from holdfast.cli.ps import Listed
from holdfast.cli.terminal import print_json
from holdfast.config import home_path
from holdfast.errors import HomeBusy

if TYPE_CHECKING:
    from holdfast.api import SessionInfo
    from holdfast.transports.connection import Connection


def reset(session: str, *, home: Path | None, as_json: bool) -> int:
    """Purge a session's memory; its files stay."""
    where = home_path(home)
    found = _found(where, session)
    if found.state == "kept":
        told = f"session {found.id} is kept, and has no memory: there is nothing to reset"
        print(json.dumps({"session": found.id, "reset": False}) if as_json else told)
        return 0
    info = homes.ask(where, lambda connection: _reset(connection, found.id))
    if info is None:
        raise _not_served(where)
    if as_json:
        print_json({"session": info.id, "reset": True, "ckpt": info.ckpt})
    else:
        print(f"memory of session {info.id} is empty, generation {info.generation}; its files stay: {info.ckpt}")
    return 0


def end(session: str, *, home: Path | None, keep: bool, sure: bool, as_json: bool) -> int:
    """End a live session; delete its files and books unless they are to be kept, and those of a kept one."""
    where = home_path(home)
    found = _found(where, session)
    if not keep and not sure and sys.stdin.isatty():
        _confirm(where, found)
    if homes.ask(where, lambda connection: _end(connection, found.id, keep=keep)) is None:
        _end_unserved(where, found, keep=keep)
    if as_json:
        print(json.dumps({"session": found.id, "kept": keep}))
    elif keep:
        print(f"session {found.id} is kept; go on with holdfast repl --session {found.id}")
    else:
        print(f"session {found.id} is gone, with its files and receipts")
    return 0


def _found(home: Path, session: str) -> Listed:
    return ps.one(home, homes.resolve(home, session))


def _confirm(home: Path, found: Listed) -> None:
    with homes.reading(home) as store:
        files = len(store.files(found.id)) if store else 0
    typer.confirm(
        f"Delete session {found.id} ({found.state}): {files:,} files, {found.receipts:,} receipts?", abort=True
    )


async def _reset(connection: "Connection", session: str) -> "SessionInfo":
    from holdfast.api import SessionInfo

    doubt = "whether memory was reset is not known; holdfast show tells"
    return await connection.ask("POST", f"/v1/sessions/{session}/reset", SessionInfo, doubt=doubt)


async def _end(connection: "Connection", session: str, *, keep: bool) -> bool:
    await connection.ask("DELETE", f"/v1/sessions/{session}", object, query={"keep": str(keep).lower()})
    return True


def _end_unserved(home: Path, found: Listed, *, keep: bool) -> None:
    if found.state == "unknown":
        raise _not_served(home)
    if not keep:
        from holdfast.config import Settings
        from holdfast.opening import drop_kept

        asyncio.run(drop_kept(Settings(home=home), found.id))


def _not_served(home: Path) -> HomeBusy:
    return HomeBusy(
        f"{homes.owner(home) or 'another process'} has {home} open and does not serve it",
        hint="do it there, or end that process first",
    )
