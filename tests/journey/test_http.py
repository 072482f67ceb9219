"""The HTTP face, as curl or any other client meets it: a real server process, real connections."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.lean import lean_home

from holdfast.access import KeyRing
from holdfast.home import acquire

Start = Callable[..., Any]
ENDLESS = "import time\nprint('on', flush=True)\ntime.sleep(1000)"


def client_of(server: Any, **more: Any) -> httpx2.Client:
    headers = {"authorization": f"Bearer {server.token}"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False, **more)


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx2.Client]:
    with client_of(server) as client:
        yield client


@pytest.fixture
def at(http: httpx2.Client) -> Iterator[str]:
    """The address of a fresh session."""
    with session(http) as address:
        yield address


@contextmanager
def session(http: httpx2.Client, **wanted: Any) -> Iterator[str]:
    made = http.post("/v1/sessions", json={"memory": "512M", "timeout": 30, **wanted})
    assert made.status_code == 201, made.text
    address = made.headers["location"]
    yield address
    http.delete(address)


def run(http: httpx2.Client, at: str, code: str, **asked: Any) -> dict[str, Any]:
    answer = http.post(f"{at}/runs", json={"code": code, **asked}, headers={"accept": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(answer: httpx2.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in answer.iter_lines())


@contextmanager
def following(http: httpx2.Client, at: str, code: str, **asked: Any) -> Iterator[Iterator[dict[str, Any]]]:
    with http.stream("POST", f"{at}/runs", json={"code": code, **asked}) as answer:
        assert answer.status_code == 200, answer.read()
        yield events(answer)


def until(condition: Callable[[], Any], *, seconds: float = 30) -> Any:
    give_up_at = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    return found


# -- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_is_told_event_by_event(http: httpx2.Client, at: str) -> None:
    with following(http, at, "print('a'); open('made.txt', 'w').write('x')\n6 * 7") as told:
        began, *middle, last = list(told)

    assert (began["type"], began["number"], last["type"]) == ("began", 0, "settled")
    assert [event["number"] for event in middle] == list(range(1, 1 + len(middle)))
    assert "".join(event["text"] for event in middle if event["type"] == "output") == "a\n"
    assert [event["display"]["data"]["text/plain"] for event in middle if event["type"] == "displayed"] == ["42"]
    done = last["run"]
    assert (done["id"], done["status"], done["text"]) == (began["run"], "committed", "42")
    assert [change["path"] for change in done["outputs"]] == ["made.txt"]
    assert http.get(f"{at}/runs/{done['id']}/receipt").json()["payloadType"] == "application/vnd.in-toto+json"
    assert http.get(f"{at}/runs/{done['id']}/output").text == "a\n"
    assert http.get(f"{at}/runs/{done['id']}/code").text.endswith("6 * 7")
    assert http.get(f"{at}/runs/{done['id']}/card").json()["run"] == done["id"]
    assert http.get(f"{at}/runs/{done['id']}").json()["entry"]["ckpt"] == done["ckpt"]
    assert [entry["run"] for entry in http.get(f"{at}/history").json()] == [done["id"]]


def test_a_card_is_at_the_stage_that_its_run_has_passed(http: httpx2.Client, at: str) -> None:
    asserted = "all([__import__('time').sleep(2), True])"
    seen = []
    with following(http, at, "print('on', flush=True); import time; time.sleep(1)", asserts=[asserted]) as told:
        card = f"{at}/runs/{next(told)['run']}/card"
        next(told)
        seen.append(http.get(card).json().get("stage", "planned"))
        until(lambda: http.get(card).json().get("stage") == "executed")  # and is being verified
        done = list(told)[-1]["run"]
    failed = run(http, at, "1 / 0")

    assert (seen, done["status"], done["checks"][0]["ok"]) == (["planned"], "rolled_back", False)
    assert [http.get(f"{at}/runs/{each['id']}/card").json()["stage"] for each in (done, failed)] == ["rolled_back"] * 2
    committed = run(http, at, "x = 1")
    assert http.get(f"{at}/runs/{committed['id']}").json()["card"]["stage"] == committed["card"]["stage"] == "committed"


def test_events_come_as_sse_and_as_msgpack_to_who_asks_for_them(http: httpx2.Client, at: str) -> None:
    asked = {"code": "print('a')"}
    sse = http.post(f"{at}/runs", json=asked, headers={"accept": "text/event-stream"})
    packed = http.post(f"{at}/runs", json=asked, headers={"accept": "application/vnd.holdfast.msgpack-seq"})

    assert sse.headers["content-type"].startswith("text/event-stream")
    assert sse.text.startswith("id: 0\nevent: began\ndata: {")
    assert "\nevent: output\ndata: {" in sse.text
    assert "\nevent: settled\ndata: {" in sse.text.split("\n\n")[-2]
    rest, kinds = packed.content, []
    while rest:
        size = int.from_bytes(rest[:4], "big")
        kinds.append(msgspec.msgpack.decode(rest[4 : 4 + size])["type"])
        rest = rest[4 + size :]
    assert (kinds[0], kinds[1], kinds[-1]) == ("began", "output", "settled")


def test_code_that_fails_is_an_answer_and_not_an_error(http: httpx2.Client, at: str) -> None:
    done = run(http, at, "1 / 0")

    assert (done["status"], done["error"]["name"]) == ("rolled_back", "ZeroDivisionError")
    assert "ZeroDivisionError" in done["recovery"]["text"]


def test_what_is_refused_before_it_begins_is_a_problem(http: httpx2.Client, at: str) -> None:
    ckpt = http.get(at).json()["ckpt"]
    run(http, at, "x = 1")
    moved = http.post(f"{at}/runs", json={"code": "x"}, headers={"if-match": f'"{ckpt}"'})
    nonsense = http.post(f"{at}/runs", json={"code": "x", "exepct": ckpt})
    broken = http.post(f"{at}/runs", content=b"{", headers={"content-type": "application/json"})

    assert (moved.status_code, moved.json()["code"]) == (412, "state_moved")
    assert moved.headers["content-type"] == "application/problem+json"
    assert (nonsense.status_code, broken.status_code) == (422, 400)
    assert "exepct" in nonsense.json()["detail"]
    assert http.get(f"{at}/runs/run_000000000000").json()["code"] == "run_unknown"


@pytest.mark.parametrize("body", [None, {}, {"code": None}, {"key": "k"}, {"kind": "command"}, {"inputs": []}])
def test_a_body_without_code_runs_nothing(http: httpx2.Client, at: str, body: dict[str, str] | None) -> None:
    before = http.get(at).json()["ckpt"]
    for path in ("runs", "plans"):
        refused = http.post(f"{at}/{path}", json=body) if body is not None else http.post(f"{at}/{path}")
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_setting")
    assert http.get(at).json()["ckpt"] == before
    assert run(http, at, "")["status"] == "committed", "an empty cell is a cell"


def test_an_input_that_is_not_there_is_a_problem(http: httpx2.Client, at: str) -> None:
    for accept in ("application/json", "application/x-ndjson"):
        refused = http.post(f"{at}/runs", json={"code": "1", "inputs": ["nope.csv"]}, headers={"accept": accept})
        assert (refused.status_code, refused.json()["code"]) == (422, "input_missing")


def test_the_same_key_runs_once(http: httpx2.Client, at: str) -> None:
    headers, body = {"idempotency-key": "nightly", "accept": "application/json"}, {"code": "n = 1\nprint('once')"}
    first = http.post(f"{at}/runs", json=body, headers=headers).json()
    again = http.post(f"{at}/runs", json=body, headers=headers).json()
    other = http.post(f"{at}/runs", json={"code": "n = 2"}, headers=headers)

    assert (again["id"], again["replayed"], again["stdout"]) == (first["id"], True, "once\n")
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")


def test_who_was_cut_off_comes_back_and_misses_nothing(http: httpx2.Client, at: str) -> None:
    code = "import time\nfor i in range(40): print(i, flush=True); time.sleep(0.03)"
    seen = []
    with following(http, at, code) as told:
        for event in told:
            seen.append(event)
            if len(seen) == 5:
                break
    with http.stream("GET", f"{at}/runs/{seen[0]['run']}/events?from=5") as answer:
        seen += events(answer)

    assert [event["number"] for event in seen] == list(range(len(seen)))
    assert "".join(e["text"] for e in seen if e["type"] == "output") == "".join(f"{i}\n" for i in range(40))
    assert seen[-1]["run"]["status"] == "committed"
    again = list(events(http.get(f"{at}/runs/{seen[0]['run']}/events")))
    assert again == seen


def test_an_event_source_comes_back_by_itself(http: httpx2.Client, at: str) -> None:
    """A browser's says which event it saw last; what it gets then is what it missed, and nothing twice."""
    done = run(http, at, "for i in range(3): print(i, flush=True); __import__('time').sleep(0.2)")
    events_at = f"{at}/runs/{done['id']}/events"
    seen = http.get(events_at, headers={"accept": "text/event-stream"}).text
    rest = http.get(events_at, headers={"accept": "text/event-stream", "last-event-id": "1"}).text
    nonsense = http.get(events_at, headers={"accept": "text/event-stream", "last-event-id": "x"}).text

    assert seen.startswith("id: 0\n")
    assert rest.startswith("id: 2\n")
    assert seen.endswith(rest)
    assert nonsense == seen


def test_the_same_key_comes_back_to_a_run_under_way(http: httpx2.Client, at: str) -> None:
    code, key = "import time\nprint('on', flush=True)\ntime.sleep(1.5)\nprint('off')", {"key": "k"}
    with following(http, at, code, **key) as told:
        began = next(told)
    with following(http, at, code, **key) as told:
        again = list(told)

    assert again[0] == began
    assert (again[-1]["run"]["status"], again[-1]["run"]["replayed"]) == ("committed", True)  # nothing ran twice
    assert again[-1]["run"]["id"] == began["run"]


@pytest.fixture(scope="module")
def strict(serving: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with little patience, and a home whose path is longer than a socket's address may be."""
    base = tmp_path_factory.mktemp("strict")
    home = base / ("deep" * 20) / ("deeper" * 10) / "home"
    home.parent.mkdir(parents=True)
    options = ("--client-grace", "0.5s", "--sessions-per-key", "1", "--uds", str(base / "other"))
    with serving(home, *options) as server:
        yield server
    assert not (base / "other").exists()
    assert_clean(home, sessions=[])


def test_nothing_runs_on_unattended(strict: Any) -> None:
    with client_of(strict) as http, session(http) as at:
        run(http, at, "x = 1")
        with following(http, at, f"x = 2\n{ENDLESS}") as told:
            began, _ = next(told), next(told)
        entry = until(lambda: http.get(f"{at}/runs/{began['run']}").json().get("entry"))
        gone = list(events(http.get(f"{at}/runs/{began['run']}/events?from=2")))

        assert entry["status"] == "rolled_back"
        assert gone[-1]["problem"]["code"] == "run_abandoned"
        assert run(http, at, "x")["text"] == "1"

        with pytest.raises(httpx2.ReadTimeout):  # who waits for the result alone, and leaves
            http.post(f"{at}/runs", json={"code": ENDLESS}, headers={"accept": "application/json"}, timeout=1)
        until(lambda: len(http.get(f"{at}/runs").json()) == 4)
        assert http.get(f"{at}/runs").json()[-1]["status"] == "rolled_back"


def test_who_left_a_run_that_was_kept_is_told_so(strict: Any) -> None:
    with client_of(strict) as http, session(http, mode="notebook") as at:
        with following(http, at, f"open('done.txt', 'w').write('once')\n{ENDLESS}") as told:
            began, _ = next(told), next(told)
        entry = until(lambda: http.get(f"{at}/runs/{began['run']}").json().get("entry"))
        gone = list(events(http.get(f"{at}/runs/{began['run']}/events?from=2")))[-1]["problem"]

        assert (entry["status"], http.get(f"{at}/files/done.txt").text) == ("kept", "once")
        assert gone["code"] == "run_abandoned"
        assert gone["detail"].endswith(f"what it had done by then was kept, as version {entry['version']}")
        assert "rolled back" not in gone["hint"]


def test_only_so_many_runs_wait_in_a_session(strict: Any) -> None:
    many = httpx2.Limits(max_connections=200)
    with client_of(strict, limits=many) as http, session(http) as at, ExitStack() as stack:
        told = stack.enter_context(following(http, at, ENDLESS))
        began = next(told), next(told)
        at_once = {"accept": "application/vnd.holdfast.msgpack-seq"}
        large = "#" * (7 << 20)

        def wait_with(code: str) -> None:
            waits = http.stream("POST", f"{at}/runs", json={"code": code}, headers=at_once)
            assert stack.enter_context(waits).status_code == 200

        for _ in range(4):
            wait_with(large)
        too_large = http.post(f"{at}/runs", json={"code": large}, headers=at_once)
        for _ in range(96):
            wait_with("1")
        too_many = http.post(f"{at}/runs", json={"code": "1"}, headers=at_once)
        with session(http) as other:
            assert run(http, other, "6 * 7")["text"] == "42"
        assert http.get(at).json()["running"] == began[0]["run"]

    for refused in (too_large, too_many):
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        assert refused.headers["retry-after"] == "1"


def test_a_slow_reader_holds_the_run_back_and_gets_all_of_it(http: httpx2.Client, at: str) -> None:
    code = "for i in range(10_000): print(f'{i:05}' * 800)"  # 40 MB: more than is kept, and than sockets hold
    with following(http, at, code, timeout=110) as told:
        began = next(told)
        time.sleep(1)  # nobody reads: whatever the sockets do not hold waits in the sandbox
        assert http.get(at).json()["running"] == began["run"]
        texts = [event["text"] for event in told if event["type"] == "output"]

    assert "".join(texts) == "".join(f"{i:05}" * 800 + "\n" for i in range(10_000))
    dropped = http.get(f"{at}/runs/{began['run']}/events?from=1")
    assert (dropped.status_code, dropped.json()["code"]) == (410, "events_gone")
    assert len(http.get(f"{at}/runs/{began['run']}/output").content) == 10_000 * 4001


def test_who_does_not_read_keeps_nobody_from_ending_the_session(http: httpx2.Client) -> None:
    with session(http, timeout=1000) as at, client_of_same(http) as other:
        with following(other, at, "while True: print('x' * 4000)") as told:
            next(told)
            until(lambda: http.get(at).json().get("running"))
            ended = http.delete(at, timeout=30)

        assert ended.status_code == 200
        assert http.get(at).status_code == 404


def test_input_is_asked_for_and_answered(http: httpx2.Client, at: str) -> None:
    with following(http, at, "print('hello', input('who? '))", stdin=True) as told:
        began = next(told)
        asked = next(event for event in told if event["type"] == "asked")
        wrong = http.post(f"{at}/runs/{began['run']}/input", json={"text": "x", "number": asked["number"] + 1})
        right = http.post(f"{at}/runs/{began['run']}/input", json={"text": "Ann", "number": asked["number"]})
        last = list(told)[-1]

    assert (asked["prompt"], wrong.status_code, right.status_code) == ("who? ", 422, 200)
    assert last["run"]["stdout"].endswith("hello Ann\n")


def test_an_interrupt_ends_what_runs_or_what_would_run(http: httpx2.Client, at: str) -> None:
    with following(http, at, ENDLESS) as first:
        began = next(first), next(first)
        with client_of_same(http) as other, other.stream("POST", f"{at}/runs", json={"code": "1"}) as waiting:
            queued = next(events(waiting))
            stopped = http.post(f"{at}/runs/{queued['run']}/interrupt").json()
            assert http.post(f"{at}/interrupt").json() == {"interrupted": True}
        last = list(first)[-1]

    assert stopped == {"interrupted": True}
    assert (began[0]["type"], last["run"]["error"]["code"]) == ("began", "interrupted")
    assert http.post(f"{at}/interrupt").json() == {"interrupted": False}
    assert [entry["status"] for entry in http.get(f"{at}/runs").json()] == ["rolled_back"]


def test_a_run_can_be_asked_for_as_soon_as_it_has_a_name(http: httpx2.Client, at: str) -> None:
    with following(http, at, ENDLESS) as first:
        began = next(first)
        at_once = http.get(f"{at}/runs/{began['run']}")
        next(first)
        with client_of_same(http) as other, other.stream("POST", f"{at}/runs", json={"code": "6 * 7"}) as waiting:
            told = events(waiting)
            queued = next(told)["run"]
            found, code = http.get(f"{at}/runs/{queued}"), http.get(f"{at}/runs/{queued}/code")
            http.post(f"{at}/interrupt")
            list(told)
        list(first)
    after = http.get(f"{at}/runs/{queued}").json()

    assert at_once.status_code == 200, at_once.text
    assert (found.status_code, found.json()["waiting"], found.json()["entry"]) == (200, True, None), found.text
    assert (found.json()["card"]["run"], found.json()["code"], code.text) == (queued, "6 * 7", "6 * 7")
    assert (after["entry"]["status"], "waiting" in after) == ("committed", False)


def client_of_same(http: httpx2.Client) -> httpx2.Client:
    return httpx2.Client(base_url=http.base_url, headers=http.headers, timeout=60, trust_env=False)


def test_a_plan_runs_as_it_is_and_once(http: httpx2.Client, at: str) -> None:
    card = http.post(f"{at}/plans", json={"code": "open('a.csv', 'w').write('a')", "goal": "make a"}).json()
    more = http.post(f"{at}/runs", json={"plan": card["run"], "timeout": 5})
    done = http.post(f"{at}/runs", json={"plan": card["run"]}, headers={"accept": "application/json"}).json()

    assert (card["goal"], card["forecast_outputs"]) == ("make a", ["a.csv"])
    assert more.status_code == 422
    assert (done["id"], done["status"]) == (card["run"], "committed")


def test_a_command_is_a_run_too(http: httpx2.Client, at: str) -> None:
    done = run(http, at, "echo hi > out.txt; exit 3", kind="command")

    assert (done["exit_code"], done["status"]) == (3, "kept")
    assert [entry["path"] for entry in http.get(f"{at}/files").json()] == ["out.txt"]


# -- sessions ------------------------------------------------------------------------------------------------------


def test_what_can_be_asked_of_a_session(http: httpx2.Client, at: str) -> None:
    run(http, at, "x = 21")
    info = http.get(at).json()

    assert (info["state"], info["version"], info["generation"]) == ("ready", 1, 1)
    assert info["limits"]["memory_bytes"] == 512 << 20
    assert info["memory_bytes"] > 0
    assert info["id"] in [each["id"] for each in http.get("/v1/sessions").json()]
    assert http.get(f"{at}/names").json()["x"]["type"] == "int"
    assert "bit_length" in http.post(f"{at}/complete", json={"code": "x.bit_l"}).json()["matches"]
    assert "21" in http.post(f"{at}/inspect", json={"code": "x"}).json()["text/plain"]
    reset = http.post(f"{at}/reset").json()
    assert (reset["generation"], http.get(f"{at}/names").json()) == (2, {})
    assert http.post(f"{at}/recover").json()["names"] == {"x": "recomputable"}
    assert msgspec.msgpack.decode(http.get(at, headers={"accept": "application/msgpack"}).content)["id"] == info["id"]


def test_the_life_of_a_session_is_told(http: httpx2.Client, at: str) -> None:
    with http.stream("GET", f"{at}/events") as answer:
        lines = answer.iter_lines()
        next(lines)
        with client_of_same(http) as other:
            done = run(other, at, "x = 1")
            other.post(f"{at}/reset")
            other.delete(at)
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    assert [event["type"] for event in told] == ["run_began", "run_settled", "memory_lost", "session_ended"]
    assert (told[1]["run"], told[1]["status"], told[1]["ckpt"]) == (done["id"], "committed", done["ckpt"])
    assert told[2]["cause"] == "reset by the caller"


def test_an_attached_session_ends_with_its_holds(strict: Any) -> None:
    with client_of(strict) as http, session(http, attached=True) as at, client_of(strict) as holder:
        with holder.stream("GET", f"{at}/hold") as held:
            next(held.iter_raw())
            assert run(http, at, "6 * 7")["text"] == "42"
        until(lambda: http.get(at).status_code == 404)


def test_a_kept_session_comes_back_with_its_files(http: httpx2.Client) -> None:
    with session(http, keep=True) as at:
        done = run(http, at, "open('a.txt', 'w').write('a'); x = 1")
        http.delete(at, params={"keep": True})
        kept = http.get(at).json()
        no_kernel = http.post(f"{at}/runs", json={"code": "1"})
        assert [entry["run"] for entry in http.get(f"{at}/runs").json()] == [done["id"]]
        back = http.post("/v1/sessions", json={"resume": kept["id"]})

        assert (kept["state"], no_kernel.json()["code"]) == ("kept", "session_closed")
        assert (back.status_code, back.json()["generation"]) == (201, 2)
        assert http.get(f"{at}/files/a.txt").text == "a"
    assert http.get(at).status_code == 404


def test_a_key_has_so_many_sessions(strict: Any) -> None:
    _, key = KeyRing(strict.home / "keys").add("ann")
    with httpx2.Client(base_url=strict.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as ann:
        first = ann.post("/v1/sessions", json={"memory": "256M"})
        second = ann.post("/v1/sessions", json={"memory": "256M"})
        ann.delete(first.headers["location"])
        third = ann.post("/v1/sessions", json={"memory": "256M"})
        ann.delete(third.headers["location"])

    assert [each.status_code for each in (first, second, third)] == [201, 429, 201]
    assert second.json()["code"] == "too_many_sessions"
    assert first.json()["owner"] == key.split("_")[1]


# -- files ---------------------------------------------------------------------------------------------------------


def test_files_go_in_and_out_with_their_digest(http: httpx2.Client, at: str) -> None:
    data = bytes(range(256)) * 20_000
    written = http.put(f"{at}/files/sub/data.bin", content=data).json()
    whole = http.get(f"{at}/files/sub/data.bin")
    etag = whole.headers["etag"]

    assert (whole.content, etag) == (data, f'"{written["outputs"][-1]["sha256"]}"')
    assert run(http, at, "len(open('/mnt/data/sub/data.bin', 'rb').read())")["text"] == str(len(data))
    assert whole.headers["content-disposition"].startswith("attachment;")
    assert "sandbox" in whole.headers["content-security-policy"]
    assert http.get(f"{at}/files/sub/data.bin", headers={"if-none-match": etag}).status_code == 304
    head = http.head(f"{at}/files/sub/data.bin")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(data)), b"")
    assert http.get(f"{at}/manifest").text == f"{etag[1:-1]}  sub/data.bin\n"
    assert http.delete(f"{at}/files/sub/data.bin").json()["outputs"][0]["action"] == "removed"
    assert http.get(f"{at}/files/sub/data.bin").json()["code"] == "file_unknown"
    restored = http.post(f"{at}/restore", json={"ckpt": written["ckpt"]})
    assert restored.status_code == 200
    assert http.get(f"{at}/files/sub/data.bin").content == data


@pytest.mark.parametrize(
    ("asked", "status", "got"),
    [
        ("bytes=0-3", 206, b"0123"), ("bytes=8-", 206, b"89"), ("bytes=-3", 206, b"789"), ("bytes=5-99", 206, b"56789"),
        ("bytes=10-", 416, b""), ("bytes=4-2", 200, b"0123456789"), ("lines=1-2", 200, b"0123456789"),
        ("bytes=0-1,3-4", 200, b"0123456789"), ("bytes=-0", 416, b""), ("bytes=-99", 206, b"0123456789"),
    ],
)  # fmt: skip
def test_a_range_of_a_file(http: httpx2.Client, ten: str, asked: str, status: int, got: bytes) -> None:
    answer = http.get(ten, headers={"range": asked})

    assert (answer.status_code, answer.content) == (status, got)
    if status == 206:
        first = b"0123456789".index(got)
        assert answer.headers["content-range"] == f"bytes {first}-{first + len(got) - 1}/10"


@pytest.fixture(scope="module")
def ten(http: httpx2.Client) -> Iterator[str]:
    with session(http) as at:
        http.put(f"{at}/files/ten.txt", content=b"0123456789")
        yield f"{at}/files/ten.txt"


def test_a_range_of_a_file_that_is_another_by_now_is_the_whole(http: httpx2.Client, ten: str) -> None:
    etag = http.get(ten).headers["etag"]

    assert http.get(ten, headers={"range": "bytes=0-1", "if-range": etag}).content == b"01"
    assert http.get(ten, headers={"range": "bytes=0-1", "if-range": '"other"'}).content == b"0123456789"


def test_a_file_is_replaced_or_removed_only_if_it_is_what_the_writer_thinks(http: httpx2.Client, at: str) -> None:
    place = f"{at}/files/a.txt"
    first = http.put(place, content=b"1", headers={"if-none-match": "*"})
    again = http.put(place, content=b"2", headers={"if-none-match": "*"})
    etag = http.get(place).headers["etag"]
    second = http.put(place, content=b"2", headers={"if-match": etag})
    stale = http.put(place, content=b"3", headers={"if-match": etag})
    kept = http.delete(place, headers={"if-match": etag})

    assert [each.status_code for each in (first, again, second, stale, kept)] == [200, 412, 200, 412, 412]
    assert (kept.json()["code"], http.get(place).content) == ("state_moved", b"2")
    assert http.delete(place, headers={"if-match": http.get(place).headers["etag"]}).status_code == 200
    assert http.get(place).status_code == 404


def test_names_that_are_odd(http: httpx2.Client, at: str) -> None:
    run(http, at, r"import os; os.close(os.open(b'caf\xff%2F\\ ?#', os.O_CREAT | os.O_WRONLY))")
    (entry,) = http.get(f"{at}/files").json()

    assert http.get(f"{at}/files/caf%FF%252F%5C%20%3F%23").status_code == 200
    http.put(f"{at}/files/%C3%A9t%C3%A9/b.txt", content=b"b")
    assert {"été/b.txt", entry["path"]} == {each["path"] for each in http.get(f"{at}/files").json()}


def test_an_upload_that_breaks_off_is_never_seen(http: httpx2.Client, server: Any, at: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"PUT {at}/files/half.bin HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {server.token}\r\n"
        raw.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode() + b"half")
    assert run(http, at, "1")["status"] == "committed"
    assert http.get(f"{at}/files").json() == []
    assert http.get(at).json()["version"] == 1


def test_uploads_at_one_time_share_the_room_that_is_left(http: httpx2.Client, server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with session(http, disk="64M") as at, socket.create_connection((host, int(port)), timeout=60) as raw:
        head = f"PUT {at}/files/a.bin HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {server.token}\r\n"
        raw.sendall(f"{head}Content-Length: {45 << 20}\r\n\r\n".encode() + bytes(40 << 20))
        second = http.put(f"{at}/files/b.bin", content=bytes(40 << 20))
        raw.sendall(bytes(5 << 20))
        first = raw.recv(1000)
        small = http.put(f"{at}/files/c.bin", content=bytes(1 << 20))

        assert second.json()["code"] == "disk_limit"
        assert first.startswith(b"HTTP/1.1 200")
        assert small.status_code == 200, "what is over is not counted any more"


# -- the server ----------------------------------------------------------------------------------------------------


def test_it_explains_itself(http: httpx2.Client, server: Any) -> None:
    with httpx2.Client(base_url=server.url, trust_env=False) as anybody:
        assert anybody.get("/v1/health").json()["status"] == "ok"
        assert anybody.get("/openapi.json").status_code == 401
        page = anybody.get(f"/docs?token={server.token}")
    document = http.get("/openapi.json").json()

    assert "/v1/sessions/{id}/runs" in page.text
    assert "http" not in page.text.replace("http://127.0.0.1", "")
    assert document["openapi"] == "3.1.0"
    assert document["paths"]["/v1/sessions/{id}/runs"]["post"]["requestBody"]["content"]["application/json"]
    assert "holdfast_sessions " in http.get("/metrics").text


def test_it_stops_in_order_and_leaves_nothing(serving: Start, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving(home, "--grace", "2.5s") as server, ExitStack() as stack:
        http, other, third = (stack.enter_context(client_of(server)) for _ in range(3))
        kept, endless, gone = (
            http.post("/v1/sessions", json={"memory": "256M", "keep": keep}).headers["location"]
            for keep in (True, True, False)
        )
        code = "import time\nprint('on', flush=True)\ntime.sleep(1)\nx = 1"
        finishing = stack.enter_context(following(http, kept, code))
        running_on = stack.enter_context(following(other, endless, f"open('half', 'w').write('x')\n{ENDLESS}"))
        for told in (finishing, running_on):
            next(told), next(told)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: third.get("/v1/health").status_code == 503)
        refused = third.post(f"{gone}/runs", json={"code": "1"})

        assert (refused.status_code, refused.json()["code"]) == (503, "server_stopping")
        assert list(finishing)[-1]["run"]["status"] == "committed"
        assert list(running_on)[-1]["problem"]["code"] == "run_abandoned"
        assert server.process.wait(30) == 0
    assert_clean(home, sessions=[each.rpartition("/")[2] for each in (kept, endless)])
    assert not list((home / "sessions").glob("*/files/data/*"))


def assert_clean(home: Path, *, sessions: list[str]) -> None:
    """Nothing is left of a server: no socket, no process, no cgroup; only the sessions that are to be."""
    assert not (home / "socket").exists()
    assert sorted(path.name for path in (home / "sessions").iterdir()) == sorted(sessions)
    name = (home / "id").read_text().strip()
    assert not [path for path in Path("/sys/fs/cgroup").glob(f"**/*{name}*") if path.is_dir()]
    acquire(home).release()


def test_a_killed_server_loses_nothing_that_was_acknowledged(serving: Start, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving(home) as server, client_of(server) as http:
        at = http.post("/v1/sessions", json={"memory": "256M", "keep": True}).headers["location"]
        done = run(http, at, "open('a.txt', 'w').write('kept'); x = 1", key="once")
        with following(http, at, f"open('half', 'w').write('x')\n{ENDLESS}") as told:
            next(told), next(told)
            server.process.kill()
            server.process.wait(30)
    with serving(home) as server, client_of(server) as http:
        back = http.post("/v1/sessions", json={"resume": at.rpartition("/")[2]}).json()
        receipt = http.get(f"{at}/runs/{done['id']}/receipt").text
        again = run(http, at, "open('a.txt', 'w').write('kept'); x = 1", key="once")

        assert (back["version"], back["generation"]) == (1, 2)
        assert receipt == done["receipt"]["envelope"]
        assert http.get(f"{at}/files/a.txt").text == "kept"
        assert [entry["path"] for entry in http.get(f"{at}/files").json()] == ["a.txt"]
        assert (again["id"], again["replayed"]) == (done["id"], True)
        http.delete(at)


def test_processes_of_the_same_user_need_no_token(strict: Any) -> None:
    home, other = strict.home, strict.home.parents[2] / "other"
    directory = os.open(home, os.O_PATH)
    for path in (f"/proc/self/fd/{directory}/socket", str(other)):
        assert os.stat(path).st_mode & 0o777 == 0o600
        with local_client(path) as local:
            assert local.get("/v1/sessions").status_code == 200
    os.close(directory)


def local_client(path: str) -> httpx2.Client:
    return httpx2.Client(transport=httpx2.HTTPTransport(uds=path), base_url="http://localhost", timeout=60)


def test_on_demand_it_ends_by_itself(tmp_path: Path) -> None:
    home = lean_home(tmp_path / "home")
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "--on-demand", "--idle", "1s", "--home", str(home)]
    with subprocess.Popen(command) as process:
        until(lambda: (home / "socket").exists())
        with local_client(str(home / "socket")) as local:
            at = local.post("/v1/sessions", json={"memory": "256M"}).headers["location"]
        time.sleep(1.5)  # longer than it idles: a session is a need
        assert process.poll() is None
        with local_client(str(home / "socket")) as local:
            local.delete(at)
        assert process.wait(30) == 0
    assert not (home / "socket").exists()


SPELLED: dict[str, list[str]] = {
    "memory": ["1.5", "true", "null", "[]", "-1", "0", "1", '"lots"', '"0M"', "1" + "0" * 400],
    "disk": ["1.5", "true", "null", "{}", "-1", "0", '"lots"', '"0.1"', "1" + "0" * 400],
    "timeout": ["true", "[]", "-1", "0", "1e-300", "1e300", '"soon"', "1" + "0" * 400],
    "cpus": ["true", "null", '"2"', "0", "-1", "1e-300", "1e300", "10001"],
    "processes": ["1000.0", "1.5", "true", "null", '"256"', "7", "-1", "1" + "0" * 30],
    "undo": ["1.5", "true", "null", '"2"', "-1", "17", "1" + "0" * 30],
    "versions": ["1.5", "true", "null", '"2"', "0", "-1", "101", "1" + "0" * 30],
    "env": ["5", "true"], "mode": ["5", '"lax"', "null"], "preflight": ['"maybe"', "5"],
    "keep": ['"yes"', "1"], "attached": ['"yes"', "1"], "resume": ["5", "[]"],
}  # fmt: skip


def test_what_is_no_setting_is_refused_before_a_session_is_made(http: httpx2.Client) -> None:
    for name, values in SPELLED.items():
        for value in values:
            answer = http.post(
                "/v1/sessions", content=f'{{"{name}": {value}}}', headers={"content-type": "application/json"}
            )
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_setting"), (name, value, answer.text)
