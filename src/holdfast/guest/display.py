"""Rich output: from IPython's hooks to messages."""

import base64
import binascii
import json
from typing import Any, Protocol

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from holdfast.guest.channel import MAX_MESSAGE_BYTES
from holdfast.kernel import wire

_BINARY = ("image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf")
_ROOM_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
_METADATA_BYTES = 1 << 18
_MAX_ID = 1000


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
    encoded = {text(str(kind)): _encode(str(kind), value) for kind, value in data.items() if value is not None}
    whole = wire.Mime(
        text={kind: value for kind, value in encoded.items() if isinstance(value, str)},
        binary={kind: value for kind, value in encoded.items() if isinstance(value, bytes)},
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
    if kind == "application/json" or kind.endswith("+json"):
        return text(json.dumps(value, default=str))
    return text(str(value))


def _metadata(metadata: dict[str, Any]) -> str:
    """Only what is plain JSON, and not much of it: anything else has no business on the wire."""
    if not metadata:
        return ""
    encoded = text(json.dumps(metadata, default=str, ensure_ascii=False))
    return encoded if len(encoded.encode()) <= _METADATA_BYTES else ""
