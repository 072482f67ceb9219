"""The `holdfast` command: what can be typed. What it then does is in the module of the same name."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.errors import HoldfastError, InvalidSetting

_EXIT_CODES = (
    "Exit codes: [b]0[/b] the code ran · [b]1[/b] the code failed · [b]2[/b] wrong usage · "
    "[b]3[/b] holdfast could not run it · [b]124[/b] time-out · [b]130[/b] interrupted · "
    "[b]137[/b] out of memory, or killed"
)

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class MemoryCap(StrEnum):
    cgroup = "cgroup"
    watchdog = "watchdog"


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    def check(value: str) -> str:
        try:
            parse(value)
        except InvalidSetting as error:
            raise typer.BadParameter(f"{error.message}: {error.hint}") from None
        return value

    return check


def _parse_memory(value: str) -> None:
    from holdfast.config import MIN_MEMORY_BYTES, parse_bytes

    if parse_bytes(value, name="memory") < MIN_MEMORY_BYTES:
        raise InvalidSetting(f"memory={value!r} is too little", hint=f"at least {MIN_MEMORY_BYTES >> 20}M")


def _parse_disk(value: str) -> None:
    from holdfast.config import parse_bytes

    parse_bytes(value, name="disk")


def _parse_timeout(value: str) -> None:
    from holdfast.config import parse_seconds

    parse_seconds(value, name="timeout")


Memory = Annotated[str, typer.Option(help="Hard cap of RAM.", metavar="SIZE", callback=_checked(_parse_memory))]
Timeout = Annotated[str, typer.Option(help="Deadline.", metavar="TIME", callback=_checked(_parse_timeout))]
Disk = Annotated[str, typer.Option(help="What the session may store.", metavar="SIZE", callback=_checked(_parse_disk))]
Cpus = Annotated[float, typer.Option(help="Processor time, in cores.", min=0.01)]
Env = Annotated[
    str | None, typer.Option(help="Python for the code: a virtual environment or an interpreter.", metavar="PATH")
]
Home = Annotated[Path | None, typer.Option(help="Home directory. [dim]Default: $HOLDFAST_HOME[/dim]", metavar="DIR")]
Save = Annotated[Path | None, typer.Option(help="Where images go.", metavar="DIR", file_okay=False)]
CapBy = Annotated[MemoryCap, typer.Option(help="[b]watchdog[/b] only samples: for machines without cgroups.")]
Resume = Annotated[
    str | None, typer.Option("--session", help="Go on in a kept session; it is kept again.", metavar="ID")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the session: its files, receipts and keys.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback(
    epilog="First steps: [b]holdfast doctor[/b] (can this machine do it?), [b]holdfast demo[/b] (what is it like?), "
    "[b]holdfast exec 'print(6 * 7)'[/b]"
)
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run untrusted Python in a real Linux sandbox, on your own machine."""


@app.command("exec", epilog=_EXIT_CODES)
def execute(
    code: Annotated[
        str | None, typer.Argument(help="Python, as in a notebook cell. [b]-[/b] or nothing: read from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the code from a file.", exists=True, dir_okay=False)
    ] = None,
    memory: Memory = "1G",
    timeout: Timeout = "60s",
    cpus: Cpus = 2.0,
    disk: Disk = "10G",
    env: Env = None,
    home: Home = None,
    memory_cap: CapBy = MemoryCap.cgroup,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Run one cell in a fresh sandbox.

    Output streams as it comes; the last expression is printed, as in a notebook.

    \b
      holdfast exec '6 * 7'
      holdfast exec --file report.py --memory 2G --timeout 5m
      echo 'import sys; sys.version' | holdfast exec
      holdfast exec --save plots 'import matplotlib.pyplot as plt; plt.plot(range(9))'
      holdfast exec --json '1 / 0' | jq .error.name
    """
    source = _source(code, file)
    with _told(as_json=as_json):
        from holdfast.cli.execute import Cell, run_cell

        settings = {
            "memory": memory, "timeout": timeout, "cpus": cpus, "disk": disk, "env": env, "home": home,
            "memory_cap": memory_cap.value,
        }  # fmt: skip
        raise typer.Exit(run_cell(Cell(code=source, settings=settings, save=save, as_json=as_json)))


@app.command(epilog=_EXIT_CODES)
def run(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="A file of Python.", exists=True, dir_okay=False, metavar="JOB.PY")],
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: in one session it commits at most once.", metavar="KEY")
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(help="A file that must exist afterwards, below /mnt/data. Again for more.", metavar="PATH"),
    ] = None,
    keep: Keep = False,
    session: Resume = None,
    memory: Memory = "1G",
    timeout: Timeout = "60s",
    cpus: Cpus = 2.0,
    disk: Disk = "10G",
    env: Env = None,
    home: Home = None,
    memory_cap: CapBy = MemoryCap.cgroup,
    as_json: Json = False,
) -> None:
    """Run a file as one transaction: all that it does is committed with a receipt, or none of it.

    What the file prints goes to stdout. The Run Card before it, and after it the outcome (files with SHA-256, the CKPT,
    the receipt, and what to do next if it failed), go to stderr.

    \b
      holdfast run job.py --output sales.parquet
      holdfast run job.py --keep --key nightly
      holdfast run next.py --session 4f1c0a9be2
    """
    source = _source(None, job)
    if session is not None:
        _refuse_given(context, "memory", "cpus", "disk", "env")
    with _told(as_json=as_json):
        from holdfast.cli.run import Job, run_job

        settings = {
            "memory": memory, "timeout": timeout, "cpus": cpus, "disk": disk, "env": env, "home": home,
            "memory_cap": memory_cap.value,
        }  # fmt: skip
        asked = Job(
            code=source, settings=settings, session=session, keep=keep, key=key, outputs=output or [], as_json=as_json
        )
        raise typer.Exit(run_job(asked))


@app.command()
def sessions(home: Home = None, as_json: Json = False) -> None:
    """List the sessions that a home keeps: id, version, CKPT, when it changed, and whether it is halted."""
    with _told(as_json=as_json):
        from holdfast.cli.sessions import list_sessions

        raise typer.Exit(list_sessions(home=home, as_json=as_json))


@app.command(epilog="Exit codes: [b]0[/b] all is as its receipts say · [b]1[/b] something is not, and it is named.")
def verify(
    target: Annotated[str, typer.Argument(help="An exported directory, or the id of a session.", metavar="PATH|ID")],
    public_key: Annotated[
        Path | None,
        typer.Option(help="The key that you trust. [dim]Default: the home's, or the export's own[/dim]", metavar="PEM"),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Check receipts, signatures, manifests and files, and name the first thing that is wrong.

    Nothing but the public key is needed, and nothing is changed.
    """
    with _told(as_json=as_json):
        from holdfast.cli.verify import check_session

        raise typer.Exit(check_session(target, home=home, public_key=public_key, as_json=as_json))


@app.command()
def export(
    session: Annotated[str, typer.Argument(help="The id of a session.", metavar="ID")],
    directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet.", metavar="DIR")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Copy a session's files, manifest and receipts, so that anybody can verify them."""
    with _told(as_json=as_json):
        from holdfast.cli.export import export as write

        raise typer.Exit(write(session, directory, home=home, as_json=as_json))


@app.command(epilog="Ends with its client: on end of input, SIGTERM or Ctrl-C. See docs/mcp.md.")
def mcp(
    context: typer.Context,
    keep: Keep = False,
    session: Resume = None,
    memory: Memory = "1G",
    timeout: Timeout = "60s",
    cpus: Cpus = 2.0,
    disk: Disk = "10G",
    env: Env = None,
    home: Home = None,
    memory_cap: CapBy = MemoryCap.cgroup,
) -> None:
    """Serve one session to an MCP client over stdin and stdout: run_code, status, recover."""
    if session is not None:
        _refuse_given(context, "memory", "cpus", "disk", "env")
    with _told():
        from holdfast.cli.progress import rich_report
        from holdfast.server.mcp import Desk, serve

        settings = {
            "memory": memory, "timeout": timeout, "cpus": cpus, "disk": disk, "env": env, "home": home,
            "memory_cap": memory_cap.value, "mode": "notebook", "resume": session,
        }  # fmt: skip
        with rich_report() as report:
            raise typer.Exit(serve(Desk({**settings, "report": report}, keep=keep or session is not None)))


@app.command(epilog="Exit codes: [b]0[/b] a strict sandbox is possible here, for you · [b]1[/b] it is not.")
def doctor(home: Home = None, as_json: Json = False) -> None:
    """Try every primitive that the sandbox is made of, and say how to get what is missing.

    It probes for real, in namespaces that end with the probe, and leaves nothing behind.
    """
    with _told(as_json=as_json):
        from holdfast.cli.doctor import examine

        raise typer.Exit(examine(home, as_json=as_json))


@app.command(epilog="Exit codes: [b]0[/b] every promise was kept · [b]1[/b] one was not.")
def demo(home: Home = None, env: Env = None, save: Save = None) -> None:
    """Watch it work: some attacks, runs that die, receipts, a pipeline that is killed, and what became of each.

    Every figure and every tick at the end is taken from what happened just then.
    """
    with _told():
        from holdfast.cli.demo import show

        raise typer.Exit(show(home=home, env=env, save=save))


def _source(code: str | None, file: Path | None) -> str:
    if code not in (None, "-") and file is not None:
        raise typer.BadParameter("give the code, or --file, not both")
    if code is not None and code != "-":
        return code
    if file is None and sys.stdin.isatty():
        print("holdfast: reading the code from the terminal; Ctrl-D ends it", file=sys.stderr)
    raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the code is not UTF-8: {error}") from None


def _refuse_given(context: typer.Context, *names: str) -> None:
    """A resumed session has the limits that it was made with: another wish would silently come to nothing."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name} is for a new session; one that is resumed has its own")


@contextlib.contextmanager
def _told(*, as_json: bool = False) -> Iterator[None]:
    """Our own failures as a message and a hint, never as a traceback."""
    try:
        yield
    except HoldfastError as error:
        if as_json:
            told = {"code": error.code, "message": error.message, "hint": error.hint}
            print(json.dumps({"status": "refused", "error": told}))
        print(f"holdfast: {error.message} [{error.code}]\nhint: {error.hint}", file=sys.stderr)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
