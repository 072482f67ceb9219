"""`holdfast exec`: one cell, one sandbox, one exit code."""

from pathlib import Path
from typing import Any

import msgspec

from holdfast.blocking import Session
from holdfast.cli.interrupting import interrupting
from holdfast.cli.progress import rich_report
from holdfast.cli.screen import Screen
from holdfast.cli.terminal import print_json


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    code: str
    settings: dict[str, Any]
    save: Path | None = None
    as_json: bool = False


def run_cell(cell: Cell) -> int:
    """Run it and print what came of it; returns the exit code."""
    with rich_report() as report:
        session = Session(**cell.settings, report=report)
    with session, interrupting(session) as stop:
        screen = Screen(stop)
        if cell.as_json:
            run = session.run(cell.code)
            print_json(run)
        else:
            run = session.run(cell.code, on_stdout=screen.stdout, on_stderr=screen.stderr, on_display=screen.display)
            screen.conclude(run)
        screen.keep_images(run, cell.save, quiet=cell.as_json)
    return screen.exit_code(run)
