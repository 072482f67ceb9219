"""What an MCP client may call: each tool is the struct of its arguments, and its docstring is what models read."""

from typing import Annotated, Any, Literal

import msgspec
from mcp.types import Tool, ToolAnnotations

from holdfast.errors import InvalidSetting

INSTRUCTIONS = """\
Holdfast is a sandboxed Python session in which every run is a transaction: it commits with a signed receipt, or it is \
rolled back. Variables, and the files in /mnt/data, stay from call to call.

How to work:
1. Plan. Before code that is long, slow or overwrites files, call `plan` (nothing runs) or `rehearse` (it runs and is \
taken back). They show what is read, what would be written, and which names memory lacks.
2. Run the smallest unit that proves something, look at the answer, then go on. Declare the files that must come out \
as `outputs`. Give work that must not happen twice a `key`.
3. Claim only what an answer shows. `committed`: done, and the files are listed with their SHA-256. `kept`: the code \
raised, and what it did until then stays. `rolled_back`: nothing of it stays; do what the answer says. Requests that \
it lists under `May have happened` did leave: check them before you send them again.
4. Nothing runs between two calls. Never promise background work, and never report something as in progress.
5. After a reset, a reconnect or `state_moved` call `recover` and follow its steps. Never assume that a variable is \
still there. Pass the last CKPT as `expect` if your code relies on that state: elsewhere, nothing runs."""

Code = Annotated[str, msgspec.Meta(description="Python, as in a notebook cell; `!command` and `%magic` work.")]
Timeout = Annotated[
    float | None, msgspec.Meta(description="Seconds that it may take; past them it is stopped and rolled back.")
]
Outputs = Annotated[
    list[str] | dict[str, Any] | None,
    msgspec.Meta(
        description="Files below /mnt/data that must exist afterwards, or the run is rolled back: paths or patterns, "
        'or {"a.parquet": {"format": "parquet", "columns": ["id"], "min_rows": 1}}.'
    ),
]
Expect = Annotated[
    str | None,
    msgspec.Meta(description="The CKPT that you believe the session is at; elsewhere, nothing runs (state_moved)."),
]
FilePath = Annotated[str, msgspec.Meta(description="Relative to /mnt/data, or beginning with it.")]
Place = Annotated[int, msgspec.Meta(ge=1)]


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of the tools: a mistyped argument is refused, for it may be a promise that nobody keeps."""


class Plan(Arguments, frozen=True):
    """Look at code before it runs: the Run Card. It says which files the code will read and write, which names it \
needs that memory does not hold, and what looks wrong. Nothing is executed and nothing changes. Use it before code \
that is long, slow or overwrites files; then call run_code with the same code."""

    code: Code
    outputs: Outputs = None
    expect: Expect = None


class RunCode(Arguments, frozen=True):
    """Run Python in the session, as a notebook cell: the last expression is shown, figures come back as images, \
variables stay. /mnt/data is the working directory. No network, but for hosts that `status` lists. The run is a \
transaction: if it crashes, exceeds its time or memory, or misses a declared output, memory and files are as before, \
and the answer says why and what to do. Code that raises is an answer, not an error of the tool. Nothing goes on after \
the answer. Run one small step a call."""

    code: Code
    timeout: Timeout = None
    key: Annotated[
        str | None,
        msgspec.Meta(
            description="Idempotency key: code that must not happen twice. At most one run with it commits; the same "
            "call again gets the recorded answer."
        ),
    ] = None
    expect: Expect = None
    outputs: Outputs = None


class Rehearse(Arguments, frozen=True):
    """Execute code for real and then take all of it back: the answer shows its output, and which files and names it \
would change. Memory and files stay exactly as they are, and there is no receipt: what was rehearsed did not happen. \
Use it before something that is hard to undo; then call run_code with the same code."""

    code: Code
    timeout: Timeout = None
    expect: Expect = None
    outputs: Outputs = None


class Status(Arguments, frozen=True):
    """Where the session stands: CKPT, version, live variables, files, the latest runs, memory in use, and whether \
a run is under way. Changes nothing and does not wait. Call it first in a conversation, and whenever in doubt."""


class Recover(Arguments, frozen=True):
    """After a reset, a reconnect, a loss of memory or `state_moved`: the cause, what is lost, what is still there, \
and the steps back with the code of the runs that are to be run again. Changes nothing; the steps are yours to take."""


class Restore(Arguments, frozen=True):
    """Bring the files of an earlier CKPT back, as a new version. Memory stays as it is: the answer names the \
variables that are newer than the files. `status` lists the CKPTs of the latest runs."""

    ckpt: Annotated[str, msgspec.Meta(description="A CKPT of this session, from an answer or from `status`.")]


class ListFiles(Arguments, frozen=True):
    """The committed files in /mnt/data, with size and SHA-256."""

    pattern: Annotated[
        str | None,
        msgspec.Meta(description="Only these: `*.csv`, `plots/*.png`; `**` stands for any number of directories."),
    ] = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=500, description="At most so many.")] = 100


class ReadFile(Arguments, frozen=True):
    """Read a committed file of /mnt/data: text, as much as fits into one answer, which says where to go on; or an \
image (PNG, JPEG, GIF, WebP), which you then see. Other formats are refused: load those with run_code. For a large \
table print its head with run_code instead."""

    path: FilePath
    start_line: Annotated[Place | None, msgspec.Meta(description="First line wanted, from 1.")] = None
    end_line: Annotated[Place | None, msgspec.Meta(description="Last line wanted.")] = None
    start_byte: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        msgspec.Meta(description="First byte wanted, from 0; instead of lines, for very long ones."),
    ] = None
    end_byte: Annotated[Place | None, msgspec.Meta(description="The byte to stop before.")] = None


class WriteFile(Arguments, frozen=True):
    """Put a file into /mnt/data, or replace one: a version and a receipt of its own, as if a run had written it. \
Directories are made. An earlier version still has what was there."""

    path: FilePath
    content: Annotated[str, msgspec.Meta(description="All of it.")]
    encoding: Annotated[Literal["text", "base64"], msgspec.Meta(description="`base64` for what is not text.")] = "text"


class Reset(Arguments, frozen=True):
    """Begin with an empty memory: every variable is lost and every process ended, also a run that is under way. Files \
stay. The last resort, when memory is broken or full: deleting large variables is often enough."""


Call = Plan | RunCode | Rehearse | Status | Recover | Restore | ListFiles | ReadFile | WriteFile | Reset
TOOLS: dict[str, type[Call]] = {
    "plan": Plan,
    "run_code": RunCode,
    "rehearse": Rehearse,
    "status": Status,
    "recover": Recover,
    "restore": Restore,
    "list_files": ListFiles,
    "read_file": ReadFile,
    "write_file": WriteFile,
    "reset": Reset,
}
_READING = (Plan, Rehearse, Status, Recover, ListFiles, ReadFile)
"""They leave memory and files as they are. A rehearsal takes back what it did."""
_REPEATABLE = (*_READING, Restore, WriteFile, Reset)
"""Again has no further effect on memory and files."""


def listed() -> list[Tool]:
    return [_tool(name, call) for name, call in TOOLS.items()]


def parse(name: str, arguments: dict[str, Any] | None) -> Call:
    """What was asked for. Nonsense is told to the model: it can do better."""
    try:
        return msgspec.convert(arguments or {}, TOOLS[name])
    except KeyError:
        raise InvalidSetting(f"there is no tool {name!r}", hint=f"the tools are {', '.join(TOOLS)}") from None
    except msgspec.ValidationError as error:
        raise InvalidSetting(f"{name} cannot take that: {error}", hint=f"it takes {_signature(TOOLS[name])}") from None


def _signature(call: type[Call]) -> str:
    """
    >>> _signature(ListFiles)
    'pattern?, limit?'
    """
    given = [field.name if field.required else f"{field.name}?" for field in msgspec.structs.fields(call)]
    return ", ".join(given) or "no arguments"


def _tool(name: str, call: type[Call]) -> Tool:
    reads = call in _READING
    return Tool(
        name=name,
        description=(call.__doc__ or "").strip(),
        input_schema=_schema(call),
        annotations=ToolAnnotations(
            title=name.replace("_", " ").capitalize(),
            read_only_hint=reads,
            destructive_hint=not reads,  # files are replaced or memory is lost; an earlier version still has the files
            idempotent_hint=call in _REPEATABLE,
            open_world_hint=False,
        ),
    )


def _schema(call: type[Call]) -> dict[str, Any]:
    """One object without references and without null: not every client follows the ones or sends the other."""
    schema: dict[str, Any] = msgspec.json.schema(call)["$defs"][call.__name__]
    del schema["description"]  # the tool has it
    schema.pop("title", None)
    schema["properties"] = {name: _plain(given) for name, given in schema.get("properties", {}).items()}
    return schema


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """
    >>> _plain({"anyOf": [{"type": "number"}, {"type": "null"}], "default": None, "description": "Seconds."})
    {'description': 'Seconds.', 'type': 'number'}
    """
    plain = {key: value for key, value in given.items() if key != "anyOf" and not (key == "default" and value is None)}
    if "enum" in plain:
        plain["type"] = "string"
    kinds = [kind for kind in given.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        plain.update(kinds[0])
    elif kinds:
        plain["anyOf"] = kinds
    return plain
