"""`holdfast ps`: the sessions of a home, live and kept. It changes nothing."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.table import Table
from rich.text import Text

from holdfast.cli import homes
from holdfast.cli.sizes import ago, short
from holdfast.cli.terminal import console, print_json
from holdfast.config import home_path, read_settings
from holdfast.errors import SessionUnknown
from holdfast.store.rows import SessionRow
from holdfast.store.sqlite import Store
from holdfast.visible import visible

if TYPE_CHECKING:
    from holdfast.api import SessionInfo
    from holdfast.transports.connection import Connection

State = Literal["ready", "running", "kept", "halted", "unknown"]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    id: str
    state: State
    """`kept`: it has files and books, and no kernel. `unknown`: who owns the home does not serve it, and so cannot be
    asked."""
    version: int
    generation: int
    ckpt: str
    mode: str
    memory_bytes: int | None
    """In use now; None where there is no kernel, or nobody who tells."""
    memory_limit_bytes: int | None
    running: str | None
    """The run that is under way."""
    owner: str
    """The API key whose it is; empty: the home's owner."""
    receipts: int
    created_at: float
    changed_at: float
    """When its latest version was made."""
    halted: str
    """Why nothing runs in it any more; empty: all is well."""


def list_sessions(*, home: Path | None, as_json: bool) -> int:
    """Oldest first."""
    where = home_path(home)
    listed, told = read(where)
    if as_json:
        print_json(listed)
    elif listed:
        console().print(_table(listed))
    else:
        print(f"no session is in {where}; holdfast repl --keep makes one")
    if told:
        print(told, file=sys.stderr)
    return 0


def read(home: Path) -> tuple[list[Listed], str]:
    """What the journal says, and over it what the server does; and what is to be said of that."""
    served = homes.ask(home, _infos)
    owner = homes.owner(home) if served is None else None
    live = {info.id: info for info in served or []}
    with homes.reading(home) as store:
        rows = {row.id: row for row in store.sessions()} if store else {}
        # A run that its owner has not settled goes on; without an owner, the next one settles it.
        kept = [_kept(row, store, owned=owner is not None) for row in rows.values() if store and row.id not in live]
    here = [_live(info, rows.get(info.id)) for info in live.values()]
    told = f"{owner} has this home open and does not serve it: which sessions are live, it alone knows" if owner else ""
    return sorted(kept + here, key=lambda one: (one.created_at, one.id)), told


def one(home: Path, session: str) -> Listed:
    """One of them, by its whole id."""
    for listed in read(home)[0]:
        if listed.id == session:
            return listed
    raise SessionUnknown(f"session {session} has just ended", hint="`holdfast ps` lists those that are there")


async def _infos(connection: "Connection") -> "list[SessionInfo]":
    from holdfast.api import SessionInfo

    return await connection.ask("GET", "/v1/sessions", list[SessionInfo])


def _live(info: "SessionInfo", row: SessionRow | None) -> Listed:
    limit = info.limits.get("memory_bytes")
    return Listed(
        id=info.id, state=info.state, version=info.version, generation=info.generation, ckpt=info.ckpt, mode=info.mode,
        memory_bytes=info.memory_bytes, memory_limit_bytes=limit if isinstance(limit, int) else None,
        running=info.running, owner=info.owner, receipts=row.receipts if row else 0, created_at=info.created_at,
        changed_at=info.changed_at, halted=row.halted if row else "",
    )  # fmt: skip


def _kept(row: SessionRow, store: Store, *, owned: bool) -> Listed:
    limits, mode, _ = read_settings(row.settings)
    running = next((run for _, run in store.unsettled(row.id)), None) if owned else None
    return Listed(
        id=row.id, state="halted" if row.halted else "unknown" if owned else "kept", version=row.version,
        generation=row.generation, ckpt=row.ckpt, mode=mode, memory_bytes=None,
        memory_limit_bytes=limits.memory_bytes, running=running,
        owner=str(row.settings.get("owner") or ""), receipts=row.receipts, created_at=row.created_at,
        changed_at=store.changed_at(row), halted=row.halted,
    )  # fmt: skip


def _table(listed: list[Listed]) -> Table:
    table, now = Table(box=None, pad_edge=False), time.time()
    names: list[tuple[str, dict[str, Any]]] = [
        ("session", {"no_wrap": True}), ("state", {"no_wrap": True}), ("version", {"justify": "right"}),
        ("ckpt", {"no_wrap": True}), ("memory", {"no_wrap": True}), ("age", {"justify": "right"}),
        ("changed", {"justify": "right"}), ("owner", {}), ("", {"overflow": "fold"}),
    ]  # fmt: skip
    for name, how in names:
        table.add_column(name, **how)
    for each in listed:
        used = f"{short(each.memory_bytes)}/" if each.memory_bytes is not None else ""
        note = each.halted or each.running or ""
        table.add_row(
            each.id, each.state, str(each.version), each.ckpt, used + short(each.memory_limit_bytes),
            ago(now - each.created_at), ago(now - each.changed_at), Text(visible(each.owner)),
            # As text, not as markup: what halted a session may name a guest's file.
            Text(visible(note)),
        )  # fmt: skip
    return table
