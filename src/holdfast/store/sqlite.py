"""The store as one SQLite file.

1. A transaction is all or nothing, and durable when `write` returns.
2. A run's records follow one another as `protocol.NEXT` says; a write that would break the order leaves nothing behind.
3. After a sync that failed nothing more is written through this object: what the kernel still holds of the file may
   not be what is on the disk. Opened anew, the file is read from there.

One object is one connection, for one thread at a time.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast import api, protocol
from holdfast.errors import DiskFailed
from holdfast.records import AnyRecord, Executed, FileEntry, Lost, Planned, Saved, Sent, Settled, Unsent, Verified
from holdfast.store import accidents, connection, queries
from holdfast.store.accidents import Seen
from holdfast.store.rows import (
    AnyWrite,
    Append,
    DropResults,
    DropSession,
    KeyRow,
    NameRow,
    PutFiles,
    PutKey,
    PutLost,
    PutNames,
    PutReceipt,
    PutResult,
    PutSession,
    PutVersion,
    ReceiptRow,
    SessionRow,
    VersionRow,
)

T = TypeVar("T")

_TYPES: dict[str, type[AnyRecord]] = {
    each.__name__: each for each in (Planned, Saved, Sent, Unsent, Executed, Verified, Settled)
}
_encode = msgspec.msgpack.Encoder().encode
_ROW_BYTES = 100
"""What a row takes beside its body, in its table and indexes."""


class Store:
    """Rows of all sessions of a home. `read_only` changes nothing, and works beside the owner."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._broken: DiskFailed | None = None
        self.kept_bytes: dict[str, int] = {}
        """What was written of each session's runs and is kept; what a commit that failed would have added stays in."""
        self._db = connection.open_read_only(path) if read_only else connection.open_writable(path)
        self._seen = None if read_only else self._watch()

    def _watch(self) -> Seen:
        try:
            with connection.failures_told(self._path):
                return Seen(self._path, self._db)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        if self._seen is not None:
            self._seen.close()
            self._seen = None
        self._db.close()

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[AnyWrite]) -> None:
        """All of them, durably, or none. ValueError: a record that is not legal here."""
        try:
            self.stage(writes)
        except ValueError:
            self.abandon()
            raise
        self.commit()

    @property
    def is_broken(self) -> bool:
        """A sync failed, and nothing is written any more."""
        return self._broken is not None

    def stage(self, writes: Sequence[AnyWrite]) -> None:
        """Into the next commit. A list that is refused (ValueError) leaves nothing behind, and what was staged before
        it stays so; any other failure takes all of it along."""
        if self._broken:
            raise self._broken
        try:
            with self._failures_told():
                if not self._db.in_transaction:
                    self._db.execute("begin immediate")
                self._apply_whole(writes)
        except ValueError:
            raise
        except BaseException:
            self.abandon()
            raise

    def commit(self) -> None:
        """All that is staged, durably, or none of it."""
        try:
            with self._failures_told():
                self._db.execute("commit")
                self._refuse_lost()
        except BaseException:
            self.abandon()
            raise

    def _refuse_lost(self) -> None:
        """A commit is durable only in the files that the next one to open the journal finds."""
        if self._seen is not None and (wrong := self._seen.confirm()):
            raise connection.JournalGone(
                f"{wrong}: {self._seen.rescue()}",
                hint="end this process and start it again: the start says whether anything is missing. Nothing more is "
                "acknowledged until then",
            )

    def abandon(self) -> None:
        """Nothing is staged any more."""
        if self._db.in_transaction:  # a full disk may have ended it already
            self._db.execute("rollback")

    def _apply_whole(self, writes: Sequence[AnyWrite]) -> None:
        self._db.execute("savepoint list")
        try:
            for run, several in groupby(writes, key=_run_of):
                if run is None:
                    for write in several:
                        self._apply(write)
                else:
                    self._append(run, [write for write in several if isinstance(write, Append)])
        except (ValueError, TypeError, OverflowError, sqlite3.IntegrityError) as error:
            # What cannot be encoded or stored is its writer's fault alone, as an illegal record is.
            self._db.execute("rollback to list")
            raise error if isinstance(error, ValueError) else ValueError(str(error)) from error
        finally:
            if self._db.in_transaction:
                self._db.execute("release list")

    def _apply(self, write: AnyWrite) -> None:
        if (apply := _APPLY.get(type(write))) is None:
            raise TypeError(f"{type(write).__name__} is no write")
        apply(self, write)

    def _count(self, session: str, *bodies: bytes) -> None:
        more = sum(map(len, bodies)) + _ROW_BYTES * len(bodies)
        self.kept_bytes[session] = self.kept_bytes.get(session, 0) + more

    def _append(self, run: str, writes: Sequence[Append]) -> None:
        """Records of one run that follow one another: its row is looked up and changed once."""
        key, owner, last = self._db.execute(queries.FIND_RUN, (run,)).fetchone() or (None, writes[0].session, None)
        for write in writes:
            tag = type(write.record).__name__
            if owner != write.session:
                raise ValueError(f"run {run} is of session {owner}, not of {write.session}")
            if not protocol.is_legal(_TYPES[last] if last else None, write.record):
                raise ValueError(f"run {run}: {tag} cannot follow {last or 'nothing'}")
            last = tag
        if key is None:
            key = self._db.execute(queries.OPEN_RUN, (run, owner, last)).lastrowid
        else:
            self._db.execute(queries.ADVANCE_RUN, (last, key))
        bodies = [_encode(write.record) for write in writes]
        self._db.executemany(queries.ADD_RECORD, [(key, body) for body in bodies])
        self._count(owner, *bodies)

    def _put_session(self, write: PutSession) -> None:
        self._db.execute(queries.PUT_SESSION, (write.session, _encode(write.row)))

    def _drop_session(self, write: DropSession) -> None:
        last = accidents.last_record(self._db)
        for query in queries.DROP_SESSION:
            self._db.execute(query, (write.session,))
        self._db.execute(queries.DROP_PLACEHOLDER)
        self._db.execute(queries.KEEP_PLACE, (last,))
        self.kept_bytes.pop(write.session, None)

    def _put_receipt(self, write: PutReceipt) -> None:
        row = write.row
        self._db.execute(queries.ADD_RECEIPT, (write.session, row.number, row.run, row.sha256, row.envelope))
        self._count(write.session, row.envelope)

    def _put_version(self, write: PutVersion) -> None:
        self._db.execute(queries.PUT_VERSION, (write.session, write.row.version, body := _encode(write.row)))
        self._count(write.session, body)

    def _put_files(self, write: PutFiles) -> None:
        self._db.executemany(queries.DROP_FILE, ((write.session, path) for path in write.gone))
        rows = ((write.session, file.path, file.sha256, file.bytes) for file in write.put)
        self._db.executemany(queries.PUT_FILE, rows)

    def _put_names(self, write: PutNames) -> None:
        self._db.executemany(queries.DROP_NAME, ((write.session, name) for name in write.gone))
        rows = ((write.session, name, _encode(row)) for name, row in write.put.items())
        self._db.executemany(queries.PUT_NAME, rows)

    def _put_key(self, write: PutKey) -> None:
        self._db.execute(queries.PUT_KEY, (write.session, write.row.key, body := _encode(write.row)))
        self._count(write.session, body)

    def _put_result(self, write: PutResult) -> None:
        self._db.execute(queries.PUT_RESULT, (write.run, write.session, write.body))
        self._count(write.session, write.body)

    def _drop_results(self, write: DropResults) -> None:
        for run in write.runs:
            for (size,) in self._db.execute(queries.RESULT_BYTES, (run, write.session)).fetchall():
                left = self.kept_bytes.get(write.session, 0) - size - _ROW_BYTES
                self.kept_bytes[write.session] = max(0, left)
        self._db.executemany(queries.DROP_RESULT, ((run, write.session) for run in write.runs))

    def _put_lost(self, write: PutLost) -> None:
        self._db.execute(queries.ADD_LOSS, (write.session, body := _encode(write.lost)))
        self._count(write.session, body)

    # -- reading ---------------------------------------------------------------------------------------------

    @contextmanager
    def view(self) -> Iterator[None]:
        """All reads within it see one state."""
        self._db.execute("begin")
        try:
            yield
        finally:
            self._db.execute("rollback")

    def sessions(self) -> list[SessionRow]:
        """In order of creation."""
        found = [self._decode(body, SessionRow, "a session") for (body,) in self._select(queries.SESSIONS)]
        return sorted(found, key=lambda row: (row.created_at, row.id))

    def session(self, session: str) -> SessionRow | None:
        return self._one(SessionRow, f"session {session}", queries.SESSION, session)

    def changed_at(self, row: SessionRow) -> float:
        """When its latest version was made, or else itself."""
        latest = self.versions(row.id, limit=1)
        return latest[0].at if latest else row.created_at

    def unsettled(self, session: str | None = None) -> list[tuple[str, str]]:
        """(session, run) of those that are not `Settled`, oldest first."""
        if session is None:
            return self._select(queries.UNSETTLED)
        return self._select(queries.UNSETTLED_OF_SESSION, session)

    def records(self, run: str) -> list[AnyRecord]:
        """In order; none: the run is unknown."""
        bodies = self._select(queries.RECORDS_OF_RUN, run)
        return [self._decode(body, AnyRecord, f"a record of run {run}") for (body,) in bodies]

    def runs(self, session: str, *, limit: int | None = None, newest_first: bool = False) -> list[str]:
        """In the order in which they were planned."""
        query = queries.RUNS_OF_SESSION_NEWEST_FIRST if newest_first else queries.RUNS_OF_SESSION
        return [run for (run,) in self._select(query, session, -1 if limit is None else limit)]

    def files(self, session: str) -> dict[str, FileEntry]:
        rows = self._select(queries.FILES, session)
        return {path: FileEntry(path=path, sha256=sha256, bytes=size) for path, sha256, size in rows}

    def names(self, session: str) -> dict[str, NameRow]:
        rows = self._select(queries.NAMES, session)
        return {name: self._decode(body, NameRow, f"name {name} of {session}") for name, body in rows}

    def losses(self, session: str) -> list[Lost]:
        """Oldest first."""
        bodies = self._select(queries.LOSSES, session)
        return [self._decode(body, Lost, f"a loss of {session}") for (body,) in bodies]

    def receipts(self, session: str) -> list[ReceiptRow]:
        """In order of their numbers."""
        return [_receipt(row) for row in self._select(queries.RECEIPTS_OF_SESSION, session)]

    def receipt(self, run: str) -> list[ReceiptRow]:
        """One, or two: that of the run's savepoints and its own."""
        return [_receipt(row) for row in self._select(queries.RECEIPTS_OF_RUN, run)]

    def versions(self, session: str, *, limit: int | None = None) -> list[VersionRow]:
        """Newest first."""
        bodies = self._select(queries.VERSIONS_NEWEST_FIRST, session, -1 if limit is None else limit)
        return [self._decode(body, VersionRow, f"a version of {session}") for (body,) in bodies]

    def version(self, session: str, version: int) -> VersionRow | None:
        return self._one(VersionRow, f"version {version} of {session}", queries.VERSION, session, version)

    def key(self, session: str, key: str) -> KeyRow | None:
        return self._one(KeyRow, f"key {key} of {session}", queries.KEY, session, key)

    def keys(self, session: str) -> dict[str, KeyRow]:
        rows = self._select(queries.KEYS, session)
        return {key: self._decode(body, KeyRow, f"key {key} of {session}") for key, body in rows}

    def result(self, run: str) -> bytes | None:
        rows = self._select(queries.RESULT, run)
        return rows[0][0] if rows else None

    def answered_calls(self, session: str) -> list[str]:
        """Runs under keys that clients made for one call each, and whose answers are kept; oldest first."""
        keys = self._select(queries.CALLS, session)
        runs = {self._decode(body, KeyRow, f"the key {key!r}").run for key, body in keys if api.is_call(key)}
        return [run for (run,) in self._select(queries.RESULTS_OF_SESSION, session) if run in runs]

    def _select(self, query: str, *values: str | int) -> list[Any]:
        with self._failures_told():
            return self._db.execute(query, values).fetchall()

    def _one(self, kind: type[T], what: str, query: str, *values: str | int) -> T | None:
        rows = self._select(query, *values)
        return self._decode(rows[0][0], kind, what) if rows else None

    def _decode(self, body: bytes, kind: Any, what: str) -> Any:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise connection.damaged(self._path, f"{what} cannot be read: {error}") from error

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            with connection.failures_told(self._path):
                yield
        except connection.SyncFailed as error:
            self._broken = error
            raise


_APPLY: dict[type, Callable[[Store, Any], None]] = {
    PutSession: Store._put_session,
    DropSession: Store._drop_session,
    PutReceipt: Store._put_receipt,
    PutVersion: Store._put_version,
    PutFiles: Store._put_files,
    PutNames: Store._put_names,
    PutKey: Store._put_key,
    PutResult: Store._put_result,
    DropResults: Store._drop_results,
    PutLost: Store._put_lost,
}


def _run_of(write: AnyWrite) -> str | None:
    return write.record.run if isinstance(write, Append) else None


def _receipt(row: tuple[str, int, str, str, bytes]) -> ReceiptRow:
    session, number, run, sha256, envelope = row
    return ReceiptRow(session=session, number=number, run=run, sha256=sha256, envelope=envelope)
