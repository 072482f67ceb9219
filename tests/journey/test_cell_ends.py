"""How a cell can end beside its last line: the same in this process and at a server."""

from typing import Any

import pytest

from holdfast import Session

TRANSPORTS = True


@pytest.mark.parametrize(("mode", "ends"), [("strict", ("committed", None)), ("notebook", ("kept", "SystemExit"))])
def test_exit_ends_a_cell_well_but_in_a_notebook_it_is_an_error(
    where: dict[str, Any], mode: str, ends: tuple[str, str | None]
) -> None:
    with Session(memory="512M", mode=mode, **where) as session:
        run = session.run("x = 5\nimport sys; sys.exit(0)\nx = 6")

        assert (run.status, run.error and run.error.name) == ends
        assert (run.exit_code, session.run("x").text) == (0, "5")


BROKEN = """
class Broken:
    def __repr__(self): raise ValueError("no")
class Html:
    def _repr_html_(self): return 1 / 0
    def __repr__(self): return "html"
broken, html = Broken(), Html()
"""


@pytest.mark.parametrize(
    ("code", "name", "what"),
    [
        ("broken", "ValueError", "the variable `broken`, of type Broken, could not be shown: its __repr__ failed"),
        ("[Broken()]", "ValueError", "a value of type list could not be shown: its __repr__ failed"),
    ],
)
@pytest.mark.parametrize(("mode", "status"), [("strict", "rolled_back"), ("notebook", "kept")])
def test_a_value_whose_own_code_fails_when_it_is_shown_is_an_error_that_names_it(
    where: dict[str, Any], mode: str, status: str, code: str, name: str, what: str
) -> None:
    with Session(memory="512M", mode=mode, **where) as session:
        session.run(BROKEN)
        run = session.run(code)

        assert run.error is not None
        assert (run.status, run.error.name, run.error.hint) == (status, name, what)
        assert what in run.error.traceback
        assert session.run("1").error is None


def test_a_display_that_fails_is_told_on_stderr_and_the_cell_goes_on(session: Session) -> None:
    session.run(BROKEN)
    run = session.run("display(broken)\n7")

    assert (run.status, run.text) == ("committed", "7")
    assert "ValueError: no" in run.stderr
    assert "the variable `broken`, of type Broken, could not be shown" in run.stderr


def test_a_value_that_has_another_form_is_shown_and_what_failed_is_told_on_stderr(session: Session) -> None:
    session.run(BROKEN)
    run = session.run("html")

    assert (run.status, run.text) == ("committed", "html")
    assert "the variable `html`, of type Html, could not be shown: its _repr_html_ failed" in run.stderr


def test_text_for_the_next_cell_comes_with_the_result(session: Session) -> None:
    session.run("open('m.py', 'w').write('x = 1')")
    loaded = session.run("%load m.py").next_input
    offered = session.run("get_ipython().set_next_input('first'); get_ipython().set_next_input('y = 2')").next_input

    assert loaded is not None
    assert (loaded.text, loaded.replace) == ("# %load m.py\nx = 1", True)
    assert offered is not None
    assert (offered.text, offered.replace) == ("y = 2", False)
    assert session.run("1").next_input is None


def test_text_for_the_next_cell_is_bounded(session: Session) -> None:
    run = session.run("get_ipython().set_next_input('x' * 1_000_001)")

    assert (run.error, run.next_input) == (None, None)
    assert "1,000,001 characters are too many" in run.stderr
