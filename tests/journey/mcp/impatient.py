"""An HTTP server whose MCP sessions end soon, behind a real door. Says where it is, and ends with its stdin."""

import asyncio
import json
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from holdfast.access import Access, KeyRing
from holdfast.config import Settings
from holdfast.opening import open_service
from holdfast.server.doors import DoorSettings, guarded
from holdfast.server.mcp.late import LateMcp, McpSettings


async def main(home: Path, idle_s: float) -> None:
    service = await open_service(Settings(home=home))
    mcp = LateMcp(service, McpSettings(idle_s=idle_s))
    access = Access(KeyRing(service.home.keys))
    app = guarded(Starlette(routes=[Route("/mcp", mcp)]), DoorSettings(access=access))
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}", "token": access.token}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    await mcp.close()
    await service.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
