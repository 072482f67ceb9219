"""What is written to the store, row by row. A list of these is one transaction."""

import msgspec

from holdfast.records import AnyRecord, FileEntry, Lost, Noun


class SessionRow(Noun, frozen=True, kw_only=True):
    """A session, as it must be known to come back after the host is gone."""

    id: str
    created_at: float
    generation: int
    version: int
    settings: dict[str, bool | int | float | str | None]
    """Limits, mode, environment: what `Session(...)` was asked for."""
    ckpt: str = ""
    halted: str = ""
    """Why nothing runs in it any more; empty: all is well."""
    head: str = ""
    """Digest of the last receipt; the next one names it."""
    receipts: int = 0
    """How many there are."""
    journal_bytes: int = 0
    """What the store holds of its runs, as of the write before this one."""


class VersionRow(Noun, frozen=True, kw_only=True):
    """A version that a run made."""

    session: str
    version: int
    generation: int
    ckpt: str
    run: str
    at: float
    manifest_sha256: str
    files_version: int | None = None
    """The version that changed files last: this one, or one before it; 0: none has. None: an earlier build wrote it."""


class NameRow(Noun, frozen=True, kw_only=True):
    """A name that the session's memory holds, or held before it was lost."""

    type: str
    run: str
    """That bound it last."""
    generation: int


class KeyRow(Noun, frozen=True, kw_only=True):
    """The latest run that an idempotency key stands for."""

    session: str
    key: str
    run: str
    request_sha256: str
    attempt: int
    may_have_happened: tuple[str, ...] = ()
    """Requests that attempts before it sent."""
    claim: bytes = b""
    """Of a key that stands for a run which had another key, or none (`jobs`): the row, signed (`receipts.seal`)."""


class ReceiptRow(Noun, frozen=True, kw_only=True):
    session: str
    number: int
    """From 1, without a gap."""
    run: str
    sha256: str
    """Of the envelope."""
    envelope: bytes


# -- writes ------------------------------------------------------------------------------------------------------


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the writes."""

    session: str


class Append(Write, frozen=True, kw_only=True):
    """A journal record. `Planned` opens the run, `Settled` closes it; an illegal order is refused."""

    record: AnyRecord


class PutSession(Write, frozen=True, kw_only=True):
    row: SessionRow


class DropSession(Write, frozen=True, kw_only=True):
    """All that is known of a session."""


class PutReceipt(Write, frozen=True, kw_only=True):
    row: ReceiptRow


class PutVersion(Write, frozen=True, kw_only=True):
    row: VersionRow


class PutFiles(Write, frozen=True, kw_only=True):
    """Changes of the files of the current version."""

    put: list[FileEntry] = []
    gone: list[str] = []


class PutNames(Write, frozen=True, kw_only=True):
    put: dict[str, NameRow] = {}
    gone: list[str] = []


class PutKey(Write, frozen=True, kw_only=True):
    row: KeyRow


class PutResult(Write, frozen=True, kw_only=True):
    """What a run with a key answered, for whoever asks again."""

    run: str
    body: bytes


class DropResults(Write, frozen=True, kw_only=True):
    """Answers that nobody can ask for again."""

    runs: list[str]


class PutLost(Write, frozen=True, kw_only=True):
    lost: Lost


AnyWrite = (
    Append
    | PutSession
    | DropSession
    | PutReceipt
    | PutVersion
    | PutFiles
    | PutNames
    | PutKey
    | PutResult
    | DropResults
    | PutLost
)
