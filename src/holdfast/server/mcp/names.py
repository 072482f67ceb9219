"""Which session a client had: how one that comes back finds it again.

A file per name, below `mcp/` of the home, holds the id of a session. Whether that still exists is the home's business:
a name whose session is gone is given a new one. Names belong to whoever uses them: two API keys may use the same.
"""

import fcntl
import hashlib
import os
from pathlib import Path

import msgspec

from holdfast import durable
from holdfast.errors import InvalidSetting

CAME_BACK = "you are back in the session that you had: its files are there, its variables may not be; call recover"
BEGAN_ANEW = "the session that you had is gone, with its files; this one is new and empty"
_LONGEST = 100
_MOST_AT_ONCE = 16


class _Kept(msgspec.Struct, frozen=True):
    owner: str
    name: str
    session: str


class Named:
    """One name of one owner."""

    def __init__(self, home: Path, name: str, *, owner: str = "") -> None:
        if not name.isprintable() or not 0 < len(name) <= _LONGEST:
            raise InvalidSetting(f"{name!r} is no name", hint=f"1 to {_LONGEST} printable characters")
        self._kept = _Kept(owner, name, "")
        digest = hashlib.sha256(f"{owner}\0{name}".encode(errors="surrogateescape")).hexdigest()
        self._path = home / "mcp" / f"{digest[:32]}.json"
        self._lock: int | None = None

    def session(self) -> str | None:
        """The id of the session that it had."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Kept).session
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidSetting(
                f"{self._path} cannot be read: {error}", hint="remove it, or use another name"
            ) from error

    def remember(self, session: str) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.write_file(self._path, msgspec.json.encode(msgspec.structs.replace(self._kept, session=session)))

    def claim(self) -> bool:
        """Whether no other process uses it; from now on this one does, until it ends or lets go."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def first_free(home: Path, name: str) -> Named:
    """The name, or while another process uses it `name 2`, `name 3` …: two windows of one client do not share a
    session, and each that comes back finds one of theirs."""
    for number in range(1, _MOST_AT_ONCE + 1):
        named = Named(home, name if number == 1 else f"{name} {number}")
        if named.claim():
            return named
    raise InvalidSetting(f"{_MOST_AT_ONCE} clients use the name {name!r}", hint="use another --name")
