"""The `holdfast` command: what can be typed. What it then does is in the module of the same name."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli import jupyter, keys, sessions
from holdfast.cli.options import (
    EXIT_CODES,
    OWN_EXIT_CODES,
    CapBy,
    ClientGrace,
    Cpus,
    Describe,
    Disk,
    Egress,
    EgressCeiling,
    Env,
    Home,
    Json,
    Keep,
    McpIdle,
    Memory,
    MemoryCap,
    Resume,
    Save,
    Timeout,
    UndeclaredWrites,
    Undo,
    Versions,
    read_source,
    refuse_given,
    typed,
)
from holdfast.cli.telling import carry_out
from holdfast.cli.telling import told as _told

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys.app)
app.add_typer(jupyter.app)
app.add_typer(sessions.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback(
    epilog="First steps: [b]holdfast doctor[/b] (can this machine do it?), [b]holdfast demo[/b] (what is it like?), "
    "[b]holdfast exec 'print(6 * 7)'[/b]\n\n" + EXIT_CODES + ". All in docs/cli.md."
)
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run untrusted Python in a real Linux sandbox, on your own machine."""


@app.command("exec", epilog=EXIT_CODES)
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
    egress: Egress = None,
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
    source = read_source(code, file)
    with _told(home, as_json=as_json):
        from holdfast.cli.execute import Cell, run_cell

        settings = {
            "memory": memory, "timeout": timeout, "cpus": cpus, "disk": disk, "env": env, "home": home,
            "memory_cap": memory_cap.value, "egress": egress or [],
        }  # fmt: skip
        raise typer.Exit(run_cell(Cell(code=source, settings=settings, save=save, as_json=as_json)))


@app.command(epilog=EXIT_CODES)
def run(
    file: Annotated[
        Path,
        typer.Argument(help="A script or a notebook.", exists=True, dir_okay=False, metavar="JOB.PY|NOTEBOOK.IPYNB"),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script has in sys.argv. Behind [b]--[/b] if one begins with -.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--in", help="A file that it reads: named in the receipt with its SHA-256.", metavar="FILE"),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--out",
            help="A file or pattern that must be there, and not be empty. What is not named is not written: see "
            "[b]--undeclared[/b].",
            metavar="PATTERN",
        ),
    ] = None,
    undeclared: Annotated[
        UndeclaredWrites,
        typer.Option(
            help="Writes that no [b]--out[/b] covers: [b]refuse[/b] rolls the run back, so that nothing appears or is "
            "lost unexpectedly; [b]drop[/b] leaves them unpublished; [b]keep[/b] publishes them."
        ),
    ] = UndeclaredWrites.refuse,
    executable: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or pattern that may get an executable bit. Nothing else new has one.", metavar="PATTERN"
        ),
    ] = None,
    workspace: Annotated[
        Path,
        typer.Option(help="The directory that it reads and changes.", metavar="DIR", exists=True, file_okay=False),
    ] = Path(),
    key: Annotated[str | None, typer.Option(help="Idempotency key: commits at most once here.", metavar="KEY")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run it, say what would change, change nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Run it though the directory is what it made.")] = False,
    memory: Memory = "1G",
    timeout: Timeout = "1h",
    cpus: Cpus = 2.0,
    disk: Disk = "10G",
    egress: Egress = None,
    env: Env = None,
    home: Home = None,
    memory_cap: CapBy = MemoryCap.cgroup,
    as_json: Json = False,
) -> None:
    """Run a file over the current directory as one transaction: [b]python job.py[/b], all or nothing.

    It reads the directory as it is. What it writes is staged, verified, and then appears all at once, with a signed
    receipt; if it fails, the directory is untouched. Run again where nothing has changed, it does nothing.

    Files that your tools run by themselves ([b].git[/b], [b].envrc[/b], [b].vscode[/b], [b]*.pth[/b] and more:
    docs/run.md) appear only if [b]--out[/b] names each exactly. Otherwise the run is rolled back.

    What the file prints goes to stdout. The Run Card before it, and after it the outcome (files with SHA-256, the CKPT,
    the receipt, and what to do next if it failed), go to stderr. Receipts and journal are in [b].holdfast[/b].

    \b
      holdfast run job.py 2024 --in sales.csv --out report.parquet
      holdfast run job.py --rehearse
      holdfast run notebook.ipynb --memory 4G --timeout 2h
      holdfast run job.py -- --verbose
      holdfast verify
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.run import Asked, run_file
        from holdfast.config import Settings, home_path, parse_limits

        limits = parse_limits(memory=memory, timeout=timeout, cpus=cpus, disk=disk)
        settings = Settings(home=home_path(home), memory_cap=memory_cap.value)
        asked = Asked(
            file=file, workspace=workspace, settings=settings, limits=limits, arguments=arguments or [], env=env,
            options={"inputs": inputs or [], "outputs": outputs or [], "key": key, "rehearse": rehearse},
            egress=egress or [], undeclared=undeclared.value, executable=executable or [], force=force, as_json=as_json,
        )  # fmt: skip
        raise typer.Exit(run_file(asked))


@app.command(epilog=EXIT_CODES)
def repl(
    context: typer.Context,
    keep: Keep = False,
    session: Resume = None,
    strict: Annotated[bool, typer.Option("--strict", help="A cell that fails leaves no trace.")] = False,
    memory: Memory = "1G",
    timeout: Timeout = "60s",
    cpus: Cpus = 2.0,
    disk: Disk = "10G",
    undo: Undo = 0,
    versions: Versions = 20,
    egress: Egress = None,
    env: Env = None,
    home: Home = None,
    memory_cap: CapBy = MemoryCap.cgroup,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Talk to one session: cells with history, completion and live output; each is a transaction.

    It is IPython inside: !command, %magic and name? work. :help lists what else there is. From a pipe, cells are
    separated by empty lines or by # %% lines, and the first that fails ends it.

    \b
      holdfast repl --keep
      holdfast repl --session 4f1c0a9be2
      printf 'x = 6\\n\\nx * 7\\n' | holdfast repl
    """
    if session is not None:
        refuse_given(context, "memory", "cpus", "disk", "undo", "versions", "env", "strict")
    with _told(home, as_json=as_json):
        from holdfast.cli.repl.loop import Asked, repl

        settings = {
            "memory": memory, "timeout": timeout, "cpus": cpus, "disk": disk, "env": env, "home": home,
            "undo": undo, "versions": versions, "memory_cap": memory_cap.value,
            "mode": "strict" if strict else "notebook", "egress": egress or [],
        }  # fmt: skip
        raise typer.Exit(repl(Asked(settings=settings, session=session, keep=keep, save=save, as_json=as_json)))


@app.command(epilog="Exit codes: [b]0[/b] all is as its receipts say · [b]1[/b] something is not, and it is named.")
def verify(
    target: Annotated[
        str,
        typer.Argument(
            help="A directory that jobs were run in, an exported one, or the id of a session.", metavar="[PATH|ID]"
        ),
    ] = ".",
    public_key: Annotated[
        Path | None,
        typer.Option(help="The key that you trust. [dim]Default: the home's, or the export's own[/dim]", metavar="PEM"),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Check receipts, signatures, manifests and files, and name the first thing that is wrong.

    Nothing but the public key is needed, and nothing is changed; only what a job that was killed had begun to publish
    in a directory is finished first.
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.verify import check_session

        raise typer.Exit(check_session(target, home=home, public_key=public_key, as_json=as_json))


@app.command(
    epilog="Exit codes: [b]0[/b] all is as its receipts say now (with [b]--dry-run[/b]: would be) · [b]1[/b] something "
    "cannot be repaired, and it is named · [b]3[/b] another program has the home, and it is named."
)
def repair(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A directory that jobs were run in, or the id of a session. [dim]Default: this directory, or all "
            "sessions of the home[/dim]",
            metavar="[PATH|ID]",
            autocompletion=sessions.complete_session,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Render manifests again that were deleted or damaged, from the signed receipts.

    Files, receipts and keys cannot be computed from anything: what is wrong with them is named, and left as it is.

    \b
      holdfast repair --dry-run
      holdfast repair 4f1c
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.repair import repair_sessions

        raise typer.Exit(repair_sessions(target, home=home, dry_run=dry_run, as_json=as_json))


@app.command(epilog=OWN_EXIT_CODES)
def export(
    session: Annotated[
        str,
        typer.Argument(
            help="The id of a session, the beginning of it, or a directory that jobs were run in.",
            metavar="SESSION|PATH",
            autocompletion=sessions.complete_session,
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet.", metavar="DIR")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Copy the files, manifest and receipts of a session, or of jobs, so that anybody can verify them.

    \b
      holdfast export 4f1c handed-on
      holdfast export . ../handed-on
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.export import export as write

        raise typer.Exit(write(session, directory, home=home, as_json=as_json))


@app.command("accept-loss", epilog=OWN_EXIT_CODES)
def accept_loss(home: Home = None, as_json: Json = False) -> None:
    """Go on with a home whose journal is lost, with what is there. No file of a session is removed.

    A start refuses such a home ([b]journal_lost[/b]) and names what is missing. Put a backup in its place if there is
    one: runs that only the lost journal knew are forgotten by this command. See docs/accidents.md.
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.accidents import accept

        raise typer.Exit(accept(home, as_json=as_json))


@app.command(epilog="Ends with its client: on end of input, SIGTERM or Ctrl-C. See docs/mcp.md.")
def mcp(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Option(help="Go on where the last client of that name was; kept again.", metavar="NAME")
    ] = None,
    keep: Keep = False,
    session: Resume = None,
    memory: Memory = "1G",
    timeout: Timeout = "60s",
    cpus: Cpus = 2.0,
    disk: Disk = "10G",
    versions: Versions = 20,
    egress: Egress = None,
    env: Env = None,
    home: Home = None,
    memory_cap: CapBy = MemoryCap.cgroup,
    as_json: Describe = False,
) -> None:
    """Serve one session to an MCP client, over stdin and stdout.

    \b
      holdfast mcp
      holdfast mcp --name claude --memory 2G --timeout 5m
      holdfast mcp --name claude --json | jq .config
    """
    if session is not None:
        refuse_given(context, "memory", "cpus", "disk", "versions", "env", "name")
    with _told(home, as_json=as_json):
        if as_json:
            from holdfast.cli.mcp import describe

            raise typer.Exit(describe(typed(context, but="as_json"), home=home, name=name, session=session))
        from holdfast.cli.progress import rich_report
        from holdfast.server.mcp.stdio import serve

        settings = {
            "memory": memory, "timeout": timeout, "cpus": cpus, "disk": disk, "env": env, "home": home,
            "versions": versions, "memory_cap": memory_cap.value, "mode": "notebook", "resume": session,
            "shared": memory_cap is MemoryCap.cgroup, "egress": egress or [],
        }  # fmt: skip
        with rich_report() as report:
            raise typer.Exit(serve({**settings, "report": report}, keep=keep or session is not None, name=name))


@app.command(epilog="Runs finish when it is told to stop (SIGTERM, Ctrl-C), or are rolled back. See docs/http.md.")
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="[b]0[/b] takes a free one.", min=0, max=65535)] = 8765,
    uds: Annotated[
        Path | None, typer.Option(help="A Unix socket as well, beside the home's own.", metavar="PATH")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="The owner's. [dim]Default: a new one[/dim]", envvar="HOLDFAST_TOKEN", metavar="TEXT"),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name of this server. Again for more.", metavar="NAME[:PORT]")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may use it. Again for more.", metavar="URL")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let others than this machine in, without TLS.")] = False,
    grace: Annotated[str, typer.Option(help="How long runs may go on when it stops.", metavar="TIME")] = "30s",
    client_grace: ClientGrace = "5s",
    mcp_idle: McpIdle = "30m",
    sessions_per_key: Annotated[int, typer.Option(help="The most sessions of one API key.", min=1)] = 100,
    egress: EgressCeiling = None,
    home: Home = None,
    memory_cap: CapBy = MemoryCap.cgroup,
    as_json: Json = False,
    on_demand: Annotated[bool, typer.Option("--on-demand", hidden=True)] = False,
    idle: Annotated[str, typer.Option("--idle", hidden=True)] = "30s",
) -> None:
    """Serve this home over HTTP: sessions, runs with live events, files, receipts.

    \b
      holdfast serve
      holdfast serve --port 0 --json
      holdfast serve --allow-host box.example.org    # behind a proxy of this machine that speaks TLS
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.serve import run_server
        from holdfast.config import Settings, home_path, parse_seconds
        from holdfast.egress.allowed import AllowList
        from holdfast.server.http.hub import HttpSettings
        from holdfast.server.serving import ServeSettings

        grace_s, ceiling = parse_seconds(client_grace, name="client_grace"), AllowList.parse(egress or [])
        settings = ServeSettings(
            home=Settings(home=home_path(home), memory_cap=memory_cap.value), host=host,
            port=None if on_demand else port, uds=uds, token=token, allow_hosts=tuple(allow_host or ()),
            allow_origins=tuple(allow_origin or ()), stop_grace_s=parse_seconds(grace, name="grace"),
            idle_s=parse_seconds(idle, name="idle") if on_demand else None,
            mcp_idle_s=parse_seconds(mcp_idle, name="mcp_idle"),
            http=HttpSettings(grace_s=grace_s, hold_grace_s=grace_s, sessions_per_key=sessions_per_key, egress=ceiling),
        )  # fmt: skip
        raise typer.Exit(run_server(settings, as_json=as_json, quiet=on_demand, insecure=insecure))


@app.command(epilog="Exit codes: [b]0[/b] a strict sandbox is possible here, for you · [b]1[/b] it is not.")
def doctor(home: Home = None, as_json: Json = False) -> None:
    """Try every primitive that the sandbox is made of, and say how to get what is missing.

    It probes for real, in namespaces that end with the probe, and leaves nothing behind.
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.doctor import examine

        raise typer.Exit(examine(home, as_json=as_json))


@app.command(epilog="Exit codes: [b]0[/b] every promise was kept · [b]1[/b] one was not.")
def demo(home: Home = None, env: Env = None, save: Save = None, as_json: Json = False) -> None:
    """Watch it work: some attacks, runs that die, receipts, a pipeline that is killed, and what became of each.

    Every figure and every tick at the end is taken from what happened just then.
    """
    with _told(home, as_json=as_json):
        from holdfast.cli.demo import show

        raise typer.Exit(show(home=home, env=env, save=save, as_json=as_json))


def main() -> None:
    sys.exit(carry_out(app))


if __name__ == "__main__":
    main()
