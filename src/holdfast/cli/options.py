"""Options that several commands have, as typer reads them; and the exit codes, in one place."""

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import BadEgress, InvalidSetting

EXIT_CODES = (
    "Exit codes: [b]0[/b] the code ran · [b]1[/b] the code failed · [b]2[/b] wrong usage · "
    "[b]3[/b] holdfast could not run it · [b]124[/b] time-out · [b]130[/b] interrupted · "
    "[b]137[/b] out of memory, or killed"
)

OWN_EXIT_CODES = (
    "Exit codes: [b]0[/b] done · [b]2[/b] wrong usage · [b]3[/b] holdfast could not do it, and the hint says what to do"
)
"""Of commands that run nobody's code."""


class MemoryCap(StrEnum):
    cgroup = "cgroup"
    watchdog = "watchdog"


class UndeclaredWrites(StrEnum):
    refuse = "refuse"
    drop = "drop"
    keep = "keep"


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


def _checked_hosts(hosts: list[str] | None) -> list[str] | None:
    from holdfast.egress.allowed import AllowList

    try:
        AllowList.parse(hosts or [])
    except BadEgress as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from None
    return hosts


Memory = Annotated[str, typer.Option(help="Hard cap of RAM.", metavar="SIZE", callback=_checked(_parse_memory))]
Timeout = Annotated[str, typer.Option(help="Deadline.", metavar="TIME", callback=_checked(_parse_timeout))]
Disk = Annotated[str, typer.Option(help="What the session may store.", metavar="SIZE", callback=_checked(_parse_disk))]
Cpus = Annotated[float, typer.Option(help="Processor time, in cores.", min=0.01)]
Undo = Annotated[int, typer.Option(help="Versions that :restore brings memory back of.", min=0, max=16)]
Versions = Annotated[int, typer.Option(help="Latest versions whose files can be brought back.", min=1, max=100)]
Egress = Annotated[
    list[str] | None,
    typer.Option(
        help="A host that the code may reach. Again for more.", metavar="HOST[:PORT]", callback=_checked_hosts
    ),
]
EgressCeiling = Annotated[
    list[str] | None,
    typer.Option(
        help="A host that clients may let sessions reach. Again for more.",
        metavar="HOST[:PORT]",
        callback=_checked_hosts,
    ),
]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ClientGrace = Annotated[
    str, typer.Option(help="How long a client that was cut off has to come back to its run.", metavar="TIME")
]
McpIdle = Annotated[
    str, typer.Option(help="How long an MCP client's session waits for it; then it is kept.", metavar="TIME")
]
Describe = Annotated[
    bool, typer.Option("--json", help="Print as JSON how a client connects with these options; serve nothing.")
]


def read_source(code: str | None, file: Path | None) -> str:
    """The code that was given, or what the file or stdin has."""
    if code not in (None, "-") and file is not None:
        raise typer.BadParameter("give the code, or --file, not both")
    if code is not None and code != "-":
        _refuse_file_name(code)
        return code
    if file is None and sys.stdin.isatty():
        print("holdfast: reading the code from the terminal; Ctrl-D ends it", file=sys.stderr)
    raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the code is not UTF-8: {error}") from None


def _refuse_file_name(code: str) -> None:
    """`job.py` is Python too, and not what was meant."""
    if os.path.isfile(code) and not code.isidentifier() and not code.isdigit():
        raise typer.BadParameter(
            f"{code} is a file: `holdfast run {code}` runs it over this directory, `holdfast exec --file {code}` as a "
            "cell in an empty sandbox"
        )


def is_typed(context: typer.Context, name: str) -> bool:
    """Not a default, nor from the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed(context: typer.Context, *, but: str) -> list[str]:
    """The options as they were typed, in the order of the help; paths in full, for whoever types them elsewhere."""
    words = list[str]()
    for option in context.command.params:
        if option.name is None or option.name == but or not is_typed(context, option.name):
            continue
        value = context.params[option.name]
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words.append(option.opts[0])
            if each is not True:
                words.append(str(each.expanduser().absolute() if isinstance(each, Path) else each))
    return words


def refuse_given(context: typer.Context, *names: str) -> None:
    """A resumed session has the limits that it was made with: another wish would silently come to nothing."""
    for name in names:
        if is_typed(context, name):
            raise typer.BadParameter(f"--{name} is for a new session; one that is resumed has its own")
