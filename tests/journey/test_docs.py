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
import select
import signal
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.cli import homes

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/python.md", "docs/transactions.md", "docs/egress.md")
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
            if example.language == "python":
                said = in_python(example, name, names)
            else:
                said = in_shell(example, SESSION=names["s"].id)
            if example.printed is not None:
                assert matches(example.printed, said.rstrip()), f"{name}:{example.line} prints\n{said}"
    finally:
        if (session := names.get("s")) is not None:
            session.close()


@pytest.mark.timeout(300)
def test_the_examples_of_the_command_line_run_in_a_home_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
    try:
        for example in examples(ROOT / "docs/cli.md"):
            said = in_shell(example, HOLDFAST_HOME=str(home), SESSION=(homes.session_ids(home) or [""])[0])
            assert example.printed is not None
            assert matches(example.printed, said.rstrip()), f"docs/cli.md:{example.line} prints\n{said}"
    finally:
        end_server(home)


def test_the_examples_of_a_job_run_in_a_directory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    for directory in (home, project):
        directory.mkdir()
    (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")
    monkeypatch.chdir(project)
    for example in examples(ROOT / "docs/run.md"):
        said = in_shell(example, HOLDFAST_HOME=str(home))
        assert example.printed is not None
        assert matches(example.printed, said.rstrip()), f"docs/run.md:{example.line} prints\n{said}"


def test_the_examples_of_the_http_page_run_against_a_server(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are typed into one shell: what one sets, the next has."""
    monkeypatch.chdir(tmp_path)
    variables = {"URL": server.url, "TOKEN": server.token}
    told = list(examples(ROOT / "docs/http.md"))
    assert told
    for example in told:
        said = in_shell(example._replace(source=f"set -a\n{example.source}\nenv -0 > .kept"), **variables)
        assert matches(example.printed or "", said.rstrip()), f"docs/http.md:{example.line} prints\n{said}"
        variables = dict(each.split("=", 1) for each in Path(".kept").read_text().split("\0") if each)


def end_server(home: Path) -> None:
    """The one that the examples started; it would end by itself after a while."""
    if (owner := homes.owner(home)) is not None:
        server = os.pidfd_open(int(owner.split()[1]))
        signal.pidfd_send_signal(server, signal.SIGTERM)
        assert select.select([server], [], [], 60)[0]
        os.close(server)


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


def in_shell(example: Example, **variables: str) -> str:
    environment = os.environ | variables | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", example.source], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def matches(shown: str, found: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), found, re.S) is not None
