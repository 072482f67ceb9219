"""Files between a session and whoever uses it, whole or piece by piece."""

import io
import os
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

from holdfast.errors import InvalidSetting
from holdfast.paths import to_bytes
from holdfast.transports import Transport
from holdfast.workfiles import Written


async def read_whole(reached: Transport, path: str) -> bytes:
    async with aclosing(reached.read(path)) as pieces:
        return b"".join([piece async for piece in pieces])


def as_stream(data: bytes | str) -> BinaryIO:
    if not isinstance(data, (str, bytes, bytearray, memoryview)):
        raise InvalidSetting(f"a file holds text or bytes, not {type(data).__name__}", hint="encode it first")
    return io.BytesIO(data.encode() if isinstance(data, str) else data)


async def upload(reached: Transport, source: Path, path: str | None) -> Written:
    try:
        file = source.open("rb")
    except OSError as error:
        raise InvalidSetting(f"{source} cannot be read: {error.strerror}", hint="name a file of yours") from error
    with file:
        return await reached.write(path or source.name, file)


async def download(reached: Transport, path: str, target: Path) -> Path:
    place = _place(path, target)
    async with aclosing(reached.read(path)) as pieces:
        first = await anext(pieces, b"")  # what is not there is said before anything is overwritten
        try:
            with place.open("wb") as sink:
                await anyio.to_thread.run_sync(sink.write, first)
                async for piece in pieces:
                    await anyio.to_thread.run_sync(sink.write, piece)
        except OSError as error:
            raise InvalidSetting(
                f"{target} cannot be written: {error.strerror}", hint="name a file of yours"
            ) from error
    return place


def _place(path: str, target: Path) -> Path:
    return target / os.fsdecode(to_bytes(path).rpartition(b"/")[2]) if target.is_dir() else target
