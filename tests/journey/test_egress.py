"""Egress: what a session may reach, what its receipts say of it, and what may have happened when a run is taken back.

The server that is reached is real, on the host's loopback, and listed by its address.
"""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.upstream import Upstream, certify, serving

from holdfast import Session, departures
from holdfast.cli.show import show
from holdfast.config import default_home
from holdfast.errors import BadEgress, EgressRefused
from holdfast.model import Run
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

GET = "import urllib.request\ndef get(url, **more): return urllib.request.urlopen(url, **more).read()\n"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with serving() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def reaching(upstream: Upstream) -> Iterator[Session]:
    """May reach the upstream, and nothing else."""
    with Session(memory="512M", timeout=60, egress=[upstream.at]) as session:
        assert session.run(GET).status == "committed"
        yield session


@pytest.fixture
def seen(upstream: Upstream) -> list[str]:
    """What reached the upstream in this test."""
    upstream.seen.clear()
    return upstream.seen


# -- what is said of it ---------------------------------------------------------------------------------------------

REPORT = """
import os, subprocess, threading, time
keep = b"x" * (32 << 20)
open("report.csv", "w").write(open("in.csv").read() + "more")
os.remove("old.csv")
get("http://{at}/data")
subprocess.Popen(["sleep", "600"])
threading.Thread(target=time.sleep, args=(600,), name="dozes", daemon=True).start()
"""


def test_a_receipt_says_of_a_run_what_its_caller_was_told(upstream, seen):
    with Session(memory="512M", timeout=30, egress=[upstream.at]) as session:
        session.run(GET)
        fingerprint = session._session._transport._session.computer.environment.fingerprint
        session.write("in.csv", "1\n")
        session.write("old.csv", "0\n")
        began, code = time.time(), REPORT.format(at=upstream.at)
        run = session.run(code, key="monthly", outputs=["report.csv"], asserts=["len(keep) == 32 << 20"])
        ended = time.time()
        command = session.shell("echo made > made; sleep 600 & exit 3")

    told = run.receipt.statement["predicate"]
    by = told["byproducts"]
    assert told["command"]["code_sha256"] == hashlib.sha256(code.encode()).hexdigest() == run.card.code_sha256
    assert (told["status"], told["run"], told["command"]["key"]) == (run.status, run.id, "monthly")
    assert told["environment"] == {"fingerprint": fingerprint} == {"fingerprint": run.card.environment}
    assert run.card.limits == {"memory_bytes": 512 << 20, "timeout_s": 30.0, "disk_bytes": 10 << 30}
    assert told["materials"] == [
        {"name": "in.csv", "digest": {"sha256": hashlib.sha256(b"1\n").hexdigest()}, "annotations": {"bytes": 2}}
    ]
    assert [(each["path"], each["action"]) for each in by["changes"]] == [
        ("old.csv", "removed"),
        ("report.csv", "added"),
    ]
    assert [(each["path"], each["sha256"]) for each in by["changes"] if "sha256" in each] == [
        ("report.csv", hashlib.sha256(b"1\nmore").hexdigest())
    ]
    assert (by["duration_s"], run.duration_s > 0) == (run.duration_s, True)
    assert began <= run.receipt.facts().started_at <= run.receipt.facts().finished_at <= ended
    assert by["peak_memory_bytes"] == run.peak_memory_bytes
    assert run.peak_memory_bytes is None or run.peak_memory_bytes > 32 << 20
    assert by["strays"] == ["process sleep 600 (killed)", "thread dozes (frozen)"]
    assert by["strays"] == [f"{stray.kind} {stray.name} ({stray.outcome})" for stray in run.strays]
    assert by["egress"] == run.egress == [f"GET http://{upstream.at}/data"]
    assert by["checks"] == msgspec.to_builtins(run.checks)
    assert {"output report.csv", "assert len(keep) == 32 << 20"} <= {check.name for check in run.checks if check.ok}
    assert (by["error"], by["exit_code"], told["rollback"]) == (None, None, None)

    by = command.receipt.statement["predicate"]["byproducts"]
    assert by["exit_code"] == command.exit_code == 3
    assert by["strays"] == [f"process {stray.name} (killed)" for stray in command.strays] != []


# -- who gets out ----------------------------------------------------------------------------------------------------

CLIENTS = {
    "urllib": "import urllib.request; print(urllib.request.urlopen('{url}').read().decode())",
    "requests": "import requests; print(requests.get('{url}').text)",
    "a requests.Session": "import requests; s = requests.Session(); print([s.get('{url}').text for _ in range(3)][0])",
    "httpx": "import httpx; print(httpx.get('{url}').text)",
    "pandas": "import pandas; print(pandas.read_csv('{url}').columns[0])",
    "curl": "print(__import__('subprocess').check_output(['curl', '-sS', '{url}'], text=True))",
    "a process": "!python -c \"import urllib.request as u; print(u.urlopen('{url}').read().decode())\"",
}


@pytest.mark.parametrize("client", CLIENTS)
def test_the_usual_clients_reach_what_is_listed_unmodified(reaching, upstream, seen, client):
    run = reaching.run(CLIENTS[client].format(url=f"http://{upstream.at}/data?token=secret"))

    assert (run.error, run.stdout.strip()) == (None, "hello")
    assert set(seen) == {"GET /data?token=secret"}
    assert run.egress == [f"GET http://{upstream.at}/data?..."] * len(seen)


def test_a_command_reaches_it_too(reaching, upstream, seen):
    done = reaching.shell(f"curl -sS -d x=1 http://{upstream.at}/form")

    assert (done.stdout, done.egress, seen) == ("hello", [f"POST http://{upstream.at}/form"], ["POST /form"])


def test_tls_goes_through_from_end_to_end(tmp_path):
    file = certify(tmp_path / "upstream.pem")
    with serving(file) as upstream, Session(memory="512M", timeout=60, egress=[upstream.at]) as session:
        session.write("ca.pem", file.read_bytes()[file.read_bytes().index(b"-----BEGIN CERTIFICATE") :])
        run = session.run(f"""
            import requests, ssl, subprocess, urllib.request
            url = "https://{upstream.at}/secret?token=1"
            print(urllib.request.urlopen(url, context=ssl.create_default_context(cafile="ca.pem")).read().decode())
            print(requests.get(url, verify="ca.pem").text)
            print(subprocess.check_output(["curl", "-sS", "--cacert", "ca.pem", url], text=True))
        """)
        untrusted = session.run("requests.get(url)")

    assert (run.error, run.stdout.split()) == (None, ["hello"] * 3)
    assert upstream.seen == ["GET /secret?token=1"] * 3
    assert run.egress == [f"CONNECT {upstream.at}"] * 3  # what is inside nobody sees, so no path is told
    assert untrusted.error is not None
    assert untrusted.error.name == "SSLError"


def test_what_is_not_listed_is_refused_and_named(reaching, upstream, seen):
    run = reaching.run("get('http://example.com/path?q=secret')")

    assert run.error is not None
    assert "egress list" in run.error.message
    assert run.error.hint.startswith("egress refused: GET http://example.com/path?... (not allowed)")
    assert run.egress == ["refused: GET http://example.com/path?... (not allowed)"]
    assert (run.may_have_happened, run.recovery.may_have_happened, seen) == ([], [], [])


def test_the_guests_own_loopback_is_reached_past_the_proxy(upstream):
    with Session(memory="512M", timeout=60, egress=["example.org"]) as session:
        run = session.run("""
            import http.server, threading, urllib.request
            server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
            threading.Thread(target=server.handle_request).start()
            print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").status)
        """)

    assert (run.error, run.stdout, run.egress) == (None, "200\n", [])


# -- a session without -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import urllib.request; urllib.request.urlopen('http://example.com')",
        "import requests; requests.get('https://example.com')",
        "import httpx; httpx.get('https://example.com')",
        "import socket; socket.create_connection(('192.0.2.1', 80))",
    ],
)
def test_a_session_without_egress_says_how_to_get_it(session, code):
    run = session.run(code)

    assert run.error is not None
    assert "egress=" in run.error.hint
    assert run.egress == []


@pytest.mark.parametrize("host", ["example.com", "192.0.2.1"])
def test_who_goes_past_the_proxy_is_told_so(reaching, host):
    run = reaching.run(f"import socket; socket.create_connection(('{host}', 443), timeout=5)")

    assert run.error is not None
    assert "https_proxy" in run.error.hint
    assert run.egress == []


def test_a_server_inside_that_is_not_there_is_no_matter_of_the_proxy(reaching):
    run = reaching.run("import socket; socket.create_connection(('localhost', 9), timeout=5)")

    assert (run.error.name, run.error.hint) == ("ConnectionRefusedError", "")


def test_an_error_that_is_not_of_the_network_has_no_such_hint(session):
    assert session.run("1 / 0").error.hint == ""


def test_a_session_without_egress_has_no_proxy_and_no_listener(session):
    run = session.run("""
        import os, socket
        print([name for name in os.environ if "proxy" in name.lower()])
        print(socket.socket().connect_ex(("127.0.0.1", 3128)), open("/proc/self/net/tcp").read().count("\\n"))
    """)

    assert run.stdout == "[]\n111 1\n"


def test_a_list_that_cannot_be_meant_is_refused_before_anything_starts():
    with pytest.raises(BadEgress):
        Session(egress=["https://example.com/path"])


# -- receipts --------------------------------------------------------------------------------------------------------


def test_the_receipt_lists_what_left_and_what_did_not(reaching, upstream, seen):
    run = reaching.run(f"""
        get("http://{upstream.at}/a"); get("http://{upstream.at}/b", data=b"x")
        try: get("http://10.0.0.1/")
        except OSError: pass
    """)

    assert run.status == "committed"
    told = [
        f"GET http://{upstream.at}/a",
        f"POST http://{upstream.at}/b",
        "refused: GET http://10.0.0.1/ (not allowed)",
    ]
    assert (run.egress, run.receipt.facts().egress) == (told, told)
    assert seen == ["GET /a", "POST /b"]


def test_a_run_that_is_rolled_back_has_them_in_its_receipt_too(reaching, upstream):
    run = reaching.run(f"get('http://{upstream.at}/x', data=b'1')\ntry: get('http://no.example/')\nfinally: 1 / 0")

    assert run.status == "rolled_back"
    told = [f"POST http://{upstream.at}/x", "refused: GET http://no.example/ (not allowed)"]
    assert (run.egress, run.receipt.facts().egress) == (told, told)


def test_a_kernel_that_dies_takes_no_word_of_it_along(upstream):
    with Session(memory="512M", timeout=60, egress=[upstream.at]) as session:
        run = session.run(f"{GET}get('http://{upstream.at}/before')\nimport os; os._exit(9)")

    assert (run.status, run.error.code) == ("rolled_back", "killed")
    assert run.receipt.facts().egress == run.may_have_happened == [f"GET http://{upstream.at}/before"]


def test_what_was_sent_and_what_was_saved_stand_beside_each_other(reaching, upstream):
    """Many requests at once, from threads, between savepoints of the main one; then it fails."""
    run = reaching.run(f"""
        import concurrent.futures
        from holdfast.kit import save
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(get, f"http://{upstream.at}/{{n}}") for n in range(40)]
            for number in range(5):
                open(f"saved-{{number}}.txt", "w").write("x")
                save(f"saved-{{number}}.txt")
            assert {{each.result() for each in asked}} == {{b"hello"}}
        1 / 0
    """)

    assert run.error.name == "ZeroDivisionError"
    assert sorted(run.receipt.facts().egress) == sorted(f"GET http://{upstream.at}/{n}" for n in range(40))
    assert run.saved == [f"saved-{number}.txt" for number in range(5)]
    assert {f"saved-{number}.txt" for number in range(5)} <= {file.path for file in reaching.files()}


def test_more_than_a_run_may_send_does_not_leave(reaching, upstream, seen, monkeypatch):
    monkeypatch.setattr(departures, "MOST_SENT", 3)
    run = reaching.run(f"""
        codes = []
        for number in range(5):
            try: get(f"http://{upstream.at}/{{number}}"); codes.append(200)
            except urllib.error.HTTPError as error: codes.append(error.code)
        print(codes)
    """)

    assert (run.stdout, len(seen)) == ("[200, 200, 200, 503, 503]\n", 3)
    assert run.egress[3:] == [f"refused: GET http://{upstream.at}/{number} (not noted)" for number in (3, 4)]


# -- when a run is taken back ----------------------------------------------------------------------------------------


def test_what_a_rolled_back_run_sent_may_have_happened(reaching, upstream):
    run = reaching.run(f"get('http://{upstream.at}/charge', data=b'1'); 1 / 0")
    after = reaching.recover()
    reaching.run("mended = 1")

    sent = [f"POST http://{upstream.at}/charge"]
    for told in (run.recovery, after):
        assert told.may_have_happened == sent
        assert f"May have happened: POST http://{upstream.at}/charge" in told.text
        assert told.steps[0].action == "check"
    assert run.may_have_happened == sent
    assert reaching.recover().may_have_happened == []  # the caller has gone on


def test_what_reached_nobody_is_not_among_it(reaching, upstream):
    """The server is down: that is refused, and nobody is sent to look at what it did."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        down = f"127.0.0.1:{nobody.getsockname()[1]}"
        with Session(memory="512M", timeout=60, egress=[upstream.at, down]) as session:
            run = session.run(f"{GET}get('http://{upstream.at}/a'); get('http://{down}/charge', data=b'1')")
            after = session.recover()
            store = Store(default_home() / "journal.sqlite3", read_only=True)
            try:
                verified = check_in_home(store, session.id, default_home())
            finally:
                store.close()

    assert run.status == "rolled_back"
    assert run.egress == [f"GET http://{upstream.at}/a", f"refused: POST http://{down}/charge (unreachable)"]
    assert run.receipt.facts().egress == run.egress
    assert run.may_have_happened == after.may_have_happened == run.egress[:1]
    assert verified.ok


def test_the_next_attempt_with_the_same_key_names_what_those_before_sent(reaching, upstream, seen):
    code = f"get('http://{upstream.at}/order', data=b'1'); assert flag"
    reaching.run("flag = False")
    first = reaching.run(code, key="order-17")
    second = reaching.run(code, key="order-17", retry=True)
    reaching.run("flag = True")
    third = reaching.run(code, key="order-17", retry=True)
    again = reaching.run(code, key="order-17")

    sent = f"POST http://{upstream.at}/order"
    assert [first.may_have_happened, second.may_have_happened] == [[sent], [sent, sent]]
    assert (third.status, third.attempt, third.may_have_happened) == ("committed", 3, [sent, sent])
    assert (again.replayed, again.may_have_happened, len(seen)) == (True, [sent, sent], 3)


def test_an_interrupted_run_with_a_key_runs_again_and_says_so(upstream, seen):
    code = f"{GET}get('http://{upstream.at}/slowly', data=b'1')\nimport time\nif first: time.sleep(100)"
    with Session(memory="512M", timeout=120, egress=[upstream.at]) as session:
        session.run("first = True")
        ended: list[Run] = []
        thread = threading.Thread(target=lambda: ended.append(session.run(code, key="one")))
        thread.start()
        upstream.wait_for("POST /slowly")
        while not session.interrupt():
            pass
        thread.join()
        session.run("first = False")
        second = session.run(code, key="one")

    sent = [f"POST http://{upstream.at}/slowly"]
    assert (ended[0].status, ended[0].may_have_happened) == ("rolled_back", sent)
    assert (second.status, second.attempt, second.may_have_happened) == ("committed", 2, sent)


# -- when it is open -------------------------------------------------------------------------------------------------


def test_a_rehearsal_sends_nothing_and_says_so(reaching, upstream, seen):
    run = reaching.run(f"get('http://{upstream.at}/x')", rehearse=True)

    assert (run.status, seen) == ("rehearsed", [])
    assert "rehearsal" in run.error.message
    assert run.egress == [f"refused: GET http://{upstream.at}/x (withheld)"]


def test_what_is_declared_may_reach_out_as_the_code_may(reaching, upstream, seen):
    run = reaching.run("checked = 1", asserts=[f"get('http://{upstream.at}/check') == b'hello'"])

    assert (run.status, seen) == ("committed", ["GET /check"])
    assert run.receipt.facts().egress == [f"GET http://{upstream.at}/check"]


def test_a_plan_sends_nothing(reaching, upstream, seen):
    reaching.plan(f"get('http://{upstream.at}/plan')")

    assert seen == []


# -- a session that comes back ---------------------------------------------------------------------------------------


def test_whoever_resumes_a_session_says_what_it_reaches(upstream, seen):
    get = f"{GET}get('http://{upstream.at}/again')"
    with Session(memory="512M", timeout=60, egress=[upstream.at], keep=True) as session:
        name = session.id
        assert session.run(get).status == "committed"
        session.close(keep=True)
    with Session(resume=name) as session:
        refused = session.run(get)
        session.close(keep=True)
    with Session(resume=name, egress=["127.0.0.1:1"]) as session:
        not_listed = session.run(get)
        session.close(keep=True)
    with Session(resume=name, egress=[upstream.at]) as session:
        assert session.run(get).status == "committed"

    assert "egress=" in refused.error.hint
    assert not_listed.egress == [f"refused: GET http://{upstream.at}/again (not allowed)"]
    assert len(seen) == 2


def test_sessions_that_are_ready_ahead_are_of_the_right_kind(upstream):
    """The next session is started before it is asked for: one with a way out is never one without, nor the reverse."""
    looks = "import os; print('http_proxy' in os.environ)"
    for egress in ([upstream.at], [], [upstream.at], [upstream.at], [], []):
        with Session(memory="512M", timeout=60, egress=egress) as session:
            assert session.run(looks).stdout == f"{bool(egress)}\n"
            assert (session.run(GET + f"get('http://{upstream.at}/')").error is None) == bool(egress)


def test_a_new_kernel_has_a_way_out_as_the_old_one_had(upstream):
    with Session(memory="512M", timeout=60, egress=[upstream.at]) as session:
        session.reset()
        run = session.run(f"{GET}get('http://{upstream.at}/')")
        session.run("import os; os._exit(1)")
        again = session.run(f"{GET}get('http://{upstream.at}/')")

    assert (run.error, again.error) == (None, None)


# -- at a server -----------------------------------------------------------------------------------------------------


def test_a_server_lets_its_clients_reach_what_its_owner_allows_and_no_more(upstream, seen, serving_at):
    with serving_at("--egress", upstream.at, "--egress", "*.example.org") as server:
        where = {"url": server.url, "token": server.token, "memory": "512M", "timeout": 60}
        with Session(**where, egress=[upstream.at, "api.example.org"], keep=True) as session:
            run = session.run(f"{GET}get('http://{upstream.at}/')")
            with pytest.raises(EgressRefused, match=r"may not reach example\.com"):
                Session(**where, egress=["example.com"])
            with Session(resume=session.id, url=server.url, token=server.token):  # and with it, nothing
                revoked = session.run(f"{GET}get('http://{upstream.at}/')")

    assert (run.error, run.egress) == (None, [f"GET http://{upstream.at}/"])
    assert revoked.egress == [f"refused: GET http://{upstream.at}/ (not allowed)"]


def test_a_server_whose_owner_allows_nothing_refuses(server, upstream):
    with pytest.raises(EgressRefused, match="may not reach") as refused:
        Session(url=server.url, token=server.token, egress=[upstream.at])

    assert "serve --egress" in refused.value.hint


def test_the_owner_on_his_own_machine_needs_nobodys_leave(server, upstream):
    with Session(url=f"unix:{server.home / 'socket'}", egress=[upstream.at], memory="512M", timeout=60) as session:
        assert session.run(f"{GET}get('http://{upstream.at}/')").error is None
    with Session(url=f"unix:{server.home / 'socket'}", memory="512M") as session, pytest.raises(EgressRefused):
        Session(url=f"unix:{server.home / 'socket'}", resume=session.id, egress=[upstream.at])


@pytest.fixture
def serving_at(serving, tmp_path) -> Callable[..., Any]:
    return lambda *arguments: serving(tmp_path / "home", *arguments)


# -- faces -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def holdfast(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "envs").symlink_to(Path(os.environ["HOLDFAST_HOME"]) / "envs")

    def run(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "holdfast.cli.main", *arguments, "--home", str(home)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)

    return run


def test_the_command_line_allows_and_shows(holdfast, upstream, tmp_path):
    code = (
        f"{GET}print(get('http://{upstream.at}/cli').decode())\ntry: get('http://no.example/')\nexcept OSError: pass\n"
    )
    executed = holdfast("exec", "--egress", upstream.at, code)
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.py").write_text(code)
    ran = holdfast("run", "job.py", "--egress", upstream.at, cwd=project)

    assert (executed.returncode, executed.stdout) == (0, "hello\n"), executed.stderr
    assert "egress refused: GET http://no.example/ (not allowed)" in executed.stderr
    assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr
    assert f"egress   GET http://{upstream.at}/cli\n" in ran.stderr
    assert "egress   refused: GET http://no.example/ (not allowed)\n" in ran.stderr


def test_show_prints_what_a_run_sent(reaching, upstream, capsys):
    run = reaching.run(f"get('http://{upstream.at}/shown'); get('http://no.example/')")
    show(reaching.id, run.id, home=default_home(), as_json=False)

    shown = capsys.readouterr().out.splitlines()
    assert f"egress   GET http://{upstream.at}/shown" in shown
    assert "egress   refused: GET http://no.example/ (not allowed)" in shown


def test_the_journal_and_the_receipts_agree(reaching, upstream):
    reaching.run(f"get('http://{upstream.at}/'); 1 / 0")
    store = Store(default_home() / "journal.sqlite3", read_only=True)
    try:
        assert check_in_home(store, reaching.id, default_home()).ok
    finally:
        store.close()
