"""Where a cell ends, and what may be typed about sessions."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.cli.repl import cells

runner = CliRunner()


@pytest.mark.parametrize(
    "text",
    [
        "x = 1", "x = [\n    1,\n    2]", "if x: y", "if x:\n    y\n", "def f():\n    return 1\n    ", "!ls -l",
        "%time f()", "%%bash\nls\n", "x?", "?x", "", "# only a comment", "await f()", ":status", ":restore", "x = = 1",
        "'unclosed", "files = !ls", "print('a'); 1",
    ],
)  # fmt: skip
def test_complete(text: str) -> None:
    assert cells.is_complete(text)


@pytest.mark.parametrize(
    "text",
    [
        "if x:", "if x:\n    y", "def f():", "@decorated", "x = (1,", "'''open", "x = 1 \\", "%%bash", "%%bash\nls",
        "for name in names:\n    !cat {name}", "class A:\n    def f(self):\n\n", "with a as b:", "[\n\n\n",
    ],
)  # fmt: skip
def test_not_complete(text: str) -> None:
    assert not cells.is_complete(text)


@pytest.mark.parametrize(
    ("before", "indent"),
    [
        ("if x:", 4), ("if x:  # why", 4), ("    for y in x:", 8), ("    y", 4), ("    return y", 0),
        ("        pass", 4), ("x = 1", 0), ("", 0),
    ],
)  # fmt: skip
def test_indentation(before: str, indent: int) -> None:
    assert cells.indentation(before) == " " * indent


def test_a_text_is_cut_at_empty_lines_that_end_a_statement() -> None:
    text = (
        "x = 1\n\n\nif x:\n    y = 2\n\nelse:\n    y = 3\n\ntext = '''\n\nx\n'''\n \n%%bash\nls\n\n:status\r\n\r\nx\n"
    )

    assert cells.split(text) == [
        "x = 1", "if x:\n    y = 2\n\nelse:\n    y = 3", "text = '''\n\nx\n'''", "%%bash\nls", ":status", "x",
    ]  # fmt: skip


def test_marks_cut_where_there_are_any() -> None:
    assert cells.split("# %% first\nx = 1\n\ny = 2\n# %%\nz") == ["x = 1\n\ny = 2", "z"]


@pytest.mark.parametrize(("text", "ends"), [("exit", True), (" quit()\n", True), ("exit_code", False), ("", False)])
def test_who_types_exit_wants_to_leave(text: str, ends: bool) -> None:
    assert cells.is_end(text) is ends


def test_nothing_is_no_cell() -> None:
    assert cells.split("\n \n") == []


@pytest.mark.parametrize("command", ["exec", "run", "repl", "ps", "show", "logs", "reset", "end", "verify", "export",
                                     "doctor", "demo"])  # fmt: skip
def test_every_command_speaks_json_and_says_so(command: str) -> None:
    shown = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"})

    assert shown.exit_code == 0
    assert "--json" in shown.output


def test_the_shell_completes_without_the_engine(tmp_path: Path) -> None:
    program = """if True:
        import sys
        from holdfast.cli.sessions import complete_session
        class Context: params = {"home": sys.argv[1]}
        assert complete_session(Context, "") == []
        print([name for name in ("anyio", "httpx2", "holdfast.client") if name in sys.modules])
        """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("[]\n", "")
