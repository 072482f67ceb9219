"""Which hosts clients may have their sessions reach: at most what whoever started the server allows.

On his own machine, over the home's Unix socket, he asks for himself, and there is no ceiling.
"""

from starlette.requests import Request

from holdfast.egress.allowed import AllowList, Entry
from holdfast.errors import EgressRefused
from holdfast.server.doors.connections import is_owner, peer_uid_of


def allowed(request: Request, asked: list[str], *, ceiling: AllowList) -> AllowList:
    """What was asked for, if it may be."""
    wanted = AllowList.parse(asked)
    if is_owner(peer_uid_of(request.scope)):
        return wanted
    beyond = [str(entry) for entry in wanted.entries if not any(_covers(above, entry) for above in ceiling.entries)]
    if beyond:
        raise EgressRefused(
            f"sessions of this server may not reach {', '.join(beyond)}",
            hint=f"it allows {', '.join(ceiling.texts()) or 'nothing'}; more is up to whoever starts it "
            "(holdfast serve --egress HOST)",
        )
    return wanted


def _covers(above: Entry, entry: Entry) -> bool:
    """
    >>> one, several = AllowList.parse(["a.example.org"]).entries[0], AllowList.parse(["*.example.org"]).entries[0]
    >>> _covers(several, one), _covers(one, several), _covers(several, several)
    (True, False, True)
    """
    if not set(entry.ports) <= set(above.ports):
        return False
    if not above.below:
        return entry.host == above.host and not entry.below
    return entry.host.endswith(f".{above.host}") or (entry.below and entry.host == above.host)
