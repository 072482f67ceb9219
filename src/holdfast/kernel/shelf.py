"""What a run displays, bounded."""

from typing import Any

import msgspec

from holdfast.config import Limits
from holdfast.kernel import wire
from holdfast.model import Display

_METADATA_CHARACTERS = 64 << 10
_METADATA_CONTAINERS = 100
"""Lists and objects in the metadata of one display. Python's garbage collector walks over all that are kept, and while
it does every session waits."""
_BYTES_PER_CHARACTER = 32
"""At most, about: an empty list has two characters, a comma, and 64 bytes."""


class Shelf:
    """The displays of one run, within bounds; an update replaces what it names."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size = 0
        self.displays: list[Display] = []
        self.result: str | None = None
        self.dropped = 0
        self._clear_pending = False

    def add(self, shown: wire.Shown) -> Display:
        display = Display(
            data=shown.data.merged(), metadata=_metadata(shown.metadata), display_id=shown.display_id,
            objects=[kind for kind in dict.fromkeys(shown.data.objects) if kind in shown.data.text],
        )  # fmt: skip
        if shown.kind == "result":
            self.result = shown.data.text.get("text/plain")
        if self._clear_pending:
            self.clear()
        # Every one counts, also one that replaces another: what is kept never exceeds what was counted.
        self._size += shown.data.size() + metadata_bytes(display.metadata) + len(shown.display_id or "")
        if len(self.displays) >= self._limits.displays or self._size > self._limits.display_bytes:
            self.dropped += 1
        elif shown.update:
            self.displays = [display if d.display_id == shown.display_id else d for d in self.displays]
        else:
            self.displays.append(display)
        return display

    def clear(self, *, wait: bool = False) -> None:
        self._clear_pending = wait
        if not wait:
            self.displays, self._size = [], 0


def metadata_bytes(metadata: dict[str, Any]) -> int:
    """What it takes as objects."""
    return _BYTES_PER_CHARACTER * len(msgspec.json.encode(metadata)) if metadata else 0


def _metadata(text: str) -> dict[str, Any]:
    """Typed by JSON alone: its keys are text, which nobody can make collide. Metadata past its bounds is left out."""
    if not 0 < len(text) <= _METADATA_CHARACTERS or text.count("[") + text.count("{") > _METADATA_CONTAINERS:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
