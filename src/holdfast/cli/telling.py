"""What every command has around it: what a killed job left half done is finished first, and failures of our own are
told as a message and a hint, never as a traceback."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from holdfast.errors import HoldfastError, HomeBusy


@contextlib.contextmanager
def told(home: Path | None = None, *, as_json: bool = False) -> Iterator[None]:
    """Exit code 3 for what Holdfast could not do, 130 for Ctrl-C."""
    try:
        _finish_killed(home)
        yield
    except HoldfastError as error:
        if as_json:
            said = {"code": error.code, "message": error.message, "hint": error.hint}
            print(json.dumps({"status": "refused", "error": said}))
        print(f"holdfast: {error}", file=sys.stderr)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def _finish_killed(home: Path | None) -> None:
    """Of jobs anywhere that were this home's. A command that is about something else goes on all the same."""
    from holdfast import underway
    from holdfast.config import home_path

    where = home_path(home)
    for directory in underway.abandoned(where):
        try:
            _finish(where, directory)
        except HomeBusy:  # a job is there, or somebody who finishes it
            pass
        except HoldfastError as error:
            print(f"holdfast: a job in {directory} was killed, and cannot be finished: {error}", file=sys.stderr)


def _finish(home: Path, directory: Path) -> None:
    from holdfast import engine, underway
    from holdfast.config import Settings
    from holdfast.opening import settle_shared

    ended = engine.wait(lambda: settle_shared(Settings(home=home, workspace=directory)))
    for run, status in ended.items():
        came = {
            "unsettled": "what it had begun cannot be finished yet; `holdfast run` there says why",
            "halted": "what it had begun cannot be finished; `holdfast verify` there says what is wrong",
        }.get(status, f"finished now, {status}")
        print(f"holdfast: {run} was killed in {directory}: {came}", file=sys.stderr)
    if "unsettled" not in ended.values():
        underway.leave(home, directory)
