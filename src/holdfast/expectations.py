"""What a caller may declare of a run: the files it reads, the files it must leave behind, and what must hold then.

1. A path is relative to /mnt/data, or begins with it, and never leads outside; it is kept as `paths.to_text` writes it.
2. A path may be a pattern (`patterns`).
3. Nothing here looks at a disk: nonsense is refused before anything runs.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from holdfast import paths
from holdfast.errors import InvalidSetting, PatternsTooCostly
from holdfast.kernel import wire
from holdfast.patterns import HINT, Files

WORKSPACE = "/mnt/data"
_MAX_PATH_BYTES = 4096
_MAX_DECLARED = 1_000
_MAX_ASSERTION = 10_000
_MAX_PROBES = wire.MAX_WORDS - _MAX_DECLARED
"""Files that are tried by format: a kernel answers each probe with one word, and asserts are probes too."""

_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".tsv"),
    "json": (".json", ".jsonl", ".ndjson", ".geojson"),
    "image": (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
}
_TABLES = ("parquet", "csv")

PathLike: TypeAlias = str | os.PathLike[str]
Declared: TypeAlias = Sequence[PathLike] | Mapping[PathLike, Mapping[str, Any] | str | None]
"""`["a.csv", "plots/*.png"]`, `{"a.csv": "csv"}` or `{"a.parquet": {"columns": ["id"], "min_rows": 1}}`."""


class Expected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output that must exist afterwards and not be empty."""

    path: str
    """Or a pattern; as `paths.to_text` writes it."""
    format: str = ""
    """parquet, csv, json or image; empty: any content will do."""
    columns: list[str] = []
    min_rows: int = 0


class _Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may stand behind an output's path."""

    format: str = ""
    columns: list[str] = []
    min_rows: int | None = None


def outputs(declared: Declared | None) -> list[Expected]:
    """
    >>> outputs({"/mnt/data/sales.parquet": {"columns": ["id"]}})
    [Expected(path='sales.parquet', format='parquet', columns=['id'], min_rows=1)]
    """
    declared = _several(declared, what="outputs")
    if not isinstance(declared, Mapping):
        return [Expected(path=path) for path in _paths(declared)]
    expected = {path: _expect(path, declared[given]) for given in declared for path in [_path(given)]}
    if len(expected) < len(declared):
        raise InvalidSetting("two outputs are the same path", hint="name each output once")
    return list(expected.values())


def inputs(declared: Sequence[PathLike] | None) -> list[str]:
    """
    >>> inputs(["/mnt/data/raw.csv", "./raw.csv", "more/*.csv"])
    ['raw.csv', 'more/*.csv']
    """
    return _paths(_several(declared, what="inputs"))


def patterns(declared: Sequence[PathLike] | None, *, what: str) -> list[str]:
    """Files and patterns, as `inputs` reads them."""
    return _paths(_several(declared, what=what))


def asserts(declared: Sequence[str] | None) -> list[str]:
    """
    >>> asserts(["len(df) > 0"])
    ['len(df) > 0']
    """
    for code in (given := _several(declared, what="asserts")):
        if not isinstance(code, str) or not code.strip():
            raise InvalidSetting(f"{code!r} is no assertion", hint='write Python as text: asserts=["len(df) > 0"]')
        if len(code) > _MAX_ASSERTION:
            raise InvalidSetting(
                f"an assertion of {len(code):,} characters", hint="define a function in the code and assert its call"
            )
    return list(given)


def probes(expected: Iterable[Expected], files: Iterable[str], *, asserts: Iterable[str] = ()) -> list[wire.Probe]:
    """What is to be tried inside the sandbox. Outputs that are not among the files fail without a trial.

    Raises PatternsTooCostly."""
    by_format = list(islice(_formats(expected, Files(files)), _MAX_PROBES + 1))
    if len(by_format) > _MAX_PROBES:
        raise PatternsTooCostly(f"outputs with a format mean more than {_MAX_PROBES:,} files", hint=HINT)
    return by_format + [wire.Probe(name=code, code=code) for code in asserts]


def _formats(expected: Iterable[Expected], files: Files) -> Iterator[wire.Probe]:
    for one in expected:
        for path in files.meant_by(one.path) if one.format else ():
            yield wire.Probe(name=path, path=path, format=one.format, columns=one.columns, min_rows=one.min_rows)


# -- from what the caller wrote ----------------------------------------------------------------------------------


def _several(declared: Any, *, what: str) -> Any:
    if declared is None:
        return []
    if isinstance(declared, (str, bytes, os.PathLike)) or not isinstance(declared, (Sequence, Mapping)):
        raise InvalidSetting(f"{what}={declared!r} is not a list", hint=f"write {what}=[…], also for a single one")
    if isinstance(declared, Mapping) and what != "outputs":
        raise InvalidSetting(f"{what} is a mapping", hint=f"write {what}=[…]; only outputs have terms")
    if len(declared) > _MAX_DECLARED:
        raise InvalidSetting(f"{len(declared):,} {what}", hint=f"at most {_MAX_DECLARED:,}; a pattern covers many")
    return declared


def _paths(declared: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(_path(given) for given in declared))


def _path(given: Any) -> str:
    if not isinstance(given, (str, os.PathLike)) or not isinstance(name := os.fspath(given), str):
        raise InvalidSetting(f"{given!r} is no path", hint='write it as text, relative to /mnt/data: "plots/a.png"')
    inside = name[len(WORKSPACE) :] if name == WORKSPACE or name.startswith(f"{WORKSPACE}/") else name
    if inside is name and name.startswith("/"):
        raise _bad_path(name, "is not in the workspace", "only files in /mnt/data are verified and have receipts")
    components = [part for part in inside.split("/") if part not in ("", ".")]
    if not components or name.endswith("/"):
        raise _bad_path(name, "names no file", 'for what is in a directory write a pattern: "plots/*" or "plots/**"')
    if ".." in components:
        raise _bad_path(name, 'has ".." in it', "name the file by its path from /mnt/data down")
    return paths.to_text(_encoded("/".join(components)))


def _encoded(name: str) -> bytes:
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        raise _bad_path(name, "is no text that a file name can have", "check how it was decoded") from None
    if b"\0" in encoded or len(encoded) > _MAX_PATH_BYTES:
        raise _bad_path(name, "cannot be a path on Linux", f"no NUL, at most {_MAX_PATH_BYTES:,} bytes")
    return encoded


def _bad_path(name: str, why: str, hint: str) -> InvalidSetting:
    return InvalidSetting(f"path {name[:200]!r} {why}", hint=hint)


def _expect(path: str, given: Any) -> Expected:
    terms = _terms(path, given)
    stated = bool(terms.columns or terms.min_rows is not None)
    format = terms.format or (_format_of(path) if stated else "")
    if format == "image" and stated:
        raise InvalidSetting(f"output {path}: an image has no rows or columns", hint='write "image" alone')
    # A table without a row is what a filter gone wrong leaves behind; who wants one says min_rows=0.
    min_rows = terms.min_rows if terms.min_rows is not None else int(format in _TABLES)
    return Expected(path=path, format=format, columns=terms.columns, min_rows=min_rows)


def _terms(path: str, given: Any) -> _Terms:
    try:
        terms = msgspec.convert({"format": given} if isinstance(given, str) else given or {}, _Terms)
    except msgspec.ValidationError as error:
        raise InvalidSetting(f"output {path}: {error}", hint='like {"format": "csv", "columns": ["id"]}') from None
    if terms.format and terms.format not in _SUFFIXES:
        raise InvalidSetting(f"output {path}: unknown format {terms.format!r}", hint=f"one of {', '.join(_SUFFIXES)}")
    if terms.min_rows is not None and not 0 <= terms.min_rows < 1 << 63:
        raise InvalidSetting(f"output {path}: min_rows={terms.min_rows}", hint="0 or more")
    return terms


def _format_of(path: str) -> str:
    found = [format for format, suffixes in _SUFFIXES.items() if path.lower().endswith(suffixes)]
    if not found:
        raise InvalidSetting(
            f"output {path}: rows and columns of what?", hint=f'say "format": one of {", ".join(_SUFFIXES)}'
        )
    return found[0]
