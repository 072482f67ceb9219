"""Files of a home are deleted, replaced, copied or set back by mistake, while it lives and while it is stopped.

Nothing that was acknowledged is lost in silence: what is missing is mended, or named with a code and the next step.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.lean import lean_home

from holdfast.config import Settings
from holdfast.errors import HoldfastError
from holdfast.opening import accept_loss, repair_home
from holdfast.resources.workspace import remove_tree
from holdfast.signing import SigningKey

JOURNAL = "journal.sqlite3"
OWNER = """
import json, sys
from pathlib import Path
from holdfast import HoldfastError, Session

home, env, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None

def attempt(work):
    try:
        return ["ok", work()]
    except HoldfastError as error:
        return [error.code, f"{error.message} | {error.hint}"]

def ran(run):
    return [run.status, run.text, run.error.code if run.error else None]

opened = attempt(lambda: Session(memory="256M", home=home, env=env, resume=resume))
print(json.dumps([opened[0], opened[1].id if opened[0] == "ok" else opened[1]]), flush=True)
s = opened[1]
for line in sys.stdin:
    print(json.dumps(attempt(lambda: eval(json.loads(line)))), flush=True)
"""
WRITE = "ran(s.run(\"open('{0}', 'w').write('{1}')\"))"


class Owner:
    """A process that owns a home and has a session in it."""

    living: ClassVar[list["Owner"]] = []

    def __init__(self, home: Path, env: Path, resume: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(home), str(env), resume],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.living.append(self)
        self.code, self.session = self._answer()

    def _answer(self) -> list[Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        answer: list[Any] = json.loads(line)
        return answer

    def do(self, code: str) -> list[Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def write(self, name: str, text: str = "kept") -> list[Any]:
        return self.do(WRITE.format(name, text))

    def keep(self) -> str:
        """End in the ordinary way, and keep the session. Returns what was printed to stderr."""
        self.do("s.close(keep=True)")
        return self.end()

    def end(self) -> str:
        self.living.remove(self)
        return self.process.communicate(timeout=60)[1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()


@pytest.fixture(autouse=True)
def _no_owner_outlives_its_test() -> Iterator[None]:
    yield
    for owner in list(Owner.living):
        owner.kill()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return lean_home(tmp_path / "home")


def holdfast(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def journal_files(home: Path) -> list[Path]:
    return [path for path in home.iterdir() if path.name.startswith(JOURNAL)]


def files_of(home: Path, session: str) -> Path:
    return home / "sessions" / session / "files" / "data"


# -- the journal, while the home lives ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["", "-wal", "-shm", "all"])
def test_a_journal_that_is_deleted_under_its_owner_is_noticed_and_nothing_is_lost(
    home: Path, lean: Path, what: str
) -> None:
    owner = Owner(home, lean)
    assert owner.write("a.txt") == ["ok", ["committed", "4", None]]
    for path in journal_files(home) if what == "all" else [home / (JOURNAL + what)]:
        path.unlink()

    code, told = owner.do(WRITE.format("b.txt", "after"))
    assert code == "journal_lost"
    assert "was deleted while it was in use" in told
    assert "start it again" in told
    assert owner.do("ran(s.run('1'))")[0] == "journal_lost", "and nothing more is acknowledged"
    owner.kill()

    again = Owner(home, lean, owner.session)
    assert again.code == "ok"
    assert again.do("s.read('a.txt').decode()") == ["ok", "kept"]
    assert again.write("c.txt")[0] == "ok"
    again.keep()
    assert holdfast("verify", owner.session, "--home", home).returncode == 0


def test_a_journal_that_is_replaced_under_its_owner_is_noticed(home: Path, lean: Path) -> None:
    owner = Owner(home, lean)
    owner.write("a.txt")
    copy = home / "copy"
    shutil.copy(home / JOURNAL, copy)
    copy.rename(home / JOURNAL)

    code, told = owner.do(WRITE.format("b.txt", "after"))
    assert code == "journal_lost"
    assert "was replaced while it was in use" in told
    assert str(home / "lost+found" / JOURNAL) in told
    owner.kill()
    assert Owner(home, lean, owner.session).do("s.read('a.txt').decode()") == ["ok", "kept"], "its WAL is there"


def test_a_home_that_is_moved_under_its_owner_is_noticed(home: Path, lean: Path) -> None:
    owner = Owner(home, lean)
    owner.write("a.txt")
    moved = home.rename(home.with_name("moved"))

    assert owner.do(WRITE.format("b.txt", "after"))[0] in ("journal_lost", "files_lost")
    owner.kill()
    again = Owner(moved, lean, owner.session)
    assert again.do("s.read('a.txt').decode()") == ["ok", "kept"]


# -- the journal, while the home is stopped ----------------------------------------------------------------------


@pytest.fixture
def stopped(home: Path, lean: Path) -> Callable[..., str]:
    """Have a session with a file, in a home that nobody owns; its id."""

    def make(*, killed: bool = False) -> str:
        owner = Owner(home, lean)
        assert owner.write("a.txt")[0] == "ok"
        owner.kill() if killed else owner.keep()
        return str(owner.session)

    return make


def delete_journal(home: Path) -> None:
    for path in journal_files(home):
        path.unlink()


def delete_journal_and_what_was_seen(home: Path) -> None:
    delete_journal(home)
    (home / "journal.seen").unlink()


def empty_journal(home: Path) -> None:
    (home / JOURNAL).write_bytes(b"")


def truncate_journal(home: Path) -> None:
    os.truncate(home / JOURNAL, (home / JOURNAL).stat().st_size // 2)


def cut_header(home: Path) -> None:
    os.truncate(home / JOURNAL, 50)


def damage_journal(home: Path) -> None:
    (home / JOURNAL).write_bytes(b"no database" * 1000)


def replace_by_anothers(home: Path) -> None:
    other = home.with_name("other")
    subprocess.run([sys.executable, "-c", MADE, str(other)], check=True)
    (other / JOURNAL).rename(home / JOURNAL)


MADE = """
import sys
from pathlib import Path
from holdfast.store.sqlite import Store
Path(sys.argv[1]).mkdir()
Store(Path(sys.argv[1]) / "journal.sqlite3").close()
"""
LOSSES = [
    delete_journal, delete_journal_and_what_was_seen, empty_journal, truncate_journal, cut_header, damage_journal,
    replace_by_anothers,
]  # fmt: skip


@pytest.mark.parametrize("lose", LOSSES)
def test_a_home_whose_journal_is_lost_is_not_served_until_the_user_says_so(
    home: Path, lean: Path, stopped: Callable[..., str], lose: Callable[[Path], None]
) -> None:
    session = stopped()
    lose(home)
    before = (home / JOURNAL).read_bytes() if (home / JOURNAL).exists() else None

    for _ in range(2):
        refused = Owner(home, lean)
        assert refused.code == "journal_lost"
        assert f"holdfast accept-loss --home {home}" in refused.session
        refused.end()
    assert before == ((home / JOURNAL).read_bytes() if (home / JOURNAL).exists() else None), "nothing was changed"
    assert (files_of(home, session) / "a.txt").read_text() == "kept"

    accepted = holdfast("accept-loss", "--home", home)
    assert accepted.returncode == 0, accepted.stderr
    assert f"session {session} is not in the journal" in accepted.stdout
    assert (home / "lost+found" / session / "files/data/a.txt").read_text() == "kept"
    again = Owner(home, lean)
    assert again.code == "ok"
    assert again.write("new.txt")[0] == "ok"
    assert holdfast("accept-loss", "--home", home).returncode == 3, "it is in use"
    again.keep()
    assert holdfast("accept-loss", "--home", home).stdout == "nothing is lost: nothing was done\n"


def test_a_journal_that_is_put_back_is_taken_as_it_was(home: Path, lean: Path, stopped: Callable[..., str]) -> None:
    session = stopped()
    saved = (home / JOURNAL).read_bytes()
    (home / JOURNAL).unlink()
    Owner(home, lean).end()
    (home / JOURNAL).write_bytes(saved)

    again = Owner(home, lean, session)
    assert again.do("s.read('a.txt').decode()") == ["ok", "kept"]


def test_a_wal_that_was_deleted_after_a_crash_is_missed(home: Path, lean: Path, stopped: Callable[..., str]) -> None:
    session = stopped()
    owner = Owner(home, lean, session)
    owner.write("b.txt", "later")
    owner.kill()
    (home / f"{JOURNAL}-wal").unlink()

    refused = Owner(home, lean, session)
    assert refused.code == "journal_lost"
    assert "lacks the last" in refused.session
    refused.end()
    accepted = holdfast("accept-loss", "--home", home)
    assert f"session {session} is stopped: file b.txt is in no manifest" in accepted.stdout
    assert (files_of(home, session) / "b.txt").read_text() == "later"
    assert Owner(home, lean, session).code == "session_halted"


def test_the_index_of_the_wal_is_made_again(home: Path, lean: Path, stopped: Callable[..., str]) -> None:
    session = stopped(killed=True)
    (home / f"{JOURNAL}-shm").unlink()

    assert Owner(home, lean, session).do("s.read('a.txt').decode()") == ["ok", "kept"]


def test_sessions_that_the_journal_does_not_know_are_set_aside_and_named(
    home: Path, lean: Path, stopped: Callable[..., str]
) -> None:
    """An older journal was put in place of this one, and nothing else is there that knows more."""
    older = home.with_name("older")
    first = stopped()
    shutil.copy(home / JOURNAL, older)
    session = stopped()
    older.replace(home / JOURNAL)
    (home / "journal.seen").unlink()

    owner = Owner(home, lean, first)
    assert owner.code == "ok"
    told = owner.keep()
    assert f"session {session} is not in the journal: its files are in {home}/lost+found/{session}" in told
    assert (home / "lost+found" / session / "files/data/a.txt").read_text() == "kept"


def test_a_session_that_is_deleted_is_no_loss_also_if_its_records_were_the_last(home: Path, lean: Path) -> None:
    first, second = Owner(home, lean), None
    first.write("a.txt")
    first.keep()
    second = Owner(home, lean)
    second.write("b.txt")
    second.do("s.close()")
    second.end()
    assert os.listdir(home / "sessions") == [first.session]

    third = Owner(home, lean, first.session)
    assert third.code == "ok"
    assert third.keep() == ""


# -- one owner ---------------------------------------------------------------------------------------------------


def test_a_deleted_lock_file_lets_no_second_owner_in(home: Path, lean: Path) -> None:
    owner = Owner(home, lean)
    owner.write("a.txt")
    (home / "lock").unlink()

    assert Owner(home, lean).code == "home_busy"
    (home / "lock").write_text("")
    assert Owner(home, lean).code == "home_busy"
    assert owner.write("b.txt")[0] == "ok"


# -- copies ------------------------------------------------------------------------------------------------------


def id_of(home: Path) -> str:
    return (home / "id").read_text().strip()


def copy(home: Path, target: Path) -> Path:
    subprocess.run(["cp", "-a", home, target], check=True)
    return target


def test_a_copied_home_takes_a_new_id_and_both_run_side_by_side(home: Path, lean: Path) -> None:
    original = Owner(home, lean)
    original.write("a.txt")
    copied = copy(home, home.with_name("copied"))

    other = Owner(copied, lean, original.session)
    assert other.code == "ok", "its lock is its own"
    assert id_of(copied) != id_of(home)
    for owner in (original, other):
        assert owner.write("b.txt", "both")[0] == "ok"
        assert owner.do("s.read('a.txt').decode()") == ["ok", "kept"]
    assert "is a copy, or was moved to another disk: it has a new id now" in other.keep()
    assert original.write("c.txt")[0] == "ok", "the other one ended, and swept nothing of this one"
    original.keep()
    for place in (home, copied):
        verified = holdfast("verify", original.session, "--home", place)
        assert verified.returncode == 0, verified.stdout


def test_a_copy_keeps_its_new_id_and_a_moved_home_its_own(home: Path, lean: Path, stopped: Callable[..., str]) -> None:
    session = stopped()
    original = id_of(home)
    copied = copy(home, home.with_name("copied"))
    Owner(copied, lean).keep()
    new = id_of(copied)
    moved = home.rename(home.with_name("moved"))

    assert Owner(copied, lean).keep() == ""
    owner = Owner(moved, lean, session)
    assert owner.do("s.read('a.txt').decode()") == ["ok", "kept"]
    assert owner.keep() == ""
    assert (id_of(copied), id_of(moved)) == (new, original)


def test_a_home_that_is_restored_in_place_goes_on(home: Path, lean: Path, stopped: Callable[..., str]) -> None:
    session = stopped()
    backup = copy(home, home.with_name("backup"))
    remove_tree(home)
    copy(backup, home)

    owner = Owner(home, lean, session)
    assert owner.do("s.read('a.txt').decode()") == ["ok", "kept"]
    owner.keep()
    assert holdfast("verify", session, "--home", home).returncode == 0


def test_a_home_that_is_restored_under_its_owner_is_noticed(
    home: Path, lean: Path, stopped: Callable[..., str]
) -> None:
    session = stopped()
    backup = copy(home, home.with_name("backup"))
    owner = Owner(home, lean, session)
    home.rename(home.with_name("old"))
    copy(backup, home)

    assert owner.do(WRITE.format("b.txt", "after"))[0] in ("journal_lost", "files_lost")
    owner.kill()
    again = Owner(home, lean, session)
    assert again.do("s.read('a.txt').decode()") == ["ok", "kept"]


# -- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["ed25519.pem", "*.pem", "*"])
def test_lost_keys_are_named_at_the_start_and_a_new_one_leaves_old_receipts_right(
    home: Path, lean: Path, stopped: Callable[..., str], lost: str
) -> None:
    session = stopped()
    for path in (home / "keys").glob(lost):
        path.unlink()

    refused = Owner(home, lean, session)
    assert refused.code == "keys_lost"
    assert "holdfast keys rotate" in refused.session
    refused.end()
    rotated = holdfast("keys", "rotate", "--home", home)
    assert rotated.returncode == 0, rotated.stderr
    assert "still accepted" in rotated.stdout
    owner = Owner(home, lean, session)
    assert owner.write("b.txt")[0] == "ok"
    assert holdfast("keys", "rotate", "--home", home).returncode == 3, "its owner would go on with the old one"
    owner.keep()
    assert holdfast("verify", session, "--home", home).returncode == 0


# -- everything that is in a home, one at a time -----------------------------------------------------------------

SESSION = "sessions/*"
PATHS = [
    "id", "lock", "epoch", "place", "starting.lock", "journal.seen", "keys", "keys/ed25519.pem", "keys/ed25519.pub.pem",
    "keys/chain", "keys.chain", "logs", "root", "sessions", SESSION, f"{SESSION}/files", f"{SESSION}/files/data",
    f"{SESSION}/files/data/a.txt", f"{SESSION}/files/tmp", f"{SESSION}/files/home", f"{SESSION}/stages",
    f"{SESSION}/blobs", f"{SESSION}/blobs/*", f"{SESSION}/manifests", f"{SESSION}/manifests/*", f"{SESSION}/view",
    f"{SESSION}/log",
]  # fmt: skip
MENDED = {
    "id", "lock", "epoch", "place", "starting.lock", "journal.seen", "keys/ed25519.pub.pem", "keys/chain", "keys.chain",
    "logs", "root", f"{SESSION}/stages", f"{SESSION}/blobs", f"{SESSION}/blobs/*", f"{SESSION}/view", f"{SESSION}/log",
}  # fmt: skip
"""What holds nothing that was committed now: all goes on."""
OWN = {"journal_lost", "files_lost", "keys_lost", "session_halted", "disk_failed", "home_busy", "state_moved"}


def delete_at(home: Path, pattern: str) -> None:
    found = list(home.glob(pattern))
    for path in found:
        remove_tree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, lean: Path) -> tuple[Path, str]:
    """A home that nobody owns, with a session that has files and an old version of one."""
    home = lean_home(tmp_path_factory.mktemp("written") / "home")
    owner = Owner(home, lean)
    owner.write("a.txt", "old")
    owner.write("a.txt")
    owner.write("b.txt")
    owner.keep()
    return home, owner.session


@pytest.fixture
def session(home: Path, written: tuple[Path, str]) -> str:
    """A copy of that home is the test's; its session."""
    made, session = written
    remove_tree(home)
    copy(made, home)
    return session


@pytest.mark.parametrize("pattern", PATHS)
def test_what_is_deleted_while_the_home_is_stopped_is_mended_or_named(
    home: Path, lean: Path, session: str, pattern: str
) -> None:
    delete_at(home, pattern)

    owner = Owner(home, lean, session)
    if owner.code != "ok":
        assert pattern not in MENDED
        assert owner.code in OWN
        assert " | " in owner.session, "a hint"
        return
    assert owner.do("s.run('1').outside") == ["ok", ["a.txt"] if pattern.endswith("a.txt") else []]
    assert owner.write("c.txt")[1][0] == "committed"
    answer = owner.do("s.read('a.txt').decode()")
    owner.keep()
    verified = holdfast("verify", session, "--home", home)
    if pattern in MENDED:
        assert answer == ["ok", "kept"]
        assert verified.returncode == 0, verified.stdout
    else:
        assert answer == ["ok", "kept"] or answer[0] == "file_unknown"
        assert "WRONG" in verified.stdout


@pytest.mark.parametrize("pattern", PATHS)
def test_what_is_deleted_while_the_home_lives_is_mended_or_named(
    home: Path, lean: Path, session: str, pattern: str
) -> None:
    owner = Owner(home, lean, session)
    owner.do("s.names()")  # nothing of the start is left to do
    delete_at(home, pattern)

    code, told = owner.do(WRITE.format("c.txt", "new"))
    again = owner.do("ran(s.run('1'))")
    if code != "ok":
        assert pattern not in MENDED
        assert code in OWN
        assert " | " in told, "a hint"
        assert again[0] in OWN, "and nothing else is acknowledged"
        return
    assert told[0] == "committed", told
    assert again[1][:2] == ["committed", "1"]
    answer = owner.do("s.read('a.txt').decode()")
    if pattern in MENDED:
        assert answer == ["ok", "kept"]
    owner.keep()
    assert (files_of(home, session) / "c.txt").read_text() == "new"
    verified = holdfast("verify", session, "--home", home)
    assert verified.returncode == 0 or pattern not in MENDED, verified.stdout


PAIRED = [
    JOURNAL, "journal.seen", "place", "id", "lock", "keys", "keys.chain", "sessions", SESSION, f"{SESSION}/files/data",
    f"{SESSION}/files/data/a.txt", f"{SESSION}/stages", f"{SESSION}/blobs", f"{SESSION}/manifests",
]  # fmt: skip


def committed(home: Path) -> set[tuple[str, str]]:
    found = [*home.glob(f"{SESSION}/files/data/*"), *home.glob("lost+found/*/files/data/*")]
    return {(path.name, path.read_text()) for path in found}


def opened(home: Path) -> str:
    """Open a home as a start does, without a kernel; the code of what is in the way."""
    try:
        asyncio.run(repair_home(Settings(home=home)))
    except HoldfastError as error:
        return error.code
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", PAIRED[:-1])
def test_no_pair_of_deletions_has_a_start_delete_what_is_left(
    home: Path, written: tuple[Path, str], first: str
) -> None:
    made, _ = written
    for pair in [pair for pair in combinations(PAIRED, 2) if pair[0] == first]:
        remove_tree(home)
        shutil.copytree(made, home, symlinks=True)
        for pattern in pair:
            delete_at(home, pattern)
        left = committed(home)

        code = opened(home)
        assert code in OWN | {""}, pair
        assert committed(home) == left, pair
        if code == "keys_lost":
            SigningKey.rotate(home / "keys")
        asyncio.run(accept_loss(Settings(home=home)))
        assert opened(home) == "", pair
        assert committed(home) == left, pair


def test_a_server_that_is_started_on_demand_says_why_it_is_not(
    home: Path, lean: Path, stopped: Callable[..., str]
) -> None:
    stopped()
    delete_journal(home)

    refused = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "repl", "--home", home], input="1\n", capture_output=True, text=True
    )
    assert refused.returncode == 3
    assert "[journal_lost]" in refused.stderr
    assert f"holdfast accept-loss --home {home}" in refused.stderr
