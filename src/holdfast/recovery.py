"""What a caller is told after a reset or a rollback: cause, what is lost, what is there, what to do next.

Each is said twice: as data, and as a few lines that a model can follow. Nothing is ever said to be "in progress".
"""

import time
from collections.abc import Container, Mapping, Sequence

import msgspec

from holdfast import ckpt as ckpts
from holdfast.books import Books
from holdfast.ckpt import Ckpt
from holdfast.errors import StateMoved
from holdfast.executions import Aftermath
from holdfast.inputs import Read, read_for_lost_names, spoilt
from holdfast.model import Label, Memory, Recovery, RunError, Step
from holdfast.records import Lost
from holdfast.state import State
from holdfast.store.rows import VersionRow
from holdfast.travel import is_kept
from holdfast.visible import visible, visible_lines

_NAMED = 10
_MOST_CAUSE = 10_000
"""Characters: an exception's message may be a megabyte."""
_COMPARED = 200
"""CKPTs that a mistyped one is compared with, the latest first."""
_ADVICE = {
    "exception": Step(action="change", why="fix the code and run it again"),
    "syntax": Step(action="change", why="fix the syntax and run it again; nothing was started"),
    "verification": Step(action="change", why="mend what the check names, and run it again"),
    "protected_path": Step(action="change", why="write elsewhere, or name each such file exactly with --out"),
    "undeclared_write": Step(
        action="change", why="declare what it writes with --out, or choose --undeclared drop or keep"
    ),
    "patterns_too_costly": Step(action="change", why="declare fewer patterns, or name the directory of the files"),
    "timeout": Step(action="change", why="do less in one run, or give it more time"),
    "out_of_memory": Step(action="change", why="work in chunks or keep fewer copies, or give the session more memory"),
    "killed": Step(action="change", why="run the part that dies alone, and look at it there"),
    "kernel_lost": Step(action="retry", why="it was no fault of the code: run it again as it is, or with the same key"),
    "disk_limit": Step(action="change", why="write less, remove files first, or give the session a larger disk"),
    "output_limit": Step(action="change", why="print less, or write to a file"),
    "interrupted": Step(action="retry", why="it was ended from outside; run it again when you mean it"),
}

_NOTHING_READ = Read()
_LOOK_OUTSIDE = Step(action="check", why="nothing takes them back: sent again they may happen twice")


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """How a session differs from the state that a caller believes in."""

    expected: str
    found: str
    files: list[str]
    """Changed since; a name alone, or "unknown" where the state is too old to be told."""
    names_lost: list[str]
    names_changed: list[str]
    resets: list[Lost]
    steps: list[Step]


def of_rollback(
    state: State,
    run: str,
    error: RunError,
    aftermath: Aftermath,
    *,
    undone: Sequence[str],
    saved: Sequence[str],
    gave_way: Sequence[str],
    sent: list[str],
    read: Read,
) -> Recovery:
    """After a run that was rolled back, to this state; `undone` are the files that it had touched, `gave_way` those
    that had no place beside what it had saved, `sent` the requests that left, `read` what the runs had read that made
    what was lost with it."""
    kept = f"; saved on the way and kept: {_few(saved)}" if saved else ""
    kept += f", in place of {_few(gave_way)}" if gave_way else ""
    advice = msgspec.structs.replace(_ADVICE.get(error.code, _ADVICE["exception"]), run=run)
    return _written(
        state,
        cause=f"{error.name}: {error.message}" if error.message else error.name,
        code=error.code,
        at=time.time(),
        run=run,
        memory=aftermath.memory,
        files=f"as committed at version {state.version}{kept}",
        discarded=[*(path for path in undone if path not in {*saved, *gave_way}), *aftermath.discarded],
        not_restored=aftermath.not_restored,
        may_have_happened=sent,
        first=[advice] if error.code != "kernel_lost" or aftermath.memory != "lost" else [],  # names come first
        read=read,
    )


async def of_session(books: Books) -> Recovery:
    """Where the session stands now, and why memory is not what it was. Asking changes nothing."""
    read = await read_for_lost_names(books)
    state = books.state
    last = books.losses[-1] if books.losses else None
    if last is None:
        return _written(
            state, cause="nothing was lost", code="ok", at=time.time(), run=None, memory="kept",
            files=f"as committed at version {state.version}", discarded=[], not_restored=[], first=[],
            may_have_happened=books.may_have_happened,
        )  # fmt: skip
    return _written(
        state,
        cause=last.cause,
        code="lost",
        at=last.at,
        run=last.run,
        memory="lost",
        files=f"as committed at version {state.version}",
        discarded=[],
        not_restored=[],
        may_have_happened=books.may_have_happened,
        first=[],
        read=read,
    )


def labels(state: State, read: Read) -> dict[str, Label]:
    """Names that are in memory no more. Each was bound by a run whose code the journal has: it makes them again, unless
    what it read is not there as it was."""
    gone = {name: row for name, row in state.names.items() if row.generation != state.generation}
    spoils = spoilt(read, state.files)
    return {name: "lost" if row.run in spoils else "recomputable" for name, row in sorted(gone.items())}


def reruns(state: State, read: Read) -> list[Step]:
    """The runs that bound the lost names, in their order; and why one may not make them again as they were."""
    order, spoils = {run: number for number, run in enumerate(read.by_run)}, spoilt(read, state.files)
    wanted: dict[str, list[str]] = {}
    for name, row in state.names.items():
        if row.generation != state.generation:
            wanted.setdefault(row.run, []).append(name)
    runs = sorted(wanted, key=lambda run: order.get(run, len(order)))
    return [Step(action="rerun", run=run, names=sorted(wanted[run]), why=spoils.get(run, "")) for run in runs]


def differences(books: Books, expected: Ckpt, *, later_runs: Container[str], read: Read) -> Differences:
    """What a caller that believes in `expected` has to know; `later_runs` are those that committed since."""
    state = books.state
    since = [changes for version, changes in books.recent if version > expected.version]
    files = sorted({change.path for changes in since for change in changes if change.area == "data"})
    resets = [lost for lost in books.losses if lost.generation > expected.generation]
    lost = sorted({name for reset in resets for name in reset.names} - set(state.live()))
    back: list[Step] = []
    if expected.version < books.oldest:
        files = ["unknown: the state is too old"]
    elif files and is_kept(books, expected.version):
        back = [Step(action="restore", ckpt=str(expected), why="its files come back, memory stays")]
    return Differences(
        expected=str(expected),
        found=str(state.ckpt()),
        files=files,
        names_lost=lost,
        names_changed=sorted(name for name, (_, run) in state.live().items() if run in later_runs),
        resets=resets,
        steps=[
            *reruns(state, read),
            *back,
            Step(action="continue", ckpt=str(state.ckpt()), why="run on the state as it is"),
        ],
    )


async def refuse_if_moved(books: Books, expect: str | None) -> None:
    """A caller who believes in another state than this is told what differs, and nothing runs."""
    if expect is None or expect.strip() == (found := str(books.state.ckpt())):
        return
    believed, rows = await resolve(books, expect)
    later = {row.run for row in rows if row.version > believed.version}
    read = await read_for_lost_names(books)
    differs = await books.in_thread(lambda: differences(books, believed, later_runs=later, read=read))
    resets = "; ".join(f"{lost.cause} ({_clock(lost.at)})" for lost in differs.resets)
    raise StateMoved(
        f"expected {believed}, the session is at {found}; "
        f"not in memory any more: {_few(differs.names_lost) or 'nothing'}; "
        f"files changed since: {_few(differs.files) or 'none'}; resets since: {resets or 'none'}",
        hint="call recover() for the steps back, or run again with expect= set to the current CKPT",
        differs=differs,
    )


async def resolve(books: Books, text: str) -> tuple[Ckpt, list[VersionRow]]:
    """A CKPT of this session, and its versions; a mistyped one gets "did you mean"."""
    wanted = ckpts.parse(text)
    rows = await books.read(lambda store: store.versions(books.session))
    first = str(State(session=books.session, generation=1).ckpt())
    known = [str(books.state.ckpt()), first, *_after_resets(books, rows), *(row.ckpt for row in rows)]
    if str(wanted) not in known:
        ckpts.resolve(text, known[:_COMPARED])
    return wanted, rows


def _after_resets(books: Books, rows: Sequence[VersionRow]) -> list[str]:
    """What named the session when memory was just lost: the files of the version before, and no names."""
    found = []
    for lost in books.losses:
        before = next((row for row in rows if row.generation < lost.generation), None)
        state = State(session=books.session, generation=lost.generation)
        if before is not None:
            state = msgspec.structs.replace(state, version=before.version, manifest_sha256=before.manifest_sha256)
        found.append(str(state.ckpt()))
    return found


def _written(
    state: State,
    *,
    cause: str,
    code: str,
    at: float,
    run: str | None,
    memory: Memory,
    files: str,
    discarded: list[str],
    not_restored: list[str],
    may_have_happened: list[str],
    first: list[Step],
    read: Read = _NOTHING_READ,
) -> Recovery:
    if len(cause) > _MOST_CAUSE:
        cause = f"{cause[:_MOST_CAUSE]}… [cut here: {len(cause):,} characters in all; the run's error has more]"
    names = labels(state, read) if memory == "lost" else {}
    ckpt = str(state.ckpt())
    steps = [*([_LOOK_OUTSIDE] if may_have_happened else []), *(reruns(state, read) if names else []), *first]
    lines = [
        f"Cause: {_cause_in_words(cause)}",
        f"When: {_clock(at)}" + (f", in {run}" if run else ""),
        f"Memory: {_memory_in_words(memory, names)}",
        f"Files: {visible(files)}",
        *([f"Taken back: {_few(discarded)}"] if discarded else []),
        *([f"Not to be brought back: {_few(not_restored)}"] if not_restored else []),
        *([f"May have happened: {_few(may_have_happened)}"] if may_have_happened else []),
        f"State now: {ckpt}",
        *(f"Next: {_in_words(step)}" for step in steps[:_NAMED]),
    ]
    return Recovery(
        cause=cause, code=code, at=at, run=run, memory=memory, ckpt=ckpt, version=state.version,
        generation=state.generation, files=files, discarded=discarded, names=names, not_restored=not_restored,
        may_have_happened=may_have_happened, steps=steps, text="\n".join(lines),
    )  # fmt: skip


def _cause_in_words(cause: str) -> str:
    """An exception's message may have lines that look like ours, so those after the first are indented."""
    return visible_lines(cause).replace("\n", "\n    ")


def _memory_in_words(memory: Memory, names: Mapping[str, Label]) -> str:
    if memory == "restored":
        return "as it was before the run"
    if memory == "kept":
        return "intact"
    again, gone = ([name for name, label in names.items() if label == each] for each in ("recomputable", "lost"))
    told = [f"to be computed again: {_few(again)}"] if again else []
    told += [f"not as they were, for what they were made of has changed: {_few(gone)}"] if gone else []
    return "; ".join(["lost", *(told or ["no name is missing now"])])


def _in_words(step: Step) -> str:
    what = {
        "rerun": f"run {step.run} again for {_few(step.names)}",
        "restore": f"restore {step.ckpt}",
        "retry": f"run {step.run or 'it'} again",
        "change": "change the code",
        "check": "look at what the requests did that left",
        "free_disk": "free disk space",
        "continue": f"go on from {step.ckpt}",
    }[step.action]
    return f"{what} ({visible(step.why)})" if step.why else what


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _few(items: Sequence[str]) -> str:
    shown = ", ".join(visible(item) for item in items[:_NAMED])
    return f"{shown} and {len(items) - _NAMED:,} more" if len(items) > _NAMED else shown
