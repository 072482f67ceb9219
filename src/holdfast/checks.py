"""What is verified on the host before the point of no return, as values that go into the receipt.

1. A check that is not `ok` rolls the run back. What is worth a note and no more is `ok` and has a `detail`.
2. All that comes from the sandbox is untrusted: probes' answers are counted and cut, and no answer is a failure.
3. A forecast is a guess about code: that it was wrong is noted and never fails a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from holdfast.errors import HoldfastError, PatternsTooCostly
from holdfast.expectations import Expected
from holdfast.kernel import wire
from holdfast.mappings import shared_writable_mappings as shared_writable_mappings
from holdfast.patterns import Files
from holdfast.records import Change, Check, FileEntry, Input
from holdfast.visible import visible

MAPPINGS = "shared mappings"
UNPUBLISHED, NOT_EXECUTABLE = "unpublished", "not executable"
"""Notes on what did not appear in a directory of the user's as the code left it (`publication`)."""
_OF_SQLITE = "-shm"
"""How SQLite names what a database in WAL mode keeps mapped for as long as a connection is open."""
_CLOSE_SQLITE = (
    "close the SQLite connection before the code ends, or keep the database out of WAL mode "
    "(pragma journal_mode = delete): then a connection may stay open"
)
_CLOSE_MAPPING = "flush and close the mapping (del the numpy.memmap and whatever looks into it) before the code ends"
_MAX_NAMED = 10
_MAX_DETAIL = 1_000
_MAX_NAME = 200


def compare(
    expected: Sequence[Expected],
    forecast: Sequence[str],
    *,
    changes: Sequence[Change],
    files_after: Mapping[str, FileEntry],
    inputs: Sequence[Input] = (),
) -> list[Check]:
    """Declared outputs, the forecast and the inputs against what is there. Raises PatternsTooCostly."""
    touched = {change.path: change for change in changes if change.area == "data"}
    written = [path for path, change in touched.items() if change.kind != "directory" and change.action != "removed"]
    present, new = Files(files_after), Files(written)
    outputs = _outputs(expected, present, touched, files_after)
    return [*outputs, *_forecast(forecast, touched, new, declared=expected), *_inputs(inputs, touched)]


def from_probes(probes: Sequence[wire.Probe], failures: Sequence[str]) -> list[Check]:
    """What became of the probes. `failures` has one text each, empty where the probe holds."""
    if len(failures) != len(probes):
        detail = f"{len(probes)} probes were sent and {len(failures)} answered"
        return [Check(name="probes", ok=False, detail=detail)]
    return [
        Check(name=_name_of(probe), ok=not failure, detail=_cut(failure, _MAX_DETAIL))
        for probe, failure in zip(probes, failures, strict=True)
    ]


def unanswered(probes: Sequence[wire.Probe], why: str) -> list[Check]:
    """The kernel was lost, or ran out of time, before it said how the probes went."""
    return [Check(name=_name_of(probe), ok=False, detail=_cut(why, _MAX_DETAIL)) for probe in probes]


def from_mappings(found: Sequence[str]) -> list[Check]:
    """Of what `shared_writable_mappings` found."""
    if not found:
        return []
    of_sqlite = [path for path in found if path.endswith(_OF_SQLITE)]
    ways = [_CLOSE_SQLITE] if of_sqlite else []
    ways += [_CLOSE_MAPPING] if len(of_sqlite) < len(found) else []
    why = "Such memory writes past every commit and rollback"
    detail = f"still mapped for writing: {few(found)}. {why}: {'; '.join(ways)}"
    return [Check(name=MAPPINGS, ok=False, detail=detail)]


def from_disturbances(
    disturbed: AbstractSet[str], *, changes: Sequence[Change], inputs: Sequence[Input]
) -> list[Check]:
    """Files that others changed in a shared directory while the run went on."""
    touched = {change.path for change in changes if change.area == "data"} | {one.path for one in inputs}
    if both := sorted(disturbed & touched):
        detail = f"changed by somebody else while it ran: {few(both)}. Nothing of theirs was overwritten: run it again"
        return [Check(name="outside", ok=False, detail=_cut(detail, _MAX_DETAIL))]
    if disturbed:
        detail = f"changed meanwhile, not by this run: {few(sorted(disturbed))}"
        return [Check(name="outside", ok=True, detail=_cut(detail, _MAX_DETAIL))]
    return []


def from_strangers(strange: Sequence[str], *, lost: Sequence[str] = ()) -> list[Check]:
    """Files that the run read or replaced, and that were not what was committed; of some, that is nowhere any more."""
    if not strange:
        return []
    detail = f"changed on the host since they were committed, by no run: {few(strange)}"
    detail += f"; what was committed of {few(lost)} is lost, and no restore brings it back" if lost else ""
    return [Check(name="outside", ok=True, detail=_cut(detail, _MAX_DETAIL))]


def from_late_changes(theirs: Sequence[str]) -> list[Check]:
    """Files that others changed after they were verified, too late for a rollback."""
    if not theirs:
        return []
    detail = f"changed by somebody else as the files appeared: {few(sorted(theirs))}. Theirs stays, not what it wrote"
    return [Check(name="outside", ok=True, detail=_cut(detail, _MAX_DETAIL))]


def refused(error: HoldfastError) -> Check:
    """A limit or rule that the run breaks; `publication.reason` makes the error of it again."""
    return Check(name=error.code, ok=False, detail=error.message)


def passed(checks: Iterable[Check]) -> bool:
    return all(check.ok for check in checks)


def reason(checks: Iterable[Check]) -> str:
    """The first failure in words; empty if there is none."""
    failed = [check for check in checks if not check.ok]
    if not failed:
        return ""
    first = f"{failed[0].name}: {failed[0].detail}" if failed[0].detail else f"{failed[0].name} failed"
    return first if len(failed) == 1 else f"{first} (and {len(failed) - 1} more)"


# -- outputs -----------------------------------------------------------------------------------------------------


def _outputs(
    expected: Sequence[Expected], present: Files, touched: Mapping[str, Change], files: Mapping[str, FileEntry]
) -> list[Check]:
    found = [(one, present.meant_by(one.path)) for one in expected]
    by_name = _by_name(touched) if not all(paths for _, paths in found) else {}
    return [
        _output(one, paths, touched, files) if paths else _absent(one.path, touched, by_name) for one, paths in found
    ]


def _output(
    expected: Expected, found: Sequence[str], touched: Mapping[str, Change], files: Mapping[str, FileEntry]
) -> Check:
    # Of a pattern, the files that this run wrote count; older ones only where it wrote none.
    written = [path for path in found if path in touched]
    empty = [path for path in written or found if files[path].bytes == 0]
    if empty:
        detail = "it is empty" if empty == [expected.path] else f"empty: {few(empty)}"
        return Check(name=_label(expected.path), ok=False, detail=detail)
    detail = "" if written else "as it was before: the run did not write it"
    return Check(name=_label(expected.path), ok=True, detail=detail)


def _label(path: str) -> str:
    return f"output {_cut(path, _MAX_NAME)}"


def _absent(path: str, touched: Mapping[str, Change], by_name: Mapping[str, Sequence[str]]) -> Check:
    return Check(name=_label(path), ok=False, detail=_why_missing(path, touched, by_name))


def _by_name(touched: Mapping[str, Change]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in touched:
        found.setdefault(path.rpartition("/")[2], []).append(path)
    return found


def _why_missing(path: str, touched: Mapping[str, Change], by_name: Mapping[str, Sequence[str]]) -> str:
    change = touched.get(path)
    if change is None:
        near = by_name.get(path.rpartition("/")[2], ())
        return "it does not exist" + (f"; the run wrote {few(near)}" if near else "")
    if change.action == "removed":
        return "the run removed it"
    return f"it is a {change.kind}, not a regular file"


# -- notes -------------------------------------------------------------------------------------------------------


def _forecast(
    forecast: Sequence[str], touched: Mapping[str, Change], new: Files, *, declared: Sequence[Expected]
) -> list[Check]:
    written = list(new)
    if not forecast and not written:
        return []
    try:
        return [_against_forecast(forecast, Files(touched), new, declared=declared)]
    except PatternsTooCostly:  # the forecast is of the guest's text, and a note about it fails no run
        return [Check(name="forecast", ok=True, detail="not compared: its patterns and the files are too many")]


def _against_forecast(forecast: Sequence[str], touched: Files, new: Files, *, declared: Sequence[Expected]) -> Check:
    meant = {pattern: touched.foreseen_by(pattern) for pattern in forecast}
    announced = set[str]().union(*meant.values(), *(new.meant_by(one.path) for one in declared))
    missing = [pattern for pattern in forecast if not meant[pattern]]
    unexpected = [path for path in new if path not in announced]
    notes = [f"{label}: {few(paths)}" for label, paths in (("missing", missing), ("unexpected", unexpected)) if paths]
    return Check(name="forecast", ok=True, detail=_cut("; ".join(notes) or "as forecast", _MAX_DETAIL))


def _inputs(inputs: Sequence[Input], touched: Mapping[str, Change]) -> list[Check]:
    changed = [one.path for one in inputs if one.path in touched]
    return [Check(name="inputs", ok=True, detail=f"changed by the run itself: {few(changed)}")] if changed else []


# -- words -------------------------------------------------------------------------------------------------------


def _name_of(probe: wire.Probe) -> str:
    return _cut(visible(f"{probe.format} {probe.path}" if probe.format else f"assert {probe.name}"), _MAX_NAME)


def few(paths: Sequence[str]) -> str:
    """The first of them, as text to be read, and how many more."""
    more = len(paths) - _MAX_NAMED
    named = ", ".join(_cut(visible(path), _MAX_NAME) for path in paths[:_MAX_NAMED])
    return f"{named} and {more:,} more" if more > 0 else named


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
