"""Pages of other sites in somebody's browser are kept out: DNS rebinding, CSRF, framing, sniffing.

A browser sends requests for any page, and to a server on 127.0.0.1 too. Three things tell them apart:

1. `Host` is the name that the page was loaded from. One that is not ours was made to point here (DNS rebinding).
2. `Origin` and `Sec-Fetch-Site` say which page asks. No page can forge them. A program sends neither, and passes.
3. A form can send only three content types without asking us first, and `application/json` is none of them.

Over the Unix socket the names are those of this machine alone: a browser gets there only through a forwarded port.
"""

import ipaddress

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from holdfast.errors import Forbidden, InvalidSetting, Malformed, WrongHost, WrongMediaType

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

_DEFAULT_PORTS = {"http": 80, "https": 443}
_METHODS = "GET, HEAD, POST, PUT, DELETE"
_SENT = "Authorization, Content-Type, Accept, Idempotency-Key, If-Match, If-None-Match, Last-Event-ID, Range"
_SHOWN = "ETag, Retry-After, Content-Range, Location"

Headers = list[tuple[bytes, bytes]]
Authority = tuple[str, int | None]

SECURITY_HEADERS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
"""On every answer that does not say otherwise itself (the page /docs needs a policy of its own)."""


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """The names that this server answers to, and the pages that may use it."""

    names: tuple[str, ...] = ()
    """The address that it is bound to, and `--allow-host`: `name`, or `name:port`."""
    port: int | None = None
    """The port that it is bound to; None: any (a test, a Unix socket)."""
    origins: tuple[str, ...] = ()
    """`--allow-origin`: pages of other sites that may use it: `https://console.example.org`."""


def checked(hosts: Hosts) -> Hosts:
    """What somebody typed, if it can be meant."""
    for name in hosts.names:
        if _authority(name) is None:
            raise InvalidSetting(f"{name!r} is no host", hint="--allow-host NAME or NAME:PORT")
    for origin in hosts.origins:
        if _origin(origin) is None:
            raise InvalidSetting(f"{origin!r} is no origin", hint="--allow-origin https://NAME[:PORT], without a path")
    return hosts


def refuse_foreign(scope: Scope, hosts: Hosts, *, local: bool) -> None:
    """`local`: it came over the Unix socket."""
    host = _only(scope, b"host")
    asked = _authority(host) if host else None
    if asked is None or not _is_ours(asked, hosts, local=local):
        raise WrongHost(
            "this server does not answer to the name in the Host header",
            hint="use the address that it printed; holdfast serve --allow-host NAME adds a name",
        )
    _refuse_foreign_page(scope, hosts, asked)


def _is_ours(asked: Authority, hosts: Hosts, *, local: bool) -> bool:
    name, port = asked
    if local:
        return name in LOCAL_NAMES
    if name in LOCAL_NAMES and (hosts.port is None or (port or 80) == hosts.port):
        return True
    return any(_fits(asked, allowed, hosts.port) for allowed in hosts.names)


def _fits(asked: Authority, allowed: str, bound_port: int | None) -> bool:
    """A name without a port is meant at our port, and at the two that a proxy before us would have."""
    if (known := _authority(allowed)) is None or known[0] != asked[0]:
        return False
    if known[1] is not None:
        return asked[1] == known[1]
    return bound_port is None or asked[1] in (None, bound_port, *_DEFAULT_PORTS.values())


def _refuse_foreign_page(scope: Scope, hosts: Hosts, asked: Authority) -> None:
    origin = _only(scope, b"origin")
    if origin is not None and _may_ask(origin, hosts, asked):
        return
    changes = origin is not None and scope["method"] not in SAFE_METHODS
    if changes or (_only(scope, b"sec-fetch-site") == "cross-site" and not _is_navigation(scope)):
        raise _foreign_page()


def _foreign_page() -> Forbidden:
    return Forbidden(
        "a page of another site asks",
        hint="use the server's own address; holdfast serve --allow-origin URL lets one more site in",
    )


def _is_navigation(scope: Scope) -> bool:
    """Somebody follows a link: the page that holds it sees nothing of the answer."""
    return scope["method"] in SAFE_METHODS and _only(scope, b"sec-fetch-mode") == "navigate"


def _may_ask(origin: str, hosts: Hosts, asked: Authority) -> bool:
    if is_allowed_origin(origin, hosts):
        return True
    found = _origin(origin)
    if found is None:
        return False
    scheme, name, port = found
    default = _DEFAULT_PORTS[scheme]  # behind a proxy that speaks TLS the page is https and we are not
    return (name, port or default) == (asked[0], asked[1] or default)


def is_allowed_origin(origin: str, hosts: Hosts) -> bool:
    return (found := _origin(origin)) is not None and found in {_origin(allowed) for allowed in hosts.origins}


def refuse_forms(scope: Scope) -> None:
    """JSON must be called JSON, and msgpack so: what a form can send is not taken for either."""
    sent = (_only(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if sent not in ("application/json", "application/msgpack"):
        raise WrongMediaType("the body is not called JSON", hint="send Content-Type: application/json")


# -- pages that were let in ----------------------------------------------------------------------------------------


def preflight(scope: Scope, hosts: Hosts) -> Response | None:
    """What a browser wants to know before it lets an allowed page ask. Anybody else is not answered."""
    origin = _only(scope, b"origin")
    if scope["method"] != "OPTIONS" or _only(scope, b"access-control-request-method") is None:
        return None
    if origin is None or not is_allowed_origin(origin, hosts):
        raise _foreign_page()
    allowed = {
        "access-control-allow-methods": _METHODS, "access-control-allow-headers": _SENT,
        "access-control-max-age": "600",
    }  # fmt: skip
    return Response(status_code=204, headers=allowed)


def answer_headers(scope: Scope, hosts: Hosts) -> Headers:
    """What every answer has; for an allowed page also the leave to read it."""
    origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
    if origin is None or not is_allowed_origin(origin.decode("latin-1"), hosts):
        return SECURITY_HEADERS
    leave = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _SHOWN.encode())]
    return [*SECURITY_HEADERS, *leave, (b"vary", b"Origin")]


# -- reading -------------------------------------------------------------------------------------------------------


def _only(scope: Scope, name: bytes) -> str | None:
    """The one header of that name; two are for two readers."""
    found = [value for key, value in scope["headers"] if key == name]
    if len(found) > 1:
        raise Malformed(f"the header {name.decode()} came twice", hint="send it once")
    return found[0].decode("latin-1") if found else None


def _origin(text: str) -> tuple[str, str, int | None] | None:
    """
    >>> _origin("https://Console.example.org:8443"), _origin("null"), _origin("https://a.org/b")
    (('https', 'console.example.org', 8443), None, None)
    """
    scheme, found, rest = text.lower().partition("://")
    authority = _authority(rest)
    if not found or scheme not in _DEFAULT_PORTS or authority is None:
        return None
    name, port = authority
    return scheme, name, None if port == _DEFAULT_PORTS[scheme] else port


def _authority(text: str) -> Authority | None:
    """
    >>> _authority("LocalHost:8787"), _authority("[::1]"), _authority("a b"), _authority("127.0.0.1.")
    (('localhost', 8787), ('::1', None), None, ('127.0.0.1', None))
    """
    text = text.strip().lower()
    if text.startswith("["):
        name, closed, port = text[1:].partition("]")
        if not closed or not _is_ipv6(name) or (port and not port.startswith(":")):
            return None
        return _with_port(str(ipaddress.IPv6Address(name)), port[1:] if port else None)
    if _is_ipv6(text):  # as people type it on a command line
        return str(ipaddress.IPv6Address(text)), None
    name, colon, port = text.partition(":")
    return _with_port(name.removesuffix("."), port if colon else None) if _is_name(name) else None


def _with_port(name: str, port: str | None) -> Authority | None:
    if port is None:
        return name, None
    return (name, int(port)) if port.isascii() and port.isdigit() and len(port) <= 5 else None


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_name(name: str) -> bool:
    return bool(name.removesuffix(".")) and name.isascii() and all(part.isalnum() or part in "-._" for part in name)
