"""The client's end of stdin and stdout.

While it is served, the real stdin and stdout are nobody else's: fd 0 is the null device and fd 1 is stderr, for us and
for every process that we start. What is printed by mistake goes to the log and never into the protocol.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
from mcp.server.stdio import stdio_server

_PIECE_BYTES = 1 << 16


@asynccontextmanager
async def client_streams() -> AsyncIterator[tuple[Any, Any]]:
    """What the client writes, and what it reads, as messages."""
    private = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        async with stdio_server(stdin=cast(Any, Lines(private))) as streams:  # stdout it takes aside by itself
            yield streams
    finally:
        os.dup2(private, 0)
        os.close(private)


class Lines:
    """Lines of a file descriptor. Waiting for one can be cancelled: the SDK's own reader sits in a thread until the
    client says something more, and a server that is told to end would not end before."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def __aiter__(self) -> AsyncIterator[str]:
        rest = b""
        while piece := await self._read():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    async def _read(self) -> bytes:
        try:
            await anyio.wait_readable(self._fd)
        except PermissionError:  # a regular file: it cannot be waited for, and need not be
            await anyio.lowlevel.checkpoint()
        return os.read(self._fd, _PIECE_BYTES)
