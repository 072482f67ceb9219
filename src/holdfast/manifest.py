r"""All files of a version, in the form that GNU `sha256sum` writes and `sha256sum -c` reads.

    <64 hex digits>  <path relative to /mnt/data>

1. One line a file, sorted by the bytes of the path: one set of files has one text, and so one digest.
2. A name is its bytes as they are, UTF-8 or not. Only if it holds a backslash, a newline or a carriage return does the
   line begin with a backslash, and the name has `\\`, `\n` and `\r` in their place.
3. A file called `-` is written `./-`: alone, it would mean standard input.

>>> render({"a.csv": FileEntry(path="a.csv", sha256="ab" * 32, bytes=3)}) == b"ab" * 32 + b"  a.csv\n"
True
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import islice

from holdfast import paths
from holdfast.records import FileEntry

_LINE = re.compile(rb"(\\?)([0-9a-f]{64})  (.+)", re.DOTALL)
_ESCAPE = re.compile(rb"\\(.?)", re.DOTALL)
_ESCAPES = {b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r"}
_MEANINGS = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}
_SPECIAL = re.compile(rb"[\\\n\r]")
_FEW = 1_000
"""So many lines are put in their places one by one; more are sorted in."""
_HASHED_AT_ONCE = 1_000


def render(files: Mapping[str, FileEntry]) -> bytes:
    """The manifest's text."""
    return Lines.of(files).text()


def line(name: bytes, sha256: str) -> bytes:
    """One file's line, by the bytes of its path."""
    if name == b"-":
        name = b"./-"
    escaped = _SPECIAL.sub(lambda found: _ESCAPES[found[0]], name)
    mark = b"\\" if escaped != name else b""
    return mark + sha256.encode() + b"  " + escaped + b"\n"


def digest(files: Mapping[str, FileEntry]) -> str:
    """SHA-256 of the text."""
    return Lines.of(files).sha256()


class Lines:
    """The lines of a manifest, sorted. They never change: `after` makes others, and renders only what is new."""

    def __init__(self, names: list[bytes], lines: list[bytes]) -> None:
        self._names, self._lines = names, lines

    @classmethod
    def of(cls, files: Mapping[str, FileEntry]) -> "Lines":
        by_name = {paths.to_bytes(path): entry.sha256 for path, entry in files.items()}
        names = sorted(by_name)
        return cls(names, [line(name, by_name[name]) for name in names])

    def after(self, put: Iterable[FileEntry], gone: Iterable[str]) -> "Lines":
        """The same with some files put in place, and others gone."""
        new = {paths.to_bytes(path): b"" for path in gone}
        for entry in put:
            name = paths.to_bytes(entry.path)
            new[name] = line(name, entry.sha256)
        if len(new) > _FEW:
            return self._sorted_in(new)
        names, lines = self._names.copy(), self._lines.copy()
        for name, text in new.items():
            at = bisect_left(names, name)
            known = at < len(names) and names[at] == name
            if text:
                names[at : at + known], lines[at : at + known] = [name], [text]
            elif known:
                del names[at], lines[at]
        return Lines(names, lines)

    def _sorted_in(self, new: dict[bytes, bytes]) -> "Lines":
        lines = dict(zip(self._names, self._lines, strict=True))
        lines.update(new)
        names = sorted(name for name, text in lines.items() if text)
        return Lines(names, [lines[name] for name in names])

    def text(self) -> bytes:
        return b"".join(self._lines)

    def sha256(self) -> str:
        """Of the text. Other threads go on while it is hashed."""
        digest, rest = hashlib.sha256(), iter(self._lines)
        while part := b"".join(islice(rest, _HASHED_AT_ONCE)):
            digest.update(part)
        return digest.hexdigest()


def parse(text: bytes) -> dict[str, str]:
    """SHA-256 by path (as `paths.to_text` writes it). Raises ValueError that names the line if it is not ours."""
    if text and not text.endswith(b"\n"):
        raise ValueError("the last line is cut short")
    found = dict(_parse_line(number, each) for number, each in enumerate(text.split(b"\n")[:-1], 1))
    if len(found) != text.count(b"\n"):
        raise ValueError("a path is in it twice")
    return found


def _parse_line(number: int, text: bytes) -> tuple[str, str]:
    matched = _LINE.fullmatch(text)
    if not matched:
        raise ValueError(f"line {number} is no line of a manifest")
    mark, sha256, name = matched.groups()
    if mark:
        name = _ESCAPE.sub(lambda found: _meaning(number, found[1]), name)
    return paths.to_text(b"-" if name == b"./-" else name), sha256.decode()


def _meaning(number: int, escaped: bytes) -> bytes:
    if escaped not in _MEANINGS:
        raise ValueError(f"line {number} has an escape that `sha256sum` does not write")
    return _MEANINGS[escaped]
