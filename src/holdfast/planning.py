"""PLAN: the Run Card, which says before anything starts what a run is asked to do."""

import hashlib
from collections.abc import Container, Iterable, Sequence
from itertools import islice

import msgspec

from holdfast import cards, preflight
from holdfast.books import Books
from holdfast.config import Limits
from holdfast.errors import PatternsTooCostly
from holdfast.model import Preflight
from holdfast.paths import to_text
from holdfast.patterns import MOST_STEPS, Files, is_pattern
from holdfast.preflight import Reading
from holdfast.records import Finding, Flow, Input, RunCard
from holdfast.requests import RunRequest
from holdfast.state import MOST_NAMES, State

_MANY = 1_000
"""Declared inputs, and files of one pattern, and files that the code seems to read."""
_MOST_INPUTS = 10_000
"""Files of all declared inputs together that a card lists."""
_NOT_FORECAST = Finding(
    code="forecast_left_out",
    message="the files that the cell reads were not looked for: its patterns and the files are too many",
    hint="declare them: inputs=[…]",
)


def plan(
    books: Books,
    request: RunRequest,
    *,
    run: str,
    limits: Limits,
    environment: str,
    policy: Preflight,
    reading: Reading,
    attempt: int = 1,
    most_steps: int = MOST_STEPS,
) -> RunCard:
    """The card of a run on the session as it is now; `reading` is of its code. Raises PatternsTooCostly, with all steps
    that there are for a declared input alone: a forecast that takes more is left out."""
    state = books.state
    ahead = _forecast(reading.forecast)
    files = Files(state.files, most_steps=most_steps)
    inputs = _inputs(state, files, request.inputs)
    foreseen, is_whole = _foreseen(
        state, files, ahead.inputs, declared=request.inputs, is_final=most_steps == MOST_STEPS
    )
    findings = _findings(books, request, reading) + ([] if is_whole else [_NOT_FORECAST])
    return RunCard(
        run=run,
        session=books.session,
        goal=request.goal or cards.goal_of(request.code),
        code_sha256=hashlib.sha256(request.code.encode()).hexdigest(),
        base=str(state.ckpt()),
        key=request.key,
        attempt=attempt,
        inputs=inputs,
        outputs=[expected.path for expected in request.outputs],
        forecast_inputs=foreseen,
        forecast_outputs=ahead.outputs,
        flows=ahead.flows,
        findings=findings if policy != "off" else [],
        limits={
            "memory_bytes": limits.memory_bytes, "timeout_s": request.timeout_s, "disk_bytes": limits.disk_bytes,
        },
        environment=environment,
        arguments=request.script.arguments if request.script else [],
        undeclared=request.undeclared if request.outputs and books.workspace.shared is not None else "",
        executable=request.executable,
    )  # fmt: skip


def _forecast(ahead: preflight.Forecast) -> preflight.Forecast:
    """In the paths that files have in records: code may spell what is no text at all."""
    flows = [Flow(output=_text(flow.output), inputs=[_text(path) for path in flow.inputs]) for flow in ahead.flows]
    return preflight.Forecast(
        inputs=[_text(path) for path in ahead.inputs], outputs=[_text(path) for path in ahead.outputs], flows=flows
    )


def _text(path: str) -> str:
    try:
        return to_text(path.encode(errors="surrogateescape"))
    except UnicodeEncodeError:  # a name that no file can have
        return to_text(path.encode(errors="replace"))


def missing(card: RunCard) -> list[Finding]:
    """What `preflight="block"` does not start: also a cell of which nothing is known."""
    return [finding for finding in card.findings if finding.code in ("name_missing", "not_looked_at")]


def lost_names(card: RunCard, state: State) -> list[str]:
    """Names that the code needs and that were in a memory which the session has no more."""
    needed = {name for finding in card.findings if finding.code == "name_missing" for name in finding.names}
    return sorted(needed & state.names.keys() - state.live().keys())


def live_names(state: State, request: RunRequest) -> Container[str]:
    """Names that are there when the code begins."""
    return {**state.live(), "__file__": ("str", "")} if request.script else state.live()


def _findings(books: Books, request: RunRequest, reading: Reading) -> list[Finding]:
    state = books.state
    if len(state.live()) >= MOST_NAMES:  # not all that are in memory are listed
        reading = msgspec.structs.replace(reading, lacking=[])
    found = preflight.findings(
        reading, live=live_names(state, request), past=state.names, losses=books.losses, generation=state.generation
    )
    as_cells = request.script is not None and request.script.cells is not None
    return [finding for finding in found if not (as_cells and finding.code == "syntax")]  # cells are no one text


def _inputs(state: State, files: Files, paths: Iterable[str]) -> list[Input]:
    found: list[Input] = []
    for path in islice(paths, _MANY):
        here = files.meant_by(path) if is_pattern(path) else [path]
        found.extend(_input(state, name) for name in here[: min(_MANY, _MOST_INPUTS - len(found))])
    return found


def _foreseen(
    state: State, files: Files, ahead: Sequence[str], *, declared: Sequence[str], is_final: bool
) -> tuple[list[Input], bool]:
    """The inputs that the code seems to read, and whether all of them were looked for. Guests write the code, so it is
    no error if its patterns are too many."""
    known = set(declared)
    try:
        return _inputs(state, files, (path for path in ahead if path not in known))[:_MANY], True
    except PatternsTooCostly:
        if not is_final:
            raise
        return [], False


def _input(state: State, path: str) -> Input:
    entry = state.files.get(path)
    return Input(path=path) if entry is None else Input(path=path, sha256=entry.sha256, bytes=entry.bytes)
