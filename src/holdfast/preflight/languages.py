"""Files named by what is not Python: SQL in a string, and shell commands."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from holdfast.preflight.steps import Steps
from holdfast.records import Noun

# Quantifiers are possessive (`\s++`) where what follows could match the same text: else a long run of it, and no match
# at its end, is tried from every character of it to every other.
_MOST_CHARACTERS = 20_000
_QUOTED = r"\s*+'([^'\n]++)'"
_SQL_COPY_FROM = re.compile(rf"\bcopy\s++[\w.\"]++\s*+(?:\([^()]*+\)\s*+)?from{_QUOTED}", re.IGNORECASE)
_SQL_READS = re.compile(
    rf"\b(?:from|join)\s{_QUOTED}|\b(?:read_\w++|parquet_scan|sniff_csv)\s*+\(\s*+(?:\[)?{_QUOTED}", re.IGNORECASE
)
_SQL_WRITES = re.compile(rf"\bto\s{_QUOTED}|\bexport\s++database\s{_QUOTED}", re.IGNORECASE)
_SQL_OPENS = re.compile(rf"\battach\s++(?:database\s++)?(?:if\s++not\s++exists\s++)?{_QUOTED}", re.IGNORECASE)
_DESCRIPTOR = re.compile(r"(?<!\S)\d++(?=[<>])")
_EXPANDED = re.compile(r"\$\{[^{}]*+\}|\$\([^()]*+\)|\$\w++|\{[^{}]*+\}")
_MATCHED = 10
"""Characters of SQL that are looked through in the time of one step. `shlex` takes about a step for each."""
_SEPARATORS = frozenset({";", "|", "||", "&&", "&", "(", ")", "\n", "|&"})
_VALUED = {"curl": ("-o", "--output"), "wget": ("-O", "--output-document")}


class Effect(Noun, frozen=True, kw_only=True):
    """What a call or command does to files, by the paths that its text has."""

    reads: list[str] = msgspec.field(default_factory=list)
    writes: list[str] = msgspec.field(default_factory=list)
    removes: list[str] = msgspec.field(default_factory=list)


def sql(text: str, steps: Steps) -> Effect:
    """
    >>> sql("COPY (SELECT * FROM 'a.csv') TO 'b.parquet' (FORMAT parquet)", Steps())
    Effect(reads=['a.csv'], writes=['b.parquet'], removes=[])
    """
    text = text[:_MOST_CHARACTERS]
    steps.take(1 + len(text) // _MATCHED)
    opened = _found(_SQL_OPENS, text)
    reads = _found(_SQL_COPY_FROM, text) + _found(_SQL_READS, text)
    return Effect(reads=list(dict.fromkeys(reads)) + opened, writes=_found(_SQL_WRITES, text) + opened)


def _found(pattern: "re.Pattern[str]", text: str) -> list[str]:
    return [group for match in pattern.finditer(text) for group in match.groups() if group]


def shell(script: str, steps: Steps) -> Effect:
    """
    >>> shell("sort < in.txt | uniq -c > counts.txt; rm in.txt", Steps())
    Effect(reads=['in.txt'], writes=['counts.txt'], removes=['in.txt'])
    """
    steps.take(min(len(script), _MOST_CHARACTERS))
    effects = [effect for line in _lines(script) for effect in _commands(line)]
    return Effect(
        reads=[path for effect in effects for path in effect.reads],
        writes=[path for effect in effects for path in effect.writes],
        removes=[path for effect in effects for path in effect.removes],
    )


def _lines(script: str) -> list[str]:
    return script[:_MOST_CHARACTERS].replace("\\\n", " ").split("\n")


def _commands(line: str) -> Iterator[Effect]:
    text = _DESCRIPTOR.sub("", _EXPANDED.sub("*", line))  # `2> file` is to us what `> file` is
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&<>()")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote that is still open: it goes on in the next line
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word not in _SEPARATORS:
            command.append(word)
        elif command:
            yield _command(command)
            command = []


def _command(words: list[str]) -> Effect:
    reads, writes, plain = [], [], []
    following = iter(words)
    for word in following:
        if word in (">", ">>", ">|", "&>", "&>>"):
            writes.append(next(following, ""))
        elif word == "<":
            reads.append(next(following, ""))
        elif word in (">&", "<&", "<<", "<<<"):  # to another descriptor; from the script itself
            next(following, "")
        else:
            plain.append(word)
    named = _program(plain)
    return Effect(reads=reads + named.reads, writes=_files(writes) + named.writes, removes=named.removes)


def _program(words: list[str]) -> Effect:
    name, *rest = words or [""]
    paths = [word for word in rest if not word.startswith("-")]
    if name == "cp" and len(paths) == 2:
        return Effect(reads=paths[:1], writes=paths[1:])
    if name == "mv" and len(paths) == 2:
        return Effect(reads=paths[:1], writes=paths[1:], removes=paths[:1])
    if name == "rm":
        return Effect(removes=paths)
    if name == "cat":
        return Effect(reads=paths)
    if name in ("tee", "touch"):
        return Effect(writes=paths)
    options = _VALUED.get(name, ())
    return Effect(writes=[value for option, value in pairwise(rest) if option in options])


def _files(paths: list[str]) -> list[str]:
    return [path for path in paths if path and not path.startswith(("/dev/", "&"))]
