"""The door of the HTTP server: everything that a request passes before, and an answer after, the application.

`guarded(app, settings)` is what a server mounts, over TCP and over its Unix socket alike; `Door._pass` is the order.
Behind it `scope["state"]["principal"]` says who asks, and every failure is a problem+json. The door's other half is
`connections.uvicorn_options`: slow headers and slow readers are nothing that an application ever sees.
"""

import re
import time

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.access import Access, Principal
from holdfast.errors import HoldfastError, Malformed
from holdfast.server.doors import auth, hosts, limits, problems
from holdfast.server.doors.connections import peer_uid_of
from holdfast.server.doors.exchange import Exchange
from holdfast.server.doors.hosts import Hosts
from holdfast.server.doors.limits import Framing, Limits, Rate, UnderWay
from holdfast.server.doors.metrics import Metrics

__all__ = ["Door", "DoorSettings", "Hosts", "Limits", "Metrics", "Principal", "guarded"]

_FILE = re.compile(r"/v1/sessions/([^/]+)/files/(?=.)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class DoorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a door needs to know."""

    access: Access
    """The server's token and the API keys."""
    hosts: Hosts = Hosts()
    """Its names, and the pages that may use it."""
    limits: Limits = Limits()
    """How much may be asked for."""
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    """Where requests are counted."""


def guarded(app: ASGIApp, settings: DoorSettings) -> "Door":
    """The application behind a door."""
    return Door(app, settings)


class Door:
    """An ASGI application that lets some requests through to another."""

    def __init__(self, app: ASGIApp, settings: DoorSettings) -> None:
        self._app = app
        self._access = settings.access
        self._hosts = hosts.checked(settings.hosts)
        self._limits = settings.limits
        self._metrics = settings.metrics
        self._requests = Rate(per_s=self._limits.requests_per_s, at_once=self._limits.requests_at_once)
        self._failures = Rate(per_s=self._limits.failures_per_s, at_once=self._limits.failures_at_once)
        self._under_way = UnderWay(most=self._limits.requests_under_way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # nothing here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The request is let through or refused; either way it is answered once, and counted."""
        began = time.monotonic()
        exchange = Exchange(scope, receive, send, limits=self._limits)
        try:
            await self._pass(scope, exchange)
        except HoldfastError as error:
            await exchange.answer(problems.problem_response(error))
        except ClientDisconnect:
            pass
        except Exception:  # the edge of the process: a mistake of ours must not end the server, nor be shown
            await self._report(scope, exchange)
        finally:
            self._count(scope, exchange, time.monotonic() - began)

    async def _pass(self, scope: Scope, exchange: Exchange) -> None:
        exchange.headers = hosts.SECURITY_HEADERS
        token = auth.take_token(scope)
        limits.refuse_large_headers(scope, self._limits)
        framing = limits.framing_of(scope)
        _refuse_control_characters(scope)
        local = peer_uid_of(scope) is not None
        hosts.refuse_foreign(scope, self._hosts, local=local)
        exchange.headers = hosts.answer_headers(scope, self._hosts)
        if leave := hosts.preflight(scope, self._hosts):
            return await exchange.answer(leave)
        principal = await auth.identify(scope, self._access, self._failures, token=token)
        if principal.owner:  # the machine is his
            return await self._let_through(scope, exchange, framing, principal)
        caller = principal.id or auth.address_of(scope)
        self._requests.spend(caller)
        with self._under_way.counted(caller):
            await self._let_through(scope, exchange, framing, principal)

    async def _let_through(self, scope: Scope, exchange: Exchange, framing: Framing, principal: Principal) -> None:
        exchange.limit_bytes = self._body_limit(scope)
        limits.refuse_large_body(framing, exchange.limit_bytes)
        if framing.has_body and not _is_upload(scope):
            hosts.refuse_forms(scope)
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, exchange.receive, exchange.send)
        if exchange.refusal is not None:
            raise exchange.refusal

    def _body_limit(self, scope: Scope) -> int:
        upload = _is_upload(scope)
        return self._limits.upload_bytes(upload[1]) if upload else self._limits.json_bytes

    async def _report(self, scope: Scope, exchange: Exchange) -> None:
        state = scope.setdefault("state", {})
        if problems.INCIDENT not in state or not exchange.complete:  # else Starlette told it, and raised it again
            await exchange.answer(problems.incident_response(state))

    def _count(self, scope: Scope, exchange: Exchange, seconds: float) -> None:
        self._metrics.request_ended(
            route=getattr(scope.get("route"), "path", None), method=scope["method"], status=exchange.status,
            seconds=seconds, bytes_in=exchange.bytes_in, bytes_out=exchange.bytes_out,
        )  # fmt: skip


def _is_upload(scope: Scope) -> re.Match[str] | None:
    return _FILE.match(scope["path"]) if scope["method"] == "PUT" else None


def _refuse_control_characters(scope: Scope) -> None:
    """Routers read them in more than one way (Starlette's takes a newline for the end). A file's name may have them."""
    path = scope["path"]
    file = _FILE.match(path)
    if _CONTROL.search(path, 0, file.end() if file else len(path)):
        raise Malformed("the address has a control character", hint="only a file's name may have one")
