"""What is written down about a run: the journal's records, and the nouns they are made of.

These are a format. They are stored for years and read by later versions of this program: a field may be added with a
default, and none may ever change its meaning.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

Area = Literal["data", "tmp", "home"]
"""Which subtree of a session's disk: /mnt/data, /tmp or $HOME. Only the first is in manifests and receipts."""
Kind = Literal["file", "directory", "symlink", "fifo", "socket"]
Status = Literal["committed", "rolled_back", "kept", "rehearsed"]
Stage = Literal["planned", "executed", "verified", "committed", "kept", "rolled_back", "rehearsed"]


class Noun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Root of the nouns below."""


class FileEntry(Noun, frozen=True, kw_only=True):
    """A regular file of a version."""

    path: str
    """Relative to /mnt/data, as `paths.to_text` writes it."""
    sha256: str
    bytes: int


class Change(Noun, frozen=True, kw_only=True):
    """What a run did to one path. Nothing is said of what it left as it was."""

    path: str
    """Relative to the area, as `paths.to_text` writes it; parents come before what is in them."""
    action: Literal["added", "changed", "removed"]
    area: Area = "data"
    kind: Kind = "file"
    sha256: str = ""
    """Of a file in `data`."""
    bytes: int = 0
    mode: int = 0
    target: str = ""
    """Where a symlink points to."""
    before: str = ""
    """SHA-256 of the file that was there."""
    before_bytes: int = 0
    before_mode: int | None = None
    """Of the file or directory that was there; None: nobody wrote it down."""
    before_kind: Kind | None = None
    """What was there, if it was no file."""
    before_target: str = ""
    """Where the symlink pointed to that was there."""


class SavedFile(FileEntry, frozen=True, kw_only=True):
    """A file as a run saved it on its way, and what is committed in its place: as in `Change`."""

    mode: int | None = None
    before_mode: int | None = None
    before_kind: Kind | None = None
    before_target: str = ""
    way: list[Change] = []
    """What else makes way for it: links and pipes in whose place directories are made, and what is no regular file in a
    directory that it replaces."""


class Check(Noun, frozen=True, kw_only=True):
    """One thing that was verified before the point of no return."""

    name: str
    ok: bool
    detail: str = ""


class Input(Noun, frozen=True, kw_only=True):
    """A file that a run read or is expected to read."""

    path: str
    sha256: str = ""
    """Empty: it does not exist yet."""
    bytes: int = 0


class Flow(Noun, frozen=True, kw_only=True):
    """Which inputs feed an output, as far as the code shows."""

    output: str
    inputs: list[str]


class Finding(Noun, frozen=True, kw_only=True):
    """What preflight noticed."""

    code: str
    message: str
    line: int | None = None
    hint: str = ""
    names: list[str] = []


class RunCard(Noun, frozen=True, kw_only=True):
    """The plan of a run."""

    run: str
    session: str
    goal: str
    """In a few words: what the caller called it, or the first line of the code."""
    code_sha256: str
    base: str
    """The CKPT that it was planned against."""
    stage: Stage = "planned"
    """What the run has passed; the last is how it ended."""
    key: str | None = None
    attempt: int = 1
    inputs: list[Input] = []
    outputs: list[str] = []
    """Declared: they must exist afterwards."""
    forecast_inputs: list[Input] = []
    forecast_outputs: list[str] = []
    """What the code shows it will write; a pattern where only a part of the path is known."""
    flows: list[Flow] = []
    findings: list[Finding] = []
    limits: dict[str, int | float] = {}
    environment: str = ""
    """Fingerprint of the guests' Python environment."""
    arguments: list[str] = []
    """Of a script: what its `sys.argv` holds behind its name."""
    undeclared: str = ""
    """In a directory of the user's, where outputs are declared: what becomes of writes that none covers."""
    executable: list[str] = []
    """In a directory of the user's: files and patterns that may be executable."""


# -- the journal's records, in the order of a run (`protocol.NEXT`) ----------------------------------------------


class Record(Noun, frozen=True, kw_only=True, tag=True):
    """Root of the records; the tag is the class name."""

    run: str
    at: float
    """Seconds since 1970."""


class Planned(Record, frozen=True, kw_only=True):
    card: RunCard
    code: str
    kind: Literal["cell", "command", "write", "restore", "outside"] = "cell"
    request_sha256: str = ""
    """Digest of all that makes two requests with one key the same: code, inputs, outputs."""


class Saved(Record, frozen=True, kw_only=True):
    """Files that a running cell has finished and wants kept whatever becomes of it; their bytes are in `blobs`."""

    files: list[SavedFile]
    step: str = ""


class Sent(Record, frozen=True, kw_only=True):
    """A request that is about to leave through the session's egress: nobody can take it back."""

    request: str
    """In a line: `GET http://host/path`, `CONNECT host:443`."""


class Executed(Record, frozen=True, kw_only=True):
    """The code has ended, in whatever way."""

    error_code: str | None
    error_message: str = ""
    duration_s: float
    exit_code: int | None = None
    peak_memory_bytes: int | None = None
    strays: list[str] = []
    kernel_replaced: str = ""
    """How and when the kernel before ended, if this run had another in its place: `model.Run`."""


class Verified(Record, frozen=True, kw_only=True):
    """The point of no return: all that is needed to publish, again if need be, and to seal the same receipt."""

    status: Literal["committed", "kept"]
    version: int
    stage: str
    """Directory of the staged files, by its name."""
    changes: list[Change]
    names: dict[str, tuple[str, str]]
    """Live names that the run changed: name -> (type, run); a type of "" is a name that is gone."""
    receipt: bytes
    """The statement, as canonical JSON: what is signed."""


class Settled(Record, frozen=True, kw_only=True):
    """Nothing is left to do."""

    status: Status
    version: int
    """Of the session after the run."""
    ckpt: str
    reason: str = ""
    """Why it was rolled back."""
    by: Literal["", "user", "system"] = ""
    """Who is to blame for a rollback: the user's own code, or what came from outside of it (a crash, a full disk, an
    interrupt, a caller who left, a name that memory lacked, so that it was not started)."""
    receipt_sha256: str = ""


class Unsent(Record, frozen=True, kw_only=True):
    """A `Sent` that did not leave after all: no connection came up. Where a crash takes this along, it may have."""

    request: str


AnyRecord = Planned | Saved | Sent | Unsent | Executed | Verified | Settled


def requests_sent(records: Iterable[AnyRecord]) -> list[str]:
    """What left through the session's egress, or was just about to."""
    found: list[str] = []
    for record in records:
        if isinstance(record, Sent):
            found.append(record.request)
        elif isinstance(record, Unsent) and record.request in found:
            found.reverse()
            found.remove(record.request)  # the latest
            found.reverse()
    return found


# -- what happens to a session beside runs -----------------------------------------------------------------------


class Lost(Noun, frozen=True, kw_only=True):
    """Memory was lost: the generation rose."""

    at: float
    generation: int
    """The new one."""
    cause: str
    """In words: out of memory, reset by the caller, the host was restarted…"""
    run: str | None = None
    names: list[str] = []
