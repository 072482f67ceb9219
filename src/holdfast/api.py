"""What goes over HTTP, both ways: the server and our own client speak these structs, and OpenAPI is made of them.

    POST   /v1/sessions                        CreateSession -> SessionInfo
    GET    /v1/sessions                        -> list[SessionInfo], the kept ones too
    GET    /v1/sessions/{id}                   -> SessionInfo
    DELETE /v1/sessions/{id}?keep=false
    GET    /v1/sessions/{id}/hold              an attached session lives while one of these is open
    POST   /v1/sessions/{id}/plans             AskedRun -> RunCard
    POST   /v1/sessions/{id}/runs              AskedRun -> events, or one Run (Accept)
    GET    /v1/sessions/{id}/runs              -> list[HistoryEntry]
    GET    /v1/sessions/{id}/runs/{run}        -> RunRecord; /card -> RunCard; /code -> text
    GET    /v1/sessions/{id}/runs/{run}/receipt    -> the DSSE envelope
    GET    /v1/sessions/{id}/runs/{run}/output?stream=stdout   -> bytes
    GET    /v1/sessions/{id}/runs/{run}/events?from=N          -> events, replayed from a number, then live
    POST   /v1/sessions/{id}/runs/{run}/input  Answer, to an `Asked` event
    POST   /v1/sessions/{id}/runs/{run}/interrupt   -> Interrupted: that run and no other, also while it waits its turn
    POST   /v1/sessions/{id}/reset|interrupt|recover|restore(Restore)|complete(AtCursor)|inspect(AtCursor)
    GET    /v1/sessions/{id}/files             -> list[FileEntry]
    GET|PUT|DELETE /v1/sessions/{id}/files/{path}              PUT, DELETE -> Written
    GET    /v1/sessions/{id}/names|history|manifest|events     events: SSE, SessionEvent
    GET    /v1/health                          -> Health; the only one that needs no token

Bodies are JSON, where bytes are base64; `Accept: application/msgpack` (and the same as Content-Type) has them as they
are. Events are one JSON object a line (application/x-ndjson), Server-Sent Events (text/event-stream), or msgpack
objects, each after its length in four bytes, big-endian (application/vnd.holdfast.msgpack-seq). What has nothing to
tell is answered by an empty object. A refusal is application/problem+json with `code` and `hint`; once events are under
way, it is a `Refused` event. A client that is cut off comes back to its run by `…/events?from=N`, or with the same key;
numbers that are missing in between were not kept (`events_gone` if all that was asked for is). If nobody comes back in
time, the run is interrupted and settled, as its mode has it (`run_abandoned`). In an address a file is its path, by its
bytes, percent-encoded.
"""

import re
import secrets
from typing import Any, Literal

import msgspec

from holdfast.model import Display, HistoryEntry, Mode, Preflight, Run, StreamName
from holdfast.receipts import Receipt
from holdfast.records import RunCard, Status

JSON = "application/json"
MSGPACK = "application/msgpack"
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
MSGPACK_SEQ = "application/vnd.holdfast.msgpack-seq"
PROBLEM = "application/problem+json"
BYTES = "application/octet-stream"
DSSE = "application/vnd.dsse.envelope+json"
EVENTS = (NDJSON, SSE, MSGPACK_SEQ)
"""What events may come as; the first if a client does not say."""

_CALL = re.compile("call-[0-9a-f]{32}")


def new_call() -> str:
    """The key of a run whose caller gave it none, so that it can be sent again (`transports.following`)."""
    return f"call-{secrets.token_hex(16)}"


def is_call(key: str | None) -> bool:
    """Whether it is one of those. Nobody knows it but the client that made it, and that only while it calls."""
    return key is not None and _CALL.fullmatch(key) is not None


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of what clients send: an unknown field is refused, for it may be a mistyped promise."""


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Root of what servers answer: clients pass over a field that they do not know."""


# -- sessions ------------------------------------------------------------------------------------------------------


class CreateSession(Body, frozen=True):
    memory: int | str = "1G"
    timeout: float | str | None = None
    cpus: float = 2.0
    processes: int = 256
    disk: int | str = "10G"
    undo: int = 0
    """Earlier versions whose memory is kept asleep, so that `restore` brings it back with the files."""
    versions: int = 20
    """Latest versions that changed files and that `restore` can go back over."""
    env: str | None = None
    """A path on the server: only its owner may choose one."""
    mode: Mode = "strict"
    preflight: Preflight = "warn"
    resume: str | None = None
    """The id of a kept session: it comes back with its files and its limits."""
    egress: list[str] = []
    """Hosts that its code may reach by HTTP and HTTPS: `api.example.com`, `*.example.org`, `10.1.2.3:8080`. A resumed
    session may reach what is listed now, and nothing else."""
    keep: bool = False
    """Whatever ends it (its client is gone, the server stops) leaves its files and books, for `resume`."""
    attached: bool = False
    """It ends shortly after the last `hold` on it is gone."""


class SessionInfo(Told, frozen=True):
    id: str
    state: Literal["ready", "running", "kept", "halted"]
    """`kept`: it has files and books, and no kernel."""
    version: int
    generation: int
    ckpt: str
    mode: Mode
    created_at: float
    changed_at: float
    limits: dict[str, int | float | str | None]
    owner: str = ""
    """The API key's id; empty for whoever owns the server."""
    memory_bytes: int | None = None
    """In use now."""
    running: str | None = None
    """The run that is under way."""
    egress: list[str] = []
    """Hosts that its code may reach now."""


# -- runs ----------------------------------------------------------------------------------------------------------


class AskedRun(Body, frozen=True):
    """A cell, a command, or a plan that was made before; the rest as `holdfast.verbs.RunOptions` has it."""

    code: str | msgspec.UnsetType = msgspec.UNSET
    """Empty code is a run; without any, and without `plan`, there is none."""
    plan: str | None = None
    """The id of a Run Card: exactly that is run, and nothing else may be asked for."""
    kind: Literal["cell", "command"] = "cell"
    timeout: float | str | None = None
    mode: Mode | None = None
    goal: str = ""
    inputs: list[str] = []
    outputs: list[str] | dict[str, Any] = []
    asserts: list[str] = []
    key: str | None = None
    """Or the header `Idempotency-Key`."""
    retry: bool = False
    expect: str | None = None
    """Or the header `If-Match`."""
    rehearse: bool = False
    preflight: Preflight | None = None
    silent: bool = False
    stdin: bool = False
    """The client answers `Asked` events; without it `input()` fails."""


class RunRecord(Told, frozen=True):
    """A settled run, as the journal has it; or one that is under way."""

    entry: HistoryEntry | None
    """None while it is under way."""
    card: RunCard
    code: str
    receipt: Receipt | None = None
    waiting: bool = False
    """It has not had its turn yet: of its card there is only what was asked for."""


class Answer(Body, frozen=True):
    text: str
    number: int
    """Of the `Asked` event that it answers."""


class Restore(Body, frozen=True):
    ckpt: str


class AtCursor(Body, frozen=True):
    code: str
    cursor: int | None = None
    detail: int = 0


class Health(Told, frozen=True):
    status: Literal["ok", "stopping", "keeper_lost"]
    """`keeper_lost`: no session has a kernel, and none can get one, until another keeper is up. All but `ok` come with
    HTTP status 503."""
    version: str


class Interrupted(Told, frozen=True):
    interrupted: bool
    """False if nothing ran."""


# -- events of a run: numbered from 0, the last one is Settled or Refused ------------------------------------------


class Numbered(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    number: int


class Began(Numbered, frozen=True, tag="began"):
    """Always number 0: what to ask for after the connection was lost."""

    run: str
    session: str


class Printed(Numbered, frozen=True, tag="output"):
    stream: StreamName
    text: str


class Shown(Numbered, frozen=True, tag="displayed"):
    display: Display
    update: bool = False
    result: bool = False
    """The value of the last expression."""


class Cleared(Numbered, frozen=True, tag="displays_cleared"):
    wait: bool


class Asked(Numbered, frozen=True, tag="asked"):
    prompt: str
    password: bool


class Settled(Numbered, frozen=True, tag="settled"):
    """The last one. Code that failed is a result like any other."""

    run: Run


class Refused(Numbered, frozen=True, tag="refused"):
    """The last one: it did not run, or we failed."""

    problem: dict[str, Any]


# -- events of a session's life, over SSE alone ----------------------------------------------------------------------


class Happened(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    at: float


class RunBegan(Happened, frozen=True, tag="run_began"):
    """A cell, a command, or a change of files from outside."""

    run: str
    kind: str
    goal: str


class RunSettled(Happened, frozen=True, tag="run_settled"):
    run: str
    status: Status
    version: int
    ckpt: str
    reason: str = ""


class MemoryLost(Happened, frozen=True, tag="memory_lost"):
    """Also by a reset: the generation rose."""

    generation: int
    cause: str
    run: str | None = None


class SessionEnded(Happened, frozen=True, tag="session_ended"):
    """The last one."""


SessionEvent = RunBegan | RunSettled | MemoryLost | SessionEnded
RunEvent = Began | Printed | Shown | Cleared | Asked | Settled | Refused
