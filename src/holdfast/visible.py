r"""Text from a guest in what we say ourselves: each character can be seen, and none steers a terminal or a reader.

Names of files, variables, processes and packages are a guest's choice. With an escape sequence one could command a
terminal; with U+202E it would read backwards; with a zero-width character it would pass for another. Such characters
are written as Python writes them in a string: `\x1b`, `\u202e`. What code prints itself stays as it is.
"""

import logging
import re
import unicodedata

_PERHAPS = re.compile(r"[^ -~]")
_PERHAPS_IN_LINES = re.compile(r"[^ -~\n\t]")
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180e\u180f\u2800\u3164\uffa0")
"""Printable to Unicode, and nothing to see."""
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def visible(text: str) -> str:
    r"""Text on one line.

    >>> visible("a\u202efdp.exe\n\x1b[2J\x9b é 漢"), visible("\udcff\u2066\u200b")
    ('a\\u202efdp.exe\\n\\x1b[2J\\x9b é 漢', '\\udcff\\u2066\\u200b')
    """
    return _PERHAPS.sub(_shown, text)


def visible_lines(text: str) -> str:
    """Text of several lines. Names in it must have been through `visible`, or one could end its line."""
    return _PERHAPS_IN_LINES.sub(_shown, text)


def visible_json(text: str) -> str:
    r"""JSON that means the same.

    >>> visible_json('{"path": "a\u202eb\U000e0001"}')
    '{"path": "a\\u202eb\\udb40\\udc01"}'
    """
    return _PERHAPS_IN_LINES.sub(_escaped_in_json, text)


class VisibleFormatter(logging.Formatter):
    """A log's lines. What is logged may name what a guest has named, and a traceback quotes it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return visible_lines(super().format(record))


def _is_seen(character: str) -> bool:
    if character in _BLANK:
        return False
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _shown(found: "re.Match[str]") -> str:
    character = found[0]
    if _is_seen(character):
        return character
    if character in _SHORT:
        return _SHORT[character]
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _escaped_in_json(found: "re.Match[str]") -> str:
    if _is_seen(found[0]):
        return found[0]
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
