"""A SQLite connection is open for many runs; SQLite looks closely at the file under it."""

import sqlite3
from hashlib import sha256
from pathlib import Path

from holdfast import Session

OPEN = """
import sqlite3
db = sqlite3.connect('/mnt/data/a.db')
db.execute('create table t (x)')
db.execute('insert into t values (0)')
db.commit()
"""
INSERT = "db.execute('insert into t values ({})'); db.commit(); db.execute('select x from t').fetchall()"


def test_a_connection_goes_on_over_commits_and_rollbacks(session: Session, tmp_path: Path) -> None:
    assert session.run(OPEN).status == "committed"
    assert session.run(INSERT.format(1)).text == "[(0,), (1,)]"
    first = session.ckpt
    assert session.run(INSERT.format(2) + "\n1 / 0").status == "rolled_back"
    assert session.run(INSERT.format(3) + "\nimport os; os._exit(1)").memory == "restored"
    assert session.run(INSERT.format(4)).text == "[(0,), (1,), (4,)]"
    assert session.run("len(db.execute('select x from t').fetchall())").outputs == []

    assert rows(session.download("a.db", tmp_path)) == [(0,), (1,), (4,)]
    session.restore(first)
    assert rows(session.download("a.db", tmp_path)) == [(0,), (1,)], "the old content was kept, not written over"


def test_in_wal_mode_a_connection_left_open_fails_verification_and_says_how_to_go_on(session: Session) -> None:
    wal = OPEN.replace("db.execute('create", "db.execute('pragma journal_mode = wal')\ndb.execute('create")
    run = session.run(wal)

    assert run.error is not None
    assert (run.status, run.error.code, run.memory, session.files()) == ("rolled_back", "verification", "restored", [])
    assert "/mnt/data/a.db-shm" in run.error.message
    assert "close the SQLite connection before the code ends" in run.error.message
    assert "numpy" not in run.error.message
    assert run.recovery is not None
    assert "mend what the check names" in run.recovery.text

    assert session.run(f"{wal}\ndb.close()").status == "committed"
    assert session.run("db = sqlite3.connect('a.db'); db.execute('select x from t').fetchall()").status == "rolled_back"
    out_of_it = "db = sqlite3.connect('a.db'); db.execute('pragma journal_mode = delete').fetchall()"
    assert session.run(out_of_it).status == "committed"
    assert session.run(INSERT.format(1)).text == "[(0,), (1,)]"
    assert session.run(INSERT.format(2) + "\n1 / 0").status == "rolled_back"
    assert session.run(INSERT.format(3)).text == "[(0,), (1,), (3,)]"


def test_another_name_of_a_database_stays_as_committed_while_a_connection_writes_to_it(
    session: Session, tmp_path: Path
) -> None:
    assert session.run(f"{OPEN}\ndb.close(); import os; os.link('a.db', 'b.db')").status == "committed"
    committed = {entry.path: entry.sha256 for entry in session.files()}
    assert session.run("db = sqlite3.connect('a.db')\n" + INSERT.format(1)).text == "[(0,), (1,)]"
    again = session.run(INSERT.format(2))

    assert (again.status, again.text, again.outside) == ("committed", "[(0,), (1,), (2,)]", [])
    assert rows(session.download("b.db", tmp_path)) == [(0,)]
    assert sha256((tmp_path / "b.db").read_bytes()).hexdigest() == committed["b.db"]
    assert rows(session.download("a.db", tmp_path)) == [(0,), (1,), (2,)]


def rows(path: Path) -> list[tuple[int]]:
    db = sqlite3.connect(path)
    try:
        return db.execute("select x from t").fetchall()
    finally:
        db.close()
