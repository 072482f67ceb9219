"""/docs: the operations for people, as one page without a script and without anything from elsewhere."""

from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from holdfast import __version__
from holdfast.server.http.operations import Operation

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.2rem 0 .3rem; font-size: 1rem; } code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: #8882; padding: .8rem; overflow-x: auto; border-radius: 4px; } p { margin: .2rem 0; }
.method { display: inline-block; width: 4.5rem; font-weight: 700; }
td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
:root { color-scheme: light dark; }
"""
_CURL = """export TOKEN=…    # the one that `holdfast serve` printed
curl -s -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" \\
     -d '{}' http://127.0.0.1:8765/v1/sessions
curl -sN -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" \\
     -d '{"code": "6 * 7"}' http://127.0.0.1:8765/v1/sessions/$ID/runs"""


def page(operations: Sequence[Operation]) -> str:
    sections = "\n".join(_section(one) for one in operations)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Holdfast {__version__}</title>'
        f"<style>{_STYLE}</style><h1>Holdfast {__version__}</h1>"
        "<p>Every run is a transaction: memory and files commit together with a receipt, or roll back together.</p>"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).</p>'
        f"<pre>{escape(_CURL)}</pre>{sections}</html>\n"
    )


def _section(one: Operation) -> str:
    head = f'<h2><span class="method">{one.method}</span><code>{escape(one.path)}</code></h2><p>{escape(one.about)}</p>'
    rows = [(f"{each.name} ({each.place})", each.about) for each in one.parameters]
    if one.takes is not None:
        rows += [(f"{one.takes.__name__}.{name}", kind) for name, kind in _fields(one.takes)]
    answered = [*one.media, *([_written(one.gives)] if one.gives is not None else [])]
    rows.append(("answers", ", ".join(answered)))
    cells = "".join(f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"{head}<table>{cells}</table>"


def _fields(kind: Any) -> list[tuple[str, str]]:
    return [
        (field.encode_name, _written(field.type) + ("" if field.required else f" = {_default(field)!r}"))
        for field in msgspec.structs.fields(kind)
    ]


def _default(field: "msgspec.structs.FieldInfo") -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _written(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    for prefix in ("typing.", "holdfast.api.", "holdfast.model.", "holdfast.records.", "holdfast.workfiles."):
        text = text.replace(prefix, "")
    return text
