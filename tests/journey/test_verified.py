"""Whatever was done in a session, the journal and the receipts tell the same story of it."""

from pathlib import Path

import pytest

from holdfast import Session
from holdfast.cli.verify import check_session
from holdfast.config import default_home


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
