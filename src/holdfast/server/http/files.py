"""Files: listed, read with ranges, written, removed. Their SHA-256 is their ETag.

What is written comes to rest in an unnamed file on the home's disk first, and is then staged from there: a slow client
keeps nobody else from the session, and what did not arrive whole is never seen.
"""

import hashlib
import re
import tempfile
from collections.abc import AsyncGenerator
from typing import IO, BinaryIO
from urllib.parse import quote, unquote_to_bytes

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from holdfast import api, workfiles
from holdfast.errors import Malformed, SessionHalted
from holdfast.records import FileEntry
from holdfast.server.http.bodies import Stream, given, taken
from holdfast.server.http.hub import hub_of
from holdfast.server.http.sessions import as_download
from holdfast.server.http.uploads import Upload

_PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))", re.ASCII)
_ETAG = re.compile(r'"([^"]*)"')


async def list_all(request: Request) -> Response:
    """What is committed in /mnt/data."""
    books = await hub_of(request).books(request)
    return given(request, [entry for _, entry in sorted(books.state.files.items())])


async def read(request: Request) -> Response:
    """A committed file, or a range of it."""
    session = await hub_of(request).live(request)
    entry = workfiles.entry(session, _path(request))
    headers = {
        **as_download("file"), **_named(entry), "etag": f'"{entry.sha256}"', "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
    }  # fmt: skip
    if _names(request, "if-none-match", entry.sha256):
        return Response(status_code=304, headers=headers)
    first, end, status = _part(request, entry)
    if status == 416:
        return Response(status_code=416, headers={**headers, "content-range": f"bytes */{entry.bytes}"})
    if status == 206:
        headers["content-range"] = f"bytes {first}-{end - 1}/{entry.bytes}"
    headers["content-length"] = str(end - first)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=api.BYTES)
    source = await anyio.to_thread.run_sync(workfiles.open_committed, session, entry.path)
    return Stream(_pieces(source, entry, first, end), status, headers=headers, media_type=api.BYTES)


async def write(request: Request) -> Response:
    """Put a file in place. A run like any other: a version, a receipt."""
    hub, path = hub_of(request), _path(request)
    session = await hub.live(request)
    workfiles.one_path(session, path)  # a path that cannot be is refused before anything is sent
    replaces = _replaced(request)
    # The file has no name: however we end, nothing of it is left.
    with (
        tempfile.TemporaryFile(dir=session.workspace.path, buffering=0) as arrived,
        hub.uploads.counted(session) as upload,
    ):
        await session.wait_settled()  # how much room is left is counted when the run before is put away
        await _receive(request, upload, arrived)
        arrived.seek(0)
        return given(request, await workfiles.write(session, path, arrived, replaces=replaces))


async def remove(request: Request) -> Response:
    """Take a file or directory away. An earlier version still has it."""
    session = await hub_of(request).live(request)
    return given(request, await workfiles.remove(session, _path(request), replaces=_replaced(request)))


async def restore(request: Request) -> Response:
    """Bring the files of an earlier version back, as a new version; and its memory, where that was kept (undo)."""
    session, wanted = await hub_of(request).live(request), await taken(request, api.Restore)
    return given(request, await workfiles.restore(session, wanted.ckpt))


# -- paths ---------------------------------------------------------------------------------------------------------


def _path(request: Request) -> str:
    """By its bytes: a name on Linux need not be UTF-8. The address must be split here as it was by the router."""
    parts = request.scope["raw_path"].split(b"/", 5)
    named = unquote_to_bytes(parts[5]) if len(parts) == 6 else b""
    if named.decode(errors="replace") != request.path_params["path"]:
        raise Malformed("the path is encoded in a way that two readers take for two", hint="encode only what must be")
    return named.decode(errors="surrogateescape")


def _named(entry: FileEntry) -> dict[str, str]:
    name = quote(entry.path.rpartition("/")[2], safe="")
    return {"content-disposition": f"attachment; filename*=UTF-8''{name}"}


# -- reading -------------------------------------------------------------------------------------------------------


def _part(request: Request, entry: FileEntry) -> tuple[int, int, int]:
    """Begin and end of what is wanted, and the status. Several ranges at once, and nonsense, get the whole file."""
    wanted = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if wanted is None or ("if-range" in request.headers and not _names(request, "if-range", entry.sha256)):
        return 0, entry.bytes, 200
    if wanted[3] is not None:
        first, end = max(0, entry.bytes - int(wanted[3])), entry.bytes
    else:
        first, end = int(wanted[1]), min(entry.bytes, int(wanted[2]) + 1 if wanted[2] else entry.bytes)
        if wanted[2] and int(wanted[2]) < first:
            return 0, entry.bytes, 200
    return (first, end, 206) if first < end else (0, 0, 416)


async def _pieces(source: BinaryIO, entry: FileEntry, first: int, end: int) -> AsyncGenerator[bytes, None]:
    """It breaks off if the file is not what it was committed as: its length and ETag are promised already."""
    digest, left = hashlib.sha256(), end - first
    with source:
        source.seek(first)
        while left and (piece := await anyio.to_thread.run_sync(source.read, min(left, _PIECE_BYTES))):
            left -= len(piece)
            digest.update(piece)
            if not left and end - first == entry.bytes and digest.hexdigest() != entry.sha256:
                break
            yield piece
        else:
            if not left:
                return
    raise SessionHalted(f"{entry.path} is not what was committed", hint="read it again; a run may have replaced it")


# -- writing -------------------------------------------------------------------------------------------------------


async def _receive(request: Request, upload: Upload, arrived: IO[bytes]) -> None:
    kept = bytearray()
    async for piece in request.stream():
        upload.add(len(piece))
        kept += piece
        if len(kept) >= _PIECE_BYTES:
            await anyio.to_thread.run_sync(_write_whole, arrived, bytes(kept))
            kept.clear()
    await anyio.to_thread.run_sync(_write_whole, arrived, bytes(kept))


def _write_whole(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _replaced(request: Request) -> str | None:
    """What must be there: If-Match names it, If-None-Match: * wants nothing."""
    if request.headers.get("if-none-match", "").strip() == "*":
        return ""
    if (wanted := request.headers.get("if-match")) is None:
        return None
    tags = _ETAG.findall(wanted)
    if len(tags) != 1:
        raise Malformed("If-Match does not name one ETag", hint='send If-Match: "SHA-256"')
    return str(tags[0])


def _names(request: Request, header: str, sha256: str) -> bool:
    wanted = request.headers.get(header, "")
    return wanted.strip() == "*" or sha256 in _ETAG.findall(wanted)
