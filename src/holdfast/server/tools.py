"""What an MCP client may call: each tool is the struct of its arguments."""

from typing import Annotated, Any

import msgspec
from mcp.types import Tool, ToolAnnotations

from holdfast.errors import InvalidSetting

INSTRUCTIONS = """\
A sandboxed Python session in which every run is a transaction. Variables and the files in /mnt/data stay from call to \
call. Each answer ends with its status: `committed`; `kept` (your code raised, and what it did until then stays); or \
`rolled_back` (memory and files are as before the run, and the answer says why and what to do). A CKPT names the \
state after a run: pass it as `expect` if your next code relies on that state. Nothing runs between two calls. After \
anything unexpected call `status` or `recover`; never assume that a variable is still there."""


class RunCode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run Python in the session, as a notebook cell: the last expression is shown, figures come back as images, \
variables stay. /mnt/data is the working directory. No network. Code that fails is an answer, not an error of the tool.
"""

    code: Annotated[str, msgspec.Meta(description="Python, as in a notebook cell; `!command` and `%magic` work.")]
    timeout: Annotated[
        float | None, msgspec.Meta(description="Seconds that it may take; past them it is rolled back.")
    ] = None
    key: Annotated[
        str | None,
        msgspec.Meta(description="Idempotency key: runs with it commit at most once; again, the recorded answer."),
    ] = None
    expect: Annotated[
        str | None,
        msgspec.Meta(description="The CKPT that you believe the session is at; elsewhere, nothing runs (state_moved)."),
    ] = None
    outputs: Annotated[
        list[str] | dict[str, Any] | None,
        msgspec.Meta(
            description="Files below /mnt/data that must exist afterwards, or the run is rolled back: paths or "
            'patterns, or {"a.parquet": {"format": "parquet", "columns": ["id"], "min_rows": 1}}.'
        ),
    ] = None


class Status(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the session stands: its CKPT, version and generation, live variables, files, and the latest runs."""


class Recover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """After a reset or a loss of memory: the cause, what is lost, what is there, and the steps back with their code. \
Changes nothing."""


Call = RunCode | Status | Recover
TOOLS: dict[str, type[Call]] = {"run_code": RunCode, "status": Status, "recover": Recover}


def listed() -> list[Tool]:
    return [_tool(name, call) for name, call in TOOLS.items()]


def parse(name: str, arguments: dict[str, Any] | None) -> Call:
    """What was asked for. Nonsense is told to the model: it can do better."""
    try:
        return msgspec.convert(arguments or {}, TOOLS[name])
    except KeyError:
        raise InvalidSetting(f"there is no tool {name!r}", hint=f"the tools are {', '.join(TOOLS)}") from None
    except msgspec.ValidationError as error:
        raise InvalidSetting(f"{name} cannot take that: {error}", hint="see the tool's input schema") from None


def _tool(name: str, call: type[Call]) -> Tool:
    reads = call is not RunCode
    return Tool(
        name=name,
        description=(call.__doc__ or "").strip(),
        input_schema=_schema(call),
        annotations=ToolAnnotations(
            title=name.replace("_", " ").capitalize(),
            read_only_hint=reads,
            destructive_hint=not reads,  # code may remove files; an earlier version still has them
            idempotent_hint=reads,
            open_world_hint=False,
        ),
    )


def _schema(call: type[Call]) -> dict[str, Any]:
    """One object without references: not every client follows them."""
    schema: dict[str, Any] = msgspec.json.schema(call)["$defs"][call.__name__]
    del schema["description"]  # the tool has it
    return schema
