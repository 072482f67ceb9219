"""One cell's outputs, and how the receipt comes into their metadata: it exists only when the run is settled.

- A result waits for it, and what follows a result waits behind it, in order: a while, and not long if the cell goes on
  printing.
- A display is sent at once, and repeated with its receipt by `update_display_data` when the run is settled. That is
  harmless where it changes nothing else: so not of what a browser would execute a second time or a user may have typed
  into, and not of a display whose id another one has as well.
- Text and errors have no metadata in a notebook.

What would be too much is not repeated; it names its session and run alone.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.jupyter.messages import INERT, Message, with_receipt

MOST_DISPLAYS = 100
MOST_CHARACTERS = 4_000_000
"""A cell: of displays that are repeated, and of messages that wait."""
RESULT_WAITS_S = 60.0
PRINTED_WAITS_S = 1.0
_MOST_IDS = 10_000
_LONGEST_ID = 200
_MARKUP = ("text/html", "text/markdown", "image/svg+xml")
_LIVELY = re.compile(
    r"<\s*(?:script|iframe|object|embed|video|audio|link|form|input|select|textarea|button|details|canvas|animate|set"
    r"|foreignobject)\b|[\s\"'/]on[a-z]+\s*=|javascript:",
    re.IGNORECASE,
)
"""Would run, load, play or forget what was typed, if shown again. No boundary: what it misses is shown twice."""
Content = dict[str, Any]


class Outputs:
    def __init__(self, send: Callable[[str, Content], bool], known_ids: set[str]) -> None:
        """`send` says whether it could be sent. `known_ids`: those that cells gave to displays so far."""
        self._send = send
        self._known_ids = known_ids
        self._waiting: list[Message] = []
        self._waiting_characters = 0
        self._patience: asyncio.TimerHandle | None = None
        self._shown: dict[str, tuple[Content, int]] = {}
        self._clears_next = False

    def add(self, messages: Iterable[Message]) -> None:
        """In order, each at once or behind a result that waits."""
        for kind, content in messages:
            if kind == "execute_result" or self._waiting:
                self._wait(kind, content)
            else:
                self._show(kind, content, None)

    def release(self) -> None:
        """What waits is sent without a receipt: the run is not over yet, or has none."""
        self._send_waiting(None)

    def settle(self, receipt: Content | None) -> None:
        """The run is over."""
        self._send_waiting(receipt)
        if receipt is not None:
            for content, _ in self._shown.values():
                self._send("update_display_data", with_receipt(content, receipt))
        self._shown.clear()

    # -- what waits --------------------------------------------------------------------------------------------

    def _wait(self, kind: str, content: Content) -> None:
        size = _characters(content)
        if size is None or self._waiting_characters + size > MOST_CHARACTERS or len(self._waiting) >= MOST_DISPLAYS:
            self.release()
            self._show(kind, content, None)
            return
        self._waiting.append((kind, content))
        self._waiting_characters += size
        if self._patience is None:
            self._be_patient(RESULT_WAITS_S)
        elif kind == "stream":
            self._be_patient(PRINTED_WAITS_S)

    def _be_patient(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        if self._patience is None or end < self._patience.when():
            self._forget_patience()
            self._patience = loop.call_at(end, self.release)

    def _forget_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _send_waiting(self, receipt: Content | None) -> None:
        self._forget_patience()
        waiting, self._waiting, self._waiting_characters = self._waiting, [], 0
        for kind, content in waiting:
            self._show(kind, content, receipt)

    # -- what is repeated --------------------------------------------------------------------------------------

    def _show(self, kind: str, content: Content, receipt: Content | None) -> None:
        if kind == "clear_output":
            self._clear(wait=content["wait"])
        elif self._clears_next and kind != "update_display_data":
            self._clear(wait=False)
        if "metadata" in content and receipt is not None:
            content = with_receipt(content, receipt)
        size = self._repeatable(kind, content) if receipt is None else None
        if (number := content.get("transient", {}).get("display_id")) is not None:
            self._shown.pop(number, None)
            self._know(number)
        elif size is not None:
            number = content["transient"]["display_id"] = secrets.token_hex(8)
        if self._send(kind, content) and size is not None:
            self._shown[number] = content, size

    def _clear(self, *, wait: bool) -> None:
        self._clears_next = wait
        if not wait:
            self._shown.clear()

    def _know(self, number: str) -> None:
        if len(self._known_ids) < _MOST_IDS and len(number) <= _LONGEST_ID:
            self._known_ids.add(number)

    def _repeatable(self, kind: str, content: Content) -> int | None:
        """How much there is to keep until then; None if it is not to be repeated."""
        if kind not in ("display_data", "update_display_data") or (size := _characters(content)) is None:
            return None
        number = content["transient"].get("display_id")
        if kind == "display_data" and number is not None and not self._is_new(number):
            return None
        others = [size for known, (_, size) in self._shown.items() if known != number]
        if len(others) >= MOST_DISPLAYS or sum(others) + size > MOST_CHARACTERS:
            return None
        return size if _is_still(content["data"]) else None

    def _is_new(self, number: str) -> bool:
        """For certain: also that it will be known the next time."""
        return number not in self._known_ids and len(self._known_ids) < _MOST_IDS and len(number) <= _LONGEST_ID


def _is_still(data: Content) -> bool:
    return all(
        kind in INERT or (kind in _MARKUP and isinstance(value, str) and not _LIVELY.search(value))
        for kind, value in data.items()
    )


def _characters(content: Content) -> int | None:
    """About as many as will be sent; None if it cannot be."""
    values = list(content.get("data", {}).values())
    texts = [content.get("text", ""), *(value for value in values if isinstance(value, str))]
    others = [value for value in values if not isinstance(value, str)]
    try:
        rest = json.dumps([content.get("metadata"), content.get("transient"), others])
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None
    return len(rest) + sum(map(len, texts))
