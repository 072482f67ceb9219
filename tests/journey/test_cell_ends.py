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
