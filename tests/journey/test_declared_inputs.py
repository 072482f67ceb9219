"""inputs=: what a run declares that it reads must be there before it starts."""

import os
from typing import Any

import pytest

from holdfast import Run, Session
from holdfast.errors import InputMissing

TRANSPORTS = True

MISSING = [
    (["nope.txt"], "no file nope.txt is in /mnt/data | there are data/a.csv, data/raw/b.CSV, sales.csv;"),
    (["sale.csv"], "no file sale.csv is in /mnt/data | did you mean sales.csv?"),
    (["sales.csv", "a.csv", "b.csv"], "no file a.csv, b.csv is in /mnt/data | did you mean data/a.csv"),
    (["*.CSV"], "no file *.CSV is in /mnt/data | did you mean data/a.csv, data/raw/b.CSV, sales.csv"),
    (["data/**/*.parquet"], "no file data/**/*.parquet is in /mnt/data | there are "),
    (["data/raw"], 'data/raw is a directory, and no file | write "data/raw/*" or "data/raw/**"'),
    (["there"], 'there is a directory, and no file | write "there/*" or'),
    (["dangling"], "no file dangling is in /mnt/data | "),
    (["round"], "no file round is in /mnt/data | "),
    (["there/gone.csv"], "no file there/gone.csv is in /mnt/data | "),
    (["sales.csv/x"], "no file sales.csv/x is in /mnt/data | "),
    (["é" * 400, "q" * 300 + "*"], "is in /mnt/data | "),
]


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


@pytest.fixture
def filled(session: Session) -> Session:
    code = "import os; os.makedirs('data/raw'); os.symlink('a.csv', 'data/link'); os.symlink('nothing', 'dangling')\n"
    code += "os.symlink('/mnt/data/data', 'there'); os.symlink('/tmp', 'out'); os.symlink('round', 'round')\n"
    ok(session.run(code + "for name in ('data/a.csv', 'data/raw/b.CSV', 'sales.csv'): open(name, 'w').write('1')"))
    return session


def test_a_run_whose_input_is_not_there_does_not_start(filled: Session) -> None:
    before, runs = filled.ckpt, len(filled.history())
    for declared, said in MISSING:
        with pytest.raises(InputMissing) as error:
            filled.run("open('ran', 'w').write('1')", inputs=declared, key="k")
        assert said in f"{error.value.message} | {error.value.hint}"
    options: list[dict[str, Any]] = [{}, {"rehearse": True}, {"mode": "notebook"}, {"preflight": "block"}]
    for each in options:
        with pytest.raises(InputMissing):
            filled.run("open('ran', 'w').write('1')", inputs=["sales.csv", "nope.txt"], **each)
    with pytest.raises(InputMissing):
        filled.plan("1", inputs=["nope.txt"])
    assert (filled.ckpt, len(filled.history())) == (before, runs)
    assert not ok(filled.run("n = 1", key="k")).replayed


def test_an_input_that_is_there_by_whatever_name_is_no_obstacle(filled: Session) -> None:
    there = ["sales.csv", "./data/a.csv", "data/*.csv", "**/*.CSV", "data/link", "there/a.csv", "out", "out/x"]
    assert ok(filled.run("1", inputs=there)).status == "committed"


def test_a_run_that_was_recorded_is_answered_though_its_input_is_gone_since(filled: Session) -> None:
    first = ok(filled.run("n = 1", inputs=["sales.csv"], key="k"))
    filled.remove("sales.csv")
    again = filled.run("n = 1", inputs=["sales.csv"], key="k")
    assert (again.id, again.replayed) == (first.id, True)


def test_an_empty_workspace_says_that_it_is_empty(session: Session) -> None:
    with pytest.raises(InputMissing) as error:
        session.run("1", inputs=[os.fspath("a.csv")])
    assert "/mnt/data holds no file yet" in error.value.hint
