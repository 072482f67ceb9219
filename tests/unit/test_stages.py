"""What `make test` makes of tests that fail: tried once more, alone, and told."""

import sys
from pathlib import Path

import pytest
from tests.stages import PYTEST, Stage, tell, try_again, try_it

FAILS_UNDER_LOAD = """
import os
def test_alone(): assert "PYTEST_XDIST_WORKER" not in os.environ
def test_good(): assert "PYTEST_XDIST_WORKER" in os.environ
"""
KILLS_ITS_WORKER = """
import os
def test_worker():
    if "PYTEST_XDIST_WORKER" in os.environ: os._exit(9)
"""
FIXTURE_FAILS = """
import os, pytest
@pytest.fixture(scope="session")
def server(): assert "PYTEST_XDIST_WORKER" not in os.environ
def test_one(server): pass
def test_two(server): pass
"""
WRONG = """
def test_wrong(): assert False
def test_right(): pass
"""
ENDS_PYTEST = """
import os
def test_first(): pass
def test_end():
    if not os.path.exists(__file__ + ".ended"):
        open(__file__ + ".ended", "w").close()
        os._exit(3)
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """In a directory of its own with settings of its own, and two workers."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than all else takes
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # this process's own
    (tmp_path / "pytest.ini").touch()
    pytest = (*PYTEST, "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), "-p", "xdist")
    return Stage("few", pytest, (str(tmp_path),), ("-n", "2"), tmp_path / "cache")


def test_what_failed_is_tried_again_alone_and_must_pass(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, code in enumerate((FAILS_UNDER_LOAD, KILLS_ITS_WORKER, FIXTURE_FAILS, WRONG)):
        (tmp_path / f"test_{number}.py").write_text(code)

    first = try_it(stage)
    second = try_again(first)

    fine = ["test_0.py::test_alone", "test_1.py::test_worker", "test_2.py::test_one", "test_2.py::test_two"]
    assert (first.code, sorted(first.failed)) == (1, [*fine, "test_3.py::test_wrong"])
    assert (second.code, second.failed) == (1, ("test_3.py::test_wrong",))
    assert tell([first], [second]) == 1
    told = capsys.readouterr().out
    assert [name for name in fine if f"passed at the second try: {name}\n" in told] == fine
    assert "failed twice: test_3.py::test_wrong\n" in told
    assert told.splitlines()[-1].startswith("stages: failed")

    assert tell([first], [second._replace(code=0, failed=())]) == 0
    assert "passed at the second try: test_3.py::test_wrong\n" in capsys.readouterr().out


def test_where_pytest_itself_dies_all_of_it_is_tried_again(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_0.py").write_text(ENDS_PYTEST)
    first = try_it(stage._replace(how=()))
    second = try_again(first)

    assert (first.code, first.failed, second.code) == (3, (), 0)
    assert tell([first], [second]) == 0
    assert "passed at the second try: pytest itself, with 3\n" in capsys.readouterr().out


def test_where_it_dies_twice_the_stage_has_failed(stage: Stage) -> None:
    first = try_it(stage._replace(pytest=(sys.executable, "-c", "raise SystemExit(4)")))
    second = try_again(first)

    assert (first.code, second.code, tell([first], [second])) == (4, 4, 1)
