"""Who may use a server: its own token, and API keys.

    hf_<id>_<secret>    an API key; the id is public, the secret is 256 random bits

1. A key is shown once, when it is made. Kept is the SHA-256 of its secret: of a secret that long nothing can be guessed
   back, so that a slow hash would cost every request and protect nothing.
2. All keys of a home are one file, `keys/access.json`, replaced as a whole. Whoever changes it holds
   `keys/access.lock`, so that `holdfast keys` works beside a running server, which sees a change at the next request.
3. A revoked key stays in the file: its id is never given out again, and its sessions have a name.
4. The server's token acts as its owner, who sees every session. A key sees its own.
"""

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast import durable
from holdfast.errors import ApiKeyUnknown, InvalidSetting

OWNER_ID = "owner"
FILE, LOCK = "access.json", "access.lock"
USE_COARSENESS_S = 3600.0
"""`last_used_at` is written at most this often: no request is to wait for a disk."""
MIN_TOKEN_LENGTH = 16

_KEY = re.compile(r"hf_([0-9a-f]{10})_([0-9a-f]{64})")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_NAME_LENGTH = 100


class Principal(msgspec.Struct, frozen=True):
    """Who asks."""

    id: str
    name: str
    owner: bool = False

    @property
    def session_owner(self) -> str:
        """How the books of his sessions name him: whoever owns the server has no name there."""
        return "" if self.owner else self.id

    def may_use(self, session_owner: str) -> bool:
        """Whether a session of that owner is his to see and use."""
        return self.owner or (session_owner != "" and session_owner == self.id)


OWNER = Principal(OWNER_ID, OWNER_ID, owner=True)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a key, and what may be shown of it."""

    id: str
    name: str
    created_at: float
    last_used_at: float | None = None
    """To the hour."""
    revoked_at: float | None = None


class _Kept(ApiKey, frozen=True, kw_only=True):
    sha256: str


class _File(msgspec.Struct, frozen=True):
    keys: list[_Kept]


class KeyRing:
    """The API keys of a home. Any number of processes may have it open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / FILE
        self._read_last: tuple[tuple[int, ...], dict[str, _Kept]] = ((), {})
        """Which file it was, and what was in it: one assignment, for `note_use` may run in a thread of its own."""

    def add(self, name: str) -> tuple[ApiKey, str]:
        """A new key: what is kept of it, and the key itself, which nobody can tell again."""
        if not name.isprintable() or not 0 < len(name) <= _NAME_LENGTH:
            raise InvalidSetting(f"{name!r} is no name for a key", hint=f"1 to {_NAME_LENGTH} printable characters")
        secret = secrets.token_hex(32)
        with self._changing() as keys:
            while (key_id := secrets.token_hex(5)) in keys:
                pass
            kept = _Kept(id=key_id, name=name, created_at=time.time(), sha256=_digest(secret))
            keys[key_id] = kept
        return _shown(kept), f"hf_{key_id}_{secret}"

    def keys(self) -> list[ApiKey]:
        """Oldest first, revoked ones too."""
        return [_shown(key) for key in self._read().values()]

    def revoke(self, key_id: str) -> ApiKey:
        """From the next request on it is not known any more. Again does no harm."""
        with self._changing() as keys:
            if (key := keys.get(key_id)) is None:
                raise ApiKeyUnknown(
                    f"no API key {key_id!r} is in this home", hint="holdfast keys list shows all of them"
                )
            if key.revoked_at is None:
                key = keys[key_id] = msgspec.structs.replace(key, revoked_at=time.time())
        return _shown(key)

    def find(self, key: str) -> ApiKey | None:
        """The key that somebody presents, if it is known and not revoked."""
        parts = _KEY.fullmatch(key)
        if parts is None:
            return None
        kept = self._read().get(parts[1])
        right = hmac.compare_digest(_digest(parts[2]), kept.sha256 if kept else _digest(""))
        return _shown(kept) if kept and right and kept.revoked_at is None else None

    def use_is_due(self, key_id: str) -> bool:
        """Whether so much time went by that `note_use` has something to write."""
        key = self._read().get(key_id)
        return key is not None and time.time() - (key.last_used_at or 0) >= USE_COARSENESS_S

    def note_use(self, key_id: str) -> None:
        """Write down that a key was used now."""
        with self._changing() as keys:
            if key := keys.get(key_id):
                keys[key_id] = msgspec.structs.replace(key, last_used_at=time.time())

    @contextmanager
    def _changing(self) -> Iterator[dict[str, _Kept]]:
        """The keys, alone; written when the block ends well."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self._directory, error) from error
        with durable.closing_fd(lock):
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = dict(self._read())
            yield keys
            durable.write_file(self._path, msgspec.json.encode(_File(list(keys.values()))), mode=0o600)

    def _read(self) -> dict[str, _Kept]:
        """All keys, read again only if the file is another one than before."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _unusable(self._path, error) from error
        with durable.closing_fd(file):
            found = os.fstat(file)
            # A replaced file has an inode of its own, and one that took a freed inode has times of its own.
            now = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
            before, keys = self._read_last
            if now != before:
                keys = _decode(self._path, file, found)
                self._read_last = (now, keys)
        return keys


class Access:
    """Everything that opens a server."""

    def __init__(self, ring: KeyRing, *, token: str | None = None) -> None:
        self.ring = ring
        self.token = checked_token(token) if token else secrets.token_hex(32)
        self.guessable = bool(token)
        """Whether a person chose the token. Keys and tokens of ours are too long to be guessed at any speed."""
        self._token_digest = _digest(self.token)

    def principal_of(self, credential: str, *, slowed: bool = False) -> Principal | None:
        """Who presents this. `slowed`: so many were wrong that a token which might be guessed is not even compared."""
        if not (slowed and self.guessable) and hmac.compare_digest(_digest(credential), self._token_digest):
            return OWNER
        key = self.ring.find(credential)
        return Principal(key.id, key.name) if key else None


def checked_token(token: str) -> str:
    """A token that somebody chose, if it can be one."""
    if len(token) < MIN_TOKEN_LENGTH or not _TOKEN.fullmatch(token):
        raise InvalidSetting(
            "the token is too short, or holds spaces or characters beyond ASCII",
            hint=f"at least {MIN_TOKEN_LENGTH} visible ASCII characters; or name none, and one is made",
        )
    return token


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def _shown(kept: _Kept) -> ApiKey:
    return ApiKey(
        id=kept.id, name=kept.name, created_at=kept.created_at, last_used_at=kept.last_used_at,
        revoked_at=kept.revoked_at,
    )  # fmt: skip


def _decode(path: Path, file: int, found: os.stat_result) -> dict[str, _Kept]:
    if stat.S_IMODE(found.st_mode) & 0o022 or found.st_uid not in (os.geteuid(), 0):
        raise InvalidSetting(
            f"others may have written {path}", hint=f"look at its keys, then chown and chmod 600 {path}"
        )
    with os.fdopen(os.dup(file), "rb") as opened:
        try:
            return {key.id: key for key in msgspec.json.decode(opened.read(), type=_File).keys}
        except msgspec.DecodeError as error:
            raise InvalidSetting(f"{path} cannot be read: {error}", hint="restore it, or move it away") from error


def _unusable(path: Path, error: OSError) -> InvalidSetting:
    return InvalidSetting(f"{path}: {error.strerror}", hint="run it as the user whom the home belongs to")
