"""A session's files from outside: what is committed can be read, and what is written is a run like any other."""

import errno
import hashlib
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from holdfast import Run, Session, engine, workfiles
from holdfast.errors import DiskLimit, FileUnknown, HoldfastError, InvalidSetting
from holdfast.workfiles import Written

TRANSPORTS = True


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


@pytest.fixture(scope="module")
def shared() -> Iterator[Session]:
    """For what leaves nothing."""
    with Session(memory="512M", timeout=30) as session:
        yield session


def seen(session: Session, expression: str) -> str:
    return ok(session.run(f"import os; print({expression})")).stdout.removesuffix("\n")


def test_a_write_is_a_run_with_a_version_and_a_receipt(session: Session) -> None:
    before = session.ckpt
    written = session.write("in/sales.csv", "a,b\n1,2\n")

    assert isinstance(written, Written)
    assert (written.version, session.version, written.ckpt) == (1, 1, session.ckpt)
    assert session.ckpt != before
    (change,) = written.outputs
    assert (change.path, change.action, change.bytes) == ("in/sales.csv", "added", 8)
    assert written.receipt is not None
    told = written.receipt.facts()
    assert (told.number, told.kind, told.goal, told.ckpt_before) == (1, "write", "write in/sales.csv", before)
    assert told.finished_at >= told.started_at
    (entry,) = session.files()
    digest = hashlib.sha256(b"a,b\n1,2\n").hexdigest()
    assert (entry.path, entry.bytes, entry.sha256, change.sha256) == ("in/sales.csv", 8, digest, digest)
    assert session.history()[0].run == written.id


def test_code_and_caller_see_each_others_files_at_once(session: Session) -> None:
    for n in range(5):
        session.write("f", f"{n}")
        assert seen(session, "open('f').read()") == str(n)
        ok(session.run(f"open('f', 'w').write('cell {n}')"))
        assert session.read("f") == f"cell {n}".encode()
    session.write("/mnt/data/new/er", b"\0\xff")
    assert seen(session, "open('new/er', 'rb').read(), oct(os.stat('new').st_mode)") == r"b'\x00\xff' 0o40755"
    ok(session.run("open('new/er', 'a').write('x'); os.rename('new', 'old')"))
    assert session.read(Path("old") / "er") == b"\0\xffx"


def test_files_that_a_cell_holds_open_go_on_where_they_are(session: Session) -> None:
    ok(session.run("f = open('f', 'w'); f.write('one\\n'); f.flush(); r = open('f'); r.readline()"))
    session.write("other", "x")
    ok(session.run("f.write('two\\n'); f.flush()"))
    assert (session.read("f"), seen(session, "r.readline()")) == (b"one\ntwo\n", "two\n")

    session.write("f", "from outside\n")
    assert seen(session, "open('f').read()") == "from outside\n"
    ok(session.run("f.write('at its own place\\n'); f.flush()"))
    assert session.read("f") == b"from outat its own place\n"


def test_memory_is_as_protected_after_a_write_as_before(session: Session) -> None:
    ok(session.run("x = [1]"))
    session.write("f", "1")
    run = session.run("x.append(2); open('f', 'w').write('half'); import os; os._exit(1)")

    assert (run.memory, run.unprotected, session.read("f")) == ("restored", None, b"1")
    assert seen(session, "x, open('f').read()") == "[1] 1"


def test_a_file_or_a_directory_can_be_removed(session: Session) -> None:
    ok(session.run("import os; os.makedirs('d/e'); open('d/e/f', 'w').write('1'); open('g', 'w').write('2')"))
    assert [change.path for change in session.remove("g").outputs] == ["g"]
    removed = session.remove("d")
    assert [(change.path, change.action) for change in removed.outputs] == [("d/e/f", "removed")]
    assert (session.files(), seen(session, "os.listdir()")) == ([], "[]")
    assert removed.receipt is not None
    assert removed.receipt.facts().goal == "remove d"
    with pytest.raises(FileUnknown):
        session.remove("g")
    assert session.version == 4  # with the run that looked


@pytest.mark.parametrize(
    "name", ["a b", "naïve ☃.csv", "back\\slash", "new\nline", "-rf", "*?[x]", "\udcff raw", "x" * 255]
)
def test_odd_names_are_names(shared: Session, tmp_path: Path, name: str) -> None:
    session = shared
    session.write(name, "from outside")
    assert seen(session, f"os.listdir() == [{name!r}]") == "True"
    ok(session.run(f"open({name!r}, 'a').write(' and inside')"))
    (entry,) = session.files()

    assert session.read(name) == session.read(entry.path) == b"from outside and inside"
    assert os.fsencode(session.download(entry.path, tmp_path).name) == os.fsencode(name)
    session.write(entry.path, "again")
    assert [(change.path, change.action) for change in session.remove(entry.path).outputs] == [(entry.path, "removed")]
    assert session.files() == []


@pytest.mark.parametrize(
    "path", ["", ".", "/", "../x", "a/../../x", "/etc/passwd", "/tmp/x", "x/", "nul\0", "y" * 5000]
)
def test_a_path_that_is_none_of_the_workspace_is_refused(shared: Session, path: str) -> None:
    version = shared.version
    for verb in (shared.read, shared.remove, lambda path: shared.write(path, "x")):
        with pytest.raises(InvalidSetting):
            verb(path)  # type: ignore[operator]
    assert shared.version == version


def test_no_link_leads_anywhere(session: Session, tmp_path: Path) -> None:
    ok(
        session.run(
            "import os; os.symlink('/etc', 'd'); os.symlink('/etc/passwd', 'f'); os.mkfifo('p'); os.mkdir('dir')"
        )
    )
    before = Path("/etc/passwd").read_bytes()
    for path in ("f", "d/passwd", "p", "dir", "nothing"):
        with pytest.raises(FileUnknown):
            session.read(path)
        with pytest.raises(FileUnknown):
            session.download(path, tmp_path / "x")
    for path in ("d/new", "dir", "f/x", "p/x"):
        with pytest.raises(InvalidSetting):
            session.write(path, "x")
    assert [entry.status for entry in session.history()][1:] == ["rolled_back"] * 4

    session.write("f", "in its place")  # the link itself goes
    assert seen(session, "os.path.islink('f'), open('f').read()") == "False in its place"
    session.remove("d")
    assert seen(session, "sorted(os.listdir())") == "['dir', 'f', 'p']"
    assert (Path("/etc/passwd").read_bytes(), list(tmp_path.iterdir())) == (before, [])


def test_files_are_streamed_and_never_whole_in_memory(session: Session, tmp_path: Path) -> None:
    large, size = tmp_path / "large.bin", 100 << 20
    with large.open("wb") as file:
        file.truncate(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    written = session.upload(large)
    back = session.download("large.bin", tmp_path / "back.bin")

    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 40 << 20
    assert [change.bytes for change in written.outputs] == [size]
    assert (back.stat().st_size, seen(session, "os.path.getsize('large.bin')")) == (size, str(size))


def test_upload_and_download_name_what_is_wrong(session: Session, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("1")
    session.upload(tmp_path / "mine", "data/theirs")
    assert session.download("data/theirs", tmp_path) == tmp_path / "theirs"
    for verb in (
        lambda: session.upload(tmp_path / "nothing"),
        lambda: session.upload(tmp_path),
        lambda: session.download("data/theirs", tmp_path / "no" / "where"),
        lambda: session.write("f", 5),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidSetting):
            verb()


def test_more_than_the_disk_holds_is_refused_and_leaves_nothing(where: dict[str, Any]) -> None:
    with Session(memory="512M", timeout=30, disk="16M", **where) as small:
        small.write("f", b"x" * (10 << 20))
        for _ in range(2):
            with pytest.raises(DiskLimit):
                small.write("g", b"x" * (10 << 20))
        assert [entry.path for entry in small.files()] == ["f"]
        small.remove("f")
        small.write("g", b"x" * (10 << 20))
        assert seen(small, "os.listdir()") == "['g']"


class Broken(io.RawIOBase):
    """A source that ends as nobody expects: a file that its owner closes, a stream with a bug."""

    def read(self, size: int = -1) -> bytes:
        raise LookupError("it was closed meanwhile")


@pytest.mark.embedded("a server reads from its own client")
def test_a_source_that_fails_as_nobody_expects_leaves_no_run_without_an_end(session: Session) -> None:
    live = session._session._transport._session
    session.write("f", "before")
    with pytest.raises(LookupError):
        engine.wait(lambda: workfiles.write(live, "f", cast(BinaryIO, Broken())))

    assert (live.books.open, session.info().state, session.read("f")) == ({}, "ready", b"before")
    last = session.history()[-1]
    assert (last.status, last.reason) == ("rolled_back", "LookupError: it was closed meanwhile")
    assert seen(session, "open('f').read()") == "before"


@pytest.mark.embedded("a look is made to fail inside the host")
def test_a_host_file_that_cannot_be_looked_at_leaves_nothing_staged(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = session._session._transport._session
    session.write("f", "before")
    ok(session.run("1"))

    async def fails(*_: object) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    stages = live.workspace.path / "stages"
    session.names()  # all is at rest
    before = sorted(os.listdir(stages))
    with monkeypatch.context() as patched:
        patched.setattr(workfiles, "changed_on_host", fails)
        with pytest.raises(OSError, match="Too many open files"):
            session.write("f", "after")

    assert (live.books.open, session.history()[-1].status, session.read("f")) == ({}, "rolled_back", b"before")
    session.names()
    assert len(os.listdir(stages)) == len(before)


def test_files_can_be_read_while_a_run_goes_on_and_are_those_of_the_last_commit(session: Session) -> None:
    ok(session.run("open('f', 'w').write('committed')"))
    read: list[bytes] = []
    run = session.run(
        "open('f', 'w').write('half')\nprint('go', flush=True)\nimport time; time.sleep(0.2)",
        on_stdout=lambda _: read.append(session.read("f")),
    )

    assert (ok(run).status, set(read), session.read("f")) == ("committed", {b"committed"}, b"half")


def test_a_session_that_is_closed_has_no_files() -> None:
    with Session(memory="512M") as session:
        session.write("f", "x")
    with pytest.raises(HoldfastError):
        session.read("f")
