"""A disk without room: files and memory agree, the caller is told, and the session goes on once there is room again.

Each home lies on a small file system of its own. Its owner is a process of its own, so that it can be unmounted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.upstream import serving

from holdfast.store.sqlite import Store
from holdfast.verify import Report, check_in_home

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")

OWNER = """
import json, os, sys
from pathlib import Path
from holdfast import HoldfastError, Session
from holdfast.store import connection

if os.environ.get("JOURNAL") == "full":  # it has used up the blocks that it has from the start
    connection._LOG_BYTES = 0
connection._PLENTY = 0  # else no journal on a disk as small as these has any
home, env, resume, code = Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None, sys.argv[4]
filler = home / "filler"

def fill():
    with open(filler, "wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2

def free():
    filler.unlink()

def recovery(of):
    return of and [of.code, of.cause, of.memory, of.files, of.discarded, [[s.action, s.names] for s in of.steps]]

def attempt(verb, *arguments, **options):
    done = None
    try:
        done = verb(*arguments, **options)
        error = getattr(done, "error", None)
        told = [getattr(done, "status", "committed"), error.message if error else None, getattr(done, "text", None)]
    except HoldfastError as error:
        told = [error.code, error.message, None]
    files = [entry.path for entry in s.files()]
    told = [*told, s.version, s.generation, files]
    print(json.dumps([told, recovery(getattr(done, "recovery", None)), recovery(s.recover())]), flush=True)

s = Session(memory="256M", timeout=60, home=home, env=env, resume=resume, egress=os.environ.get("EGRESS", "").split())
print(json.dumps(s.id), flush=True)
exec(code)
s.close(keep=True)
"""
BASE = "attempt(s.run, \"kept = [7]\\nopen('a.txt', 'w').write('a')\")\n"
FILLED = "with open('big', 'wb', buffering=0) as file:\\n    while True: file.write(bytes(4096))"
REMEMBERS = "attempt(s.run, 'kept')\n"


@pytest.fixture
def home(tmp_path: Path, mount: Callable[..., Path]) -> Path:
    return mount(tmp_path / "home")


def own(home: Path, env: Path, code: str, *, resume: str = "") -> tuple[str, list[list[Any]]]:
    """The session, and of each attempt: status or code of the error, message, text, version, generation, files."""
    session, attempts = recovered(home, env, code, resume=resume)
    return session, [told for told, _, _ in attempts]


def recovered(home: Path, env: Path, code: str, *, resume: str = "") -> tuple[str, list[list[list[Any]]]]:
    """The same; and what `run.recovery` and what `recover()` say afterwards: code, cause, memory, files, what was taken
    back, and the steps with their names."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OWNER, home, env, resume, code],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    session, *attempts = [json.loads(line) for line in done.stdout.splitlines()]
    return session, attempts


def nothing_lost(version: int) -> list[Any]:
    return ["ok", "nothing was lost", "kept", f"as committed at version {version}", [], []]


def verified(home: Path, session: str) -> Report:
    store = Store(home / "journal.sqlite3", read_only=True)
    try:
        assert store.unsettled() == []
        manifests = {row.manifest_sha256 for row in store.versions(session)}
        assert set(os.listdir(home / "sessions" / session / "manifests")) <= manifests
        return check_in_home(store, session, home)
    finally:
        store.close()


def test_code_that_fills_the_disk_fails_and_leaves_no_trace(home: Path, lean: Path) -> None:
    """The session may write far more than this disk holds, so that the code is not to blame for it."""
    session, (_, (filled, _, then), (after, _, _)) = recovered(
        home, lean, f'{BASE}attempt(s.run, "{FILLED}")\n{REMEMBERS}'
    )

    met = "[Errno 28] No space left on device"
    assert filled[:2] == ["disk_full", f"the disk is full (a run's write); the code met it: {met}"]
    assert filled[3:] == [1, 1, ["a.txt"]]
    assert then == nothing_lost(1)
    assert after == ["committed", None, "[7]", 2, 1, ["a.txt"]]
    assert verified(home, session).ok


@pytest.fixture
def full_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL", "full")


def test_code_that_fills_the_disk_and_does_not_mind_is_rolled_back(home: Path, lean: Path) -> None:
    code = (
        f"try:\\n  {FILLED.replace(chr(92) + 'n', chr(92) + 'n  ')}\\nexcept OSError as error: print(error)\\nkept = 8"
    )
    session, (_, filled, after) = own(home, lean, f'{BASE}attempt(s.run, "{code}")\n{REMEMBERS}')

    assert filled[:2] == ["disk_full", "the disk is full: what the run wrote may not be all there"]
    assert filled[3:] == [1, 1, ["a.txt"]]
    assert after == ["committed", None, "[7]", 2, 1, ["a.txt"]]
    assert verified(home, session).ok


@pytest.mark.parametrize("earlier", [0, 1])
def test_code_that_leaves_no_room_for_a_directory_is_rolled_back(
    tmp_path: Path, mount: Callable[..., Path], lean: Path, earlier: int
) -> None:
    """A fresh layer finds no room either, before what was written to the dead one is gone."""
    home = mount(tmp_path / "home", options="size=24m,nr_inodes=600")
    fills = 'attempt(s.run, "import os\\nfor n in range(1000): os.mkdir(str(n))")\n'
    code = f"{BASE * earlier}{fills}attempt(s.run, 'new = [8]; new')\n"
    session, (*_, filled, after) = own(home, lean, code)

    files = ["a.txt"] * earlier
    assert filled[0] == "disk_full"
    assert "No space left on device" in filled[1]
    # Linux may count what was removed for as long as the old overlay is there, under a snapshot that is to wake.
    generation = filled[4]
    assert generation in (1, 1 + earlier)
    assert (filled[3], filled[5]) == (earlier, files)
    assert after == ["committed", None, "[8]", earlier + 1, generation, files]
    assert verified(home, session).ok


def test_a_file_from_outside_that_has_no_room_is_not_there(home: Path, lean: Path) -> None:
    code = f"{BASE}attempt(s.write, 'big.bin', bytes(40 << 20))\nattempt(s.write, 'b.txt', 'b')\n{REMEMBERS}"
    session, (_, refused, written, after) = own(home, lean, code)

    assert refused[0] == "disk_full"
    assert refused[3:] == [1, 1, ["a.txt"]]
    assert written[3:] == [2, 1, ["a.txt", "b.txt"]]
    assert after == ["committed", None, "[7]", 3, 1, ["a.txt", "b.txt"]]
    assert verified(home, session).ok


@pytest.mark.usefixtures("full_journal")
def test_a_request_that_cannot_be_written_down_does_not_leave(
    home: Path, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as upstream:
        monkeypatch.setenv("EGRESS", upstream.at)
        get = f"urllib.request.urlopen('http://{upstream.at}/{{}}').status"
        cell = f"""
import os, urllib.error, urllib.request
from holdfast.kit import save
open("saved.txt", "w").write("saved")
save("saved.txt")
try:
    with open("big", "wb", buffering=0) as file:
        while True: file.write(bytes(4096))
except OSError: pass
try: {get.format("full")}
except urllib.error.HTTPError as error: refused = error
os.remove("big")
raise RuntimeError(f"{{refused.code}} {{refused.headers['X-Holdfast-Egress']}}, then {{{get.format("room")}}}")
"""
        session, (_, sent, after) = own(home, lean, f"{BASE}attempt(s.run, {cell!r})\n{REMEMBERS}")

    assert sent[:2] == ["rolled_back", "503 not_noted, then 200"]
    assert upstream.seen == ["GET /room"]
    assert sent[5] == after[5] == ["a.txt", "saved.txt"]
    assert after[:3] == ["committed", None, "[7]"]
    assert verified(home, session).ok


def test_a_savepoint_that_has_no_room_is_refused_to_the_code(home: Path, lean: Path) -> None:
    cell = (
        "from holdfast.kit import SaveRefused, save\\nopen('half.bin', 'wb').write(bytes(range(256)) * (14 << 12))\\n"
        "try: save('half.bin')\\nexcept SaveRefused as error: refused = str(error)\\nos.remove('half.bin')\\nrefused"
    )
    code = f'{BASE}attempt(s.run, "import os\\n{cell}")\n{REMEMBERS}'
    session, (_, refused, after) = own(home, lean, code)

    assert refused[:2] == ["committed", None]
    assert "the disk is full" in refused[2]
    assert after[2:] == ["[7]", 3, 1, ["a.txt"]]
    assert verified(home, session).ok


@pytest.mark.usefixtures("full_journal")
def test_without_room_for_the_journal_nothing_runs_and_then_it_goes_on(
    home: Path, mount: Callable[..., Path], lean: Path
) -> None:
    mount(home / "sessions")
    attempts = (
        "attempt(s.run, 'kept = 8')\n"
        "attempt(s.run, \"open('b.txt', 'w').write('b')\")\n"
        "attempt(s.write, 'c.txt', 'c')\n"
        "attempt(s.restore, s.ckpt)\n"
    )
    session, recoveries = recovered(home, lean, f"{BASE}fill()\n{attempts}free()\n{REMEMBERS}{attempts}")
    told = [told for told, _, _ in recoveries]

    assert [then for _, _, then in recoveries] == [nothing_lost(version) for version in (1, 1, 1, 1, 1, 2, 3, 4, 5, 6)]
    assert [each[:2] for each in told[1:5]] == [["disk_full", "the disk is full (journal)"]] * 4
    assert {(each[3], each[4], *each[5]) for each in told[1:5]} == {(1, 1, "a.txt")}
    assert told[5] == ["committed", None, "[7]", 2, 1, ["a.txt"]]
    assert [each[3:] for each in told[6:]] == [
        [3, 1, ["a.txt"]],
        [4, 1, ["a.txt", "b.txt"]],
        [5, 1, ["a.txt", "b.txt", "c.txt"]],
        [6, 1, ["a.txt", "b.txt", "c.txt"]],
    ]
    assert verified(home, session).ok


def test_a_journal_with_room_goes_on_where_the_disk_has_none(
    home: Path, mount: Callable[..., Path], lean: Path
) -> None:
    mount(home / "sessions")
    session, (_, bound, written, after) = own(
        home, lean, f"{BASE}fill()\nattempt(s.run, 'kept = [8]')\nattempt(s.write, 'b.txt', 'b')\nfree()\n{REMEMBERS}"
    )

    assert bound == ["committed", None, None, 2, 1, ["a.txt"]]
    assert written[3:] == [3, 1, ["a.txt", "b.txt"]]
    assert after == ["committed", None, "[8]", 4, 1, ["a.txt", "b.txt"]]
    assert verified(home, session).ok


@pytest.mark.usefixtures("full_journal")
def test_a_session_that_had_no_room_to_the_end_is_there_for_the_next_owner(
    home: Path, mount: Callable[..., Path], lean: Path
) -> None:
    mount(home / "sessions")
    session, _ = own(home, lean, f"{BASE}fill()\nattempt(s.run, \"open('b.txt', 'w').write('b')\")\n")
    (home / "filler").unlink()
    _, ((lost, run, then), (after, _, back)) = recovered(home, lean, f"{REMEMBERS}{BASE}", resume=session)

    assert lost[:2] == ["rolled_back", "name 'kept' is not defined"]
    cause, files = "the host was restarted, and memory ended with it", "as committed at version 1"
    assert run == ["exception", "NameError: name 'kept' is not defined", "restored", files, [], [["change", []]]]
    assert then == ["lost", cause, "lost", files, [], [["rerun", ["kept"]]]]
    assert back == ["lost", cause, "lost", "as committed at version 2", [], []]
    assert after == ["committed", None, "1", 2, 2, ["a.txt"]]
    assert verified(home, session).ok


def test_a_layer_that_found_no_room_is_laid_again_and_no_run_is_blamed(
    tmp_path: Path, mount: Callable[..., Path], lean: Path
) -> None:
    """With a few inodes left an overlay is mounted, but read-only: at some of these counts the next layer is."""
    home = mount(tmp_path / "home", options="size=24m,nr_inodes=600")
    code = f"""
import shutil
def leave(count):
    filler.mkdir()
    try:
        for n in range(os.statvfs(home).f_favail - count): (filler / str(n)).mkdir()
    except OSError: pass
{BASE}
for left in range(8):
    leave(left)
    for n in range(3): attempt(s.run, f"open('{{left}}-{{n}}', 'w').write('b'); 1", key=f"{{left}}-{{n}}")
    try: s.names() if left % 2 else None  # all that a run left to do is done
    except HoldfastError: pass
    shutil.rmtree(filler)
    for n in range(3): attempt(s.run, f"open('{{left}}-{{n}}', 'w').write('b'); 1", key=f"{{left}}-{{n}}")
{REMEMBERS}"""
    session, (_, *told, after) = own(home, lean, code)

    rounds = [(told[at : at + 3], told[at + 3 : at + 6]) for at in range(0, len(told), 6)]
    tight = [each for before, _ in rounds for each in before]
    assert {each[0] for each in tight} == {"committed", "disk_full"}
    assert all(each[0] == "committed" for _, free in rounds for each in free)
    assert (after[2], len(after[5])) == ("[7]", 1 + 3 * len(rounds))
    assert verified(home, session).ok


@pytest.mark.parametrize("verb", ["s.run, CODE, mode='notebook', key='k'", "s.shell, 'echo b > b.txt'"])
def test_what_meets_a_full_disk_is_our_failure_by_whatever_way(
    tmp_path: Path, mount: Callable[..., Path], lean: Path, verb: str
) -> None:
    home = mount(tmp_path / "home", options="size=24m,nr_inodes=600")
    asked = verb.replace("CODE", "\"open('b.txt', 'w').write('b')\"")
    code = f"""
s.run("import os")
s.names()
filler.mkdir()
try:
    while True: (filler / os.urandom(8).hex()).mkdir()
except OSError: pass
attempt({asked})
__import__("shutil").rmtree(filler)
attempt({asked})
"""
    _, (full, room) = own(home, lean, code)

    assert (full[0], full[3:]) == ("disk_full", [1, 1, []])
    assert (room[0], room[5]) == ("committed", ["b.txt"])


def test_a_full_dev_shm_is_the_codes_own_affair(home: Path, lean: Path) -> None:
    """This disk has less room than the session may use; but it is not what is full."""
    fills = "file = open('/dev/shm/x', 'wb', buffering=0)\\nwhile True: file.write(bytes(1 << 20))"
    _, (_, filled, after) = own(home, lean, f'{BASE}attempt(s.run, "{fills}")\n{REMEMBERS}')

    assert filled[:2] == ["rolled_back", "[Errno 28] No space left on device"]
    assert after[:3] == ["committed", None, "[7]"]
