"""Whatever was done in a session, the journal and the receipts tell the same story of it."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import Session
from holdfast.cli.verify import check_session
from holdfast.config import default_home
from holdfast.home import JOURNAL
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home


def test_every_kind_of_run_is_told_alike_by_journal_and_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "up.csv").write_text("a,b\n1,2\n")
    with Session(memory="512M", timeout=30, undo=1) as session:
        session.write("in", "1")
        first = session.run("x = 1; open('a', 'w').write('a')", goal="make a \u20ac", key="k", inputs=["in"])
        session.run(
            "x = 2; open('a', 'a').write('b'); open('/tmp/t', 'w').write('t')", outputs=["a"], asserts=["x == 2"]
        )
        session.run("1 / 0")
        session.run("raise ValueError('\\udc80 odd')")
        session.run("from holdfast.kit import save; open('s', 'w').write('s'); save('s', step='load'); 1 / 0")
        session.run("open('s2', 'w').write('s'); save('s2'); open('s2', 'w').write('other')")
        session.run("open('never', 'w').write('n')", outputs=["missing"])
        session.run("while True: pass", timeout=1)
        session.run("import os; os._exit(3)")
        session.run("y = 1", rehearse=True)
        session.run("x = 1; open('a', 'w').write('a')", key="k", inputs=["in"])
        session.shell("echo command > c; exit 3")
        session.shell("rm c")
        session.upload(tmp_path / "up.csv")
        session.write("w", "written")
        session.remove("w")
        session.run("import threading; threading.Thread(target=__import__('time').sleep, args=(60,)).start()")
        session.restore(first.ckpt)
        session.reset()
        last = session.run("open('last', 'w').write('l')", mode="notebook")

        code = check_session(session.id, home=default_home(), public_key=None, as_json=False)

    assert last.status == "committed"
    assert code == 0, capsys.readouterr().out


MAKE = """
import os, socket
open('f', 'w').write('f'); open('suid', 'w').write('s'); os.chmod('suid', 0o6755)
open('x.sh', 'w').write('x'); os.chmod('x.sh', 0o750); os.link('x.sh', 'hard')
os.symlink('f', 'l'); os.symlink('/nowhere', 'dangling'); os.mkfifo('p', 0o640)
with socket.socket(socket.AF_UNIX) as bound: bound.bind('s')
os.makedirs('d/e'); os.chmod('d/e', 0o750); open('d/e/f', 'w').write('g'); os.chmod('f', 0o000)
os.mkdir('shut'); open('shut/in', 'w').write('1'); os.chmod('shut', 0o000); os.chmod('.', 0o750)
os.mkdir('sticky'); os.chmod('sticky', 0o1777)
"""
CHANGE = """
import os
os.chmod('f', 0o644); os.chmod('shut', 0o700); os.remove('l'); os.symlink('x.sh', 'l'); os.chmod('hard', 0o700)
"""
REPLACE = """
import os, shutil
shutil.rmtree('d'); os.symlink('sticky', 'd'); os.remove('s'); os.mkdir('s'); os.remove('p'); open('p', 'w').write('p')
os.rmdir('sticky')
"""
SAVE = """
from holdfast import kit
import os
os.remove('d'); os.makedirs('d/n/m'); open('d/n/m/x', 'w').write('x'); kit.save('d/n/m/x'); 1 / 0
"""


def test_all_that_receipts_state_is_on_the_disk_after_every_kind_of_change() -> None:
    """Kinds, modes, targets and directories; a run, a write, savepoints, a restore, and a resumed session."""

    def problem(session: Session) -> str:
        home = default_home()
        with closing(Store(home / JOURNAL, read_only=True)) as store:
            return check_in_home(store, session.id, home).problem

    with Session(memory="512M", timeout=30) as session:
        for code in (MAKE, CHANGE, REPLACE):
            done = session.run(code)
            assert (done.status, problem(session)) == ("committed", "")
        session.write("up/er/w", b"w")
        assert problem(session) == ""
        session.remove("up")
        assert session.run(SAVE).saved == ["d/n/m/x"]
        assert problem(session) == ""
        session.restore(done.ckpt)
        assert problem(session) == ""
        name = session.id
        session.close(keep=True)
    with Session(resume=name) as session:
        assert problem(session) == ""
        assert session.run("__import__('os').rename('d', 'e')").error is None
        assert problem(session) == ""


ACCIDENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "content": (lambda data: (data / "a.csv").write_bytes(b"3,4"), "file a.csv was changed"),
    "no file": (lambda data: (data / "a.csv").unlink(), "file a.csv is missing"),
    "mode": (lambda data: (data / "a.csv").chmod(0o777), "file a.csv has the mode 0777"),
    "set-id": (lambda data: (data / "a.csv").chmod(0o4644), "file a.csv has the mode 4644"),
    "target": (lambda data: relink(data / "link", "/etc/passwd"), "symlink link points to /etc/passwd"),
    "no link": (lambda data: (data / "link").unlink(), "symlink link is missing"),
    "file for link": (lambda data: refile(data / "link"), "symlink link is a file"),
    "link for file": (lambda data: relink(data / "a.csv", "link"), "file a.csv is a symlink"),
    "no directory": (lambda data: (data / "empty").rmdir(), "directory empty is missing"),
    "directory's mode": (lambda data: (data / "empty").chmod(0o777), "directory empty has the mode 0777"),
    "root's mode": (lambda data: data.chmod(0o777), "directory . has the mode 0777"),
    "extra file": (lambda data: (data / "empty" / "x").touch(), "file empty/x is in no manifest"),
    "extra link": (lambda data: (data / "x").symlink_to("a.csv"), "symlink x is in no receipt"),
    "extra FIFO": (lambda data: os.mkfifo(data / "x"), "fifo x is in no receipt"),
    "extra directory": (lambda data: (data / "x" / "y").mkdir(parents=True), "directory x is in no receipt"),
}


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def refile(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[str, Path]]:
    """A session's directory of files, as a run left it."""
    with Session(memory="512M", timeout=30) as session:
        run = session.run(
            "import os; open('a.csv', 'w').write('1,2'); os.symlink('a.csv', 'link'); os.mkdir('empty', 0o755)"
        )
        assert run.status == "committed"
        yield session.id, default_home() / "sessions" / session.id / "files" / "data"


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_accident_on_the_host_is_named(kept: tuple[str, Path], accident: str) -> None:
    session, data = kept
    shutil.copytree(data, data.with_name("before"), symlinks=True)
    spoil, named = ACCIDENTS[accident]
    try:
        spoil(data)
        with closing(Store(default_home() / JOURNAL, read_only=True)) as store:
            report = check_in_home(store, session, default_home())
    finally:
        shutil.rmtree(data)
        data.with_name("before").rename(data)

    assert report.problem.startswith(named)
