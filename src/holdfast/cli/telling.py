"""What every command has around it: what a killed job left half done is finished first, and failures of our own are
told as a message and a hint, never as a traceback."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import typer

from holdfast.cli import unheard
from holdfast.errors import DISK, HoldfastError, HomeBusy, as_told
from holdfast.visible import visible, visible_lines

# typer has click within, and names only this one of its errors.
_WrongUsage = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


def carry_out(app: typer.Typer) -> int:
    """What was typed; the exit code. Wrong usage is shown by typer, but to who asks for JSON told as any failure is."""
    unheard.go_on()
    typed = sys.argv[1:]
    if "--json" not in typed[: typed.index("--") if "--" in typed else None]:
        app()  # it exits by itself
    try:
        return int(app(standalone_mode=False, prog_name="holdfast") or 0)
    except _WrongUsage as error:
        command = error.ctx.command_path if error.ctx else "holdfast"
        message, hint = error.format_message(), f"`{command} --help` has all that it takes"
        _refuse("wrong_usage", message, hint)
        print(visible_lines(f"holdfast: {message} [wrong_usage]\nhint: {hint}"), file=sys.stderr)
        return error.exit_code


@contextlib.contextmanager
def told(home: Path | None = None, *, as_json: bool = False) -> Iterator[None]:
    """Exit code 3 for what Holdfast could not do, 130 for Ctrl-C."""
    try:
        _finish_killed(home)
        yield
    except (HoldfastError, OSError) as failure:
        if isinstance(failure, OSError) and failure.errno not in DISK:
            raise
        error = as_told(failure)
        if as_json:
            _refuse(error.code, error.message, error.hint)
        print(f"holdfast: {error}", file=sys.stderr)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def _refuse(code: str, message: str, hint: str) -> None:
    print(json.dumps({"status": "refused", "error": {"code": code, "message": message, "hint": hint}}))


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
            killed = f"a job in {visible(str(directory))} was killed, and cannot be finished"
            print(f"holdfast: {killed}: {error}", file=sys.stderr)


def _finish(home: Path, directory: Path) -> None:
    from holdfast import engine
    from holdfast.config import Settings
    from holdfast.opening import settle_shared

    ended = engine.wait(lambda: settle_shared(Settings(home=home, workspace=directory)))
    for run, status in ended.items():
        came = {
            "unsettled": "what it had begun cannot be finished yet; `holdfast run` there says why",
            "halted": "what it had begun cannot be finished; `holdfast verify` there says what is wrong",
        }.get(status, f"finished now, {status}")
        print(f"holdfast: {run} was killed in {visible(str(directory))}: {came}", file=sys.stderr)
