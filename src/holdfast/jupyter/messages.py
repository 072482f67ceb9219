"""From what a run said and how it ended to what Jupyter's protocol calls it. All of it is hostile: only data is made.

Every output that has metadata carries the run's id there under `holdfast`, and the receipt's digest once it exists (see
`outputs.py`): a saved notebook says which receipt each of its figures belongs to. What a cell itself writes there is
overwritten.
"""

import base64
import html
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from holdfast.errors import HoldfastError
from holdfast.model import Display, Displayed, DisplaysCleared, Event, Output, Run, RunError

INERT = (
    "text/plain", "text/latex", "application/json", "image/png", "image/jpeg", "image/gif", "image/webp",
)  # fmt: skip
"""What no browser executes. Front ends trust what cells that they ran show: HTML, SVG and Markdown may hold scripts."""
OURS = "holdfast"
"""The key in every metadata."""
Message = tuple[str, dict[str, Any]]
"""Its type and its content."""


def of_events(events: Iterable[Event], *, session: str, count: int, inert: bool = False) -> Iterator[Message]:
    """In order; text that came in pieces is put together."""
    for event in _joined(events):
        match event:
            case Output():
                yield "stream", {"name": event.stream, "text": event.text}
            case Displayed():
                yield _of_display(event, session=session, count=count, inert=inert)
            case DisplaysCleared():
                yield "clear_output", {"wait": event.wait}


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    stream, pieces = "", list[str]()
    for event in events:
        if pieces and not (isinstance(event, Output) and event.stream == stream):
            yield Output(stream="stderr" if stream == "stderr" else "stdout", text="".join(pieces))
            pieces = []
        if isinstance(event, Output):
            stream = event.stream
            pieces.append(event.text)
        else:
            yield event
    if pieces:
        yield Output(stream="stderr" if stream == "stderr" else "stdout", text="".join(pieces))


def _of_display(event: Displayed, *, session: str, count: int, inert: bool) -> Message:
    display = event.display
    content: dict[str, Any] = {
        "data": bundle(display.data, objects=display.objects, inert=inert),
        "metadata": {**display.metadata, OURS: {"session": session, "run": event.run}},
    }
    if event.result:
        return "execute_result", {**content, "execution_count": count}
    content["transient"] = {} if display.display_id is None else {"display_id": display.display_id}
    return ("update_display_data" if event.update else "display_data"), content


def bundle(data: dict[str, Any], *, objects: Collection[str] = (), inert: bool = False) -> dict[str, Any]:
    """By MIME type: bytes as base64, JSON as what it says."""
    kept = {kind: value for kind, value in data.items() if kind in INERT} if inert else data
    if data and not kept:
        return {"text/plain": f"<left out, for a browser would execute it: {', '.join(sorted(data))}>"}
    return {kind: _value(kind, value, is_object=kind in objects) for kind, value in kept.items()}


def _value(kind: str, value: str | bytes, *, is_object: bool) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if is_object or kind == "application/json" or kind.endswith("+json"):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def of_run(run: Run) -> dict[str, Any]:
    """For the metadata of the reply: where the run stands in the journal, and its receipt."""
    return {
        "session": run.session,
        "run": run.id,
        "status": run.status,
        "version": run.version,
        "generation": run.generation,
        "ckpt": run.ckpt,
        "memory": run.memory,
        "receipt": of_receipt(run),
        "error": run.error and {"code": run.error.code, "message": run.error.message, "hint": run.error.hint},
    }


def of_receipt(run: Run) -> dict[str, Any] | None:
    return None if run.receipt is None else {"sha256": run.receipt.sha256, "number": run.receipt.number}


def with_receipt(content: dict[str, Any], receipt: dict[str, Any]) -> dict[str, Any]:
    """An output that names its run already."""
    ours = {**content["metadata"][OURS], "receipt": receipt}
    return {**content, "metadata": {**content["metadata"], OURS: ours}}


def of_error(error: RunError) -> dict[str, Any]:
    """As Jupyter shows it; of a cell that did not live to raise, what stands in its place.

    Clients know an interrupt by its empty `evalue`. Our own words about it are in the metadata.
    """
    evalue = "" if error.name == "KeyboardInterrupt" else error.message
    blocks = _blocks(error) if error.traceback else [f"{error.name}: {error.message}"]
    return {"ename": error.name, "evalue": evalue, "traceback": blocks}


def _blocks(error: RunError) -> list[str]:
    """One item per block, as IPython has it. The guest says where they begin, so any number can stand there."""
    whole = error.traceback
    starts = sorted({start for start in error.blocks if 0 < start < len(whole)})
    ends = [*(start - 1 for start in starts), len(whole)]  # between two of them is a newline
    return [whole[start:end] for start, end in zip([0, *starts], ends, strict=True)]


def payload(run: Run) -> list[dict[str, Any]]:
    """What the front end is to do after the cell: the text that it offers for the next one."""
    if run.next_input is None:
        return []
    return [{"source": "set_next_input", "text": run.next_input.text, "replace": run.next_input.replace}]


def of_refusal(error: Exception) -> dict[str, Any]:
    """What Holdfast itself could not do: its message and its hint."""
    said = error.message if isinstance(error, HoldfastError) else str(error)
    return {"ename": type(error).__name__, "evalue": said, "traceback": str(error).split("\n")}


def note(run: Run) -> str:
    """What is said of a run that was taken back; nothing of any other, nor of one that was never started."""
    if run.recovery is None or run.recovery.code == "syntax":
        return ""
    return f"Holdfast took this cell back; the notebook goes on.\n{run.recovery.text}"


def of_note(text: str, run: Run, *, inert: bool) -> dict[str, Any]:
    """A display, and not text on stderr, so that the saved notebook has the receipt beside it."""
    shown = f'<pre style="margin: 0; border-left: 4px solid #c62828; padding-left: 1em">{html.escape(text)}</pre>'
    return {
        "data": bundle({"text/plain": text, "text/html": shown}, inert=inert),
        "metadata": {OURS: {"session": run.session, "run": run.id, "receipt": of_receipt(run)}},
        "transient": {},
    }


def expressions(displays: list[Display], kind: str) -> dict[str, Any]:
    """What the guest answered to `user_expressions`: an object of objects, or nothing."""
    for display in displays:
        try:
            return msgspec.json.decode(display.data.get(kind, ""), type=dict[str, dict[str, Any]])
        except (msgspec.DecodeError, RecursionError):
            continue
    return {}
