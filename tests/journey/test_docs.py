"""The pages' examples run as they stand, and what they show is what comes out.

A block behind `<!-- runs -->` is an example. The blocks of a page are one story: they share their names, and a
directory. In Python, what stands in a comment behind an expression is its value; `: …` behind it is for the reader. A
block of text that follows an example is what it prints. `…` stands for anything.
"""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/python.md", "docs/transactions.md")
EXAMPLE = re.compile(r"<!-- runs -->\n```(python|sh)\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.S | re.M)


class Example(NamedTuple):
    language: str
    source: str
    printed: str | None
    line: int


def examples(page: Path) -> Iterator[Example]:
    text = page.read_text()
    for found in EXAMPLE.finditer(text):
        printed = None if found[3] is None else found[3].rstrip()
        yield Example(found[1], found[2], printed, text.count("\n", 0, found.start(2)))


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run_and_give_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    told = list(examples(ROOT / name))
    assert told
    try:
        for example in told:
            said = in_python(example, name, names) if example.language == "python" else in_shell(example, names)
            if example.printed is not None:
                assert matches(example.printed, said.rstrip()), f"{name}:{example.line} prints\n{said}"
    finally:
        if (session := names.get("s")) is not None:
            session.close()


def in_python(example: Example, page: str, names: dict[str, Any]) -> str:
    tree = ast.parse(example.source)
    shown = dict(comments(example.source))
    shows = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and node.end_lineno in shown]
    for node in shows:
        node.value = ast.copy_location(
            ast.Call(ast.Name("_shows", ast.Load()), [ast.Constant(node.end_lineno), node.value], []), node.value
        )

    def shows_value(line: int, value: object) -> None:
        wanted = shown[line]
        told = [wanted, *(wanted[: colon.start()] for colon in re.finditer(": ", wanted))]
        assert any(matches(each, repr(value)) for each in told), f"{page}:{example.line + line} is {value!r}"

    names["_shows"] = shows_value
    code = compile(ast.fix_missing_locations(tree), page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, names)
    return said.getvalue()


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.removeprefix("#").strip()


def in_shell(example: Example, names: dict[str, Any]) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SESSION": names["s"].id, "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", example.source], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def matches(shown: str, found: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), found, re.S) is not None
