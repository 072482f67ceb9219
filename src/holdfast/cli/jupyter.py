"""`holdfast jupyter`: the kernelspec by which JupyterLab, VS Code, nbclient and papermill find the kernel."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import Cpus, Disk, Egress, Env, Home, Json, Keep, Memory, Timeout, is_typed
from holdfast.cli.telling import told

app = typer.Typer(name="jupyter", no_args_is_help=True, help="A Jupyter kernel whose cells run in a sandbox.")

Name = Annotated[str, typer.Option(help="How Jupyter calls it.", metavar="NAME")]


@app.command(epilog="See docs/jupyter.md.")
def install(
    context: typer.Context,
    user: Annotated[bool, typer.Option("--user", help="For yourself. [dim]Default[/dim]")] = False,
    sys_prefix: Annotated[bool, typer.Option("--sys-prefix", help="Into this Python environment.")] = False,
    prefix: Annotated[Path | None, typer.Option(help="Into another prefix.", metavar="DIR", file_okay=False)] = None,
    name: Name = "holdfast",
    display_name: Annotated[str, typer.Option(help="How people see it.", metavar="TEXT")] = "Holdfast",
    memory: Memory = "1G",
    timeout: Timeout = "366d",
    cpus: Cpus = 2.0,
    disk: Disk = "10G",
    egress: Egress = None,
    env: Env = None,
    home: Home = None,
    upload: Annotated[
        list[str] | None,
        typer.Option(
            help="Files beside a notebook that its sandbox gets at the start. Again for more.", metavar="GLOB"
        ),
    ] = None,
    inert: Annotated[bool, typer.Option("--inert", help="Leave out displays that a browser would execute.")] = False,
    keep: Keep = False,
    as_json: Json = False,
) -> None:
    """Install the kernelspec. One of the same name is replaced.

    What is given here holds for each notebook of this kernelspec; a second one, with another name, may have other
    limits. A cell has no deadline unless --timeout gives it one.

    \b
      holdfast jupyter install --sys-prefix
      holdfast jupyter install --name holdfast-8g --display-name 'Holdfast 8G' --memory 8G
    """
    if sum((user, sys_prefix, prefix is not None)) > 1:
        raise typer.BadParameter("give one of --user, --sys-prefix and --prefix")
    with told(home, as_json=as_json):
        from holdfast.jupyter import settings, spec

        options = {
            "memory": memory, "timeout": timeout, "cpus": cpus, "disk": disk, "env": env, "home": home,
            "egress": egress, "upload": upload, "inert": inert, "keep": keep,
        }  # fmt: skip
        where = spec.install(
            name=name,
            display_name=display_name,
            prefix=sys.prefix if sys_prefix else None if prefix is None else str(prefix),
            arguments=settings.arguments(_named(context, options)),
        )
        _say(f"installed in {where}", name=name, directory=where, as_json=as_json)


@app.command()
def uninstall(name: Name = "holdfast", as_json: Json = False) -> None:
    """Remove the kernelspec. Sessions that are kept stay."""
    with told(as_json=as_json):
        from holdfast.jupyter import spec

        where = spec.uninstall(name=name)
        _say(f"removed {where}", name=name, directory=where, as_json=as_json)


def _named(context: typer.Context, options: dict[str, object]) -> dict[str, object]:
    """Only what was typed: the rest may still be chosen by environment variables, when a kernel starts."""
    return {option: value for option, value in options.items() if is_typed(context, option)}


def _say(text: str, *, name: str, directory: Path, as_json: bool) -> None:
    print(json.dumps({"name": name, "directory": str(directory)}) if as_json else text)
