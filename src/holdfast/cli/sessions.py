"""`holdfast sessions`: what a home keeps. It is read beside whoever owns the home, and changes nothing."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from holdfast.cli.terminal import console, harmless
from holdfast.config import default_home
from holdfast.store.rows import SessionRow
from holdfast.store.sqlite import Store


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    id: str
    version: int
    generation: int
    ckpt: str
    receipts: int
    created_at: float
    changed_at: float
    """When its latest version was made."""
    halted: str
    """Why nothing runs in it any more; empty: all is well."""


def list_sessions(*, home: Path | None, as_json: bool) -> int:
    """Oldest first."""
    where = default_home() if home is None else home.expanduser().absolute()
    kept = _read(where / "journal.sqlite3")
    if as_json:
        print(msgspec.json.encode(kept).decode())
    elif not kept:
        print(f"no session is kept in {where}")
    else:
        console().print(_table(kept))
    return 0


def _read(journal: Path) -> list[Kept]:
    if not journal.exists():  # a home where nothing ever ran
        return []
    with closing(Store(journal, read_only=True)) as store:
        return [_kept(row, store) for row in store.sessions()]


def _kept(row: SessionRow, store: Store) -> Kept:
    latest = store.versions(row.id, limit=1)
    return Kept(
        id=row.id, version=row.version, generation=row.generation, ckpt=row.ckpt, receipts=row.receipts,
        created_at=row.created_at, changed_at=latest[0].at if latest else row.created_at, halted=row.halted,
    )  # fmt: skip


def _table(kept: list[Kept]) -> Table:
    table = Table(box=None, pad_edge=False)
    names: list[tuple[str, dict[str, Any]]] = [
        ("session", {"no_wrap": True}), ("version", {"justify": "right"}), ("ckpt", {"no_wrap": True}),
        ("changed (UTC)", {"no_wrap": True}), ("halted", {"overflow": "fold"}),
    ]  # fmt: skip
    for name, how in names:
        table.add_column(name, **how)
    for one in kept:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.changed_at))
        # As text, not as markup: what halted a session may name a guest's file.
        table.add_row(one.id, str(one.version), one.ckpt, when, Text(harmless(one.halted)))
    return table
