"""What a caller declares is verified before the point of no return; a check that fails rolls the run back."""

import threading
import time
from collections.abc import Iterator

import pytest

from holdfast import Run, Session
from holdfast.errors import InvalidSetting

FILES = {
    "sales.parquet": "import pandas as pd; pd.DataFrame({'id': [1, 2], 'total': [3, 4]}).to_parquet('sales.parquet')",
    "sales.csv": "open('sales.csv', 'w').write('id,total\\n1,3\\n2,4\\n')",
    "facts.json": "import json; json.dump([{'a': 1}, {'a': 2}], open('facts.json', 'w'))",
    "plot.png": "from PIL import Image; Image.new('RGB', (4, 4)).save('plot.png')",
}


def ok(run: Run) -> Run:
    assert run.error is None, run.error.traceback or run.error.message
    return run


@pytest.fixture(scope="module")
def shared() -> Iterator[Session]:
    """These leave nothing: what fails is rolled back, what passes removes its files."""
    with Session(memory="512M", timeout=30) as session:
        yield session


def failed(session: Session, run: Run, *, check: str, because: str) -> None:
    assert run.error is not None, run.checks
    assert (run.status, run.error.code, run.memory) == ("rolled_back", "verification", "restored")
    assert because in run.error.message
    assert check in [one.name for one in run.checks if not one.ok]
    assert run.recovery is not None
    assert run.recovery.code == "verification"
    assert "Cause: VerificationFailed" in run.recovery.text
    assert run.receipt is not None
    assert run.receipt.facts().checks == run.checks
    assert session.files() == []


def test_a_declared_output_exists_and_is_not_empty(shared: Session) -> None:
    run = ok(shared.run("open('out.txt', 'w').write('x')", outputs=["out.txt"]))
    assert [(check.name, check.ok) for check in run.checks] == [("output out.txt", True), ("forecast", True)]
    assert run.card.outputs == ["out.txt"]
    assert run.receipt is not None
    assert run.receipt.facts().checks == run.checks
    shared.remove("out.txt")

    missing = shared.run("x = 1\nopen('other/out.txt', 'w') if False else None", outputs=["out.txt"])
    failed(shared, missing, check="output out.txt", because="output out.txt: it does not exist")
    assert ok(shared.run("'x' in globals()")).text == "False"
    empty = shared.run("open('out.txt', 'w').close()", outputs=["/mnt/data/out.txt"])
    failed(shared, empty, check="output out.txt", because="it is empty")
    elsewhere = shared.run("import os; os.mkdir('d'); open('d/out.txt', 'w').write('x')", outputs=["out.txt"])
    failed(shared, elsewhere, check="output out.txt", because="the run wrote d/out.txt")
    directory = shared.run("import os; os.mkdir('out.txt')", outputs=["out.txt"])
    failed(shared, directory, check="output out.txt", because="not a regular file")
    link = shared.run("import os; os.symlink('/etc/passwd', 'out.txt')", outputs=["out.txt"])
    failed(shared, link, check="output out.txt", because="not a regular file")


def test_a_pattern_stands_for_many(shared: Session) -> None:
    code = "import os; os.makedirs('plots')\nfor n in range(3): open(f'plots/{n}.csv', 'w').write('a\\n1\\n')"
    run = ok(shared.run(code, outputs={"plots/*.csv": "csv"}))
    assert [check.name for check in run.checks if check.name.startswith("csv")] == [
        "csv plots/0.csv", "csv plots/1.csv", "csv plots/2.csv",
    ]  # fmt: skip
    shared.remove("plots")

    none = shared.run("1", outputs=["plots/*.csv"])
    failed(shared, none, check="output plots/*.csv", because="does not exist")
    one_is_bad = shared.run(f"{code}\nopen('plots/1.csv', 'w').write('a\\n')", outputs={"plots/*.csv": "csv"})
    failed(shared, one_is_bad, check="csv plots/1.csv", because="plots/1.csv")


@pytest.mark.parametrize("name", FILES)
def test_a_format_is_checked_by_opening_it(shared: Session, name: str) -> None:
    terms = {"format": name.rpartition(".")[2].replace("png", "image")}
    ok(shared.run(FILES[name], outputs={name: terms}))
    shared.remove(name)

    broken = shared.run(f"{FILES[name]}\nopen('{name}', 'r+b').truncate(9)", outputs={name: terms})
    failed(shared, broken, check=f"{terms['format']} {name}", because=name)


@pytest.mark.parametrize("name", ["sales.parquet", "sales.csv"])
def test_rows_and_columns_are_as_stated(shared: Session, name: str) -> None:
    ok(shared.run(FILES[name], outputs={name: {"columns": ["id", "total"], "min_rows": 2}}))
    shared.remove(name)
    check = f"{name.rpartition('.')[2]} {name}"

    failed(shared, shared.run(FILES[name], outputs={name: {"columns": ["id", "price"]}}), check=check, because="price")
    failed(shared, shared.run(FILES[name], outputs={name: {"min_rows": 3}}), check=check, because="2")


def test_assertions_are_code_over_the_live_names(shared: Session) -> None:
    run = ok(shared.run("rows = [1, 2]", asserts=["len(rows) == 2", "all(row > 0 for row in rows)"]))
    assert [(check.name, check.ok) for check in run.checks] == [
        ("assert len(rows) == 2", True), ("assert all(row > 0 for row in rows)", True),
    ]  # fmt: skip
    for code, because in (
        ("len(rows) > 5", "len(rows) > 5"), ("nothing > 1", "NameError"), ("1 / 0", "ZeroDivisionError"), ("if", "if"),
    ):  # fmt: skip
        run = shared.run("rows = []; open('f', 'w').write('x')", asserts=["True", code])
        failed(shared, run, check=f"assert {code}", because=because)
    assert ok(shared.run("rows", asserts=["rows.append(3) is None"])).text == "[1, 2]"


ENDLESS = "all(n == 0 for n in iter(int, 1))"


@pytest.mark.parametrize(
    ("code", "error", "because"),
    [
        ("__import__('os')._exit(1)", "killed", "exit code 1"),
        ("__import__('time').sleep(60)", "timeout", "the run was not done after 3 s"),
        ("__import__('signal').signal(2, 1) and not " + ENDLESS, "timeout", "did not heed an interrupt"),
        ("len(bytes(x) + bytes(x)) > 0", "out_of_memory", "memory"),
        ("[__import__('os').write(1, bytes(65536)) for _ in range(2000)]", "output_limit", "printed more than"),
        ("[open(f'{n}', 'wb').write(bytes(1 << 20)) for n in range(500)]", "disk_limit", "its limit is 128 MiB"),
    ],
)
def test_an_assertion_ends_as_its_cell_would_and_costs_no_variable(code: str, error: str, because: str) -> None:
    with Session(memory="256M", disk="128M", timeout=30) as session:
        ok(session.run("x = 1"))
        began = time.monotonic()
        run = session.run(
            "x = bytearray(b'1') * (100 << 20); open('f', 'w').write('x')",
            asserts=["True", code], timeout=3 if error == "timeout" else 30,
        )  # fmt: skip

        assert time.monotonic() - began < 25
        assert run.error is not None
        assert (run.status, run.error.code, run.memory, session.files()) == ("rolled_back", error, "restored", [])
        assert because in run.error.message
        assert [check.name for check in run.checks if not check.ok][-1] == f"assert {code}"
        after = ok(session.run("x"))
        assert (after.text, after.stdout) == ("1", "")


def test_an_assertion_has_the_time_that_its_cell_left(shared: Session) -> None:
    run = shared.run("import time; time.sleep(1.5)", asserts=["time.sleep(1.5) is None"], timeout=2)

    assert run.error is not None
    assert run.error.code == "timeout"
    assert "the run was not done after 2 s" in run.error.message


@pytest.mark.parametrize("rehearse", [False, True])
def test_an_assertion_can_be_interrupted(shared: Session, rehearse: bool) -> None:
    told: list[bool] = []
    threading.Timer(1, lambda: told.append(shared.interrupt())).start()
    run = shared.run("y = 1", asserts=["True", ENDLESS], rehearse=rehearse, timeout=20)

    assert told == [True]
    assert run.error is not None
    assert (run.error.code, run.memory) == ("interrupted", "restored")
    assert [check.ok for check in run.checks] == [True, False]
    assert ok(shared.run("'y' in globals()")).text == "False"


def test_what_an_assertion_prints_is_its_runs(shared: Session) -> None:
    told: list[str] = []
    run = ok(shared.run("print('cell')", asserts=["print('tried') is None"], on_stdout=told.append))

    assert run.stdout == "".join(told) == shared.output(run) == "cell\ntried\n"
    assert ok(shared.run("1")).stdout == ""


def test_a_process_that_an_assertion_starts_ends_with_its_run(shared: Session) -> None:
    start = "__import__('subprocess').Popen(['sleep', '100'])"
    run = ok(shared.run("1", asserts=[start]))

    assert [stray.name for stray in run.strays] == ["sleep 100"]


def test_the_forecast_is_compared_and_never_fails_a_run(shared: Session) -> None:
    code = "name = 'un' + 'seen'\nopen(f'{name}.txt', 'w').write('x')\nif False: open('never.txt', 'w').write('x')"
    run = ok(shared.run(code + "\nexec(\"open('hidden.txt', 'w').write('x')\")"))
    (check,) = [check for check in run.checks if check.name == "forecast"]

    assert check.ok
    assert "missing: never.txt" in check.detail
    assert "unexpected: hidden.txt" in check.detail
    for name in ("unseen.txt", "hidden.txt"):
        shared.remove(name)


def test_in_a_notebook_a_failed_check_rolls_back_too(shared: Session) -> None:
    run = shared.run("open('f', 'w').write('x')", outputs=["g"], mode="notebook")
    failed(shared, run, check="output g", because="does not exist")

    raised = shared.run("open('f', 'w').write('x')\n1 / 0", outputs=["g"], mode="notebook")
    assert raised.error is not None
    assert (raised.status, raised.error.name, shared.files()) == ("rolled_back", "ZeroDivisionError", [])


@pytest.mark.parametrize(
    "options",
    [
        {"outputs": "a.csv"}, {"outputs": ["../a"]}, {"outputs": {"a.csv": "excel"}}, {"outputs": {"a": {"rows": 1}}},
        {"outputs": {"a.png": {"min_rows": 1}}}, {"asserts": "True"}, {"asserts": [1]}, {"inputs": {"a": 1}},
    ],
)  # fmt: skip
def test_nonsense_is_refused_before_anything_runs(shared: Session, options: dict[str, object]) -> None:
    version = shared.version
    with pytest.raises(InvalidSetting):
        shared.run("print('ran')", **options)  # type: ignore[arg-type]
    assert shared.version == version
