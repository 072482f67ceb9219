"""The files of a directory of the user's, hashed; and whether somebody changed them meanwhile.

It is not ours: others write there while we look, some of it may be closed to us, and other file systems may be mounted
in it. So nothing is opened by force, no link is followed, and what counts is what the caller may read:

1. Regular files are counted, by path. What Holdfast keeps (`.holdfast`, at any depth), what is mounted there and what
   the caller may not read are not.
2. A digest belongs to a *sign*: size, times and inode. It is taken again until a look at all of the directory finds no
   sign that has no digest: so all of them were true at one moment.
3. Digests are kept from job to job (`.holdfast/hashes`), but never one of a file that had changed shortly before: it
   could have changed again within one tick of the file system's clock, with the same sign.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast import durable
from holdfast.errors import InvalidSetting
from holdfast.paths import to_text
from holdfast.records import FileEntry
from holdfast.resources.descent import HIDDEN, Cursor, Parts
from holdfast.resources.entries import Entry, found_at
from holdfast.resources.hashing import Hasher

_ROUNDS = 5
_RACY_NS = 2_000_000_000
"""The coarsest clock of a file system in use (FAT's)."""
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Sign = tuple[int, int, int, int]
"""Size, mtime, ctime (which nobody can set back), inode."""


class Hashed(msgspec.Struct, frozen=True, array_like=True):
    sign: Sign
    sha256: str


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """A directory at one moment."""

    directory: Path
    files: dict[str, FileEntry]
    signs: dict[str, Sign]
    at_ns: int = 0
    """When the look began, by the clock of the directory's file system."""

    def disturbed(self) -> set[str]:
        """Files that somebody has changed, added or removed since; a look at the signs alone."""
        now = {to_text(b"/".join(parts)): sign_of(status) for parts, status in _look(self.directory)}
        return {path for path in now.keys() | self.signs.keys() if now.get(path) != self.signs.get(path)}


_decoder = msgspec.msgpack.Decoder(dict[str, Hashed])


def take(directory: Path, cache: Path | None = None) -> Census:
    """Hash what has changed since the last time. The cache is a file in `.holdfast`."""
    known = _remembered(cache) if cache is not None else {}
    now_ns = _clock_ns(cache) if cache is not None else 0
    for _ in range(_ROUNDS):
        signs, fresh = dict[str, Sign](), list[tuple[Parts, Sign]]()
        for parts, status in _look(directory):
            path = to_text(b"/".join(parts))
            signs[path] = sign_of(status)
            if path not in known or known[path].sign != signs[path]:
                fresh.append((parts, signs[path]))
        if not fresh:
            break
        known = {path: known[path] for path in signs if path in known} | _hash(directory, fresh)
    else:
        raise InvalidSetting(
            f"{to_text(b'/'.join(fresh[0][0]))} is being written to while it is read",
            hint="let whoever writes there finish, and run it again",
        )
    if cache is not None:
        _remember(cache, {path: known[path] for path in signs}, before_ns=now_ns - _RACY_NS)
    files = {
        path: FileEntry(path=path, sha256=known[path].sha256, bytes=signs[path][0])
        for path in signs if known[path].sha256
    }  # fmt: skip
    return Census(directory=directory, files=files, signs=signs, at_ns=now_ns)


def everything(directory: Path) -> Iterator[tuple[str, Entry]]:
    """Whatever counts or could be seen beside it, parents first: files that can be read, and all that is no file."""
    files = take(directory).files
    with Cursor(directory, open_shut=False) as cursor:
        for parts, status in _counted(cursor):
            path = to_text(b"/".join(parts))
            try:
                found = found_at(parts[-1], status, dir_fd=cursor.fd)
            except FileNotFoundError:  # a link that somebody removed just now
                continue
            if found.kind != "file":
                yield path, found
            elif path in files:
                yield path, msgspec.structs.replace(found, sha256=files[path].sha256, bytes=files[path].bytes)


# -- looking -----------------------------------------------------------------------------------------------------


def _look(directory: Path) -> Iterator[tuple[Parts, os.stat_result]]:
    """Every regular file that counts; parents first, and the cursor's way of going."""
    with Cursor(directory, open_shut=False) as cursor:
        for parts, status in _counted(cursor):
            if stat.S_ISREG(status.st_mode):
                yield parts, status


def _counted(cursor: Cursor) -> Iterator[tuple[Parts, os.stat_result]]:
    """All but what Holdfast keeps and what is mounted there."""
    device = os.fstat(cursor.fd).st_dev
    for parts, status in cursor.walk(into=lambda parts, status: parts[-1] != HIDDEN and status.st_dev == device):
        if HIDDEN not in parts and (status.st_dev == device or not stat.S_ISDIR(status.st_mode)):
            yield parts, status


def sign_of(status: os.stat_result) -> Sign:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


# -- hashing -----------------------------------------------------------------------------------------------------


def _hash(directory: Path, wanted: list[tuple[Parts, Sign]]) -> dict[str, Hashed]:
    """What the caller may not read has no digest. What has gone, or changes while it is read, is left out."""
    found: dict[str, Hashed] = {}
    hashing: list[tuple[str, Sign]] = []
    with Cursor(directory, open_shut=False) as cursor, Hasher() as hasher:
        for parts, sign in wanted:
            path = to_text(b"/".join(parts))
            try:
                file = _open(cursor, parts)
                now = sign_of(os.fstat(file))
                hasher.add(file)
            except PermissionError:
                found[path] = Hashed(sign, "")
            except OSError:  # the next look tells
                continue
            else:
                hashing.append((path, now))
        for (path, sign), digest in zip(hashing, hasher.attempts(), strict=True):
            if digest is not None:
                found[path] = Hashed(sign, digest[0])
    return found


def _open(cursor: Cursor, parts: Parts) -> int:
    if not cursor.go(parts[:-1]):
        raise FileNotFoundError(parts[-1])
    file = os.open(parts[-1], _FILE, dir_fd=cursor.fd)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise FileNotFoundError(parts[-1])


# -- remembering -------------------------------------------------------------------------------------------------


def _remembered(cache: Path) -> Mapping[str, Hashed]:
    with suppress(FileNotFoundError, msgspec.DecodeError):
        return _decoder.decode(cache.read_bytes())
    return {}


def _remember(cache: Path, known: Mapping[str, Hashed], *, before_ns: int) -> None:
    settled = {path: hashed for path, hashed in known.items() if max(hashed.sign[1], hashed.sign[2]) < before_ns}
    durable.write_file(cache, msgspec.msgpack.encode(settled))


def _clock_ns(cache: Path) -> int:
    """What time it is on that file system."""
    clock = cache.with_name("clock")
    clock.write_bytes(b"")
    os.utime(clock)
    return clock.stat().st_ctime_ns
