"""What crosses the sockets, as tagged structs. How it is cut into packets: `framing`.

Three conversations:

    host ⇄ keeper     `StartZygote` → `Forked` | `Refused`; `Stage` → `Staged` | `Refused`
    host ⇄ zygote     `ForkSession` → `Forked` | `Refused`; with a way out, the listener travels with `Forked`
    host ⇄ kernel     the requests below → any number of events, then one reply
"""

import signal
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MEMORY_SIGNAL = signal.SIGXCPU
"""From the host to a kernel that nears its cap: raise MemoryError. (Nobody limits CPU seconds in here.)"""
LOCATION_SIGNAL = signal.SIGPWR
"""From the host to a kernel that is about to be killed: write down where you are (in the trace pipe)."""
IMAGE_NAME = "holdfast-image"
"""Of the file in memory that holds what a zygote shares with its kernels (`_image.c`), as `/proc/PID/maps` shows it."""

EGRESS_ADDRESS = ("127.0.0.1", 3128)
"""Where guests that may reach something find the host's proxy. Nothing else is in their network."""


MAX_FORMS, MAX_NAMES, MAX_WORDS, MAX_PATHS, MAX_PROMPT = 100, 10_000, 10_000, 100_000, 100_000
MAX_NEXT_INPUT = 1_000_000
MAX_BLOCKS = 1_000
"""Of what a kernel sends. An honest one keeps to them. What an entry costs the host is many times what it takes on the
wire, so a message that has more is refused before it is built."""
Forms = Meta(max_length=MAX_FORMS)
Words = Annotated[list[str], Meta(max_length=MAX_WORDS)]


MAX_TEXT = 1_000_000
"""Characters of an exception's message, and of its traceback."""


def cut_end(text: str, most: int = MAX_TEXT) -> str:
    """A message that is too long, and how long it was.

    >>> cut_end("x" * 2_000_000)[-45:]
    'xxxx… [cut here: 2,000,000 characters in all]'
    """
    if len(text) <= most:
        return text
    mark = f"… [cut here: {len(text):,} characters in all]"
    return text[: most - len(mark)] + mark


def cut_middle(text: str, most: int = MAX_TEXT) -> str:
    """A traceback that is too long: it begins with the cell and ends with the exception."""
    if len(text) <= most:
        return text
    mark = f"\n… [cut here: {len(text):,} characters in all] …\n"
    half = (most - len(mark)) // 2
    return text[:half] + mark + text[-half:]


class Mime(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing in several forms, by MIME type. (A msgspec union cannot hold both str and bytes.)"""

    text: Annotated[dict[str, str], Forms] = {}
    binary: Annotated[dict[str, bytes], Forms] = {}
    objects: Annotated[list[str], Forms] = []
    """Types in `text` that were given as an object, and so are JSON."""

    def merged(self) -> dict[str, str | bytes]:
        return {**self.text, **self.binary}

    def size(self) -> int:
        return sum(len(kind) + len(value) for kind, value in self.merged().items())


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Root of everything below; the tag on the wire is the class name."""


# -- host → keeper, host → zygote ------------------------------------------------------------------------------


class Shared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A directory of the host's user that is a session's /mnt/data, as whoever mounts it is to do so."""

    path: str
    """As the mounting process sees it."""
    identity: tuple[int, int]
    """Its device and inode: another directory, put in its place, is not mounted."""
    owner: tuple[int, int]
    """Its user and group."""
    guest: int | None
    """Which id the guest has in the owner's place; None where it has the owner's own."""


class StartZygote(Message, frozen=True):
    """Build the root that guests of one environment see, and start a zygote in it."""

    python: str
    """The base interpreter, as a host path."""
    prefix: str
    base_prefix: str
    root: str
    """An empty directory to build on, as a host path."""
    sessions: str
    """Directory that holds the sessions' subtrees, as a host path."""
    package: str
    """Directory of the `holdfast` package itself, as a host path."""
    shared: str = ""
    """A directory that sessions have as /mnt/data, as a host path; empty if there is none."""


class Stage(Message, frozen=True):
    """Give a session an overlay of its own over the committed files, in place of the one it has.

    With it travels a pidfd of the session's pid 1, in whose mount namespace it happens.
    """

    directory: str
    """The session's directory, as a host path."""
    stage: str
    """Where the changes go: a name below `stages` there."""
    shared: Shared | None = None


class ForkSession(Message, frozen=True):
    """Fork one confined kernel. With it travel: control, reports, wake, trace, stdout, stderr, cgroups…"""

    session: str
    stage: str
    """Where its changes go: a name below `stages` in the session's directory."""
    kernel_id: int
    """User and group of the kernel, as the zygote's user namespace numbers them."""
    init_id: int
    """The same for pid 1; equal to `kernel_id` where only one id can be mapped."""
    memory_bytes: int
    """The cap, so that the guest can say how near it came. The cgroup keeps it."""
    processors: int
    """How many it is shown, and its libraries are told to use. The cgroup keeps what it may use of them."""
    shm_bytes: int
    file_bytes: int
    open_files: int
    processes: int | None
    """RLIMIT_NPROC; None where a cgroup counts them."""
    shared: Shared | None = None
    past_proxy: tuple[str, ...] | None = None
    """Listen at `EGRESS_ADDRESS` in the session's network, and hand that to the host, whose proxy answers there: to
    all but these names, which are the guest's own. None: there is no way out."""


MOST_FDS_BACK = 2
"""That come with the answer: the file behind its /proc/meminfo, and the listener of its way out."""


class Forked(Message, frozen=True):
    pid: int


class Staged(Message, frozen=True):
    pass


class Refused(Message, frozen=True):
    reason: str


# -- host → kernel ----------------------------------------------------------------------------------------------


class Script(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a file is to be run: as `python file arguments…` would, or as a notebook."""

    file: str
    """What `__file__` says."""
    arguments: list[str] = []
    cells: list[str] | None = None
    """Of a notebook, in their order."""


class Execute(Message, frozen=True):
    turn: int
    code: str
    script: Script | None = None
    stdin: bool = False
    silent: bool = False
    """Not counted, not in the history, and its value is not shown."""
    exit_is_error: bool = False
    """In a notebook `sys.exit()` is an exception like any other. Elsewhere exit code 0 ends the cell well."""


class Shell(Message, frozen=True):
    turn: int
    command: str


class Complete(Message, frozen=True):
    code: str
    cursor: int


class Inspect(Message, frozen=True):
    code: str
    cursor: int
    detail: int = 0


class ListNames(Message, frozen=True):
    bare: bool = False
    """Only names and addresses. Types and sizes run code of the values' own, which may never end."""


class TakeSnapshot(Message, frozen=True):
    """Fork a frozen copy of yourself, threads included. Answered by `Snapped`; by the copy, once woken, `Woken`."""


class Restage(Message, frozen=True):
    """The workspace was mounted anew: change directory again, and re-open its files in place. → `Restaged`"""


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing to verify inside the sandbox before the point of no return."""

    name: str
    """How the result is called: the path, or the assertion's text."""
    path: str = ""
    """A file relative to /mnt/data that `format` is to be tried on."""
    format: str = ""
    """parquet, csv, json or image; empty: `code` is an assertion."""
    columns: list[str] = []
    """That the file must have."""
    min_rows: int = 0
    code: str = ""
    """Python, evaluated over a copy of the live names; an expression that is false, or an exception, is a failure."""


class Verify(Message, frozen=True):
    """Try these, in order. → `Finished`"""

    turn: int
    probes: list[Probe]


class SavedReply(Message, frozen=True):
    """What became of `Saving`."""

    refused: str = ""
    """Why not; empty: it is durable."""


class Taken(Message, frozen=True):
    """What was sent before `Printing` has arrived: what is printed now comes after it."""


class Answer(Message, frozen=True):
    """What the user typed after `Asked`."""

    text: str


# -- kernel → host: events --------------------------------------------------------------------------------------


class Shown(Message, frozen=True):
    """Something to display, or the value of the last expression."""

    kind: Literal["display", "result"]
    data: Mime
    metadata: str = ""
    """JSON text. Not a typed field: msgpack knows keys that collide by design, and a dict of them would hold us up."""
    display_id: str | None = None
    update: bool = False


class Cleared(Message, frozen=True):
    """`clear_output`: what was displayed so far is to be taken away."""

    wait: bool = False


class Printing(Message, frozen=True):
    """The cell has shown something and is about to print: the two go different ways. → `Taken`"""


class Asked(Message, frozen=True):
    """`input()` where the face offers stdin."""

    prompt: Annotated[str, Meta(max_length=MAX_PROMPT)]
    password: bool = False


class Saving(Message, frozen=True):
    """`kit.save`: these files are finished and are to be kept whatever becomes of the run. → `SavedReply`"""

    paths: Annotated[list[str], Meta(max_length=MAX_PATHS)]
    """Relative to /mnt/data, as `holdfast.paths.to_text` writes them."""
    step: str = ""


class Raised(Message, frozen=True):
    """The exception that ended the cell."""

    name: str
    message: str
    traceback: str
    kind: Literal["exception", "syntax"]
    line: int | None = None
    """Line of the cell that was running."""
    hint: str = ""
    blocks: Annotated[list[int], Meta(max_length=MAX_BLOCKS)] = []
    """Where in the traceback each of its blocks begins: a heading, a frame, the exception."""


# -- kernel → host: replies -------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The first message, sent before any user code ran."""

    pid: int
    """The kernel's pid as its own pid namespace numbers it: how pid 1 will report its death."""


class NextInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Text that a cell offers for the next one: `%load`, `%recall`, `get_ipython().set_next_input`."""

    text: Annotated[str, Meta(max_length=MAX_NEXT_INPUT)]
    replace: bool = False
    """It takes the place of the cell that ran."""


class Finished(Message, frozen=True):
    """The last message of a cell, a command or a trial: all it printed is already in the pipes."""

    turn: int
    count: int = 0
    exit_code: int | None = None
    threads: Words = []
    """That are alive, and were not at the end of an earlier run."""
    tasks: Words = []
    """The same of tasks in the cells' event loop."""
    names: Annotated[dict[str, str], Meta(max_length=MAX_NAMES)] = {}
    """Names that the cell bound anew, as far as identity shows: name -> type."""
    gone: Words = []
    """Names that the cell took away."""
    result: Shown | None = None
    """The value of the last expression, where it is small and nothing was shown after it: one message less."""
    next_input: NextInput | None = None
    failures: Words = []
    """Of a trial, one per probe, in order: why it failed; empty: it holds."""


class Restaged(Message, frozen=True):
    not_reopened: Words = []
    """Open files whose path leads nowhere any more, in words."""


class Completed(Message, frozen=True):
    matches: Words
    start: int
    end: int


class Inspected(Message, frozen=True):
    data: Mime
    """Empty when nothing is known of what stands at the cursor."""


class Snapped(Message, frozen=True):
    pid: int = 0
    """The copy, as the session's pid namespace numbers it; 0: there is none, and `reason` says why."""
    threads: int = 0
    reason: str = ""


class Woken(Message, frozen=True):
    """The first words of a copy that is now the kernel."""

    pid: int
    not_restored: Words = []
    """What lies outside memory and is as the run before left it: sockets, pipes, shared memory, ended processes."""


class Name(msgspec.Struct, frozen=True, kw_only=True):
    """A live variable, as the kernel describes it."""

    type: str = ""
    approx_bytes: int = 0
    address: int = 0
    """Tells whether two snapshots of one process have the same object under a name."""


class Named(Message, frozen=True):
    names: Annotated[dict[str, Name], Meta(max_length=MAX_NAMES)]


HostRequest = (
    Execute | Shell | Complete | Inspect | ListNames | TakeSnapshot | Restage | Verify
    | SavedReply | Taken | Answer
)  # fmt: skip
Conducted = Execute | Shell | Verify
"""What runs code of the user's, and is ended by `Finished`."""
KernelMessage = (
    Shown | Cleared | Printing | Asked | Saving | Raised
    | Ready | Finished | Completed | Inspected | Named | Snapped | Woken | Restaged
)  # fmt: skip
Supervision = Forked | Staged | Refused
