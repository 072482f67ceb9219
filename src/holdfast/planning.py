"""PLAN: the Run Card, which says before anything starts what a run is asked to do."""

import hashlib
import re

from holdfast import cards, expectations, preflight
from holdfast.books import Books
from holdfast.config import Limits
from holdfast.model import Preflight
from holdfast.paths import to_text
from holdfast.records import Finding, Flow, Input, RunCard
from holdfast.requests import RunRequest
from holdfast.state import State

_PATTERN = re.compile(r"[*?\[]")
_MANY = 1_000


def plan(
    books: Books,
    request: RunRequest,
    *,
    run: str,
    limits: Limits,
    environment: str,
    policy: Preflight,
    attempt: int = 1,
) -> RunCard:
    """The card of a run on the session as it is now."""
    state = books.state
    ahead = _forecast(request.code) if request.kind == "cell" else preflight.Forecast()
    return RunCard(
        run=run,
        session=books.session,
        goal=request.goal or cards.goal_of(request.code),
        code_sha256=hashlib.sha256(request.code.encode()).hexdigest(),
        base=str(state.ckpt()),
        key=request.key,
        attempt=attempt,
        inputs=_inputs(state, request.inputs),
        outputs=[expected.path for expected in request.outputs],
        forecast_inputs=_inputs(state, [path for path in ahead.inputs if path not in request.inputs]),
        forecast_outputs=ahead.outputs,
        flows=ahead.flows,
        findings=_findings(books, request) if policy != "off" else [],
        limits={
            "memory_bytes": limits.memory_bytes, "timeout_s": request.timeout_s, "disk_bytes": limits.disk_bytes,
        },
        environment=environment,
        arguments=request.script.arguments if request.script else [],
        undeclared=request.undeclared if request.outputs and books.workspace.shared is not None else "",
        executable=request.executable,
    )  # fmt: skip


def _forecast(code: str) -> preflight.Forecast:
    """In the paths that files have in records: code may spell what is no text at all."""
    ahead = preflight.forecast(code)
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
    """What `preflight="block"` does not start."""
    return [finding for finding in card.findings if finding.code == "name_missing"]


def _findings(books: Books, request: RunRequest) -> list[Finding]:
    if request.kind != "cell":
        return []
    state = books.state
    live = {**state.live(), **({"__file__": ("str", "")} if request.script else {})}
    found = preflight.examine(
        request.code, live=live, past=state.names, losses=books.losses, generation=state.generation
    )
    as_cells = request.script is not None and request.script.cells is not None
    return [finding for finding in found if not (as_cells and finding.code == "syntax")]  # cells are no one text


def _inputs(state: State, paths: list[str]) -> list[Input]:
    found: list[Input] = []
    for path in paths[:_MANY]:
        here = expectations.matching(path, state.files) if _PATTERN.search(path) else [path]
        found.extend(_input(state, name) for name in here[:_MANY])
    return found


def _input(state: State, path: str) -> Input:
    entry = state.files.get(path)
    return Input(path=path) if entry is None else Input(path=path, sha256=entry.sha256, bytes=entry.bytes)
