"""A guest names files, variables, exceptions, threads and processes so that a terminal obeys or a reader is misled."""

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lean import lean_home
from typer.testing import CliRunner

from holdfast.cards import render
from holdfast.cli.main import app
from holdfast.errors import FileUnknown
from holdfast.records import RunCard
from holdfast.server.mcp import answers, protocol
from holdfast.visible import VisibleFormatter, visible, visible_json, visible_lines

BAD = (
    "\x1b]0;owned\x07\x9b2J\x85\x7f\r\b\u202e\u202d\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u200b\u200c\u200d\u2060"
    "\ufeff\u2028\u2029\u00ad\u180e\u3164\U000e0041\ue000"
)
"""What no text of ours may hold."""
NAME = f"a{BAD}\n\tb"
PRELUDE = f"BAD = {NAME!r}\nimport os, threading\n"
CELL = """
open(BAD + ".csv", "w").write("x")
open(b"\\xff\\x9b" + os.fsencode(BAD), "wb").write(b"x")
os.makedirs(BAD + "dir"); os.symlink(BAD, "link" + BAD)
globals()[BAD] = 1
globals()["T"] = type(BAD, (), {})()
threading.Thread(target=threading.Event().wait, name=BAD, daemon=True).start()
import shutil, subprocess
shutil.copy("/usr/bin/sleep", "/tmp/s" + BAD.replace("/", ""))
subprocess.Popen(["/tmp/s" + BAD.replace("/", ""), "100"])
"""
FAILS = """
open("gone" + BAD, "w").write("x"); globals()["g" + BAD] = 1
raise type("E" + BAD, (Exception,), {})("why " + BAD)
"""


def raw(text: str) -> set[str]:
    """Which of them are in a text as they are."""
    hidden = {character for character in BAD if not character.isascii() or not character.isprintable()}
    return {character for character in text if character in hidden or "\ud800" <= character <= "\udfff"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lean_home(tmp_path_factory.mktemp("visible") / "home")


def command(home: Path, *arguments: str | Path, stdin: str = "", cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *map(str, arguments)], input=stdin.encode(), cwd=cwd,
        capture_output=True, timeout=120, check=False, env=os.environ | {"HOLDFAST_HOME": str(home), "COLUMNS": "200"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert b"/holdfast/cli/" not in done.stderr, said
    return said.decode("utf-8", "surrogateescape")


def reading(home: Path, *arguments: str | Path) -> str:
    """A command that only reads, without a process of its own."""
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"HOLDFAST_HOME": str(home), "COLUMNS": "200"})
    return (done.stdout_bytes + done.stderr_bytes).decode("utf-8", "surrogateescape")


def check(said: str, *, names: bool = True) -> None:
    assert raw(said) == set()
    if names:
        assert "\\u202e" in said


def test_one_cell_and_one_that_fails(home: Path) -> None:
    check(command(home, "exec", PRELUDE + CELL))
    check(command(home, "exec", "--json", PRELUDE + FAILS))


def test_a_session_and_what_tells_of_it(home: Path, tmp_path: Path) -> None:
    cells = [PRELUDE + CELL, ":status", ":files", ":history", "# goal \u202e\u2066\nx = 1", ":history", PRELUDE + FAILS]
    check(command(home, "repl", "--keep", stdin="\n# %%\n".join(cells)))
    session = json.loads(reading(home, "ps", "--json"))[-1]["id"]
    run = json.loads(reading(home, "show", session, "--json"))["history"][0]["run"]

    for arguments in ([session], [session, run], [session, "--json"], [session, run, "--json"]):
        check(reading(home, "show", *arguments))
    check(reading(home, "ps"), names=False)
    check(reading(home, "logs", session, run), names=False)
    check(reading(home, "export", session, tmp_path / "one"), names=False)
    for path in (tmp_path / "one/files").iterdir():
        path.write_text("changed")
        check(reading(home, "verify", tmp_path / "one"))
        check(reading(home, "verify", tmp_path / "one", "--json"))


def test_a_job_and_what_tells_of_it(home: Path, tmp_path: Path) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / f"mine{NAME}").write_text("x")
    (directory / "job.py").write_text(PRELUDE + CELL)
    (directory / "fails.py").write_text(PRELUDE + FAILS)
    (directory / "hook.py").write_text(PRELUDE + 'os.makedirs(".git/" + BAD); open("y" + BAD, "w").write("y")')

    check(command(home, "run", "job.py", cwd=directory))
    failed = command(home, "run", "fails.py", cwd=directory)
    check(failed)
    assert "\nTaken back: gone" in failed
    assert "\n    \tb\n" in failed, "lines of an exception's message do not look like ours"
    check(command(home, "run", "hook.py", "--json", cwd=directory))
    check(command(home, "run", "hook.py", "--out", f"no{NAME}*", cwd=directory))
    check(command(home, "run", "hook.py", "--in", f"no{NAME}", cwd=directory))
    (directory / f"{NAME}.csv").write_text("changed")
    os.symlink("x", directory / f"new{NAME}")
    check(reading(home, "verify", directory))


def test_what_a_guest_prints_is_not_altered_in_a_pipe(home: Path) -> None:
    done = command(home, "exec", PRELUDE + "print(BAD)")

    assert done.replace("\r", "") == f"{NAME}\n".replace("\r", "")


def test_errors_cards_logs_and_answers_for_models() -> None:
    error = FileUnknown(f"no file {NAME}", hint=f"not {BAD}")
    assert raw(str(error) + error.message + error.hint) == set()
    card = RunCard(run="run_1", session="s", goal=NAME, code_sha256="ab" * 32, base="CKPT-s-g1-v0-00", arguments=[NAME])
    assert raw(render(card)) == set()
    log = io.StringIO()
    logger = logging.Logger("guest")
    logger.addHandler(handler := logging.StreamHandler(log))
    handler.setFormatter(VisibleFormatter("%(message)s"))
    try:
        raise ValueError(NAME)
    except ValueError:
        logger.exception("it said %s", NAME)
    assert raw(log.getvalue()) == set()
    assert "it said a\\x1b]0;owned" in log.getvalue()
    assert log.getvalue().splitlines()[0].endswith("\\n\\tb"), "a name ends no line of a log"
    answer = protocol._encoded(answers.of_error(error))
    assert raw("".join(getattr(block, "text", "") for block in answer.content)) == set()


def test_every_character_that_cannot_be_seen_is_escaped_and_json_means_the_same() -> None:
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    shown, lines = visible(every), visible_lines(every)

    assert all(character.isprintable() or character in "\u00a0\u1680\u202f\u205f\u3000" or
               "\u2000" <= character <= "\u200a" for character in shown)  # fmt: skip
    assert set(lines) - set(shown) == {"\n", "\t"}
    assert raw(shown) == set()
    assert visible("Zoë's données 漢字 😀 ❤️.csv") == "Zoë's données 漢字 😀 ❤️.csv"
    assert json.loads(visible_json(json.dumps(every, ensure_ascii=False))) == every
    assert visible("\udcff\ud800") == "\\udcff\\ud800"
