"""A home has one owner, and whatever that owner's end, the next one finds it clean."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import HoldfastError, Session

OWNER = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have had it ignored
from pathlib import Path
from holdfast import Session

home, env, code = sys.argv[1], sys.argv[2], sys.argv[3]
with Session(memory="256M", home=home, env=env) as s:
    reached = s._session._transport
    kernel, keeper = reached._session.computer.now.kernel, reached._service.node._keeper
    pids = [kernel.pid, kernel.init_pid, keeper.peer_pid]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    print(json.dumps({"session": s.id, "pids": pids, "files": os.listdir(Path(home, "sessions"))}), flush=True)
    exec(code)
"""
ENDLESS = "s.run(\"open('started', 'w').close()\\nimport time; time.sleep(1000)\")"


class Owner:
    """A process of its own that owns a home and has a session in it."""

    def __init__(self, home: Path, env: Path, code: str) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-W", "error", "-c", OWNER, str(home), str(env), code],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        line = self.line()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        told = json.loads(line)
        self.session: str = told["session"]
        self.pids: list[int] = told["pids"]
        self.files: list[str] = told["files"]

    def line(self) -> bytes:
        """The next that it prints. Byte by byte: what a buffer had read ahead, `communicate` would miss."""
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self.process.stdout.fileno(), 1)):
            line += byte
        return line

    def wait_started(self) -> None:
        wait_until(lambda: any((self.home / "sessions" / self.session).glob("stages/*/data/started")))

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            raise AssertionError(f"it does not end: {self.process.communicate()[1]}") from None
        return self.process.returncode, out, err

    def processes(self) -> list[int]:
        return [pid for pid in self.pids if is_alive(pid)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    assert cgroups(tmp_path / "home") == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: object) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def cgroups(home: Path) -> list[str]:
    """Every cgroup of this home, on any hierarchy."""
    name = (home / "id").read_text().strip()
    return [path for path, _, _ in os.walk("/sys/fs/cgroup") if name in path]


def test_a_script_that_ends_leaves_nothing(home: Path, lean: Path) -> None:
    owner = Owner(home, lean, "print(s.run('6 * 7').text)")
    code, out, err = owner.end()

    assert (code, out, err) == (0, "42\n", "")
    assert os.listdir(home / "sessions") == []
    assert owner.processes() == []
    assert cgroups(home) == []


def test_a_script_that_forgets_to_close_leaves_nothing(home: Path, lean: Path) -> None:
    owner = Owner(home, lean, "extra = Session(memory='128M', home=home, env=env); extra.run('1'); s.close()")
    code, _, err = owner.end()

    assert (code, err) == (0, "")
    assert os.listdir(home / "sessions") == []
    assert cgroups(home) == []


def test_ctrl_c_interrupts_the_cell_and_cleans_up(home: Path, lean: Path) -> None:
    owner = Owner(home, lean, ENDLESS)
    owner.wait_started()
    owner.process.send_signal(signal.SIGINT)
    code, _, err = owner.end()

    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert os.listdir(home / "sessions") == []
    assert owner.processes() == []
    assert cgroups(home) == []


def test_ctrl_c_may_be_caught_and_the_session_goes_on(home: Path, lean: Path) -> None:
    owner = Owner(
        home,
        lean,
        f"s.run('kept = [7]')\ntry: {ENDLESS.replace('open', 'kept.append(8); open', 1)}\n"
        "except KeyboardInterrupt: print(s.run('kept').text, s.generation)",
    )
    owner.wait_started()
    owner.process.send_signal(signal.SIGINT)

    assert owner.end() == (0, "[7] 1\n", "")


def test_ctrl_c_while_output_streams_interrupts_too(home: Path, lean: Path) -> None:
    owner = Owner(home, lean, ENDLESS[:-1] + ", on_stdout=print)")
    owner.wait_started()
    owner.process.send_signal(signal.SIGINT)
    code, _, err = owner.end()

    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert os.listdir(home / "sessions") == []
    assert cgroups(home) == []


HEARD_ELSEWHERE = f"""
import threading, time
def ask():
    while not any(Path(home, "sessions", s.id).glob("stages/*/data/started")): time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # noted, and the main thread sleeps on
threading.Thread(target=ask).start()
try: {ENDLESS[:-1]}, timeout=30)
except KeyboardInterrupt: print(s.history()[-1].reason)
"""


def test_ctrl_c_that_comes_when_the_caller_is_just_about_to_wait_is_heard(home: Path, lean: Path) -> None:
    code, out, err = Owner(home, lean, HEARD_ELSEWHERE).end()

    assert (code, err) == (0, "")
    assert "the run was interrupted" in out, "and did not come to its deadline"


WHILE_IT_IS_HANDED_OVER = f"""
from holdfast import engine
start = engine.start
def interrupted(*given):
    engine.start = start
    start(*given)
    raise KeyboardInterrupt
engine.start = interrupted
try: {ENDLESS[:-1]}, timeout=30)
except KeyboardInterrupt: print(s.run("6 * 7").text, [each.reason for each in s.history() if "30 s" in each.reason])
"""


def test_ctrl_c_while_a_run_is_handed_over_ends_it_too(home: Path, lean: Path) -> None:
    assert Owner(home, lean, WHILE_IT_IS_HANDED_OVER).end() == (0, "42 []\n", "")


WHEN_ALL_IS_SEEN = """
from concurrent.futures import Future
result = Future.result
def interrupted(self, timeout=None):
    Future.result = result
    raise KeyboardInterrupt
Future.result = interrupted
try: s.run("print('all of it')", on_stdout=lambda text: print(text, end=""))
except KeyboardInterrupt: print(s.history()[-1].status)
"""


def test_ctrl_c_when_all_of_a_run_was_seen_already_waits_for_nothing(home: Path, lean: Path) -> None:
    assert Owner(home, lean, WHEN_ALL_IS_SEEN).end() == (0, "all of it\ncommitted\n", "")


BEHIND_ANOTHER = """
import threading, time
asked, go_on, ended = threading.Event(), threading.Event(), []
def answer(prompt, password):
    asked.set()
    go_on.wait()
    return "an answer"
def ask():
    while not waits(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
other = threading.Thread(target=lambda: ended.append(s.run("input()", on_input=answer)))
other.start()
asked.wait()
threading.Thread(target=ask).start()
try: s.run("mine = True")
except KeyboardInterrupt: go_on.set()
other.join()
print(ended[0].status, ended[0].text, "mine" in s.names(), flush=True)
"""


def test_ctrl_c_while_a_run_waits_behind_another_ends_that_and_not_the_other(home: Path, lean: Path) -> None:
    waits = "waits = lambda: len(s._session._transport._session._queue._waiters or ())\n"
    assert Owner(home, lean, waits + BEHIND_ANOTHER).end() == (0, "committed 'an answer' False\n", "")


def test_what_a_killed_owner_left_is_swept_by_the_next(home: Path, lean: Path) -> None:
    owner = Owner(home, lean, ENDLESS)
    owner.wait_started()
    owner.process.kill()
    owner.end()
    wait_until(lambda: owner.processes() == [])
    assert owner.session in os.listdir(home / "sessions")

    following = Owner(home, lean, "input_is_not_needed = 1")
    code, _, err = following.end()

    assert (code, err) == (0, "")
    assert sorted(following.files) == sorted([owner.session, following.session])
    assert os.listdir(home / "sessions") == [owner.session], "it can be resumed; only what it left running is gone"
    assert os.listdir(home / "sessions" / owner.session / "stages") == []
    assert int((home / "epoch").read_text()) == 2


def test_an_idle_session_dies_with_an_owner_that_is_killed_also_if_nobody_opens_the_home_again(
    home: Path, lean: Path
) -> None:
    owner = Owner(home, lean, "s.run('x = 1'); s.names(); print('idle', flush=True); input()")
    assert owner.line() == b"idle\n"
    owner.process.kill()
    owner.end()

    wait_until(lambda: owner.processes() == [])
    assert [pid for path in cgroups(home) for pid in Path(path, "cgroup.procs").read_text().split()] == []
    assert Owner(home, lean, "pass").end()[0] == 0


def test_a_terminated_owner_leaves_no_process(home: Path, lean: Path) -> None:
    owner = Owner(home, lean, ENDLESS)
    owner.wait_started()
    owner.process.terminate()
    owner.end()

    wait_until(lambda: owner.processes() == [])
    assert Owner(home, lean, "pass").end()[0] == 0


def test_a_second_process_is_told_that_the_home_is_busy(session: Session) -> None:
    code = (
        "from holdfast import HoldfastError, Session\n"
        "try: Session()\n"
        "except HoldfastError as error: print(error.code, error.message, bool(error.hint), sep='|')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert out.startswith("home_busy|")
    assert f"process {os.getpid()}" in out
    assert out.endswith("|True\n")
    assert session.run("1").text == "1"


def test_a_home_is_opened_with_one_memory_cap(session: Session) -> None:
    with pytest.raises(HoldfastError, match="memory_cap") as caught:
        Session(memory_cap="watchdog")

    assert caught.value.code == "invalid_setting"
    assert session.run("1").text == "1"


def test_a_child_forked_by_the_host_application_does_not_keep_the_home(home: Path, lean: Path) -> None:
    owner = Owner(
        home,
        lean,
        "import subprocess, time\npid = os.fork()\nif pid == 0:\n    os.close(1); os.close(2); time.sleep(1000)\n"
        "Path(home, 'forked').write_text(str(pid))",
    )
    code, _, err = owner.end()
    assert (code, err) == (0, "")
    forked = int((home / "forked").read_text())
    try:
        assert is_alive(forked)
        assert Owner(home, lean, "pass").end()[0] == 0
    finally:
        os.kill(forked, signal.SIGKILL)


HOMES = """
import sys
from holdfast import Session, engine
from holdfast.home import acquire
from pathlib import Path

env, homes, which = sys.argv[1], sys.argv[2:4], int(sys.argv[4])
sessions = [Session(memory="256M", home=home, env=env) for home in homes]
service = engine.call(lambda: engine._running()._services[Path(homes[which])][1])

close = service.node.close

async def fail():
    await close()
    raise OSError("its disk is gone")

service.node.close = fail
try:
    engine.shut_down()
except OSError as error:
    print(error)
for home in homes:
    acquire(Path(home)).release()
print("free")
"""


@pytest.mark.parametrize("which", [0, 1])
def test_one_home_that_fails_to_close_leaves_no_other_open(tmp_path: Path, lean: Path, which: int) -> None:
    homes = [tmp_path / "a", tmp_path / "b"]
    ended = subprocess.run(
        [sys.executable, "-c", HOMES, str(lean), *map(str, homes), str(which)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert ended.stdout == "its disk is gone\nfree\n", ended.stderr
