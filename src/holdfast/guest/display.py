"""Rich output: from IPython's hooks to messages."""

import base64
import binascii
import builtins
import json
from contextlib import suppress
from typing import Any, Protocol

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from holdfast.guest.channel import MAX_MESSAGE_BYTES
from holdfast.guest.shortcuts import PlainValues
from holdfast.kernel import wire

_BINARY = ("image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf")
_ROOM_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
_METADATA_BYTES = 1 << 18
_MAX_ID = 1000
_UNDERSCORES = ("_", "__", "___")


class Sink(Protocol):
    """Whoever takes messages: the channel, or nobody while the zygote warms up."""

    def send(self, message: wire.Message) -> None: ...

    def catch_up(self) -> None: ...


class Nobody:
    """Takes messages and drops them."""

    def send(self, message: wire.Message) -> None:
        pass

    def catch_up(self) -> None:
        pass


class GuestDisplayHook(DisplayHook):
    """Called with the value of the last expression."""

    values: PlainValues
    exec_result: Any = None

    def semicolon_at_end_of_expression(self, expression: str) -> bool:  # type: ignore[override]
        """IPython tokenizes it to see that."""
        return ";" in expression and bool(DisplayHook.semicolon_at_end_of_expression(expression))

    def compute_format_data(self, result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        shell: Any = self.shell
        if (plain := self.values.form(shell.display_formatter, result)) is not None:
            return plain
        with shell.showing_value():
            form: tuple[dict[str, Any], dict[str, Any]] = super().compute_format_data(result)
            return form

    def update_user_ns(self, result: Any) -> None:
        """`_`, `__`, `___`, `_7` and `Out[7]`, as IPython sets them; in a fifth of the calls."""
        shell: Any = self.shell
        names, hidden = shell.user_ns, shell.user_ns_hidden
        outputs = names["_oh"]
        if not self.cache_size or result is outputs:
            return
        if len(outputs) >= self.cache_size and self.do_full_cache:
            self.cull_cache()
        ours = all(
            name not in names or names[name] is (hidden[name] if name in hidden else getattr(self, name))
            for name in _UNDERSCORES
        )
        self.___, self.__, self._ = self.__, self._, result
        fresh: dict[str, Any] = {}
        if ours and "_" not in vars(builtins):
            fresh = {"_": self._, "__": self.__, "___": self.___}
        if self.do_full_cache:
            count = self.prompt_count
            fresh[f"_{count}"] = outputs[count] = result
        names.update(fresh)
        hidden.update(fresh)

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        shell: Any = self.shell
        shell.show_result(wire.Shown(kind="result", data=mime(format_dict), metadata=_metadata(md_dict or {})))

    def finish_displayhook(self) -> None:
        pass


class GuestDisplayPublisher(DisplayPublisher):
    """Called by `display()` and its kin."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        display_id = (transient or {}).get("display_id")
        self.shell.show(
            wire.Shown(
                kind="display",
                data=mime(data),
                metadata=_metadata(metadata or {}),
                display_id=None if display_id is None else text(str(display_id)[:_MAX_ID]),
                update=bool(update),
            )
        )

    def clear_output(self, wait: bool = False) -> None:
        self.shell.show(wire.Cleared(wait=bool(wait)))


def mime(data: dict[str, Any]) -> wire.Mime:
    """What the wire carries: text as str, images as bytes, JSON as its text; too large is left out, and said."""
    forms = [(str(kind), value) for kind, value in data.items() if value is not None][: wire.MAX_FORMS]
    encoded = {text(kind): _encode(kind, value) for kind, value in forms}
    whole = wire.Mime(
        text={kind: value for kind, value in encoded.items() if isinstance(value, str)},
        binary={kind: value for kind, value in encoded.items() if isinstance(value, bytes)},
        objects=[text(kind) for kind, value in forms if _is_object(value)],
    )
    # A character may take four bytes on the wire.
    size = sum(len(value) if value.isascii() else 4 * len(value) for value in encoded.values())
    if size <= _ROOM_BYTES:
        return whole
    note = f"<{size:,} bytes of display data left out: one display may hold {_ROOM_BYTES:,}; write a file instead>"
    return wire.Mime(text={"text/plain": note})


def text(value: str) -> str:
    """Without the lone surrogates that no encoder takes."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _encode(kind: str, value: Any) -> str | bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        if kind in _BINARY:
            try:
                return base64.b64decode(value, validate=False)
            except binascii.Error:
                return text(value)
        return text(value)
    if _is_object(value) or kind == "application/json" or kind.endswith("+json"):
        with suppress(TypeError, ValueError, RecursionError):  # a key that JSON does not have, or an object in itself
            return text(json.dumps(value, default=str))
    return text(str(value))


def _is_object(value: Any) -> bool:
    """As in Jupyter, whatever the type is called: its messages are JSON, and so are objects in them."""
    return isinstance(value, (dict, list, tuple, bool, int, float))


def _metadata(metadata: dict[str, Any]) -> str:
    """Only what is plain JSON, and not much of it: anything else has no business on the wire."""
    if not metadata:
        return ""
    encoded = text(json.dumps(metadata, default=str, ensure_ascii=False))
    return encoded if len(encoded.encode()) <= _METADATA_BYTES else ""
