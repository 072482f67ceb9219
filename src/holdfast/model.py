"""The nouns that callers see: frozen structs, no behaviour beyond reading themselves."""

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.receipts import Receipt
from holdfast.records import Change, Check, Finding, RunCard, Status

if TYPE_CHECKING:
    Content = str | bytes
else:
    Content = Any  # msgpack tells the two apart by itself, msgspec takes no union of them

ErrorCode = Literal[
    "exception", "syntax", "verification", "protected_path", "undeclared_write", "patterns_too_costly", "timeout",
    "out_of_memory", "disk_limit", "killed", "interrupted", "output_limit", "kernel_lost",
]  # fmt: skip
_SHOWN = 100
"""Characters of a result in one line."""
StreamName = Literal["stdout", "stderr"]
MemoryCap = Literal["cgroup", "watchdog"]


class Noun(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the structs below."""


def _one_line(text: str) -> str:
    words = " ".join(text[: 2 * _SHOWN].split())
    return words if len(words) <= _SHOWN and len(text) <= 2 * _SHOWN else f"{words[: _SHOWN - 1]}…"


class RunError(Noun, frozen=True):
    """Why a run did not end well: your code's failure, or an end from outside of it (`interrupted`, `kernel_lost`)."""

    code: ErrorCode
    name: str
    """The exception's name, or what stands in its place when the kernel did not live to raise one."""
    message: str
    traceback: str = ""
    line: int | None = None
    """Line of the cell that was running, when it is known."""
    hint: str = ""
    blocks: list[int] = []
    """Where in `traceback` each of IPython's blocks begins: a heading, a frame, the exception. Empty: it is one."""


class Display(Noun, frozen=True):
    """One rich output: text as str, images as bytes, JSON as its text; by MIME type."""

    data: dict[str, Content]
    metadata: dict[str, Any] = {}
    display_id: str | None = None
    objects: list[str] = []
    """Types in `data` whose text is JSON because code gave an object, also if the type's name does not say so."""


class Stray(Noun, frozen=True):
    """What a run left behind. Nothing runs in the background: processes are killed, threads and asyncio's tasks frozen.

    A thread or a task is named by the first run that leaves it, and by none after that.
    """

    kind: Literal["process", "thread", "task"]
    name: str
    outcome: Literal["killed", "frozen"]


Mode = Literal["strict", "notebook"]
"""strict: a run that fails leaves no trace. notebook: an exception keeps what the cell did, as in Jupyter."""
Memory = Literal["kept", "restored", "lost"]
Preflight = Literal["warn", "block", "off"]
"""What becomes of a cell that needs names which memory does not hold: it is told, not started, or not looked at."""
Label = Literal["restored", "stale", "recomputable", "lost"]
"""What can be done about a name that is in memory no more. `recomputable`: its run makes it again. `lost`: that run
cannot be expected to, because a file that it read is not there any more as it was then. (The others are for durable
checkpoints, which are yet to come.)"""


class Step(Noun, frozen=True, omit_defaults=True):
    """Something to do next, as data."""

    action: Literal["rerun", "restore", "retry", "change", "check", "free_disk", "continue"]
    run: str = ""
    ckpt: str = ""
    names: list[str] = []
    why: str = ""


class Recovery(Noun, frozen=True, kw_only=True):
    """What is known after a reset or a rollback: cause, what is lost, what is there, what to do next."""

    cause: str
    """With its evidence, in words."""
    code: str
    """After a run that was rolled back, its error's. Of a session: `ok` (nothing was lost) or `lost`; `cause` says by
    what."""
    at: float
    run: str | None
    memory: Memory
    ckpt: str
    """Where the session is now."""
    version: int
    generation: int
    files: str
    """In words: what became of the files."""
    discarded: list[str]
    """Files and names that the run had made and that were taken back."""
    names: dict[str, Label]
    """Names that are in memory no more, by what can be done about each."""
    not_restored: list[str]
    may_have_happened: list[str] = []
    """Requests that left before it was taken back."""
    steps: list[Step]
    text: str
    """All of it in a few lines, for people and models."""


class NextInput(Noun, frozen=True):
    """Text that a cell offers for the next one, as `%load` and `set_next_input` do."""

    text: str
    replace: bool = False
    """It takes the place of the cell that ran."""


class Run(Noun, frozen=True, kw_only=True):
    """What one run did."""

    id: str
    session: str
    status: Status
    """`committed`: memory and files are at the next version. `kept`: the cell failed and what it did stays (notebook).
    `rolled_back`: memory and files are as before, but for those in `saved`. `rehearsed`: as before, on request."""
    version: int
    """Of the session after the run."""
    ckpt: str
    """Names the state of the session after the run."""
    card: RunCard
    """The plan, as far as it came."""
    receipt: Receipt | None
    """Signed and chained; None for a rehearsal, which leaves no trace."""
    outputs: list[Change]
    """Files of /mnt/data that it added, changed or removed; of a rehearsal: would have."""
    names: dict[str, str]
    """Names that it bound (name -> type); of a rehearsal: would have. A value that was changed in place is not seen."""
    names_gone: list[str] = []
    """Names that it deleted; of a rehearsal: would have."""
    checks: list[Check]
    recovery: Recovery | None
    """Set when it was rolled back."""
    findings: list[Finding]
    """What preflight noticed."""
    saved: list[str]
    """Files that the code itself saved on the way: they are kept whatever became of the run."""
    outside: list[str]
    """Files that changed since the run before, while nothing was running: by threads; and, of those that the run reads
    or replaces, by somebody on the host."""
    egress: list[str] = []
    """Requests that left through the session's egress (`GET http://host/path`, `CONNECT host:443`), then attempts that
    were refused (`refused: …`)."""
    may_have_happened: list[str] = []
    """Requests that left and that nothing takes back: those of earlier attempts with the same key, and its own
    if it was rolled back."""
    attempt: int
    replayed: bool
    """The answer of an earlier run with the same key; nothing was executed."""
    generation: int
    """The kernel's incarnation after the run. Higher than before: memory is not a continuation of what it was."""
    memory: Memory
    """`kept`: as the cell left it. `restored`: as it was before the run. `lost`: gone; see `unprotected`."""
    discarded: list[str]
    """Names that a rollback took back: new ones, and older ones that the run had bound anew."""
    not_restored: list[str]
    """What could not be carried over, because it lies outside memory: at a rollback open sockets and pipes, shared
    memory and handles on processes, at the commit before open files that may not be opened again."""
    unprotected: str | None
    """Why there was no snapshot to fall back to; None if there was one."""
    kernel_replaced: str = ""
    """How and when the kernel ended that the session had before, if it was ended from outside since the run before;
    this run had another in its place. Empty: it was not."""
    count: int
    """IPython's execution count, as in `Out[count]`."""
    exit_code: int | None
    """Of a command, and of a cell that ended itself by `sys.exit()` or `raise SystemExit`; None for all others."""
    text: str | None
    """text/plain of the last expression."""
    next_input: NextInput | None = None
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

    def __repr__(self) -> str:
        """One line, for who types `run` at a prompt; its fields have all of it."""
        came = self.text if self.error is None else f"{self.error.name}: {self.error.message}"
        shown = f" · {_one_line(came)}" if came else ""
        return f"<Run {self.id} · {self.status}{' (replayed)' * self.replayed}{shown} · {self.duration_s:.3f} s>"


class ShellResult(Noun, frozen=True, kw_only=True):
    """What a command did."""

    id: str
    status: Status
    """`kept` if it returned something else than 0."""
    version: int
    ckpt: str
    card: RunCard
    receipt: Receipt | None
    outputs: list[Change]
    recovery: Recovery | None
    """Set when it was rolled back."""
    exit_code: int | None
    """None if it did not live to return one: see `error`."""
    stdout: str
    stderr: str
    error: RunError | None
    strays: list[Stray]
    duration_s: float
    egress: list[str] = []
    kernel_replaced: str = ""
    """As of `Run`."""


class Name(Noun, frozen=True):
    """A live variable."""

    type: str
    approx_bytes: int


class HistoryEntry(Noun, frozen=True):
    """One settled run, as the journal has it."""

    run: str
    kind: str
    at: float
    goal: str
    status: Status
    version: int
    ckpt: str
    reason: str
    receipt_sha256: str


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
    result: bool = False
    """The value of the last expression."""
    run: str = ""
    """Whose it is: the id that the receipt will name."""


class DisplaysCleared(Noun, frozen=True, tag="displays_cleared"):
    wait: bool


Event = Output | Displayed | DisplaysCleared
