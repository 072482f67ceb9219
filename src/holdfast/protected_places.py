"""Places in a directory of the user's that are protected by what is there, and not by a name of their own.

1. A Git directory may have any name: a bare repository, or the place that a `.git` file names. Git knows it by `HEAD`
   beside `objects`, `refs` or `commondir`, and so do we. Its hooks and its `config` make Git run something.
2. A virtual environment may have any name. Python knows it by `pyvenv.cfg`, conda by `conda-meta`. What runs is in its
   `bin`, `lib` and so on; a project may lie beside them.
3. A link is followed in the directory as the run leaves it, also over links of the user's. If it passes a protected
   name, or ends in such a place, it counts as written there. A link that leaves the directory is read as text only.

A place counts if it is one before the run or after it.
"""

import os
import posixpath
import stat
from collections.abc import Iterable
from pathlib import Path

from holdfast.paths import to_bytes, to_text
from holdfast.protected import folded, is_protected
from holdfast.records import Change
from holdfast.resources.descent import Cursor, Parts, look

_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
_IN_ENVIRONMENT = frozenset(("bin", "lib", "lib64", "scripts", "include", "etc", "condabin", "conda-meta"))
_BESIDE_HEAD = ("objects", "refs", "commondir")
_AREA = b"data"
_LONGEST_NAME = 255
_MOST_LINKS = 40
"""Linux follows no more of them in one path."""


class ProtectedPlaces:
    """Looks at the directory `top` through the cursor, and at what the changes put there."""

    def __init__(self, changes: Iterable[Change], cursor: Cursor, *, top: Path) -> None:
        self._changes = {change.path: change for change in changes}
        self._cursor = cursor
        self._top = to_text(os.fsencode(top)).split("/")
        self._known: dict[str, bool] = {}
        self._is_there: dict[str, bool] = {"": True}

    def hold(self, path: str) -> bool:
        """Whether the path is such a place, or in one."""
        unknown: list[str] = []
        while path not in self._known:
            unknown.append(path)
            if not path:
                break
            path = posixpath.dirname(path)
        inside = self._known.get(path, False)
        for place in reversed(unknown):
            inside = self._known[place] = inside or self._is_one(place)
        return inside

    def are_reached_by(self, link: Change) -> bool:
        """Whether a write by the name of this link would reach something protected."""
        at = [*self._top, *posixpath.dirname(link.path).split("/")] if "/" in link.path else [*self._top]
        ahead, links = _steps(link.target), 1
        if link.target.startswith("/"):
            at = [""]
        while ahead:
            name = ahead.pop()
            if name == "..":
                at = at[:-1] or [""]
                continue
            at.append(name)
            if is_protected(name):
                return True
            target = self._target(at)
            if target is not None and (links := links + 1) <= _MOST_LINKS:
                at = [""] if target.startswith("/") else at[:-1]
                ahead += _steps(target)
        inside = self._inside(at)
        return inside is not None and self.hold(inside)

    def _is_one(self, place: str) -> bool:
        above, name = posixpath.split(place)
        if folded(name) in _IN_ENVIRONMENT and any(self._has(above, mark) for mark in _ENVIRONMENT):
            return True
        return self._has(place, "HEAD") and any(self._has(place, beside) for beside in _BESIDE_HEAD)

    def _has(self, place: str, name: str) -> bool:
        change = self._changes.get(f"{place}/{name}" if place else name)
        if change is not None and change.action != "removed":
            return True
        return self._go(place) and look(name.encode(), dir_fd=self._cursor.fd) is not None

    def _go(self, place: str) -> bool:
        """To a directory of the user's. What lies in one that is not there is not looked for."""
        if place in self._is_there and not self._is_there[place]:
            return False
        above = posixpath.dirname(place)
        there = self._is_there.get(above, True) and self._enter(_parts(place))
        self._is_there[place] = there
        return there

    def _enter(self, parts: Parts) -> bool:
        if any(len(part) > _LONGEST_NAME for part in parts):
            return False
        try:
            return self._cursor.go(parts)
        except PermissionError:  # another user's: the run could not see it either
            return False

    def _target(self, at: list[str]) -> str | None:
        """Of a link in the directory, as the run leaves it."""
        path = self._inside(at)
        if not path:
            return None
        if (change := self._changes.get(path)) is not None:
            return change.target if change.kind == "symlink" and change.action != "removed" else None
        *above, name = _parts(path)
        status = (
            look(name, dir_fd=self._cursor.fd) if len(name) <= _LONGEST_NAME and self._enter(tuple(above)) else None
        )
        if status is None or not stat.S_ISLNK(status.st_mode):
            return None
        return to_text(os.readlink(name, dir_fd=self._cursor.fd))

    def _inside(self, at: list[str]) -> str | None:
        depth = len(self._top)
        return "/".join(at[depth:]) if at[:depth] == self._top else None


def _steps(target: str) -> list[str]:
    """The names of a target, the last one first."""
    return [name for name in reversed(target.split("/")) if name not in ("", ".")]


def _parts(place: str) -> Parts:
    return (_AREA, *to_bytes(place).split(b"/")) if place else (_AREA,)
