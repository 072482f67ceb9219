"""`holdfast serve`: the home over HTTP."""

import asyncio
import logging
import os
import sys

import msgspec

from holdfast.cli.progress import rich_report
from holdfast.errors import InvalidSetting
from holdfast.home import SOCKET
from holdfast.server.serving import Ready, ServeSettings, serve
from holdfast.service import Service
from holdfast.visible import VisibleFormatter

_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")


def run_server(settings: ServeSettings, *, as_json: bool, quiet: bool = False, insecure: bool = False) -> int:
    """Until it is told to stop. `quiet`: nobody reads what we print; `insecure`: he knows what he does."""
    _refuse_plain_text(settings, insecure=insecure)
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)

    def ready(service: Service, url: str, token: str) -> None:
        told = Ready(url=url, token=token, socket=str(service.home.path / SOCKET), pid=os.getpid())
        if as_json:
            print(msgspec.json.encode(told).decode(), flush=True)
        elif not quiet:
            print(_introduction(told, settings), file=sys.stderr, flush=True)

    asyncio.run(serve(settings, reporting=rich_report, on_ready=ready))
    return 0


def _refuse_plain_text(settings: ServeSettings, *, insecure: bool) -> None:
    """Tokens and code in clear over a network are nobody's default."""
    if settings.port is None or settings.host in _THIS_MACHINE:
        return
    if not insecure:
        raise InvalidSetting(
            f"{settings.host} can be reached by others, and without TLS all of them read along",
            hint="serve 127.0.0.1 behind a proxy that speaks TLS, with --allow-host NAME; or say --insecure",
        )
    print(f"holdfast: {settings.host} is served without TLS: whoever is in between reads the token", file=sys.stderr)


def _introduction(told: Ready, settings: ServeSettings) -> str:
    if settings.port is None:
        return f"Holdfast serves {told.socket}"
    return (
        f"Holdfast serves {settings.home.home}\n\n"
        f"    {told.url}/docs?token={told.token}\n\n"
        f'  curl -H "Authorization: Bearer {told.token}" {told.url}/v1/sessions\n'
        f"  Session(url={told.url!r}, token=…) in Python; processes of yours on this machine need no token.\n"
        "  holdfast keys add NAME makes an API key for somebody else. Ctrl-C stops it."
    )
