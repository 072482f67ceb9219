r"""Paths as text. A Linux name is bytes without "/" and NUL; what we write down is text that loses none of them.

A backslash is written `\\`, a newline `\n`, a carriage return `\r`, and a byte that is no UTF-8 `\xHH`. All other
names read as they are.
"""

import re

_PLAIN = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})
_ESCAPE = re.compile(r"\\(?:(\\)|(n)|(r)|x([0-9a-f]{2}))")


def to_text(path: bytes) -> str:
    r"""
    >>> to_text(b"caf\xc3\xa9/\xff\n")
    'café/\\xff\\n'
    """
    text = path.decode(errors="surrogateescape").translate(_PLAIN)
    return "".join(f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else c for c in text)


def to_bytes(text: str) -> bytes:
    r"""
    >>> to_bytes('café/\\xff\\n')
    b'caf\xc3\xa9/\xff\n'
    """
    return _ESCAPE.sub(_unescape, text).encode(errors="surrogateescape")


def _unescape(found: "re.Match[str]") -> str:
    if found[4]:
        return chr(0xDC00 + int(found[4], 16))
    return "\\" if found[1] else "\n" if found[2] else "\r"
