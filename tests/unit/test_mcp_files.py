"""Windows of files, as models ask for them: whatever the pieces are that a file comes in."""

import doctest
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from holdfast.errors import InvalidSetting
from holdfast.server.mcp import desk, files, tools
from holdfast.server.mcp.files import MOST_BYTES, Seen, look
from holdfast.server.mcp.tools import ReadFile
from holdfast.transports import Transport


class OneFile:
    """A session's one file, in pieces of some size."""

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        self._data, self._piece_bytes = data, piece_bytes

    async def read(self, path: str) -> AsyncGenerator[bytes, None]:
        for at in range(0, len(self._data), self._piece_bytes):
            yield self._data[at : at + self._piece_bytes]


async def seen(data: bytes, *, piece_bytes: int = 1 << 20, **wanted: Any) -> Seen:
    return await look(cast(Transport, OneFile(data, piece_bytes)), ReadFile(path="a.txt", **wanted))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_examples_are_true() -> None:
    assert [doctest.testmod(module).failed for module in (files, desk, tools)] == [0, 0, 0]


@pytest.mark.parametrize("piece_bytes", [1, 3, 7, 1 << 20])
async def test_lines_are_the_same_whatever_the_pieces(piece_bytes: int) -> None:
    data = "".join(f"line {n} ü\n" for n in range(1, 101)).encode() + b"the end"
    some = await seen(data, piece_bytes=piece_bytes, start_line=10, end_line=12)
    last = await seen(data, piece_bytes=piece_bytes, start_line=101)
    beyond = await seen(data, piece_bytes=piece_bytes, start_line=500)

    assert some.text == "line 10 ü\nline 11 ü\nline 12 ü\n"
    assert (some.first_line, some.last_line, some.lines, some.next_line) == (10, 12, 101, 13)
    assert data[some.start_byte : some.end_byte].decode() == some.text
    assert (last.text, last.first_line, last.last_line, last.next_byte) == ("the end", 101, 101, None)
    assert (beyond.text, beyond.first_line, beyond.next_byte) == ("", None, None)


async def test_windows_one_after_the_other_are_the_whole_file() -> None:
    data = "".join(f"{n}\n" for n in range(30_000)).encode()
    texts, line = [], 1
    while line:
        window = await seen(data, start_line=line, piece_bytes=1000)
        assert len(window.text) <= MOST_BYTES
        texts.append(window.text)
        line = window.next_line or 0

    assert len(texts) > 3
    assert "".join(texts).encode() == data


async def test_a_line_too_long_for_a_window_goes_on_by_bytes() -> None:
    data = ("ü" * MOST_BYTES).encode()
    texts, at = [], 0
    first = await seen(data)
    while at is not None:
        window = await seen(data, start_byte=at, piece_bytes=999)
        texts.append(window.text)
        at = cast(int, window.next_byte)

    assert (first.next_line, first.next_byte) == (None, MOST_BYTES)
    assert "".join(texts).encode() == data


async def test_bytes_that_cut_characters_show_the_whole_ones() -> None:
    window = await seen("aübücü".encode(), start_byte=2, end_byte=5, piece_bytes=2)

    assert window.text == "b"
    assert (window.start_byte, window.end_byte) == (3, 4)


@pytest.mark.parametrize("data", [b"PAR1\0\0", b"text\xff\xfe", "text".encode("utf-16")])
async def test_what_is_not_text_is_binary(data: bytes) -> None:
    assert (await seen(data)).kind == "binary"


async def test_an_image_is_known_by_what_it_is_and_one_too_large_is_not_shown() -> None:
    small = await seen(b"\x89PNG\r\n\x1a\n" + b"\0" * 100)
    large = await seen(b"RIFF1234WEBP" + b"\0" * files.MOST_IMAGE_BYTES)

    assert (small.kind, small.mime, len(small.image)) == ("image", "image/png", 108)
    assert (large.kind, large.mime, large.image) == ("image", "image/webp", b"")


async def test_an_empty_file_is_empty_text() -> None:
    empty = await seen(b"")

    assert (empty.kind, empty.text, empty.lines, empty.next_byte) == ("text", "", 0, None)


async def test_lines_and_bytes_at_once_are_refused() -> None:
    with pytest.raises(InvalidSetting):
        await seen(b"a", start_line=1, start_byte=0)
