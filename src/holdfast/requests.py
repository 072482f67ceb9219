"""What a caller asks for: one run, and what of it is refused before anything starts."""

import hashlib
from typing import Literal

import msgspec

from holdfast.config import Limits
from holdfast.errors import InvalidSetting
from holdfast.expectations import Expected
from holdfast.kernel import wire
from holdfast.model import Mode, Preflight
from holdfast.publication import Publication, Undeclared

_TEXT_BYTES = 64
"""What a text costs beside its characters."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as a caller wants it."""

    code: str
    kind: Literal["cell", "command"] = "cell"
    timeout_s: float = 60.0
    mode: Mode | None = None
    goal: str = ""
    inputs: list[str] = []
    outputs: list[Expected] = []
    asserts: list[str] = []
    key: str | None = None
    retry: bool = False
    """Run again though the recorded run was rolled back by its own code."""
    expect: str | None = None
    """State the caller believes in; we never run on another."""
    rehearse: bool = False
    preflight: Preflight | None = None
    silent: bool = False
    script: wire.Script | None = None
    """It is a file that is run, and not a cell."""
    undeclared: Undeclared = "refuse"
    """In a directory of the user's: what becomes of writes that no output covers, where outputs are declared."""
    executable: list[str] = []
    """In a directory of the user's: files and patterns that may be executable."""
    run: str = ""
    """The id of a plan that was made before."""

    @property
    def publication(self) -> Publication:
        """What may appear in a directory of the user's."""
        outputs = [expected.path for expected in self.outputs]
        return Publication(outputs=outputs, undeclared=self.undeclared, executable=self.executable)

    def digest(self) -> str:
        """Of all that makes two requests with one key the same: inputs by name, not by what is in them."""
        outputs = [msgspec.json.encode(expected).decode() for expected in self.outputs]
        same = [self.kind, self.code, *self.inputs, "", *outputs, "", *self.asserts]
        same += ["", self.script.file, *self.script.arguments] if self.script else []
        if self.undeclared != "refuse" or self.executable:
            same += ["", self.undeclared, *self.executable]
        return hashlib.sha256(msgspec.msgpack.encode(same)).hexdigest()


def to_guest(request: RunRequest, *, turn: int, stdin: bool, mode: Mode) -> wire.Execute | wire.Shell:
    """The same in the words of the kernel's wire; `stdin`: somebody answers `input()`."""
    if request.kind == "command":
        return wire.Shell(turn=turn, command=request.code)
    return wire.Execute(
        turn=turn, code=request.code, stdin=stdin, silent=request.silent, script=request.script,
        exit_is_error=mode == "notebook",
    )  # fmt: skip


def refuse_nonsense(request: RunRequest, limits: Limits) -> None:
    """Before it waits for its turn: what could not be carried out when that has come."""
    columns = [column for expected in request.outputs for column in expected.columns]
    script = [request.script.file, *request.script.arguments] if request.script else []
    for text in (request.code, request.goal, request.key or "", *request.asserts, *columns, *script):
        check_text(text)
    if len(request.code.encode()) > limits.code_bytes:
        raise InvalidSetting(
            f"the cell is larger than {limits.code_bytes:,} bytes",
            hint="put data in a file under /mnt/data and read it from there",
        )
    if request.key is not None and not 0 < len(request.key) <= 200:
        raise InvalidSetting("a key has 1 to 200 characters", hint="derive it from what the run does")
    if request.retry and request.key is None:
        raise InvalidSetting("retry= goes with key=", hint="name the key whose run is to be tried again")


def check_text(code: str) -> None:
    try:
        code.encode()
    except UnicodeEncodeError as error:
        raise InvalidSetting(
            f"the code is no text: {error.reason} at character {error.start:,}",
            hint="remove the lone surrogate (decode the bytes it came from with errors='replace')",
        ) from error


def weight(request: RunRequest) -> int:
    """About how many bytes are held with a request."""
    texts = [request.code, request.key or "", request.expect or "", *request.inputs, *request.asserts]
    texts += [text for expected in request.outputs for text in (expected.path, *expected.columns)]
    return sum(len(text) + _TEXT_BYTES for text in texts)
