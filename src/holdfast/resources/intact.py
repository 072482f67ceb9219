"""Whether committed files are still what was committed: on the host somebody could have written to them.

Nobody is to do that; but a receipt must not name the digest of one file where the code has read another. So those that
a run reads or replaces are looked at, and a run without files is not kept waiting:

1. A *sign* (size, times, inode) stands for the content that a file had when it was published, or hashed here.
2. A file that has another sign, or none yet (the host was restarted), is hashed.

A directory of the user's is another matter: there others may write, and `census` looks at all of it.
"""

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from holdfast.durable import closing_fd
from holdfast.errors import FileUnknown, InvalidSetting
from holdfast.records import Change, FileEntry
from holdfast.resources.census import Sign, sign_of
from holdfast.resources.descent import Cursor, Tree, look, open_file, parts_of, split
from holdfast.resources.hashing import digest


class Intact:
    """Remembers the signs of one session's committed files."""

    def __init__(self, files: Tree) -> None:
        self._files = files
        self._signs: dict[str, Sign] = {}

    def remember(self, changes: Iterable[Change]) -> None:
        """What was published just now is what the changes say."""
        with Cursor(self._files) as cursor:
            for change in changes:
                if change.area != "data":
                    continue
                self._signs.pop(change.path, None)
                if change.kind == "file" and change.action != "removed":
                    *parent, name = parts_of(change)
                    if cursor.go(parent) and (status := look(name, dir_fd=cursor.fd)) is not None:
                        self._signs[change.path] = sign_of(status)

    def knows(self, path: str, status: os.stat_result) -> bool:
        """Whether a file has the sign of what is committed."""
        return self._signs.get(path) == sign_of(status)

    def unsure(self, paths: Iterable[str], known: Mapping[str, FileEntry]) -> list[str]:
        """Those that have to be hashed before anything can be said of them; `known` is what is committed."""
        found = []
        with Cursor(self._files) as cursor:
            for path in sorted(set(paths)):
                sign = _sign_at(cursor, path)
                if (sign is not None or path in known) and (sign is None or self._signs.get(path) != sign):
                    found.append(path)
        return found

    def missing(self, known: Iterable[str]) -> list[str]:
        """Committed files that are not there any more."""
        with Cursor(self._files) as cursor:
            return [path for path in sorted(known) if _sign_at(cursor, path) is None]

    def strange(self, paths: Sequence[str], known: Mapping[str, FileEntry]) -> dict[str, FileEntry | None]:
        """Of these, what is not as committed, and what is there instead; None: nothing that could be read."""
        found: dict[str, FileEntry | None] = {}
        for path in paths:
            there, sign = self._hash(path)
            if there is not None and there == known.get(path):
                self._signs[path] = sign
            elif there is not None or path in known:
                found[path] = there
        return found

    def _hash(self, path: str) -> tuple[FileEntry | None, Sign]:
        with suppress(FileUnknown, OSError), closing_fd(open_file(self._files.area("data"), path)) as file:
            sign = sign_of(os.fstat(file))
            sha256, size = digest(file)
            return FileEntry(path=path, sha256=sha256, bytes=size), sign
        return None, (0, 0, 0, 0)


def _sign_at(cursor: Cursor, path: str) -> Sign | None:
    """Of a regular file; a name that no file can have is at none."""
    with suppress(InvalidSetting):
        *parent, name = (b"data", *split(path))
        status = look(name, dir_fd=cursor.fd) if cursor.go(parent) else None
        if status is not None and stat.S_ISREG(status.st_mode):
            return sign_of(status)
    return None
