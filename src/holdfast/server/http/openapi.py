"""The OpenAPI 3.1 document, made of the table of operations and the structs that they take and give."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast import __version__, api
from holdfast.api import JSON, MSGPACK, PROBLEM
from holdfast.server.doors.problems import Problem
from holdfast.server.http.operations import Operation, Parameter

_REFERENCE = "#/components/schemas/{name}"
_PATHS = {
    "id": Parameter("id", "A session.", "path"),
    "run": Parameter("run", "A run of it.", "path"),
    "path": Parameter("path", "A path below /mnt/data, its bytes percent-encoded; slashes may stand.", "path"),
}
_ABOUT = """Every run is a transaction: memory and files commit together with a receipt, or roll back together.
A failure is `application/problem+json` with `code` and `hint`. Bodies may be msgpack as well."""


def document(operations: Sequence[Operation]) -> bytes:
    kinds = [kind for one in operations for kind in (one.takes, one.gives) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, api.RunEvent, Problem], ref_template=_REFERENCE)
    by_kind = {repr(kind): schema for kind, schema in zip([*kinds, api.RunEvent, Problem], schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, by_kind)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Holdfast", "version": __version__, "description": _ABOUT},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"token": []}],
        }
    )


def _operation(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": _unique(one),
        "summary": one.about,
        "parameters": [_parameter(each) for each in (*_in_path(one), *one.parameters)],
        "responses": {
            str(one.status): {"description": one.about, "content": _answer(one, schemas)},
            **_other_successes(one),
            "default": {"description": "A refusal.", "content": {PROBLEM: {"schema": schemas[repr(Problem)]}}},
        },
    }
    if one.takes is not None:
        schema = {"schema": schemas[repr(one.takes)]}
        told["requestBody"] = {"content": {JSON: schema}, "required": _is_needed(one)}
    if one.sends:
        told["requestBody"] = {"content": {one.sends: {"schema": {"type": "string", "format": "binary"}}}}
    if not one.needs_token:
        told["security"] = []
    return told


def _unique(one: Operation) -> str:
    return f"{one.name}_history" if one.path.endswith("/history") else one.name


def _is_needed(one: Operation) -> bool:
    """Whether there are fields that cannot be left out."""
    return any(field.required for field in msgspec.structs.fields(one.takes))


def _answer(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        media: {"schema": {"type": "object" if media.endswith("+json") else "string"}} for media in one.media
    }
    if one.gives is not None and not (one.media and one.method == "GET"):
        told[JSON] = told[MSGPACK] = {"schema": schemas[repr(one.gives)]}
    return told


def _other_successes(one: Operation) -> dict[str, Any]:
    if "Range" in {each.name for each in one.parameters}:
        told = {"206": "The range.", "304": "You have it.", "416": "The file has no such range."}
        return {status: {"description": about} for status, about in told.items()}
    if one.status == 201:
        return {"200": {"description": "It was there already.", "content": {}}}
    if one.path == "/v1/health":
        return {"503": {"description": "It is stopping."}}
    return {}


def _in_path(one: Operation) -> list[Parameter]:
    return [_PATHS[name] for name in re.findall(r"{(\w+)}", one.path)]


def _parameter(each: Parameter) -> dict[str, Any]:
    told: dict[str, Any] = {"name": each.name, "in": each.place, "description": each.about, "schema": each.schema}
    return {**told, "required": True} if each.place == "path" else told
