"""What an operation says of itself: its route and its place in the OpenAPI document come from this alone."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


class Parameter(msgspec.Struct, frozen=True):
    """Something beside the body."""

    name: str
    about: str
    place: str = "query"
    schema: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path."""

    method: str
    path: str
    handler: Handler
    gives: Any = None
    """The type of what is answered, as JSON or msgpack; None: `media` says what it is."""
    takes: Any = None
    media: tuple[str, ...] = ()
    """Of an answer that is no struct."""
    sends: str = ""
    """Of a body that is no struct."""
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    needs_token: bool = True

    @property
    def about(self) -> str:
        """Its handler's docstring."""
        return " ".join((self.handler.__doc__ or "").split())

    @property
    def name(self) -> str:
        module = self.handler.__module__.rpartition(".")[2]
        return f"{module}_{self.handler.__name__}"


KEY = Parameter("Idempotency-Key", "At most one run with it commits; asked again, the recorded answer.", "header")
IF_MATCH = Parameter("If-Match", "The CKPT that you believe in; nothing runs on another.", "header")
FROM = Parameter("from", "The number of the first event.", schema={"type": "integer", "minimum": 0})
LIMIT = Parameter("limit", "At most so many, the latest.", schema={"type": "integer", "minimum": 1, "maximum": 10_000})
KEEP = Parameter("keep", "Leave its files and books, for `resume`.", schema={"type": "boolean"})
STREAM = Parameter("stream", "Which of the two.", schema={"type": "string", "enum": ["stdout", "stderr"]})
RANGE = Parameter("Range", "bytes=FIRST-LAST", "header")
IF_NONE_MATCH = Parameter("If-None-Match", "An ETag that you have: 304 if it is still right.", "header")
IF_MATCH_FILE = Parameter("If-Match", "The ETag that the file must have.", "header")
