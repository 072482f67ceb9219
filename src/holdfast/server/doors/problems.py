"""Failures as RFC 9457 problems: `application/problem+json` with our `code` and `hint`.

1. Every `HoldfastError` has a status; the table below is the whole mapping.
2. Anything else is an incident: the client gets an id and nothing more, the log gets the id and the traceback.
3. Nothing of a request is repeated in a header of an answer.

`HANDLERS` are for a Starlette application, so that its routes need no `try`.
"""

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.api import PROBLEM
from holdfast.errors import DiskRefused, HoldfastError, RateLimited, StateMoved, Unauthorized, of_disk

STATUSES = {
    "invalid_setting": 422,
    "input_missing": 422,
    "bad_egress": 422,
    "egress_refused": 403,
    "home_busy": 503,
    "not_ours": 403,
    "sandbox_unavailable": 503,
    "environment_unusable": 503,
    "environment_build_failed": 503,
    "kernel_start_failed": 503,
    "keeper_lost": 503,
    "process_stuck": 503,
    "disk_limit": 507,
    "journal_limit": 507,
    "session_closed": 410,
    "session_unknown": 404,
    "session_halted": 423,
    "disk_failed": 507,
    "journal_lost": 503,
    "files_lost": 423,
    "keys_lost": 503,
    "disk_full": 507,
    "disk_read_only": 507,
    "internal": 500,
    "state_moved": 412,
    "key_reused": 422,
    "key_mismatch": 409,
    "rehearsal_unavailable": 409,
    "ckpt_unknown": 404,
    "file_unknown": 404,
    "verify_failed": 409,
    "protected_path": 403,
    "undeclared_write": 409,
    "patterns_too_costly": 422,
    "extra_missing": 501,
    "api_key_unknown": 404,
    "too_many_sessions": 429,
    "server_unreachable": 502,
    "run_unknown": 404,
    "run_abandoned": 409,
    "events_gone": 410,
    "server_stopping": 503,
    "refused": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "wrong_host": 421,
    "malformed": 400,
    "wrong_media_type": 415,
    "too_large": 413,
    "headers_too_large": 431,
    "rate_limited": 429,
    "slow_client": 408,
}
INCIDENT = "incident"
"""The code of a failure that is a mistake of ours; and where its id stands in `scope["state"]`."""

_log = logging.getLogger("holdfast.server")


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client is told of a failure."""

    type: str
    """`urn:holdfast:problem:` and the code."""
    title: str
    status: int
    detail: str
    code: str
    hint: str
    instance: str = ""
    """Of an incident: `urn:holdfast:incident:` and the id under which the log has it."""
    differs: Any = None
    """With `state_moved`: how the session differs from the state that the caller believes in."""


def problem(code: str, *, status: int, detail: str, hint: str, instance: str = "", differs: object = None) -> Problem:
    return Problem(
        type=f"urn:holdfast:problem:{code}", title=code.replace("_", " ").capitalize(), status=status, detail=detail,
        code=code, hint=hint, instance=instance, differs=differs,
    )  # fmt: skip


def problem_of(error: HoldfastError) -> Problem:
    differs = error.differs if isinstance(error, StateMoved) else None
    status = STATUSES.get(error.code, 500)
    return problem(error.code, status=status, detail=error.message, hint=error.hint, differs=differs)


def problem_response(error: HoldfastError) -> Response:
    """The whole answer for one of our own failures."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="holdfast"'
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return _response(problem_of(error), headers)


def incident_response(state: dict[str, Any]) -> Response:
    """Call it while an unexpected exception is handled: the log gets it under an id, the client gets the id."""
    incident = secrets.token_hex(8)
    _log.exception("incident %s", incident)
    state[INCIDENT] = incident
    told = problem(
        INCIDENT, status=500, detail=f"the server failed; its log says why under {incident}",
        hint="look at the server's log; the same request with the same Idempotency-Key may be sent again",
        instance=f"urn:holdfast:incident:{incident}",
    )  # fmt: skip
    return _response(told, {})


def _response(told: Problem, headers: Mapping[str, str]) -> Response:
    return Response(msgspec.json.encode(told), told.status, headers, PROBLEM)


# -- for a Starlette application -----------------------------------------------------------------------------------


async def _on_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, HoldfastError)
    return problem_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, no such method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    told = problem(
        phrase.lower().replace(" ", "_").replace("-", "_"), status=error.status_code,
        detail=error.detail or phrase, hint="GET /openapi.json lists what can be asked",
    )  # fmt: skip
    return _response(told, error.headers or {})


async def _on_os_error(request: Request, error: Exception) -> Response:
    """A file of the home that could not be read or written where no caller of it said what that means."""
    if (failure := of_disk(error)) is None:
        raise error
    trace = error if type(failure) is DiskRefused else None  # else the message says it all
    _log.warning("%s %s: %s", request.method, request.url.path, failure.message, exc_info=trace)
    return problem_response(failure)


async def _on_incident(request: Request, error: Exception) -> Response:
    return incident_response(request.scope.setdefault("state", {}))


Handler = Callable[[Request, Exception], Awaitable[Response]]
HANDLERS: dict[type[Exception], Handler] = {
    HoldfastError: _on_failure,
    HTTPException: _on_http_exception,
    OSError: _on_os_error,
    Exception: _on_incident,
}
