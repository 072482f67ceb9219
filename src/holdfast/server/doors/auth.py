"""Who asks: `Authorization: Bearer …` with the server's token or an API key, or a peer on our own Unix socket.

1. Everything but /v1/health needs it. /metrics is for the owner: it counts what every key does.
2. `?token=` is taken for a GET of /docs and /openapi.json alone, which a person opens in a browser. Wherever it stands,
   it is removed from the scope before anybody can log it.
3. A peer on the Unix socket is the owner if his uid is ours or root's: the kernel says so, nobody can claim it.
4. Wrong tokens of one address are limited. What is right passes all the same, so that nobody locks others out; but a
   token that a person chose is not even compared then, as it might be guessed.
"""

import ipaddress
import logging
from functools import partial
from urllib.parse import parse_qsl, urlencode

import anyio
from starlette.types import Scope

from holdfast.access import OWNER, Access, Principal
from holdfast.errors import Forbidden, HoldfastError, InvalidSetting, RateLimited, Unauthorized
from holdfast.server.doors.connections import is_owner, peer_uid_of
from holdfast.server.doors.limits import Rate

OPEN = ("/v1/health",)
FOR_OWNER = ("/metrics",)
TOKEN_IN_ADDRESS = ("/docs", "/openapi.json")
ANYBODY = Principal("", "anybody")
"""Who asks for what is open to all: no session belongs to him."""

_log = logging.getLogger("holdfast.server")


async def identify(scope: Scope, access: Access, failures: Rate, *, token: str | None) -> Principal:
    """Who asks, or a refusal. `token` is what `take_token` found."""
    if scope["path"] in OPEN:
        return ANYBODY
    if is_owner(peer_uid_of(scope)):
        return OWNER
    credential = _credential(scope, token)
    if credential is None:
        raise Unauthorized("a token is needed", hint="send Authorization: Bearer TOKEN, with the one that it printed")
    principal = _known(credential, access, failures, address_of(scope))
    if scope["path"] in FOR_OWNER and not principal.owner:
        raise Forbidden("this is for the server's owner", hint="send the server's own token")
    await _note_use(principal, access)
    return principal


def take_token(scope: Scope) -> str | None:
    """Remove `token` from the query, in place: the server's own access log shows this very scope."""
    if b"token" not in scope["query_string"].lower() and b"%" not in scope["query_string"]:
        return None
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    tokens = [value for name, value in pairs if name.lower() == "token"]
    if tokens:
        scope["query_string"] = urlencode([pair for pair in pairs if pair[0].lower() != "token"]).encode()
    return tokens[0] if len(tokens) == 1 else None


def _credential(scope: Scope, in_address: str | None) -> str | None:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) == 1:
        scheme, _, credential = given[0].decode("latin-1").partition(" ")
        return credential.strip() if scheme.lower() == "bearer" else None
    by_address = not given and scope["method"] == "GET" and scope["path"] in TOKEN_IN_ADDRESS
    return in_address if by_address else None


def _known(credential: str, access: Access, failures: Rate, address: str) -> Principal:
    try:
        principal = access.principal_of(credential, slowed=failures.exhausted(address))
    except InvalidSetting:
        _log.exception("the API keys cannot be read: nobody gets in by one")
        principal = None
    if principal is not None:
        return principal
    if wait_s := failures.wait_s(address):
        raise RateLimited("too many wrong tokens", hint="wait, and send a right one", retry_after_s=wait_s)
    _log.warning("a wrong token from %s", address)
    raise Unauthorized("the token is not known, or it is revoked", hint="holdfast keys list shows which are valid")


def address_of(scope: Scope) -> str:
    """Whom failures are counted for. Who has one IPv6 address has 2⁶⁴ of them."""
    if not scope.get("client"):
        return "local"
    try:
        address = ipaddress.ip_address(scope["client"][0].partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)


async def _note_use(principal: Principal, access: Access) -> None:
    """For the list of keys. A disk that fails here is no reason to refuse."""
    if principal.owner or not access.ring.use_is_due(principal.id):
        return
    try:
        await anyio.to_thread.run_sync(partial(access.ring.note_use, principal.id))
    except HoldfastError as error:
        _log.warning("the use of key %s was not noted: %s", principal.id, error.message)
