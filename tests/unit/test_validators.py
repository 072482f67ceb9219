"""What is tried inside a sandbox. Parquet and images in the guests' own Python, which has the libraries for it."""

import csv
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.config import default_home
from holdfast.guest import validators
from holdfast.kernel import wire


def tried(root: Path, path: str, content: bytes, format: str = "", **terms: Any) -> str:
    (root / path).write_bytes(content)
    probe = wire.Probe(name=path, path=path, format=format or path.rpartition(".")[2], **terms)
    (failure,) = validators.run([probe], {}, root=os.fsencode(root))
    return failure


def asserted(code: str, **names: Any) -> str:
    (failure,) = validators.run([wire.Probe(name=code, code=code)], names)
    return failure


# -- CSV ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"id,name\n1,a\n2,b\n",
        b"id;name\r\n1;a,b\r\n2;b\r\n",
        b"id\tname\n1\ta\n2\tb",
        b"id|name\n1|a\n2|b\n",
        b'id,name\n1,"a\nb, c"\n\n2,"say ""x"""\n',
        "\ufeffid,name\n1,é\n2,b\n".encode(),
        "id,name\n1,é\n2,b\n".encode("latin-1"),
        "id,name\n1,é\n2,b\n".encode("utf-16"),
    ],
)
def test_a_csv_of_any_dialect_is_read(tmp_path: Path, content: bytes) -> None:
    assert tried(tmp_path, "a.csv", content, columns=["name", "id"], min_rows=2) == ""
    assert "2 rows, and at least 3" in tried(tmp_path, "a.csv", content, min_rows=3)
    assert "no column 'price'" in tried(tmp_path, "a.csv", content, columns=["id", "price"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"\n\n", "blank"),
        (b"id,name\n", "0 rows"),
        (b"id,name\n1,a\n\n2", "line 4 has 1 fields, the header has 2"),
        (b'id,name\n1,"a\n', "unexpected end of data"),
        (b"id,name\n\0\0,\0\n", "NUL"),
    ],
)
def test_a_csv_that_was_cut_off_or_is_none_fails(tmp_path: Path, content: bytes, why: str) -> None:
    assert why in tried(tmp_path, "a.csv", content, min_rows=1)


def test_a_csv_of_one_column_has_no_delimiter(tmp_path: Path) -> None:
    assert tried(tmp_path, "a.csv", b"id\n1\n2\n", columns=["id"], min_rows=2) == ""


def test_a_large_csv_is_read_in_little_memory(tmp_path: Path) -> None:
    content = b"id,name\n" + b"1,abcdefgh\n" * 100_000
    (tmp_path / "a.csv").write_bytes(content)
    probe = wire.Probe(name="a.csv", path="a.csv", format="csv", min_rows=100_000)

    tracemalloc.start()
    assert list(validators.run([probe], {}, root=os.fsencode(tmp_path))) == [""]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4 << 20


def test_a_line_without_an_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    assert "a line of more than 64 MiB" in tried(tmp_path, "a.csv", b"id,name\n1," + b"x" * (66 << 20))


def test_the_users_own_limit_of_fields_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()

    tried(tmp_path, "a.csv", b'id\n"x')

    assert csv.field_size_limit() == before


def test_a_long_field_is_a_field(tmp_path: Path) -> None:
    assert tried(tmp_path, "a.csv", b"id,text\n1," + b"x" * 1_000_000 + b"\n", min_rows=1) == ""


# -- JSON --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content", "terms"),
    [
        ("a.json", b'{"id": 1, "deep": [{"x": null}]}', {"columns": ["id"], "min_rows": 1}),
        ("a.json", b' [{"id": 1}, {"id": 2}]\n', {"columns": ["id"], "min_rows": 2}),
        ("a.json", b'"text"', {}),
        ("a.jsonl", b'{"id": 1}\n\n{"id": 2}', {"columns": ["id"], "min_rows": 2}),
    ],
)
def test_json_is_a_document_or_lines_of_them(tmp_path: Path, path: str, content: bytes, terms: dict[str, Any]) -> None:
    assert tried(tmp_path, path, content, "json", **terms) == ""


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("a.json", b"", "empty"),
        ("a.json", b'[{"id": 1}, {"id"', "truncated"),
        ("a.json", b'{"id": 1}\n{"id": 2}\n', "trailing"),
        ("a.json", b'[{"id": NaN}]', "malformed"),
        ("a.json", b'[{"id": "\xff"}]', "not UTF-8"),
        ("a.json", b"[" * 100_000, "nested"),
        ("a.json", b"[1, 2]", "no object"),
        ("a.json", b'[{"id": 1}, {}]', "no column 'id'"),
        ("a.json", b"[]", "0 rows"),
        ("a.jsonl", b'{"id": 1}\n{"id": ', "line 2"),
    ],
)
def test_json_that_is_broken_or_lacks_something_fails(tmp_path: Path, path: str, content: bytes, why: str) -> None:
    assert why in tried(tmp_path, path, content, "json", columns=["id"], min_rows=1)


# -- files -------------------------------------------------------------------------------------------------------


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/etc/passwd")
    probes = [wire.Probe(name=name, path=name, format="csv") for name in ("fifo", "directory", "link", "none")]

    fifo, directory, link, none = validators.run(probes, {}, root=os.fsencode(tmp_path))

    assert "not a regular file" in fifo
    assert "not a regular file" in directory
    assert "symbolic links" in link
    assert "No such file" in none


def test_names_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "\udcff\n.csv").write_bytes(b"id\n1\n")

    probe = wire.Probe(name="odd", path="\\xff\\n.csv", format="csv", min_rows=1)

    assert list(validators.run([probe], {}, root=os.fsencode(tmp_path))) == [""]


# -- assertions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["x == 3", "  x == 3", "assert x > 2", "y = x + 1\ny == 4", "import math; math.pi > x", "x"]
)
def test_an_assertion_that_holds_is_silent(code: str) -> None:
    assert asserted(code, x=3) == ""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x == 4", "it is False"),
        ("None", "it is None"),
        ("assert x == 4", "it does not hold"),
        ("assert x == 4, 'x is off'", "AssertionError: x is off"),
        ("z > 1", "NameError: name 'z' is not defined"),
        ("x ==", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("y = x\ny > 7", "it is False"),
        ("Odd()", "a Odd that is false"),
        ("raise Mute()", "Mute"),
        ("raise ValueError('\\ud800' * 5_000_000)", "ValueError: ???"),
    ],
)
def test_an_assertion_that_fails_says_how(code: str, why: str) -> None:
    class Odd:
        def __bool__(self) -> bool:
            return False

        def __repr__(self) -> str:
            raise RuntimeError

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    failure = asserted(code, x=3, Odd=Odd, Mute=Mute)

    assert why in failure
    assert len(failure) <= 500
    failure.encode()


def test_an_assertion_binds_no_name_of_the_users() -> None:
    names = {"x": 3}

    assert list(validators.run([wire.Probe(name="", code="x = 4; new = 1; del x")], names)) == [""]
    assert names == {"x": 3}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_the_host_stops_ends_all_that_is_left(error: type[BaseException]) -> None:
    probes = [wire.Probe(name="", code=code) for code in ("True", f"raise {error.__name__}", "True")]
    found = validators.run(probes, {})

    assert next(found) == ""
    with pytest.raises(error):
        next(found)


# -- in the guests' own Python -----------------------------------------------------------------------------------

_IN_GUEST = """
import json, os, sys
import numpy, pandas
from PIL import Image
from holdfast.guest import validators
from holdfast.kernel import wire

os.chdir(sys.argv[1])
pandas.DataFrame({"id": range(3), "x": 1.5}).to_parquet("a.parquet")
pandas.DataFrame({"id": []}).to_parquet("none.parquet")
picture = Image.fromarray((numpy.random.default_rng(1).random((64, 48, 3)) * 255).astype("uint8"))
for kind in ("png", "jpeg", "gif", "webp", "bmp", "tiff"):
    picture.save(f"a.{kind}")
for name in ("a.parquet", "a.png", "a.jpeg"):
    whole = open(name, "rb").read()
    open(f"cut-{name}", "wb").write(whole[: len(whole) * 2 // 3])
open("text.png", "w").write("no image")
probes = json.load(sys.stdin)
print(json.dumps(list(validators.run([wire.Probe(name="", **probe) for probe in probes], {}, root=os.getcwdb()))))
"""


def in_guest(tmp_path: Path, *probes: dict[str, Any]) -> list[str]:
    environments = [path for path in (default_home() / "envs").glob("*") if (path / "pyvenv.cfg").exists()]
    if not environments:
        pytest.skip("the guests' environment is not built")
    done = subprocess.run(
        [environments[0] / "bin" / "python", "-c", _IN_GUEST, tmp_path],
        input=json.dumps(probes).encode(),
        env={"PYTHONPATH": str(Path(holdfast.__file__).parents[1])},
        stdout=subprocess.PIPE,
        check=True,
    )
    failures: list[str] = json.loads(done.stdout)
    return failures


def test_parquet_by_its_metadata(tmp_path: Path) -> None:
    whole, rows, columns, cut, empty = in_guest(
        tmp_path,
        {"path": "a.parquet", "format": "parquet", "columns": ["x", "id"], "min_rows": 3},
        {"path": "a.parquet", "format": "parquet", "min_rows": 4},
        {"path": "a.parquet", "format": "parquet", "columns": ["y"]},
        {"path": "cut-a.parquet", "format": "parquet"},
        {"path": "none.parquet", "format": "parquet", "min_rows": 1},
    )

    assert whole == ""
    assert "3 rows" in rows
    assert "no column 'y'; it has 'id', 'x'" in columns
    assert "ArrowInvalid" in cut
    assert "0 rows" in empty


def test_images_of_many_kinds_and_broken_ones(tmp_path: Path) -> None:
    kinds = [{"path": f"a.{kind}", "format": "image"} for kind in ("png", "jpeg", "gif", "webp", "bmp", "tiff")]
    broken = [{"path": path, "format": "image"} for path in ("cut-a.png", "cut-a.jpeg", "text.png")]

    *whole, png, jpeg, text = in_guest(tmp_path, *kinds, *broken)

    assert whole == [""] * 6
    assert png
    assert "truncated" in jpeg
    assert "no image" in text


@pytest.mark.skipif("pyarrow" in sys.modules, reason="this Python has pyarrow")
def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        assert "pyarrow is not installed" in tried(tmp_path, "a.parquet", b"PAR1")
