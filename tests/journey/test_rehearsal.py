"""rehearse=True: the run happens, what it would change is told exactly, and nothing has changed."""

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.upstream import serving

from holdfast import Run, Session
from holdfast.errors import RehearsalUnavailable
from holdfast.records import Change

TRANSPORTS = True


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


def told(changes: list[Change]) -> set[tuple[str, str, int, str]]:
    return {(change.path, change.action, change.bytes, change.sha256) for change in changes}


CHANGES = (
    "import os\nx, new = 2, 'n'; items.append(2); del gone\n"
    "open('f', 'a').write('more'); os.remove('g'); os.makedirs('d'); open('d/h', 'w').write('h')\n"
    "print('ran')\nlen(items)"
)


def test_a_rehearsal_tells_what_the_run_then_does(session: Session) -> None:
    before = ok(session.run("x, items, gone = 1, [1], 1; open('f', 'w').write('f'); open('g', 'w').write('g')"))
    rehearsed = ok(session.run(CHANGES, rehearse=True, goal="try"))

    assert (rehearsed.status, rehearsed.card.stage, rehearsed.memory) == ("rehearsed", "rehearsed", "restored")
    assert (rehearsed.text, rehearsed.stdout, rehearsed.receipt, rehearsed.recovery) == ("2", "ran\n", None, None)
    assert (rehearsed.version, rehearsed.ckpt, session.ckpt) == (1, before.ckpt, before.ckpt)
    assert [entry.run for entry in session.history()] == [before.id]
    assert {(change.path, change.action) for change in rehearsed.outputs} == {
        ("f", "changed"), ("g", "removed"), ("d/h", "added"),
    }  # fmt: skip
    # What is changed in place is taken back as well, and not seen: `items` is bound to the same list.
    assert (rehearsed.names, rehearsed.names_gone) == ({"os": "module", "x": "int", "new": "str"}, ["gone"])
    assert ok(session.run("x, items, gone, 'new' in globals(), sorted(__import__('os').listdir())")).text == (
        "(1, [1], 1, False, ['f', 'g'])"
    )

    real = ok(session.run(CHANGES))
    assert (told(real.outputs), real.names, real.version) == (told(rehearsed.outputs), rehearsed.names, 3)
    assert (real.names_gone, "gone" in session.names()) == (["gone"], False)
    assert real.receipt is not None
    assert real.receipt.number == 3


def test_a_new_session_can_rehearse(session: Session) -> None:
    run = ok(session.run("x = 1; open('f', 'w').write('f')", rehearse=True))

    assert (run.status, [change.path for change in run.outputs], run.names) == ("rehearsed", ["f"], {"x": "int"})
    assert (session.version, session.generation, session.files(), session.names()) == (0, 1, [], {})


@pytest.mark.parametrize("end", ["1 / 0", "os._exit(1)", "time.sleep(60)"])
def test_a_rehearsal_that_fails_says_how(session: Session, end: str) -> None:
    before = ok(session.run("import os, time; x = 1; open('f', 'w').write('f')"))
    run = session.run(f"x = 2; open('f', 'w').write('half')\n{end}", rehearse=True, timeout=0.5)

    assert run.error is not None
    assert (run.status, run.receipt, session.ckpt) == ("rehearsed", None, before.ckpt)
    assert (ok(session.run("x, open('f').read()")).text, session.generation) == ("(1, 'f')", 1)


def test_a_rehearsal_verifies_what_was_declared_and_saves_nothing(session: Session) -> None:
    run = session.run(
        "from holdfast import kit\nopen('f', 'w').write('f')\n"
        "try: kit.save('f')\nexcept kit.SaveRefused as error: print(error)",
        rehearse=True, outputs=["f", "g"],
    )  # fmt: skip

    assert "a rehearsal keeps nothing" in run.stdout
    assert [(check.name, check.ok) for check in run.checks if check.name != "forecast"] == [
        ("output f", True), ("output g", False),
    ]  # fmt: skip
    assert (run.status, session.files(), session.history()) == ("rehearsed", [], [])


def test_a_key_is_not_used_up_by_a_rehearsal(session: Session) -> None:
    assert ok(session.run("x = 1", key="k", rehearse=True)).status == "rehearsed"
    run = ok(session.run("x = 1", key="k"))

    assert (run.status, run.replayed, run.attempt) == ("committed", False, 1)


def test_under_pressure_the_rehearsal_dies_and_not_its_snapshot() -> None:
    with Session(memory="256M", timeout=30) as small:
        ok(small.run("import numpy as np; a = np.ones(int(0.8 * (256 << 20)) // 8)"))
        run = small.run("a += 1\nfloat(a.mean())", rehearse=True)

        assert run.error is not None
        assert (run.status, run.error.code, run.memory) == ("rehearsed", "out_of_memory", "restored")
        assert (ok(small.run("float(a.mean())")).text, small.generation) == ("1.0", 1)


def test_a_rehearsal_that_kills_its_own_snapshot_costs_memory_and_says_so(session: Session) -> None:
    ok(session.run("import os, time; x = 1; open('f', 'w').write('f')"))
    run = ok(session.run("os.kill(-1, 9); time.sleep(0.2); open('f', 'w').write('half')", rehearse=True))

    assert (run.status, run.memory, run.generation, session.read("f")) == ("rehearsed", "lost", 2, b"f")
    assert "the snapshot was killed" in (run.unprotected or "")
    assert session.recover().cause == "a rehearsal lost its snapshot"
    assert ok(session.run("open('f').read()")).text == "'f'"


def test_without_a_snapshot_there_is_no_rehearsal(where: dict[str, Any]) -> None:
    threads = "import threading\nthreading.stack_size(65536)\nstop = threading.Event()\n" + (
        "for _ in range(1100): threading.Thread(target=stop.wait, daemon=True).start()"
    )
    with Session(memory="1G", processes=2000, timeout=60, **where) as session:
        ok(session.run(threads))
        with pytest.raises(RehearsalUnavailable, match="more threads"):
            session.run("x = 1", rehearse=True)
        assert ok(session.run("'x' in globals()")).text == "False"


# -- installs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pip() -> bytes:
    """In one file, which Python runs as it is: the guests' environment has none."""
    bundled = Path(pytest.importorskip("ensurepip").__file__).with_name("_bundled")
    places = (bundled, Path("/usr/share/python-wheels"))  # the other is Debian's
    found = [wheel for place in places for wheel in place.glob("pip-*.whl")]
    if not found:
        pytest.skip("this Python has no pip in one file")
    return found[0].read_bytes()


def wheel() -> bytes:
    """A package of one module."""
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("tides.py", "high = 42\n")
        archive.writestr("tides-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tides\nVersion: 1.0\n")
        archive.writestr("tides-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tides-1.0.dist-info/RECORD", "")
    return packed.getvalue()


HAS_PIP = """
import os, sys
os.environ |= {'PYTHONPATH': '/mnt/data/pip.whl', 'PIP_DISABLE_PIP_VERSION_CHECK': '1'}
sys.path.insert(0, '/mnt/data/pip.whl')  # `%pip` looks there whether this Python has one
"""
SUBPROCESS = """
import subprocess, sys
pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-compile", "--target", "lib"]
subprocess.run([*pip, "tides-1.0-py3-none-any.whl"], check=True)
"""


def test_a_rehearsal_installs_nothing_and_says_so(pip: bytes) -> None:
    with serving() as upstream, Session(memory="512M", timeout=60, egress=[upstream.at]) as session:
        session.write("pip.whl", pip)
        session.write("tides-1.0-py3-none-any.whl", wheel())
        ok(session.run(HAS_PIP))
        before = session.files()

        asked = session.run(f"%pip install --retries 0 --index-url http://{upstream.at}/ tides", rehearse=True)
        assert (asked.status, asked.outputs, upstream.seen) == ("rehearsed", [], [])
        assert asked.egress == [f"refused: GET http://{upstream.at}/tides/ (withheld)"]
        assert "No matching distribution found for tides" in asked.stderr

        done = ok(session.run(SUBPROCESS, rehearse=True))
        assert (done.status, "Successfully installed tides-1.0" in done.stdout) == ("rehearsed", True)
        assert ("lib/tides.py", "added") in {(change.path, change.action) for change in done.outputs}
        assert ok(session.run("os.path.exists('lib')")).text == "False"
        assert session.files() == before
