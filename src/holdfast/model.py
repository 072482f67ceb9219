"""The nouns that callers see: frozen structs, no behaviour beyond reading themselves."""

from typing import Any, Literal

import msgspec

ErrorCode = Literal[
    "exception", "syntax", "timeout", "out_of_memory", "killed", "interrupted", "output_limit"
]  # fmt: skip
StreamName = Literal["stdout", "stderr"]
MemoryCap = Literal["cgroup", "watchdog"]


class Noun(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the structs below."""


class RunError(Noun, frozen=True):
    """Why a run did not end well. Your code's failure, never Holdfast's own."""

    code: ErrorCode
    name: str
    """The exception's name, or what stands in its place when the kernel did not live to raise one."""
    message: str
    traceback: str = ""
    line: int | None = None
    """Line of the cell that was running, when it is known."""
    hint: str = ""


class Display(Noun, frozen=True):
    """One rich output: text as str, images as bytes, JSON as its text; by MIME type."""

    data: dict[str, str | bytes]
    metadata: dict[str, Any] = {}
    display_id: str | None = None


class Stray(Noun, frozen=True):
    """What a run left behind. Nothing runs in the background: processes are killed, threads frozen."""

    kind: Literal["process", "thread"]
    name: str
    outcome: Literal["killed", "frozen"]


Mode = Literal["strict", "notebook"]
"""strict: a run that fails leaves no trace in memory. notebook: an exception keeps what the cell did, as in Jupyter."""
Memory = Literal["kept", "restored", "lost"]


class Run(Noun, frozen=True):
    """What one run did."""

    id: str
    session: str
    status: Literal["ok", "failed"]
    generation: int
    """The kernel's incarnation after the run. Higher than before: memory is not a continuation of what it was."""
    memory: Memory
    """`kept`: as the cell left it. `restored`: as it was before the run. `lost`: gone; see `unprotected`."""
    discarded: list[str]
    """Names that a rollback took back: new ones, and older ones that the run had bound anew."""
    not_restored: list[str]
    """What a rollback cannot bring back, because it lies outside memory: open sockets and pipes."""
    unprotected: str | None
    """Why there was no snapshot to fall back to; None if there was one."""
    count: int
    """IPython's execution count, as in `Out[count]`."""
    text: str | None
    """text/plain of the last expression."""
    stdout: str
    stderr: str
    dropped_bytes: int
    """How much output was left out of the middle of `stdout` and `stderr`; `Session.output` has it."""
    displays: list[Display]
    dropped_displays: int
    error: RunError | None
    strays: list[Stray]
    duration_s: float
    peak_memory_bytes: int | None
    """The most memory the session held during this run; None where the system does not count it per run."""
    memory_cap: MemoryCap
    """`watchdog` where the cap is only sampled: a burst between two samples can pass it."""


class ShellResult(Noun, frozen=True):
    """What a command did."""

    id: str
    exit_code: int | None
    """None if it did not live to return one: see `error`."""
    stdout: str
    stderr: str
    error: RunError | None
    strays: list[Stray]
    duration_s: float


class Name(Noun, frozen=True):
    """A live variable."""

    type: str
    approx_bytes: int


class Completions(Noun, frozen=True):
    """What could stand at the cursor, and which part of the code it would replace."""

    matches: list[str]
    start: int
    end: int


# -- events: what a caller may watch while a run goes on --------------------------------------------------------


class Output(Noun, frozen=True, tag="output"):
    stream: StreamName
    text: str


class Displayed(Noun, frozen=True, tag="displayed"):
    display: Display
    update: bool = False
    """Replaces the earlier display of the same `display_id`."""


class DisplaysCleared(Noun, frozen=True, tag="displays_cleared"):
    wait: bool


Event = Output | Displayed | DisplaysCleared
