"""What a model is told: what the code said, figures as images, a footer that it can follow, and the same as data.

1. Code that fails is an answer like any other. Only our own failures are errors.
2. An answer is bounded, whatever the code printed: the middle is left out, and it says so.
3. The footer is never left out: status, CKPT, files with their SHA-256, what to do next.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast import cards
from holdfast.errors import HoldfastError, StateMoved
from holdfast.model import Display, HistoryEntry, Name, Recovery, Run, RunError
from holdfast.records import Change, FileEntry, RunCard
from holdfast.server.mcp.files import Seen, advice
from holdfast.visible import visible
from holdfast.workfiles import Written

_MOST_CHARACTERS = 20_000
"""Of one stream, a traceback or a result."""
_MOST_ITEMS = 50
"""Of a list, as text; as data it has ten times as many."""
_MOST_OUTPUTS = 20
"""With their whole SHA-256, in the footer."""
_MOST_FIGURES = 10
_MOST_FIGURE_BYTES = 4 << 20
_SHOWN_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""What models take; an SVG is text to them at best."""
_NEXT = {
    "committed": "go on from this CKPT",
    "kept": "the code failed, and what it did until then stays in memory and files: mend what failed and run only that",
    "rehearsed": "nothing was changed; run_code with the same code does it",
}
"""For a run that was rolled back, the recovery has it."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    data: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What goes back to a client, in no protocol's words."""

    text: str
    """Last: what came of it."""
    facts: dict[str, Any]
    said: str = ""
    """First: the code's own words, or a file's."""
    figures: list[Figure] = []
    refused: bool = False
    """We failed, or would not; nothing ran, or nothing of it stays."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session stands."""

    session: str
    ckpt: str
    version: int
    generation: int
    files: Sequence[FileEntry]
    runs: Sequence[HistoryEntry]
    """The latest, oldest first."""
    names: Mapping[str, Name] | None = None
    """None: a run is under way, and memory cannot be asked."""
    running: str | None = None
    """What is under way, in words."""
    egress: Sequence[str] = ()
    """Hosts that code may reach."""
    memory_bytes: int | None = None
    memory_cap_bytes: int | None = None


# -- a run ---------------------------------------------------------------------------------------------------------


def of_run(run: Run) -> Answer:
    figures, left_out = _figures(run.displays)
    footer = [*_outcome(run)]
    if left_out:
        footer.insert(0, f"{left_out} figures left out: too many or too large")
    return Answer(said="\n".join(_said(run)), text="\n".join(footer), facts=_facts(run), figures=figures)


def _said(run: Run) -> Iterator[str]:
    """What the code itself has to say."""
    if run.stdout:
        yield _clipped(run.stdout).rstrip("\n")
    if run.stderr:
        yield "[stderr]\n" + _clipped(run.stderr).rstrip("\n")
    for text in _shown(run.displays):
        yield _clipped(text)
    if run.error is not None and _has_traceback(run.error):
        yield _clipped(run.error.traceback)


def _has_traceback(error: RunError) -> bool:
    return error.code in ("exception", "syntax") and bool(error.traceback)


def _outcome(run: Run) -> Iterator[str]:
    yield f"[{run.status} · {run.id} · version {run.version} · {run.duration_s:.2f} s]"
    yield f"CKPT: {run.ckpt}"
    if run.error is not None:
        yield from _in_words(run.error, told_below=run.recovery is not None)
    if run.outputs:
        yield f"{'would change' if run.status == 'rehearsed' else 'files'}: {_outputs(run.outputs)}"
    if run.names:
        names = _few([f"{name} ({kind})" for name, kind in run.names.items()])
        yield f"{'would bind' if run.status == 'rehearsed' else 'names'}: {names}"
    if run.names_gone:
        yield f"{'would delete' if run.status == 'rehearsed' else 'names deleted'}: {_few(run.names_gone)}"
    yield from _remarks(run)
    if run.recovery is not None:
        yield run.recovery.text
    if run.replayed:
        yield "next: this key has its answer already, and nothing was executed; another key runs it again"
    elif run.status in _NEXT:
        yield f"next: {_NEXT[run.status]}"


def _in_words(error: RunError, *, told_below: bool) -> Iterator[str]:
    if not told_below and not _has_traceback(error):
        yield f"{visible(error.name)}: {_clipped(error.message)}"
    if error.hint:
        yield f"hint: {error.hint}"


def _remarks(run: Run) -> Iterator[str]:
    yield from (f"check failed: {visible(check.name)}: {visible(check.detail)}" for check in run.checks if not check.ok)
    yield from (f"note: {visible(finding.message)}" for finding in run.findings[:_MOST_ITEMS])
    if run.saved:
        yield f"saved on the way: {_few(run.saved)}"
    if run.egress:
        yield f"egress: {_few(run.egress, most=_MOST_OUTPUTS)}"
    if run.may_have_happened and run.recovery is None:  # which has it
        yield f"earlier attempts sent, and it may have happened: {_few(run.may_have_happened, most=_MOST_OUTPUTS)}"
    if run.outside:
        yield f"changed between two runs: {_few(run.outside)}"
    if run.kernel_replaced:
        yield f"it had another kernel than the run before: {run.kernel_replaced}"
    if run.strays:
        yield f"left behind: {_few([f'{stray.kind} {stray.name}, {stray.outcome}' for stray in run.strays])}"
    if run.dropped_displays:
        yield f"{run.dropped_displays:,} displays past the limit were dropped"


def _outputs(changes: Sequence[Change]) -> str:
    return _few([_file(change) for change in changes], most=_MOST_OUTPUTS)


def _file(change: Change) -> str:
    if change.action == "removed" or change.kind != "file":
        return f"{change.action} {change.path}"
    return f"{change.action} {change.path} ({change.bytes:,} bytes, sha256 {change.sha256})"


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
            "exit_code": run.exit_code,
            "next_input": run.next_input,
            "error": run.error and _clipped_error(run.error),
            "outputs": run.outputs[: _MOST_ITEMS * 10],
            "names": dict(list(run.names.items())[: _MOST_ITEMS * 10]),
            "names_gone": run.names_gone[: _MOST_ITEMS * 10],
            "checks": run.checks[: _MOST_ITEMS * 10],
            "findings": run.findings[:_MOST_ITEMS],
            "saved": run.saved[: _MOST_ITEMS * 10],
            "egress": run.egress[:_MOST_ITEMS],
            "may_have_happened": run.may_have_happened[-_MOST_ITEMS:],
            "strays": run.strays[:_MOST_ITEMS],
            "kernel_replaced": run.kernel_replaced,
            "replayed": run.replayed,
            "attempt": run.attempt,
            "receipt": None if receipt is None else {"number": receipt.number, "sha256": receipt.sha256},
            "recovery": run.recovery and _latest(run.recovery),
            "duration_s": run.duration_s,
        }
    )


# -- the other answers ---------------------------------------------------------------------------------------------


def of_card(card: RunCard) -> Answer:
    hints = [f"hint: {finding.hint}" for finding in card.findings[:_MOST_ITEMS] if finding.hint]
    advice = f"next: nothing ran; run_code with the same code and expect={card.base} runs it on this state"
    return Answer(text="\n".join([cards.render(card), *hints, advice]), facts=_plain({"card": card, "ckpt": card.base}))


def of_standing(now: Standing) -> Answer:
    names = [f"{name} ({value.type}, {value.approx_bytes:,} bytes)" for name, value in (now.names or {}).items()]
    files = [f"{file.path} ({file.bytes:,} bytes)" for file in now.files]
    lines = [
        f"CKPT: {now.ckpt}",
        f"session {now.session} · version {now.version} · generation {now.generation}{_memory(now)}",
        *([f"under way: {now.running}"] if now.running else []),
        *([f"may reach: {_few(now.egress)}"] if now.egress else []),
        f"names: {_few(names) or 'none'}" if now.names is not None else "names: not known while a run is under way",
        f"files in /mnt/data: {_few(files) or 'none'}",
        *(f"{entry.run} · {entry.status} · {entry.ckpt} · {visible(entry.goal)}" for entry in now.runs),
    ]
    most = _MOST_ITEMS * 10
    facts = {
        **msgspec.structs.asdict(now),
        "names": None if now.names is None else dict(list(now.names.items())[:most]),
        "files": list(now.files)[:most],
    }
    return Answer(text="\n".join(lines), facts=_plain(facts))


def _memory(now: Standing) -> str:
    if now.memory_bytes is None or now.memory_cap_bytes is None:
        return ""
    return f" · memory {now.memory_bytes >> 20:,} of {now.memory_cap_bytes >> 20:,} MiB"


def of_recovery(recovery: Recovery, codes: Mapping[str, str]) -> Answer:
    """With the code of the runs that are to be run again: the client may have forgotten it as well."""
    told = [f"Code of {run}:\n{_clipped(code)}" for run, code in codes.items()]
    facts = {**msgspec.structs.asdict(_latest(recovery)), "codes": {run: _clipped(code) for run, code in codes.items()}}
    return Answer(text="\n".join([recovery.text, *told]), facts=_plain(facts))


def _clipped_error(error: RunError) -> RunError:
    message, traceback = _clipped(error.message), _clipped(error.traceback)
    return msgspec.structs.replace(error, message=message, traceback=traceback, blocks=[])


def _latest(recovery: Recovery) -> Recovery:
    """With the latest requests alone: the receipts have all of them."""
    return msgspec.structs.replace(recovery, may_have_happened=recovery.may_have_happened[-_MOST_ITEMS:])


def of_error(error: HoldfastError, recovery: Recovery | None = None) -> Answer:
    """With the way back, where the session's state is in question."""
    facts: dict[str, Any] = {"code": error.code, "message": error.message, "hint": error.hint}
    if isinstance(error, StateMoved) and error.differs is not None:
        facts["differs"] = error.differs
    told = [str(error)] if recovery is None else [str(error), recovery.text]
    return Answer(
        text="\n".join(told), facts=_plain({"error": facts, "recovery": recovery and _latest(recovery)}), refused=True
    )


# -- files ---------------------------------------------------------------------------------------------------------


def of_files(found: Sequence[FileEntry], *, limit: int, ckpt: str) -> Answer:
    shown = found[:limit]
    lines = [f"{file.path} ({file.bytes:,} bytes, sha256 {file.sha256})" for file in shown]
    if len(found) > limit:
        lines.append(f"and {len(found) - limit:,} more; narrow it down with pattern")
    lines.append(f"[{len(found):,} files, {sum(file.bytes for file in found):,} bytes · {ckpt}]")
    return Answer(text="\n".join(lines), facts=_plain({"ckpt": ckpt, "count": len(found), "files": shown}))


def of_file(seen: Seen) -> Answer:
    facts = msgspec.structs.asdict(seen)
    del facts["image"]
    digest = f" · sha256 {seen.sha256}" if seen.sha256 else ""
    if seen.kind == "text":
        return Answer(said=seen.text, text=f"[{seen.path} · {_extent(seen)}{digest}]{_onwards(seen)}", facts=facts)
    if seen.image:
        shown = [Figure(kind=seen.mime, data=seen.image)]
        return Answer(text=f"[{seen.path} · {seen.mime}{digest}]", facts=facts, figures=shown)
    if seen.kind == "image":
        why, hint = f"{seen.path} is an image too large to show", "make a smaller one with run_code, and read that"
    else:
        why, hint = f"{seen.path} is not text in UTF-8", advice(seen.path)
    error = {"code": "not_text", "message": why, "hint": hint}
    return Answer(text=f"{why} [not_text]\nhint: {hint}", facts={"error": error}, refused=True)


def _extent(seen: Seen) -> str:
    """Which part of the file it is."""
    size = f"{seen.read_bytes:,} bytes" if seen.sha256 else f"more than {seen.read_bytes:,} bytes"
    if seen.first_line is None or seen.last_line is None:
        return f"bytes {seen.start_byte:,} to {seen.end_byte:,} of {size}"
    of = f" of {seen.lines:,}" if seen.lines is not None else ""
    return f"lines {seen.first_line:,} to {seen.last_line:,}{of} · {size}"


def _onwards(seen: Seen) -> str:
    if seen.next_byte is None:
        return ""
    there = f"start_line={seen.next_line}" if seen.next_line is not None else f"start_byte={seen.next_byte}"
    return f"\nnext: there is more; go on with {there}"


def of_written(written: Written) -> Answer:
    lines = [
        f"[committed · {written.id} · version {written.version}]",
        f"CKPT: {written.ckpt}",
        f"files: {_outputs(written.outputs) or 'nothing changed'}",
        *_of_memory(written),
        *([f"changed between two runs: {_few(written.outside)}"] if written.outside else []),
        *([f"files not brought back: {_few(stay)}"] if (stay := written.files_not_restored) else []),
        f"next: {_NEXT['committed']}",
    ]
    receipt = written.receipt
    facts = {
        "run": written.id,
        "status": "committed",
        "ckpt": written.ckpt,
        "version": written.version,
        "outputs": written.outputs[: _MOST_ITEMS * 10],
        "memory": written.memory,
        "names_not_restored": written.names_not_restored,
        "files_not_restored": written.files_not_restored,
        "receipt": None if receipt is None else {"number": receipt.number, "sha256": receipt.sha256},
    }
    return Answer(text="\n".join(lines), facts=_plain(facts))


def _of_memory(written: Written) -> list[str]:
    if written.memory == "restored":
        left = f"; not to be brought back: {_few(written.not_restored)}" if written.not_restored else ""
        return [f"memory: as it was at that state{left}"]
    if written.memory == "lost":
        return [f"memory: lost ({written.without_memory}); gone: {_few(written.names_not_restored)}"]
    return [f"newer than these files: {_few(written.names_not_restored)}"] if written.names_not_restored else []


def of_reset(recovery: Recovery) -> Answer:
    advice = "next: memory is empty and the files are as committed; `recover` has the code that computed what is lost"
    return Answer(text=f"{recovery.text}\n{advice}", facts=_plain(msgspec.structs.asdict(_latest(recovery))))


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    plain: dict[str, Any] = msgspec.to_builtins(facts)
    return plain


def _few(items: Sequence[str], *, most: int = _MOST_ITEMS) -> str:
    shown = ", ".join(visible(item) for item in items[:most])
    return f"{shown} and {len(items) - most:,} more" if len(items) > most else shown


def _clipped(text: str) -> str:
    """
    >>> len(_clipped("x" * 30_000)) < 20_200
    True
    """
    if len(text) <= _MOST_CHARACTERS:
        return text
    half, left_out = _MOST_CHARACTERS // 2, len(text) - _MOST_CHARACTERS
    return f"{text[:half]}\n… {left_out:,} characters left out; print less, or write to a file …\n{text[-half:]}"
