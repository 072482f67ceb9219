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
from collections.abc import Mapping

from holdfast import paths
from holdfast.records import FileEntry

_LINE = re.compile(rb"(\\?)([0-9a-f]{64})  (.+)", re.DOTALL)
_ESCAPE = re.compile(rb"\\(.?)", re.DOTALL)
_ESCAPES = {b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r"}
_MEANINGS = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}
_SPECIAL = re.compile(rb"[\\\n\r]")


def render(files: Mapping[str, FileEntry]) -> bytes:
    """The manifest's text."""
    rows = sorted((paths.to_bytes(path), entry.sha256) for path, entry in files.items())
    return b"".join(line(name, sha256) for name, sha256 in rows)


def line(name: bytes, sha256: str) -> bytes:
    """One file's line, by the bytes of its path."""
    if name == b"-":
        name = b"./-"
    escaped = _SPECIAL.sub(lambda found: _ESCAPES[found[0]], name)
    mark = b"\\" if escaped != name else b""
    return mark + sha256.encode() + b"  " + escaped + b"\n"


def digest(files: Mapping[str, FileEntry]) -> str:
    """SHA-256 of the text."""
    return hashlib.sha256(render(files)).hexdigest()


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
