"""What is verified on the host before the point of no return."""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import checks
from holdfast.expectations import outputs
from holdfast.kernel import wire
from holdfast.records import Change, Check, FileEntry, Input


def wrote(path: str, **more: Any) -> Change:
    return Change(path=path, **{"action": "added", "bytes": 1, "sha256": "00", **more})


def files(*paths: str, empty: str = "") -> dict[str, FileEntry]:
    return {path: FileEntry(path=path, sha256="00", bytes=int(path != empty)) for path in paths}


def compare(
    expected: Any, changes: list[Change], after: dict[str, FileEntry], forecast: list[str] | None = None
) -> list[Check]:
    return checks.compare(outputs(expected), forecast or [], changes=changes, files_after=after)


# -- declared outputs --------------------------------------------------------------------------------------------


def test_an_output_that_is_there_passes() -> None:
    done = compare(["a.csv"], [wrote("a.csv")], files("a.csv"))

    assert done[0] == Check(name="output a.csv", ok=True)
    assert checks.passed(done)
    assert checks.reason(done) == ""


def test_an_output_that_was_there_before_passes_with_a_note() -> None:
    (check,) = compare(["a.csv"], [], files("a.csv"))

    assert check.ok
    assert "did not write it" in check.detail


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([], "does not exist"),
        ([wrote("out/a.csv")], "the run wrote out/a.csv"),
        ([wrote("a.csv", action="removed")], "the run removed it"),
        ([wrote("a.csv", kind="symlink")], "a symlink, not a regular file"),
        ([wrote("a.csv", kind="directory")], "a directory, not a regular file"),
        ([wrote("a.csv", area="tmp")], "does not exist"),
    ],
)
def test_a_missing_output_fails_and_says_why(changes: list[Change], why: str) -> None:
    done = compare(["a.csv"], changes, {})

    assert not checks.passed(done)
    assert why in checks.reason(done)
    assert checks.reason(done).startswith("output a.csv: ")


def test_an_empty_output_fails() -> None:
    done = compare(["a.csv"], [wrote("a.csv", bytes=0)], files("a.csv", empty="a.csv"))

    assert checks.reason(done) == "output a.csv: it is empty"


def test_of_a_pattern_the_files_that_the_run_wrote_count() -> None:
    after = files("old.csv", "new.csv", empty="old.csv")

    assert checks.passed(compare(["*.csv"], [wrote("new.csv")], after))
    assert "old.csv" in checks.reason(compare(["*.csv"], [wrote("old.csv", bytes=0)], after))
    assert not checks.passed(compare(["*.png"], [], after))


# -- notes -------------------------------------------------------------------------------------------------------


def test_a_wrong_forecast_is_a_note_and_no_failure() -> None:
    changes = [wrote("plots/x/1.png"), wrote("b.csv"), wrote("dir", kind="directory"), wrote("c.csv"), wrote("[1].csv")]

    done = compare(["c.csv"], changes, files("c.csv"), forecast=["*.png", "a.csv", "[1].*"])

    assert checks.passed(done)
    assert done[-1] == Check(name="forecast", ok=True, detail="missing: a.csv; unexpected: b.csv")


def test_a_forecast_that_came_true_is_said_and_silence_needs_no_words() -> None:
    assert compare([], [wrote("a.csv")], {}, forecast=["a.csv"])[0].detail == "as forecast"
    assert compare([], [], {}) == []


def test_many_unexpected_files_are_counted_and_not_listed() -> None:
    (note,) = compare([], [wrote(f"{n}.bin") for n in range(5_000)], {})

    assert note.detail.endswith("and 4,990 more")
    assert len(note.detail) < 1_000


def test_an_input_that_the_run_itself_changed_is_noted() -> None:
    done = checks.compare(
        [], ["raw.csv"], changes=[wrote("raw.csv")], files_after={}, inputs=[Input(path="raw.csv", sha256="00")]
    )

    assert done[-1] == Check(name="inputs", ok=True, detail="changed by the run itself: raw.csv")


# -- probes ------------------------------------------------------------------------------------------------------

PROBES = [wire.Probe(name="a.csv", path="a.csv", format="csv"), wire.Probe(name="x > 1", code="x > 1")]


def test_each_probe_is_a_check() -> None:
    assert checks.from_probes(PROBES, ["", "it is False"]) == [
        Check(name="csv a.csv", ok=True),
        Check(name="assert x > 1", ok=False, detail="it is False"),
    ]
    assert checks.reason(checks.unanswered(PROBES, "the kernel died")) == "csv a.csv: the kernel died (and 1 more)"


@pytest.mark.parametrize("answers", [[], [""], ["", "", ""]])
def test_a_guest_that_answers_too_little_or_too_much_has_failed(answers: list[str]) -> None:
    assert not checks.passed(checks.from_probes(PROBES, answers))


def test_what_a_guest_says_is_cut() -> None:
    assert len(checks.from_probes(PROBES, ["", "x" * 10_000_000])[1].detail) == 1_000


# -- shared mappings ---------------------------------------------------------------------------------------------

_MAPS = """
import ctypes, mmap, os, sys
mode, prot, flags, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), os.fsencode(sys.argv[4])
fd = os.open(path, os.O_RDWR if mode == "w" else os.O_RDONLY)
kept = mmap.mmap(fd, 4096, flags=flags, prot=prot)
if sys.argv[5:]: os.unlink(path)
print("mapped", flush=True)
sys.stdin.read()
"""


@contextmanager
def mapping(
    path: Path, *, mode: str = "w", prot: int = 3, flags: int = mmap.MAP_SHARED, gone: str = ""
) -> Iterator[int]:
    path.write_bytes(bytes(4096))
    arguments = [mode, str(prot), str(flags), str(path), *([gone] if gone else [])]
    with subprocess.Popen(
        [sys.executable, "-c", _MAPS, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"mapped\n"
        yield process.pid
        process.kill()


def test_a_file_mapped_for_shared_writing_is_found_and_fails(tmp_path: Path) -> None:
    with mapping(tmp_path / "a.bin") as pid:
        found = checks.shared_writable_mappings([pid])

    assert found == [str(tmp_path / "a.bin")]
    assert "del the numpy.memmap" in checks.reason(checks.from_mappings(found))


def test_what_sqlite_maps_is_told_from_what_the_code_maps() -> None:
    both = checks.reason(checks.from_mappings(["/mnt/data/a.db-shm", "/mnt/data/a.bin"]))
    sqlite = checks.reason(checks.from_mappings(["/mnt/data/a.db-shm"]))

    assert "close the SQLite connection" in sqlite
    assert "numpy" not in sqlite
    assert "close the SQLite connection" in both
    assert "del the numpy.memmap" in both


def test_no_mapping_is_no_check(tmp_path: Path) -> None:
    with mapping(tmp_path / "a.bin", flags=mmap.MAP_PRIVATE) as private:
        assert checks.shared_writable_mappings([private]) == []
    with mapping(tmp_path / "b.bin", mode="r", prot=mmap.PROT_READ) as reader:
        assert checks.shared_writable_mappings([reader]) == []
    assert checks.from_mappings([]) == []


def test_a_mapping_that_can_be_made_writable_later_counts(tmp_path: Path) -> None:
    with mapping(tmp_path / "a.bin", mode="w", prot=mmap.PROT_READ) as pid:
        assert len(checks.shared_writable_mappings([pid])) == 1


@pytest.mark.parametrize(
    "name", ["new\nline", "x (deleted)", "\\012", "[aio] (deleted)", "memfd:x", "[anon]", "\udcff"]
)
def test_no_name_hides_a_mapping(tmp_path: Path, name: str) -> None:
    with mapping(tmp_path / name) as pid:
        assert len(checks.shared_writable_mappings([pid])) == 1


def test_a_mapped_file_that_was_deleted_counts_too(tmp_path: Path) -> None:
    with mapping(tmp_path / "a.bin", gone="gone") as pid:
        assert checks.shared_writable_mappings([pid]) == [str(tmp_path / "a.bin")]


def test_memory_that_only_looks_like_files_is_left_out() -> None:
    own = checks.shared_writable_mappings([os.getpid()])  # a home that is open here has its journal mapped
    memory = os.memfd_create("memory")
    os.truncate(memory, 4096)
    shared = [mmap.mmap(memory, 4096), mmap.mmap(-1, 4096)]

    with mapping(Path("/dev/shm") / f"holdfast-test-{os.getpid()}", gone="gone") as pid:
        assert checks.shared_writable_mappings([pid, os.getpid()]) == own
    for each in shared:
        each.close()
    os.close(memory)


def test_a_process_that_has_ended_holds_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert checks.shared_writable_mappings([process.pid]) == []


def test_a_process_that_may_not_be_looked_into_is_a_finding(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may look into every process")
    assert "cannot be read" in checks.shared_writable_mappings([1])[0]


def test_thousands_of_mappings_are_few_words(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(4096))
    with (tmp_path / "a.bin").open("r+b") as file:
        many = [mmap.mmap(file.fileno(), 4096) for _ in range(2_000)]
        for number in range(30):
            path = tmp_path / f"{number}.bin"
            path.write_bytes(bytes(4096))
            with path.open("r+b") as other:
                many.append(mmap.mmap(other.fileno(), 4096))
        found = checks.shared_writable_mappings([os.getpid()])
        for each in many:
            each.close()

    assert len(found) == 20


def test_a_ring_of_asynchronous_io_is_no_file() -> None:
    setup, destroy = {"x86_64": (206, 207), "aarch64": (0, 1)}[platform.machine()]
    own = checks.shared_writable_mappings([os.getpid()])
    context = ctypes.c_ulong(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(setup, 1, ctypes.byref(context)) != 0:
        pytest.skip("no asynchronous I/O here")

    assert checks.shared_writable_mappings([os.getpid()]) == own
    libc.syscall(destroy, context)
