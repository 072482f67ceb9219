"""Whether a file is what its format says: parquet, csv, json, image.

Each check takes an open file and raises `Unfit`, or whatever the library that reads the format raises. Files are read
in pieces, so that their size does not matter: except for a JSON document, which is mapped, and the pixels of an image,
which are decoded up to a limit.

pyarrow and Pillow are the guest's own and need not be there.
"""

import codecs
import csv
import importlib
import io
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, TypeVar

import msgspec

from holdfast.kernel import wire

_MAX_LINE = 64 << 20
_PIECE = 1 << 20
_MAX_PIXELS = 64_000_000
"""Of an image that is decoded whole: a quarter of a gigabyte."""
_DELIMITERS = (",", ";", "\t", "|")
_SAMPLE_ROWS = 20
_SAMPLE_BYTES = 1 << 16
T = TypeVar("T")


class Unfit(Exception):
    """The file is not what it was declared to be; the message says how."""


def check_parquet(file: IO[bytes], probe: wire.Probe) -> None:
    """By its metadata, which a writer writes last: a file that was not finished has none."""
    table = _library("pyarrow.parquet", "pyarrow").ParquetFile(file)
    _require_columns(probe, table.schema_arrow.names)
    _require_rows(probe, table.metadata.num_rows)


def check_image(file: IO[bytes], probe: wire.Probe) -> None:
    """`verify` sees broken chunks, and only decoding sees that a JPEG ends too early."""
    images = _library("PIL.Image", "Pillow")
    try:
        images.open(file).verify()
    except images.UnidentifiedImageError:
        raise Unfit("no image of a kind that Pillow knows") from None
    file.seek(0)  # an image that was verified cannot be used again
    image = images.open(file)
    width, height = image.size
    if not width or not height:
        raise Unfit(f"an image of {width} × {height} pixels")
    if width * height <= _MAX_PIXELS:
        image.load()


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unfit(f"cannot be checked: {package} is not installed in this environment") from None


# -- CSV ---------------------------------------------------------------------------------------------------------


def check_csv(file: IO[bytes], probe: wire.Probe) -> None:
    """The first line names the columns; all others have as many fields, or the file was cut off."""
    encoding = _encoding(file)
    _require_lines(file, zeros=encoding == "utf-16")
    delimiter = _delimiter(file, encoding, probe)
    with io.TextIOWrapper(file, encoding=encoding, errors="surrogateescape", newline="") as text, _long_fields():
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(filter(None, rows), None)
        if header is None:
            raise Unfit("no header: the file is blank")
        _require_columns(probe, header)
        widths = Counter(map(len, rows))  # nothing here is slower than the parser itself
        if widths.keys() - {0, len(header)}:
            raise Unfit(_first_odd(text, delimiter, len(header)))
        _require_rows(probe, widths[len(header)])


def _first_odd(text: IO[str], delimiter: str, width: int) -> str:
    text.seek(0)
    rows = csv.reader(text, delimiter=delimiter)
    found = next(len(row) for row in rows if len(row) not in (0, width))
    return f"line {rows.line_num} has {found} fields, the header has {width}"


def _require_lines(file: IO[bytes], *, zeros: bool) -> None:
    """Text, and in lines: a parser takes in a whole line, however long it is."""
    length = 0
    while piece := file.read(_PIECE):
        if not zeros and b"\0" in piece:
            raise Unfit("NUL bytes: not text")
        length = 0 if b"\n" in piece or b"\r" in piece else length + len(piece)
        if length > _MAX_LINE:
            raise Unfit(f"a line of more than {_MAX_LINE >> 20} MiB")
    file.seek(0)


def _encoding(file: IO[bytes]) -> str:
    """Anything that extends ASCII is read as UTF-8, byte by byte where it is not: only the structure matters here."""
    start = file.read(2)
    file.seek(0)
    return "utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _delimiter(file: IO[bytes], encoding: str, probe: wire.Probe) -> str:
    """The one that finds the declared columns, and columns at all in the most of the first lines."""
    sample = file.read(_SAMPLE_BYTES)
    file.seek(0)
    lines = list(io.StringIO(sample.decode(encoding, "replace"), newline=""))
    if len(sample) == _SAMPLE_BYTES and len(lines) > 1:
        lines.pop()  # it may be cut off
    return max(_DELIMITERS, key=lambda delimiter: _merit(lines, delimiter, probe.columns))


def _merit(lines: list[str], delimiter: str, columns: list[str]) -> tuple[bool, int, int]:
    try:
        rows = [row for row in islice(csv.reader(lines, delimiter=delimiter), _SAMPLE_ROWS) if row]
    except csv.Error:
        return False, 0, 0
    header = rows[0] if rows else []
    agreeing = sum(len(row) == len(header) for row in rows) if len(header) > 1 else 0
    return set(columns) <= set(header), agreeing, len(header)


@contextmanager
def _long_fields() -> Iterator[None]:
    """The limit is the whole process's, so the user's own is put back."""
    before = csv.field_size_limit(_MAX_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


# -- JSON --------------------------------------------------------------------------------------------------------


def check_json(file: IO[bytes], probe: wire.Probe) -> None:
    """One document, or one per line where the name says so. Strictly: NaN is none of JSON's numbers."""
    _require_utf8(file)
    lines = probe.path.lower().endswith((".jsonl", ".ndjson"))
    rows = _json_lines(file) if lines else _json_rows(file)
    _require_rows(probe, sum(1 for row in rows if _has_keys(row, probe)))


def _json_lines(file: IO[bytes]) -> Iterator[msgspec.Raw]:
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
        if len(line) == _MAX_LINE:
            raise Unfit(f"line {number} is longer than {_MAX_LINE >> 20} MiB")
        if line.strip():
            yield _parsed(line, msgspec.Raw, where=f"line {number}: ")


def _json_rows(file: IO[bytes]) -> Iterator[msgspec.Raw]:
    """The elements of an array; anything else is a single row."""
    # Not closed by hand: the rows are views of it.
    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    document = _parsed(whole, msgspec.Raw)
    if bytes(memoryview(document)[:1]) == b"[":
        yield from _parsed(document, list[msgspec.Raw])
    else:
        yield document


def _parsed(data: Any, kind: type[T], *, where: str = "") -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise Unfit(f"{where}{error}") from None
    except RecursionError:
        raise Unfit(f"{where}nested too deeply to be checked") from None


def _has_keys(row: msgspec.Raw, probe: wire.Probe) -> bool:
    if probe.columns:
        try:
            _require_columns(probe, msgspec.json.decode(row, type=dict[str, msgspec.Raw]))
        except msgspec.ValidationError:
            raise Unfit("a row is no object: it has no columns") from None
    return True


def _require_utf8(file: IO[bytes]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while piece := file.read(_PIECE):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise Unfit("not UTF-8, which JSON has to be") from None
    file.seek(0)


# -- rows and columns --------------------------------------------------------------------------------------------


def _require_columns(probe: wire.Probe, found: Iterable[str]) -> None:
    present = list(found)
    if missing := [column for column in probe.columns if column not in present]:
        raise Unfit(f"no column {', '.join(map(repr, missing[:10]))}; it has {', '.join(map(repr, present[:20]))}")


def _require_rows(probe: wire.Probe, found: int) -> None:
    if found < probe.min_rows:
        raise Unfit(f"{found:,} rows, and at least {probe.min_rows:,} were declared")


CHECKS: dict[str, Callable[[IO[bytes], wire.Probe], None]] = {
    "parquet": check_parquet, "csv": check_csv, "json": check_json, "image": check_image,
}  # fmt: skip
