"""What can be typed about the sessions that are there: ps, show, logs, reset, end."""

from typing import Annotated

import typer

from holdfast.cli.options import OWN_EXIT_CODES, Home, Json
from holdfast.cli.telling import told

app = typer.Typer()


def complete_session(context: typer.Context, incomplete: str) -> list[str]:
    """Ids for the shell's Tab key; it says nothing where there is nothing to say."""
    from holdfast.cli import homes
    from holdfast.config import home_path
    from holdfast.errors import HoldfastError

    named = context.params.get("home")
    try:
        known = homes.session_ids(home_path(named))
    except HoldfastError:
        return []
    return [each for each in reversed(known) if each.startswith(incomplete)]


Session = Annotated[
    str,
    typer.Argument(
        help="The id of a session, or the beginning of it.", metavar="SESSION", autocompletion=complete_session
    ),
]
Place = Annotated[
    str,
    typer.Argument(
        help="The id of a session, the beginning of it, or a directory that jobs were run in.",
        metavar="SESSION|PATH",
        autocompletion=complete_session,
    ),
]
Run = Annotated[str | None, typer.Argument(help="The id of a run, or the beginning of it.", metavar="RUN")]


@app.command(epilog=OWN_EXIT_CODES)
def ps(home: Home = None, as_json: Json = False) -> None:
    """List the sessions of a home, live and kept: state, version, CKPT, memory against its cap, age, running run.

    A server that owns the home is asked; otherwise the journal is read, beside whoever owns it.
    """
    with told(home, as_json=as_json):
        from holdfast.cli.ps import list_sessions

        raise typer.Exit(list_sessions(home=home, as_json=as_json))


@app.command(epilog=OWN_EXIT_CODES)
def show(session: Place, run: Run = None, home: Home = None, as_json: Json = False) -> None:
    """Show where a session stands (names, files, losses, runs); or one run: card, outcome, outputs, receipt, code.

    \b
      holdfast show 4f1c
      holdfast show 4f1c run_26e3
      holdfast show .
    """
    with told(home, as_json=as_json):
        from holdfast.cli.show import show as write

        raise typer.Exit(write(session, run, home=home, as_json=as_json))


@app.command(epilog=OWN_EXIT_CODES)
def logs(
    session: Place,
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print what a run printed: the latest, unless one is named. stdout goes to stdout, stderr to stderr."""
    with told(home, as_json=as_json):
        from holdfast.cli.logs import logs as write

        raise typer.Exit(write(session, run, home=home, follow=follow, as_json=as_json))


@app.command(epilog=OWN_EXIT_CODES)
def reset(session: Session, home: Home = None, as_json: Json = False) -> None:
    """Purge a live session's memory and end its processes. Its files stay."""
    with told(home, as_json=as_json):
        from holdfast.cli.ending import reset as carry_out

        raise typer.Exit(carry_out(session, home=home, as_json=as_json))


@app.command(epilog=f"{OWN_EXIT_CODES} · [b]1[/b] you did not want it after all.")
def end(
    session: Session,
    keep: Annotated[bool, typer.Option("--keep", help="Leave its files and receipts, to go on later.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """End a live session, or delete a kept one: its files and receipts go with it, unless --keep."""
    with told(home, as_json=as_json):
        from holdfast.cli.ending import end as carry_out

        raise typer.Exit(carry_out(session, home=home, keep=keep, sure=yes or as_json, as_json=as_json))
