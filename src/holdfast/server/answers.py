"""What a model is told: a few lines that it can follow, the same as data, and figures as images.

1. Code that fails is an answer like any other. Only our own failures are errors.
2. An answer is bounded, whatever the code printed: the middle is left out, and it says so.
3. The line of the outcome is never left out: status, version, CKPT.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, StateMoved
from holdfast.model import Display, HistoryEntry, Name, Recovery, Run, RunError
from holdfast.records import Change, FileEntry

_MOST_CHARACTERS = 20_000
"""Of one stream, a traceback or a result."""
_MOST_ITEMS = 50
"""Of a list, as text; as data it has ten times as many."""
_MOST_FIGURES = 10
_MOST_FIGURE_BYTES = 4 << 20
_SHOWN_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""What models take; an SVG is text to them at best."""
_KEPT = "the code failed; what it did until then, in memory and in files, stays"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    data: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What goes back to a client, in no protocol's words."""

    text: str
    facts: dict[str, Any]
    figures: list[Figure] = []
    refused: bool = False
    """We failed, or would not; nothing ran, or nothing of it stays."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session stands."""

    session: str
    ckpt: str
    version: int
    generation: int
    names: Mapping[str, Name]
    files: Sequence[FileEntry]
    runs: Sequence[HistoryEntry]
    """The latest, oldest first."""


# -- a run ---------------------------------------------------------------------------------------------------------


def of_run(run: Run) -> Answer:
    figures, left_out = _figures(run.displays)
    parts = [*_said(run), *_outcome(run)]
    if left_out:
        parts.append(f"{left_out} figures left out: too many or too large")
    return Answer(text="\n".join(parts), facts=_facts(run), figures=figures)


def _said(run: Run) -> Iterator[str]:
    """What the code itself has to say."""
    if run.stdout:
        yield _clipped(run.stdout).rstrip("\n")
    if run.stderr:
        yield "[stderr]\n" + _clipped(run.stderr).rstrip("\n")
    for text in _shown(run.displays):
        yield _clipped(text)
    if run.error is not None:
        yield from _in_words(run.error, told_below=run.recovery is not None)


def _in_words(error: RunError, *, told_below: bool) -> Iterator[str]:
    if error.code in ("exception", "syntax") and error.traceback:
        yield _clipped(error.traceback)
    elif not told_below:
        yield f"{error.name}: {error.message}"
    if error.hint:
        yield f"hint: {error.hint}"


def _outcome(run: Run) -> Iterator[str]:
    yield f"[{run.status} · {run.id} · version {run.version} · {run.duration_s:.2f} s]"
    yield f"CKPT: {run.ckpt}"
    if run.replayed:
        yield "replayed: this key has its answer already, and nothing was executed; another key runs it again"
    if run.status == "kept":
        yield _KEPT
    if run.outputs:
        yield f"files: {_few([_file(change) for change in run.outputs])}"
    if run.names:
        yield f"names: {_few([f'{name} ({kind})' for name, kind in run.names.items()])}"
    yield from _remarks(run)
    if run.recovery is not None:
        yield run.recovery.text


def _remarks(run: Run) -> Iterator[str]:
    yield from (f"check failed: {check.name}: {check.detail}" for check in run.checks if not check.ok)
    yield from (f"note: {finding.message}" for finding in run.findings[:_MOST_ITEMS])
    if run.saved:
        yield f"saved on the way: {_few(run.saved)}"
    if run.outside:
        yield f"changed between two runs: {_few(run.outside)}"
    if run.strays:
        yield f"left behind: {_few([f'{stray.kind} {stray.name}, {stray.outcome}' for stray in run.strays])}"
    if run.dropped_displays:
        yield f"{run.dropped_displays:,} displays past the limit were dropped"


def _file(change: Change) -> str:
    if change.action == "removed" or change.kind != "file":
        return f"{change.action} {change.path}"
    return f"{change.action} {change.path} ({change.bytes:,} bytes, sha256 {change.sha256[:12]})"


def _shown(displays: Sequence[Display]) -> Iterator[str]:
    """What can be read; the last expression is among it."""
    for display in displays:
        text = display.data.get("text/plain")
        if any(kind in display.data for kind in _SHOWN_IMAGES):
            continue
        yield text if isinstance(text, str) else f"[a display of {', '.join(sorted(display.data)) or 'nothing'}]"


def _figures(displays: Sequence[Display]) -> tuple[list[Figure], int]:
    """Those that fit, and how many do not."""
    found = [figure for display in displays if (figure := _figure(display)) is not None]
    kept, room = [], _MOST_FIGURE_BYTES
    for figure in found[:_MOST_FIGURES]:
        if len(figure.data) <= room:
            kept.append(figure)
            room -= len(figure.data)
    return kept, len(found) - len(kept)


def _figure(display: Display) -> Figure | None:
    for kind in _SHOWN_IMAGES:
        if isinstance(data := display.data.get(kind), bytes):
            return Figure(kind=kind, data=data)
    return None


def _facts(run: Run) -> dict[str, Any]:
    receipt = run.receipt
    return _plain(
        {
            "run": run.id,
            "session": run.session,
            "status": run.status,
            "ckpt": run.ckpt,
            "version": run.version,
            "generation": run.generation,
            "memory": run.memory,
            "result": None if run.text is None else _clipped(run.text),
            "stdout": _clipped(run.stdout),
            "stderr": _clipped(run.stderr),
            "error": run.error and msgspec.structs.replace(run.error, traceback=_clipped(run.error.traceback)),
            "outputs": run.outputs[: _MOST_ITEMS * 10],
            "names": dict(list(run.names.items())[: _MOST_ITEMS * 10]),
            "checks": run.checks[: _MOST_ITEMS * 10],
            "findings": run.findings[:_MOST_ITEMS],
            "saved": run.saved[: _MOST_ITEMS * 10],
            "strays": run.strays[:_MOST_ITEMS],
            "replayed": run.replayed,
            "attempt": run.attempt,
            "receipt": None if receipt is None else {"number": receipt.number, "sha256": receipt.sha256},
            "recovery": run.recovery,
            "duration_s": run.duration_s,
        }
    )


# -- the other answers ---------------------------------------------------------------------------------------------


def of_standing(now: Standing) -> Answer:
    names = [f"{name} ({value.type}, {value.approx_bytes:,} bytes)" for name, value in now.names.items()]
    files = [f"{file.path} ({file.bytes:,} bytes)" for file in now.files]
    lines = [
        f"CKPT: {now.ckpt}",
        f"session {now.session} · version {now.version} · generation {now.generation}",
        f"names: {_few(names) or 'none'}",
        f"files in /mnt/data: {_few(files) or 'none'}",
        *(f"{entry.run} · {entry.status} · version {entry.version} · {entry.goal}" for entry in now.runs),
    ]
    most = _MOST_ITEMS * 10
    facts = {
        **msgspec.structs.asdict(now),
        "names": dict(list(now.names.items())[:most]),
        "files": list(now.files)[:most],
    }
    return Answer(text="\n".join(lines), facts=_plain(facts))


def of_recovery(recovery: Recovery, codes: Mapping[str, str]) -> Answer:
    """With the code of the runs that are to be run again: the client may have forgotten it as well."""
    told = [f"Code of {run}:\n{_clipped(code)}" for run, code in codes.items()]
    facts = {**msgspec.structs.asdict(recovery), "codes": {run: _clipped(code) for run, code in codes.items()}}
    return Answer(text="\n".join([recovery.text, *told]), facts=_plain(facts))


def of_error(error: HoldfastError) -> Answer:
    facts: dict[str, Any] = {"code": error.code, "message": error.message, "hint": error.hint}
    if isinstance(error, StateMoved) and error.differs is not None:
        facts["differs"] = error.differs
    return Answer(text=str(error), facts=_plain({"error": facts}), refused=True)


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    plain: dict[str, Any] = msgspec.to_builtins(facts)
    return plain


def _few(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_MOST_ITEMS])
    return f"{shown} and {len(items) - _MOST_ITEMS:,} more" if len(items) > _MOST_ITEMS else shown


def _clipped(text: str) -> str:
    """
    >>> len(_clipped("x" * 30_000)) < 20_200
    True
    """
    if len(text) <= _MOST_CHARACTERS:
        return text
    half, left_out = _MOST_CHARACTERS // 2, len(text) - _MOST_CHARACTERS
    return f"{text[:half]}\n… {left_out:,} characters left out; print less, or write to a file …\n{text[-half:]}"
