"""`holdfast doctor`: what the sandbox needs, what this machine has, and how to get the rest."""

import getpass
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast import environments
from holdfast.cli.terminal import console
from holdfast.config import home_path
from holdfast.environments import uv
from holdfast.errors import EnvironmentBuildFailed
from holdfast.sandbox import probe
from holdfast.sandbox.probe import Finding


def examine(home: Path | None, *, as_json: bool) -> int:
    """Probe and tell; 0 if a strict sandbox is possible."""
    path = home_path(home)
    on_its_disk = path if os.access(path, os.W_OK | os.X_OK) else None
    findings = [*probe.find(on_its_disk), *_guests_python(path)]
    possible = probe.strict(findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"strict_sandbox": possible, "user": _user(), "findings": rows}, indent=2))
    else:
        _print(findings, possible, console())
    return 0 if possible else 1


def _guests_python(home: Path) -> list[Finding]:
    built = environments.find(home)
    try:
        binary, remedy = uv.find_binary(), ""
    except EnvironmentBuildFailed as error:
        binary, remedy = "", error.hint
    command = f"python -m holdfast.cli.progress --home {home}"
    return [
        Finding(
            name="uv", required=False, ok=bool(binary) or (None if built else False), detail=binary or "not found",
            why="builds the guests' environment, once", remedy=remedy,
        ),
        Finding(
            name="guests' environment", required=False, ok=built is not None,
            detail=f"{built.packages} packages for Python {built.version}" if built else f"not yet in {home}",
            why="the Python of the guests; the first session builds it",
            remedy="" if built else command,
        ),
    ]  # fmt: skip


def _user() -> str:
    try:
        return f"{getpass.getuser()} (uid {os.geteuid()})"
    except (KeyError, OSError):
        return f"uid {os.geteuid()}"


def _print(findings: list[Finding], possible: bool, screen: Console) -> None:
    screen.print(f"[b]holdfast doctor[/b]  Linux {platform.release()}, {platform.machine()}, {escape(_user())}\n")
    screen.print(_table(findings))
    missing = [finding for finding in findings if finding.ok is False]
    for finding in missing:
        colour = "red" if finding.required else "yellow"
        kind = "required" if finding.required else "optional"
        screen.print(f"\n[{colour}]✗ {escape(finding.name)}[/{colour}] [dim]({kind})[/dim] {escape(finding.detail)}")
        # As it is, unbroken: it will be copied.
        screen.print(finding.remedy, style="bold", markup=False, soft_wrap=True)
    screen.print()
    if possible:
        screen.print(f"[green]✓[/green] A strict sandbox is possible on this machine for {escape(_user())}.")
        return
    names = ", ".join(finding.name for finding in missing if finding.required)
    screen.print(f"[red]✗ No strict sandbox on this machine for {escape(_user())}:[/red] {escape(names)}.")
    screen.print("  Sessions are refused until that is there. Holdfast never runs weaker than asked.")


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("primitive", no_wrap=True)
    table.add_column("found", ratio=9)
    table.add_column("why it matters", ratio=11, style="dim")
    for required in (True, False):
        rows = [finding for finding in findings if finding.required is required]
        table.add_row("", f"[dim i]{'required' if required else 'optional'}[/]")
        for finding in rows:
            table.add_row(_mark(finding), escape(finding.name), escape(finding.detail), escape(finding.why))
        table.add_row()
    return table


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return "[dim]–[/dim]"
    return "[green]✓[/green]" if finding.ok else "[red]✗[/red]" if finding.required else "[yellow]✗[/yellow]"
