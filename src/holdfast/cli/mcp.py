"""`holdfast mcp --json`: how a client connects, as one line of JSON. Nothing is served and nothing is started.

stdout of `holdfast mcp` itself is the protocol's, and so it has no JSON of ours to print.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

import msgspec

from holdfast.config import home_path
from holdfast.home import SOCKET
from holdfast.server.mcp.names import Named
from holdfast.server.mcp.tools import TOOLS


class Connecting(msgspec.Struct, frozen=True, kw_only=True):
    """What a client, or whoever sets one up, has to know."""

    transport: str
    command: str
    args: list[str]
    home: str
    socket: str
    """Where the home's server listens, which the first client starts."""
    name: str | None
    session: str | None
    """That the client will be in; None: a new one."""
    tools: list[str]
    config: dict[str, Any]
    """To be merged into the client's configuration: the shape that most of them read."""


def describe(arguments: Sequence[str], *, home: Path | None, name: str | None, session: str | None) -> int:
    """Print it; `arguments` are what was typed behind `holdfast mcp`."""
    where = home_path(home)
    command, args = which("holdfast") or sys.executable, ["mcp", *arguments]
    if home is None and os.environ.get("HOLDFAST_HOME"):  # a client starts it with an environment of its own
        args += ["--home", str(where)]
    if command == sys.executable:  # it is not on the PATH
        args = ["-m", "holdfast.cli.main", *args]
    known = Named(where, name).session() if name is not None else session
    told = Connecting(
        transport="stdio", command=command, args=args, home=str(where), socket=str(where / SOCKET), name=name,
        session=known, tools=list(TOOLS), config={"mcpServers": {"holdfast": {"command": command, "args": args}}},
    )  # fmt: skip
    print(msgspec.json.encode(told).decode())
    return 0
