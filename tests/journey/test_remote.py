"""The Python API against a server: connections break, servers and clients die, several processes share one home."""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.journey.test_home import BEHIND_ANOTHER
from tests.lean import lean_home

from holdfast import AsyncSession, HoldfastError, Session, engine, shared
from holdfast.api import new_call
from holdfast.errors import EventsGone, InvalidSetting, ServerUnreachable, SessionUnknown, Unauthorized
from holdfast.retention import KEPT_CALLS
from holdfast.store.sqlite import Store
from holdfast.transports import connection

COUNTING = "import time\nfor n in range(150):\n    print(n, flush=True); time.sleep(0.004)"
ENDLESS = "x = 1; print('go', flush=True)\nimport time; time.sleep(100)"
COUNTED = "".join(f"{n}\n" for n in range(150))


class Proxy:
    """A wire between client and server that can be cut."""

    def __init__(self, url: str) -> None:
        self._target = (urlsplit(url).hostname, urlsplit(url).port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._names = [f"Host: {urlsplit(each).netloc}".encode() for each in (self.url, url)]
        self.cuts = 0
        self.cut_at: Callable[[bytes], bool] = lambda request: False
        """Whether the answer to what was sent last is not to arrive."""
        self.cut_after_bytes: int | None = None
        """Of an answer."""
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            ends = [client, socket.create_connection(self._target)]
            self._open += ends
            asked = bytearray()
            self._start(self._carry, *ends, asked)
            self._start(self._bring, *ends, asked)

    def _carry(self, client: socket.socket, server: socket.socket, asked: bytearray) -> None:
        while piece := _received(client):
            asked += piece
            _sent(server, piece.replace(*self._names))  # the server answers to its own name alone
        _shut([client, server])

    def _bring(self, client: socket.socket, server: socket.socket, asked: bytearray) -> None:
        passed = 0
        while piece := _received(server):
            passed += len(piece)
            if self.cut_at(bytes(asked)) or (self.cut_after_bytes is not None and passed > self.cut_after_bytes):
                self.cut_at, self.cut_after_bytes = lambda request: False, None
                self.cuts += 1
                break
            asked.clear()
            _sent(client, piece)
        _shut([client, server])

    def cut(self) -> None:
        """Every connection, as a router does that forgets them."""
        self.cuts += 1
        _shut(self._open)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        _shut(self._open)
        for thread in self._threads:
            thread.join()
        for each in (self._listening, *self._open):
            each.close()


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


def _sent(end: socket.socket, piece: bytes) -> None:
    try:
        end.sendall(piece)
    except OSError:
        return


def _shut(ends: list[socket.socket]) -> None:
    for end in ends:
        try:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@pytest.fixture
def proxy(server: Any) -> Iterator[Proxy]:
    proxy = Proxy(server.url)
    yield proxy
    proxy.close()


@pytest.fixture
def cuttable(proxy: Proxy, server: Any) -> Iterator[Session]:
    with Session(memory="256M", timeout=60, url=proxy.url, token=server.token) as session:
        yield session


def told(server: Any, path: str) -> Any:
    return httpx2.get(
        f"{server.url}{path}", headers={"authorization": f"Bearer {server.token}"}, trust_env=False
    ).json()


def wait_until(condition: Callable[[], object], *, within_s: float = 60) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


# -- connections that break --------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_while_a_cell_prints_loses_and_doubles_nothing(
    cuttable: Session, proxy: Proxy
) -> None:
    pieces: list[str] = []

    def on_stdout(text: str) -> None:
        pieces.append(text)
        if len("".join(pieces).split()) // 40 > proxy.cuts:
            proxy.cut()

    run = cuttable.run(COUNTING, on_stdout=on_stdout)

    assert proxy.cuts >= 3
    assert (run.status, run.stdout, run.replayed, run.attempt) == ("committed", COUNTED, False, 1)
    assert "".join(pieces) == COUNTED
    assert [entry.run for entry in cuttable.history()] == [run.id]


@pytest.mark.parametrize("planned", [False, True])
def test_a_request_whose_answer_never_came_is_sent_again_and_runs_once(
    cuttable: Session, proxy: Proxy, planned: bool
) -> None:
    code = "open('f', 'a').write('once\\n'); print('ran')"
    wanted = cuttable.plan(code) if planned else code
    proxy.cut_at = lambda request: b"/runs" in request
    pieces: list[str] = []
    run = cuttable.run(wanted, on_stdout=pieces.append)

    assert proxy.cuts == 1
    assert (run.status, run.replayed, run.attempt, "".join(pieces)) == ("committed", False, 1, "ran\n")
    assert cuttable.read("f") == b"once\n"
    assert (cuttable.version, len(cuttable.history())) == (1, 1)


def test_a_download_goes_on_where_it_was_cut(cuttable: Session, proxy: Proxy, tmp_path: Path) -> None:
    content = os.urandom(5_000_000)
    cuttable.write("large", content)
    proxy.cut_after_bytes = 2_500_000

    assert cuttable.download("large", tmp_path / "mine").read_bytes() == content
    assert proxy.cuts == 1


def test_a_write_whose_answer_never_came_is_said_to_be_in_doubt(cuttable: Session, proxy: Proxy) -> None:
    proxy.cut_at = lambda request: b"PUT" in request or b"written" in request

    with pytest.raises(ServerUnreachable, match="whether f was written is not known"):
        cuttable.write("f", "written")
    wait_until(lambda: cuttable.history())
    assert cuttable.read("f") == b"written"


def test_a_reset_is_not_asked_for_twice(cuttable: Session, proxy: Proxy) -> None:
    proxy.cut_at = lambda request: b"/reset" in request

    with pytest.raises(ServerUnreachable, match="whether memory was reset is not known"):
        cuttable.reset()
    cuttable.recover()
    assert cuttable.generation == 2


def test_an_answer_to_input_survives_a_cut(cuttable: Session, proxy: Proxy) -> None:
    def answer(prompt: str, password: bool) -> str:
        proxy.cut()
        return f"{prompt}{password}"

    assert cuttable.run("input('who? ')", on_input=answer).text == "'who? False'"
    assert proxy.cuts == 1


def test_an_answer_to_input_that_was_taken_and_not_acknowledged_is_sent_again(cuttable: Session, proxy: Proxy) -> None:
    proxy.cut_at = lambda request: b"/input" in request

    run = cuttable.run("input('who? ') + input('and? ')", on_input=lambda prompt, password: prompt)

    assert (run.text, proxy.cuts) == ("'who? and? '", 1)


# -- runs that are ended -----------------------------------------------------------------------------------------


@pytest.fixture
def remote(server: Any) -> Iterator[Session]:
    with Session(memory="256M", timeout=60, url=server.url, token=server.token) as session:
        yield session


def test_a_run_is_interrupted_from_outside(remote: Session) -> None:
    assert remote.interrupt() is False
    run = remote.run(ENDLESS, on_stdout=lambda _: remote.interrupt())

    assert run.error is not None
    assert (run.error.code, run.status, remote.run("'x' in globals()").text) == ("interrupted", "rolled_back", "False")


def test_closing_ends_what_runs(server: Any) -> None:
    session = Session(memory="128M", url=server.url, token=server.token)
    with ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        running = pool.submit(session.run, ENDLESS, on_stdout=lambda _: started.set())
        started.wait()
        session.close()
        run = running.result()

    assert run.error is not None
    assert (run.error.code, run.status) == ("interrupted", "rolled_back")


def test_a_callback_that_fails_ends_the_run_and_is_heard(server: Any) -> None:
    async def watched() -> None:
        async with AsyncSession(memory="128M", url=server.url, token=server.token) as session:
            with pytest.raises(LookupError):
                await session.run(ENDLESS, on_stdout=lambda _: {}["nothing"])
            with pytest.raises(LookupError):
                await session.run("x = input()", on_input=lambda *_: asyncio.sleep(0, {}["nothing"]))
            assert (await session.run("'x' in globals()")).text == "False"

    asyncio.run(watched())


def test_who_does_not_wait_for_his_session_leaves_none(server: Any) -> None:
    def sessions() -> set[str]:
        return {info["id"] for info in told(server, "/v1/sessions")}

    async def go_away() -> None:
        for wait_s in (0, 0.003, 0.01, 0.05):
            opening = asyncio.create_task(AsyncSession(memory="128M", url=server.url, token=server.token).open())
            await asyncio.sleep(wait_s)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await (await opening).close()

    before = sessions()
    asyncio.run(go_away())
    wait_until(lambda: not engine._running()._under_way)
    wait_until(lambda: sessions() == before)


def test_ctrl_c_interrupts_the_cell_at_the_server(server: Any) -> None:
    code = (
        "import signal, sys\nfrom holdfast import Session\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "session = Session(memory='128M', url=sys.argv[1], token=sys.argv[2])\n"
        "print(session.id, flush=True)\n"
        "session.run('kept = 1')\n"
        "try: session.run(sys.argv[3], on_stdout=lambda text: print(text, end='', flush=True))\n"
        "except KeyboardInterrupt: print(session.run('kept, \"x\" in globals()').text)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code, server.url, server.token, ENDLESS], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    session = client.stdout.readline().strip()
    assert client.stdout.readline() == "go\n"
    client.send_signal(signal.SIGINT)

    assert client.communicate(timeout=60)[0] == "(1, False)\n"
    assert client.returncode == 0
    assert session not in os.listdir(server.home / "sessions"), "it was not closed, and ended with its process"


def test_ctrl_c_while_a_run_waits_at_the_server_ends_that_and_not_the_one_before_it(server: Any) -> None:
    code = (
        "import os, signal, sys\nfrom holdfast import Session\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "s = Session(memory='128M', url=sys.argv[1], token=sys.argv[2])\n"
        "followed = s._session._transport._following\n"
        "waits = lambda: len(followed) == 2 and all(each._began for each in list(followed.values()))\n"
    )
    client = [sys.executable, "-c", code + BEHIND_ANOTHER, server.url, server.token]
    ended = subprocess.run(client, capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout) == (0, "committed 'an answer' False\n"), ended.stderr


def test_who_runs_code_in_his_own_process_does_not_wait_for_an_http_client_to_load() -> None:
    code = "import sys, holdfast.blocking; print({'httpx2', 'starlette', 'uvicorn', 'mcp'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# -- servers that are not there ----------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    free = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{free.getsockname()[1]}"
    free.close()

    with pytest.raises(ServerUnreachable, match="does not answer") as caught:
        Session(url=url, token="x" * 20)
    assert caught.value.hint


def test_what_is_no_holdfast_server_is_said_to_be_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def answer() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")

        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer)
            with pytest.raises(ServerUnreachable, match="no Holdfast server"):
                Session(url=url)


def test_a_wrong_token_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("wrong" * 5, None):
        with pytest.raises(Unauthorized):
            Session(url=server.url, token=token)
    monkeypatch.setenv("HOLDFAST_TOKEN", server.token)
    with Session(url=server.url, memory="128M") as session:
        assert session.run("1").text == "1"
    with Session(url=f"{server.url}/?token={server.token}", memory="128M") as session:
        assert session.run("2").text == "2"


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "ftp://server"}, {"url": "127.0.0.1:80"}, {"url": "http://"}, {"url": "unix:socket"},
        {"url": "http://server", "home": "/tmp"}, {"url": "http://server", "memory_cap": "watchdog"},
        {"url": "http://server", "shared": True}, {"token": "abc"},
        {"url": "http://127.0.0.1:1", "token": "a\nb"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_have_no_meaning_there_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Session(**settings)
    assert caught.value.hint


def test_a_session_that_is_open_at_a_server_can_be_reached_by_its_id(server: Any) -> None:
    at = {"url": server.url, "token": server.token}
    with Session(memory="128M", **at) as session:
        session.run("x = 42")
        again = Session(resume=session.id, **at)
        assert (again.id, again.version, again.run("x").text) == (session.id, 1, "42")
        again.close()
        with pytest.raises(SessionUnknown):
            session.run("x")


def test_a_server_that_is_killed_is_a_clear_error_and_nothing_acknowledged_is_lost(
    serving: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 1.0)
    home = tmp_path / "home"
    with serving(home) as server:
        session = Session(memory="256M", url=server.url, token=server.token)
        kept = session.id
        done = session.run("x = 1; open('f', 'w').write('acknowledged')")

        with pytest.raises(ServerUnreachable) as caught:
            session.run(
                "open('f', 'w').write('half'); print('go', flush=True)\nimport time; time.sleep(60)",
                on_stdout=lambda _: server.process.kill(),
            )
        assert server.url in caught.value.message
        assert "history()" in caught.value.hint
        monkeypatch.setattr(connection, "PATIENCE_S", 60.0)
        began = time.monotonic()
        with pytest.raises(ServerUnreachable):
            session.close()
        assert time.monotonic() - began < 45, "it is known to be gone: nobody waits for it again"
    with serving(home) as server, Session(url=server.url, token=server.token, resume=kept) as again:
        assert again.read("f") == b"acknowledged"
        assert [entry.status for entry in again.history()] == ["committed", "rolled_back"]
        assert (again.version, again.generation, again.history()[0].ckpt) == (1, 2, done.ckpt)


# -- one home, several processes ---------------------------------------------------------------------------------

CLIENT = """
import json, sys
from holdfast import Session
session = Session(memory="128M", **json.loads(sys.argv[1]))
print(json.dumps([session.id, session.run("6 * 7").text]), flush=True)
sys.stdin.read()
session.close()
"""


class Client:
    """A process of its own with a session."""

    def __init__(self, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def told(self) -> list[str]:
        assert self.process.stdout is not None
        return list(json.loads(self.process.stdout.readline()))

    def end(self) -> None:
        self.process.communicate(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return lean_home(tmp_path / "home")


def test_an_attached_session_ends_with_a_client_that_is_killed_and_another_stays(
    serving: Callable[..., Any], tmp_path: Path
) -> None:
    code = """
import sys, time
from holdfast import Session
url, token = sys.argv[1:]
sessions = [Session(url=url, token=token, memory="256M", attached=attached) for attached in (True, False)]
print(*[session.id for session in sessions], flush=True)
time.sleep(100)
"""
    with serving(tmp_path / "home", "--client-grace", "500ms") as server:
        with subprocess.Popen(
            [sys.executable, "-c", code, server.url, server.token], stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdout is not None
            attached, other = client.stdout.readline().split()
            time.sleep(2)
            before = live(server)
            client.kill()
        give_up_at = time.monotonic() + 30
        while attached in live(server) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        after = live(server)

    assert before >= {attached, other}, "it is held while its client lives"
    assert other in after
    assert attached not in after


def live(server: Any) -> set[str]:
    headers = {"authorization": f"Bearer {server.token}"}
    return {each["id"] for each in httpx2.get(f"{server.url}/v1/sessions", headers=headers, trust_env=False).json()}


def test_answers_to_calls_without_a_key_are_not_kept_for_ever(serving: Callable[..., Any], tmp_path: Path) -> None:
    late = new_call()
    with (
        serving(tmp_path / "home") as server,
        Session(url=server.url, token=server.token, memory="256M", timeout=30) as session,
    ):
        mine = session.run("n = 0; 'mine'", key="mine")
        session.run("n += 1; n", key=late)
        at_once = session.run("n += 1; n", key=late)
        for _ in range(2 * KEPT_CALLS + 20):
            last = session.run("n += 1; n")
        with pytest.raises(EventsGone, match="it was committed, at version 2") as gone:
            session.run("n += 1; n", key=late)
        again = session.run("n = 0; 'mine'", key="mine")
        with closing(Store(server.home / "journal.sqlite3", read_only=True)) as store:
            kept = len(store.answered_calls(session.id))
            counted = session.run("n").text

    assert (at_once.text, at_once.replayed) == ("1", True)
    assert (again.text, again.replayed, again.id) == ("'mine'", True, mine.id)
    assert last.text == counted == str(2 * KEPT_CALLS + 21), "what is not known any more was not run again"
    assert KEPT_CALLS <= kept <= 2 * KEPT_CALLS
    assert gone.value.hint


def test_a_home_that_is_served_is_used_through_its_server_and_sessions_of_killed_clients_end(server: Any) -> None:
    def state(session: str) -> str:
        info = told(server, f"/v1/sessions/{session}")
        return str(info.get("state") or info["code"])

    with Session(memory="128M", home=server.home) as ours:
        clients = [Client(home=str(server.home)), Client(home=str(server.home), keep=True)]
        (theirs, answer), (kept, _) = (client.told() for client in clients)
        assert answer == "42"
        assert ours.run("6 * 9").text == "54"
        assert [state(session) for session in (ours.id, theirs, kept)] == ["ready"] * 3

        for client in clients:
            client.kill()
        wait_until(lambda: [state(session) for session in (theirs, kept)] == ["session_unknown", "kept"])
        mine = ours.id
        assert ours.run("1").text == "1"
    assert state(mine) == "session_unknown"
    with Session(home=server.home, resume=kept) as again:
        assert (again.version, again.generation) == (1, 2)


def test_a_server_is_started_for_all_who_share_a_home_and_ends_when_nobody_does(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "IDLE", "1s")
    settings: dict[str, Any] = {"memory": "128M", "home": home, "shared": True}
    with ThreadPoolExecutor(2) as pool:  # both at once, and one server
        sessions = list(pool.map(lambda _: Session(**settings), range(2)))
    client = Client(home=str(home), shared=True)
    assert client.told()[1] == "42"
    owner = int((home / "lock").read_text().split()[1])
    assert owner not in (os.getpid(), client.process.pid)
    assert os.getsid(owner) not in (os.getsid(0), os.getsid(client.process.pid))

    client.end()
    for session in sessions:
        assert session.run("6 * 7").text == "42"
        session.close()
    wait_until(lambda: not Path(f"/proc/{owner}").exists())
    assert (os.listdir(home / "sessions"), (home / "socket").exists()) == ([], False)


def test_a_server_that_cannot_be_started_says_why(home: Path, session: Session) -> None:
    ours = Path(os.environ["HOLDFAST_HOME"])  # this very process owns it, so that another can not
    code = "from holdfast import Session; Session(shared=True)"
    busy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "home_busy" in busy.stderr
    with Session(memory="128M", shared=True) as other:
        assert other.run("1").text == "1", f"{ours} is shared within the process as ever"
    (home / "socket").mkdir()
    with pytest.raises(HoldfastError, match="did not come up") as caught:
        Session(home=home, shared=True)
    assert "socket" in caught.value.message
    assert "server.log" in caught.value.hint
    (home / "journal.sqlite3").write_text("this is no database")
    with pytest.raises(HoldfastError) as caught:
        Session(home=home, shared=True)
    assert caught.value.code == "journal_lost", "the server's own error, with its hint"
    assert "accept-loss" in caught.value.hint
