"""The application: every operation in one table."""

from typing import Any, Literal

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from holdfast import __version__, api
from holdfast.errors import Forbidden
from holdfast.model import Completions, HistoryEntry, Name, Recovery, Run
from holdfast.records import FileEntry, RunCard
from holdfast.server.doors import problems
from holdfast.server.doors.metrics import CONTENT_TYPE
from holdfast.server.http import files, openapi, page, runs, sessions
from holdfast.server.http.bodies import given
from holdfast.server.http.hub import Hub, hub_of, principal_of
from holdfast.server.http.operations import (
    FROM,
    IF_MATCH,
    IF_MATCH_FILE,
    IF_NONE_MATCH,
    KEEP,
    KEY,
    LIMIT,
    RANGE,
    STREAM,
    Operation,
)
from holdfast.workfiles import Written


class _AnyPath(PathConvertor):
    """A file's name may hold a newline, which Starlette's own takes for the end."""

    regex = r"[\s\S]+"


register_url_convertor("anypath", _AnyPath())


async def health(request: Request) -> Response:
    """Whether the server is there, and can run code, for whoever asks."""
    hub = hub_of(request)
    alive: Literal["ok", "keeper_lost"] = "ok" if hub.service.node.has_keeper else "keeper_lost"
    told = api.Health(status="stopping" if hub.stopping.is_set() else alive, version=__version__)
    return given(request, told, status=200 if told.status == "ok" else 503)


async def metrics(request: Request) -> Response:
    """What the server counts, in Prometheus' text format. For its owner."""
    if not principal_of(request).owner:  # the door says so too, of the path alone
        raise Forbidden("this is for the server's owner", hint="send the server's own token")
    return Response(hub_of(request).metrics.text(), media_type=CONTENT_TYPE)


async def describe(request: Request) -> Response:
    """This document."""
    return Response(request.app.state.openapi, media_type=api.JSON)


async def docs(request: Request) -> Response:
    """The same for people."""
    return HTMLResponse(request.app.state.page, headers={"content-security-policy": page.POLICY})


def _on(path: str, method: str, handler: Any, **more: Any) -> Operation:
    return Operation(method=method, path=f"/v1/sessions{path}", handler=handler, **more)


OPERATIONS = (
    _on("", "POST", sessions.create, takes=api.CreateSession, gives=api.SessionInfo, status=201),
    _on("", "GET", sessions.list_all, gives=list[api.SessionInfo]),
    _on("/{id}", "GET", sessions.show, gives=api.SessionInfo),
    _on("/{id}", "DELETE", sessions.end, gives=dict[str, Any], parameters=(KEEP,)),
    _on("/{id}/hold", "GET", sessions.hold, media=("text/plain",)),
    _on("/{id}/events", "GET", sessions.events, gives=api.SessionEvent, media=(api.SSE,)),
    _on("/{id}/plans", "POST", runs.plan, takes=api.AskedRun, gives=RunCard, parameters=(KEY, IF_MATCH)),
    _on("/{id}/runs", "POST", runs.start, takes=api.AskedRun, gives=Run, media=api.EVENTS, parameters=(KEY, IF_MATCH)),
    _on("/{id}/runs", "GET", runs.list_all, gives=list[HistoryEntry], parameters=(LIMIT,)),
    _on("/{id}/runs/{run}", "GET", runs.show, gives=api.RunRecord),
    _on("/{id}/runs/{run}/card", "GET", runs.card, gives=RunCard),
    _on("/{id}/runs/{run}/code", "GET", runs.code, media=("text/plain",)),
    _on("/{id}/runs/{run}/receipt", "GET", runs.receipt, media=(api.DSSE,)),
    _on("/{id}/runs/{run}/output", "GET", runs.output, media=(api.BYTES,), parameters=(STREAM,)),
    _on("/{id}/runs/{run}/events", "GET", runs.events, gives=api.RunEvent, media=api.EVENTS, parameters=(FROM,)),
    _on("/{id}/runs/{run}/input", "POST", runs.answer, takes=api.Answer, gives=dict[str, Any]),
    _on("/{id}/runs/{run}/interrupt", "POST", runs.interrupt, gives=api.Interrupted),
    _on("/{id}/reset", "POST", sessions.reset, gives=api.SessionInfo),
    _on("/{id}/interrupt", "POST", sessions.interrupt, gives=api.Interrupted),
    _on("/{id}/recover", "POST", sessions.recover, gives=Recovery),
    _on("/{id}/restore", "POST", files.restore, takes=api.Restore, gives=Written),
    _on("/{id}/complete", "POST", sessions.complete, takes=api.AtCursor, gives=Completions),
    _on("/{id}/inspect", "POST", sessions.inspect, takes=api.AtCursor, gives=dict[str, Any]),
    _on("/{id}/files", "GET", files.list_all, gives=list[FileEntry]),
    _on("/{id}/files/{path}", "GET", files.read, media=(api.BYTES,), parameters=(RANGE, IF_NONE_MATCH)),
    _on("/{id}/files/{path}", "PUT", files.write, sends=api.BYTES, gives=Written, parameters=(IF_MATCH_FILE,)),
    _on("/{id}/files/{path}", "DELETE", files.remove, gives=Written, parameters=(IF_MATCH_FILE,)),
    _on("/{id}/names", "GET", sessions.names, gives=dict[str, Name]),
    _on("/{id}/history", "GET", runs.list_all, gives=list[HistoryEntry], parameters=(LIMIT,)),
    _on("/{id}/manifest", "GET", sessions.show_manifest, media=("text/plain",)),
    Operation(method="GET", path="/v1/health", handler=health, gives=api.Health, needs_token=False),
    Operation(method="GET", path="/metrics", handler=metrics, media=("text/plain",)),
    Operation(method="GET", path="/openapi.json", handler=describe, gives=dict[str, Any]),
    Operation(method="GET", path="/docs", handler=docs, media=("text/html",)),
)


def application(hub: Hub, *, mcp: ASGIApp | None = None) -> Starlette:
    """Behind no door yet: see `doors.guarded`. `mcp` is that face of the same service, at /mcp."""
    routes = [
        Route(one.path.replace("{path}", "{path:anypath}"), one.handler, methods=[one.method], name=one.name)
        for one in OPERATIONS
    ]
    if mcp is not None:
        routes.append(Route("/mcp", mcp))
    app = Starlette(routes=routes, exception_handlers=problems.HANDLERS)
    app.router.redirect_slashes = False
    app.state.hub = hub
    app.state.openapi = openapi.document(OPERATIONS)
    app.state.page = page.page(OPERATIONS)
    return app
