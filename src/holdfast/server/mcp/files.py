"""A committed file as a model can take it: a window of its text, or an image. All else is refused with advice.

1. Whatever the file holds, memory is bounded: it is read piece by piece, and only the window is kept.
2. A window ends with a whole line where it can, and says where the next one begins.
3. A file of up to 64 MiB is read to its end, so that its SHA-256 is checked; of a larger one no more than is needed.
"""

import codecs
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec

from holdfast.errors import InvalidSetting
from holdfast.server.mcp.tools import ReadFile
from holdfast.transports import Transport

MOST_BYTES = 32_000
"""Of text in one answer."""
MOST_IMAGE_BYTES = 4 << 20
_WHOLE_BYTES = 64 << 20
_HEAD_BYTES = 8192
_MAGIC = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
_ADVICE = {
    ".parquet": "pd.read_parquet({0!r}).head()",
    ".feather": "pd.read_feather({0!r}).head()",
    ".xlsx": "pd.read_excel({0!r}).head()",
    ".npy": "np.load({0!r})",
    ".npz": "np.load({0!r}).files",
    ".zip": "zipfile.ZipFile({0!r}).namelist()",
    ".gz": "gzip.open({0!r}, 'rt').readline()",
    ".db": "sqlite3.connect({0!r}).execute('select name from sqlite_master').fetchall()",
    ".sqlite": "sqlite3.connect({0!r}).execute('select name from sqlite_master').fetchall()",
}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What was found at a path."""

    path: str
    kind: Literal["text", "image", "binary"]
    read_bytes: int
    """How far it was read."""
    sha256: str = ""
    """Of the whole file; empty: it was not read to its end."""
    text: str = ""
    start_byte: int = 0
    end_byte: int = 0
    first_line: int | None = None
    """Unknown where bytes were asked for."""
    last_line: int | None = None
    lines: int | None = None
    """Of the whole file, where it was read to its end."""
    next_line: int | None = None
    next_byte: int | None = None
    """Where to go on, if there is more."""
    mime: str = ""
    image: bytes = b""


async def look(transport: Transport, wanted: ReadFile) -> Seen:
    """What a model asked to see of a file."""
    by_byte = wanted.start_byte is not None or wanted.end_byte is not None
    if by_byte and (wanted.start_line is not None or wanted.end_line is not None):
        raise InvalidSetting("lines and bytes at once", hint="give start_line/end_line, or start_byte/end_byte")
    async with aclosing(transport.read(wanted.path)) as pieces:
        file = _File(pieces)
        head = await file.head()
        if mime := _image(head):
            return await _see_image(wanted.path, file, mime)
        if b"\0" in head:
            return Seen(path=wanted.path, kind="binary", read_bytes=file.at)
        window = _Bytes(wanted) if by_byte else _Lines(wanted)
        while not window.full and (piece := await file.next()):
            window.feed(piece)
        await file.finish()
    return _see_text(wanted.path, file, window)


def advice(path: str) -> str:
    """How to load what cannot be shown.

    >>> advice("sales.parquet")
    "load it with run_code, such as pd.read_parquet('sales.parquet').head()"
    """
    call = next(
        (call for suffix, call in _ADVICE.items() if path.lower().endswith(suffix)), "open({0!r}, 'rb').read(64)"
    )
    return f"load it with run_code, such as {call.format(path)}"


class _File:
    """A file on its way, its digest and its lines counted as it comes."""

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        self._pieces = pieces
        self._digest = hashlib.sha256()
        self._first: list[bytes] = []
        self._newlines = 0
        self._last = b"\n"
        self.at = 0
        self.ended = False

    async def head(self) -> bytes:
        """How it begins; `next` gives it again."""
        while sum(map(len, self._first)) < _HEAD_BYTES and (piece := await self._read()):
            self._first.append(piece)
        return b"".join(self._first)[:_HEAD_BYTES]

    async def next(self) -> bytes:
        return self._first.pop(0) if self._first else await self._read()

    async def finish(self) -> None:
        """To its end, unless that is far."""
        while not self.ended and self.at < _WHOLE_BYTES:
            await self._read()

    async def _read(self) -> bytes:
        piece = await anext(self._pieces, b"")
        if not piece:
            self.ended = True
            return b""
        self._digest.update(piece)
        self._newlines += piece.count(b"\n")
        self._last = piece[-1:]
        self.at += len(piece)
        return piece

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest() if self.ended else ""

    @property
    def lines(self) -> int | None:
        return self._newlines + (self._last != b"\n") if self.ended else None


class _Bytes:
    """A window by bytes."""

    def __init__(self, wanted: ReadFile) -> None:
        self.start = wanted.start_byte or 0
        self.stop = self.start + MOST_BYTES
        if wanted.end_byte is not None:
            self.stop = min(self.stop, wanted.end_byte)
        self._at = 0
        self.taken = bytearray()
        self.first_line: int | None = None

    @property
    def full(self) -> bool:
        return self._at >= self.stop

    def feed(self, piece: bytes) -> None:
        self.taken += piece[max(0, self.start - self._at) : max(0, self.stop - self._at)]
        self._at += len(piece)

    def trim(self) -> None:
        """A character that the window cuts in two is left to the next one."""
        while self.start and self.taken and 0x80 <= self.taken[0] < 0xC0:
            del self.taken[0]
            self.start += 1


class _Lines:
    """A window by lines."""

    def __init__(self, wanted: ReadFile) -> None:
        self.first_line: int | None = wanted.start_line or 1
        self._last = wanted.end_line
        self._line = 1
        self.start = 0
        self.taken = bytearray()
        self._cut = False

    @property
    def full(self) -> bool:
        return self._cut or (self._last is not None and self._line > self._last)

    def feed(self, piece: bytes) -> None:
        at = self._skip(piece)
        while at < len(piece) and not self.full:
            end = piece.find(b"\n", at) + 1 or len(piece)
            room = MOST_BYTES - len(self.taken)
            self._cut = end - at > room
            self.taken += piece[at : min(end, at + room)]
            self._line += piece[end - 1 : end] == b"\n"
            at = end

    def _skip(self, piece: bytes) -> int:
        """Up to where the window begins."""
        assert self.first_line is not None
        missing, at = self.first_line - self._line, 0
        if missing > 0 and piece.count(b"\n") < missing:
            self._line += piece.count(b"\n")
            self.start += len(piece)
            return len(piece)
        for _ in range(max(0, missing)):
            at = piece.find(b"\n", at) + 1
        self._line += max(0, missing)
        self.start += at
        return at

    def trim(self) -> None:
        """A line that did not fit is left to the next window, unless it is all there is."""
        if self._cut and (end := self.taken.rfind(b"\n") + 1):
            del self.taken[end:]


def _see_text(path: str, file: _File, window: _Bytes | _Lines) -> Seen:
    window.trim()
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = decoder.decode(bytes(window.taken))
    except UnicodeDecodeError:
        return Seen(path=path, kind="binary", read_bytes=file.at, sha256=file.sha256)
    if "\0" in text:
        return Seen(path=path, kind="binary", read_bytes=file.at, sha256=file.sha256)
    end = window.start + len(text.encode())
    more = end < file.at or not file.ended
    whole_lines = text.endswith("\n")
    last = None if window.first_line is None else window.first_line + max(0, text.count("\n") - whole_lines)
    return Seen(
        path=path,
        kind="text",
        read_bytes=file.at,
        sha256=file.sha256,
        text=text,
        start_byte=window.start,
        end_byte=end,
        first_line=window.first_line if text else None,
        last_line=last if text else None,
        lines=file.lines,
        next_line=last + 1 if more and last is not None and whole_lines else None,
        next_byte=end if more else None,
    )


async def _see_image(path: str, file: _File, mime: str) -> Seen:
    image = bytearray()
    while len(image) <= MOST_IMAGE_BYTES and (piece := await file.next()):
        image += piece
    shown = bytes(image) if len(image) <= MOST_IMAGE_BYTES else b""
    return Seen(path=path, kind="image", read_bytes=file.at, sha256=file.sha256, mime=mime, image=shown)


def _image(head: bytes) -> str:
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for magic, mime in _MAGIC.items() if head.startswith(magic)), "")
