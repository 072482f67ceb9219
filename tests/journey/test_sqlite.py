"""A SQLite connection is open for many runs; SQLite looks closely at the file under it."""

import sqlite3
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


def rows(path: Path) -> list[tuple[int]]:
    db = sqlite3.connect(path)
    try:
        return db.execute("select x from t").fetchall()
    finally:
        db.close()
