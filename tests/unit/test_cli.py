"""What can be typed, and what is said to what cannot."""

import inspect
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.api import CreateSession
from holdfast.cli import demo, jupyter, main
from holdfast.cli.demo.show import Show
from holdfast.cli.main import app
from holdfast.cli.screen import saved
from holdfast.cli.terminal import Writer, harmless
from holdfast.config import Limits, default_home, parse_limits

runner = CliRunner()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_version() -> None:
    assert runner.invoke(app, ["--version"]).output == f"holdfast {holdfast.__version__}\n"


def test_help_teaches_with_examples_and_exit_codes() -> None:
    shown = runner.invoke(app, ["exec", "--help"], env={"COLUMNS": "120"})

    assert shown.exit_code == 0
    assert "holdfast exec '6 * 7'" in shown.output
    assert all(code in shown.output for code in ("124", "130", "137"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["frobnicate"], "No such command"),
        (["exec", "--frobnicate", "1"], "No such option"),
        (["exec", "--memory", "lots", "1"], "is not a size"),
        (["exec", "--memory", "1M", "1"], "at least 64M"),
        (["exec", "--timeout", "soon", "1"], "is not a duration"),
        (["exec", "--disk", "-1", "1"], "is not a size"),
        (["exec", "--cpus", "0", "1"], "--cpus"),
        (["exec", "--memory-cap", "prayer", "1"], "prayer"),
        (["exec", "--file", "/nonexistent", "1"], "does not exist"),
        (["exec", "--file", __file__, "1"], "not both"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(arguments: list[str], told: str) -> None:
    done = runner.invoke(app, arguments, env={"COLUMNS": "200"})

    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize(
    "face", [holdfast.AsyncSession, CreateSession, main.execute, main.run, main.repl, main.mcp, jupyter.install]
)
def test_every_face_has_the_same_limits_unless_told(face: Callable[..., object]) -> None:
    """Each writes them as people do; `Limits` is what they mean."""
    taken = inspect.signature(parse_limits).parameters.keys() - {"timeout"}  # a job has longer, a notebook no deadline
    usual = {name: each.default for name, each in inspect.signature(face).parameters.items() if name in taken}

    assert usual.keys() >= {"memory", "cpus", "disk"}
    assert parse_limits(**usual) == parse_limits() == Limits()


@pytest.mark.parametrize("name", ["job.py", "./notebook.ipynb"])
def test_the_name_of_a_file_is_not_taken_for_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    shown = runner.invoke(app, ["exec", name], env={"COLUMNS": "300"})

    assert shown.exit_code == 2
    assert f"holdfast run {name}" in shown.output
    assert f"holdfast exec --file {name}" in shown.output


def test_code_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_bytes(b"\xff\xfe")

    done = runner.invoke(app, ["exec", "--file", str(tmp_path / "code.py")], env={"COLUMNS": "200"})

    assert done.exit_code == 2
    assert "not UTF-8" in done.output


def test_the_command_line_loads_without_the_engine() -> None:
    heavy = ("anyio", "asyncio", "mcp", "holdfast.client", "holdfast.blocking")
    program = f"import sys, holdfast.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


# -- untrusted text on a terminal ----------------------------------------------------------------------------------


def test_colours_pass_and_commands_to_the_terminal_do_not() -> None:
    assert harmless("\x1b[1;31mred\x1b[0m\n\tx\r") == "\x1b[1;31mred\x1b[0m\n\tx\r"
    assert harmless("\x1b]52;c;ZXZpbA==\x07") == "␛]52;c;ZXZpbA==␇"
    assert harmless("\x1b[2J\x1b[6n\x9b6n") == "␛[2J␛[6n�6n"


def test_a_colour_may_come_in_two_pieces_but_a_command_may_not() -> None:
    screen = Terminal()
    writer = Writer(screen)

    for piece in ("a\x1b", "[3", "1mb\x1b", "]0;title"):
        writer.write(piece)

    assert screen.getvalue() == "a\x1b[31mb␛]0;title"


def test_a_pipe_gets_what_was_printed() -> None:
    pipe = io.StringIO()
    Writer(pipe).write("\x1b]0;title\x07")

    assert pipe.getvalue() == "\x1b]0;title\x07"


def test_a_result_stands_on_a_line_of_its_own() -> None:
    pipe = io.StringIO()
    writer = Writer(pipe)

    writer.write("no newline")
    writer.line("42")
    writer.line("43")

    assert pipe.getvalue() == "no newline\n42\n43\n"


# -- images --------------------------------------------------------------------------------------------------------


def test_images_are_saved_beside_what_is_there(tmp_path: Path) -> None:
    first = saved(tmp_path / "new", "image/png", b"1")
    second = saved(tmp_path / "new", "image/png", b"2")

    assert (first.name, second.name) == ("display-1.png", "display-2.png")
    assert first.read_bytes() == b"1"


def test_a_mime_type_is_the_guests_word_and_no_path(tmp_path: Path) -> None:
    kept = saved(tmp_path, "image/../../../etc/cron.d/x", b"evil")

    assert kept.parent == tmp_path
    assert os.listdir(tmp_path) == [kept.name]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_demo_that_breaks_one_promise_of_many_fails(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(stage: Show, home: Path, **_: object) -> list[Path]:
        stage.promise("kept", "as said", True)
        stage.promise("broken", "not as said", False)
        return [tmp_path / "gone"]

    monkeypatch.setattr(demo, "_play", play)
    assert demo.show(home=tmp_path, env=None, save=None, as_json=as_json) == 1
    told = capsys.readouterr().out
    assert ('"kept": false' if as_json else "a promise was broken") in told


@pytest.mark.parametrize(
    ("variables", "home"),
    [
        ({"HOLDFAST_HOME": "/srv/holdfast", "XDG_DATA_HOME": "/data"}, "/srv/holdfast"),
        ({"XDG_DATA_HOME": "/data"}, "/data/holdfast"),
        ({"HOME": "/home/ann"}, "/home/ann/.local/share/holdfast"),
    ],
)
def test_the_home_is_where_it_was_named_or_in_the_users_data_directory(
    variables: dict[str, str], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOLDFAST_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert default_home() == Path(home)
