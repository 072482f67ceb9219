"""The door's rules, one by one, with a real Starlette application behind it. Over real sockets: tests/escape."""

import doctest
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from holdfast import errors
from holdfast.access import Access, KeyRing, Principal
from holdfast.errors import FileUnknown, Forbidden, HoldfastError, RateLimited, StateMoved
from holdfast.server.doors import DoorSettings, Hosts, Limits, Metrics, guarded, hosts
from holdfast.server.doors.limits import Rate
from holdfast.server.doors.metrics import Gauges
from holdfast.server.doors.problems import HANDLERS, STATUSES, problem_response
from holdfast.server.http import app

HERE = "http://127.0.0.1:8787"
NAMES = Hosts(names=("box.lan",), port=8787, origins=("https://console.example.org",))


async def who(request: Request) -> Response:
    principal = request.state.principal
    return JSONResponse({"id": principal.id, "owner": principal.owner, "query": request.url.query})


async def size(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


async def boom(request: Request) -> Response:
    raise ZeroDivisionError("a secret of ours")


async def missing(request: Request) -> Response:
    raise FileUnknown("no such file", hint="list them")


async def halves(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        raise ZeroDivisionError("in the middle")

    return StreamingResponse(pieces())


async def page(request: Request) -> Response:
    return PlainTextResponse("docs", headers={"content-security-policy": "default-src 'self'"})


ROUTES = [
    Route("/v1/health", who), Route("/v1/who", who, methods=["GET", "POST"]), Route("/v1/size", size, methods=["POST"]),
    Route("/v1/boom", boom), Route("/v1/missing", missing), Route("/v1/halves", halves), Route("/docs", page),
    Route("/openapi.json", who), Route("/metrics", who),
    Route("/v1/sessions/{id}/files/{path:path}", size, methods=["PUT", "GET"]),
]  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(KeyRing(tmp_path / "keys"))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(lambda: Gauges(sessions=3, kernels=2, memory_bytes=1 << 30))


class Doors:
    """Makes clients of a door; each door is opened with the token unless told otherwise."""

    def __init__(self, access: Access, metrics: Metrics) -> None:
        self._access, self._metrics = access, metrics

    def __call__(self, *, token: str | None = "", client: str = "203.0.113.7", **limits: Any) -> TestClient:
        settings = DoorSettings(access=self._access, hosts=NAMES, limits=Limits(**limits), metrics=self._metrics)
        door = guarded(Starlette(routes=ROUTES, exception_handlers=HANDLERS), settings)
        headers = {} if token is None else {"authorization": f"Bearer {token or self._access.token}"}
        return TestClient(door, base_url=HERE, headers=headers, client=(client, 4711), follow_redirects=False)


@pytest.fixture
def doors(access: Access, metrics: Metrics) -> Doors:
    return Doors(access, metrics)


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    """Status and code of a refusal, which must be a whole problem."""
    told = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert told["status"] == answer.status_code
    assert told["type"] == f"urn:holdfast:problem:{told['code']}"
    assert told["title"]
    assert told["detail"]
    assert told["hint"]
    return answer.status_code, told["code"]


# -- who -----------------------------------------------------------------------------------------------------------


def test_a_token_is_needed_for_everything_but_health(doors: Doors) -> None:
    nobody = doors(token=None)

    answer = nobody.get("/v1/who")
    assert code_of(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == 'Bearer realm="holdfast"'
    assert code_of(nobody.get("/v1/nowhere"))[0] == 401
    assert nobody.get("/v1/health").json()["id"] == ""
    assert doors().get("/v1/who").json() == {"id": "owner", "owner": True, "query": ""}


def test_an_api_key_is_itself_until_it_is_revoked(doors: Doors, access: Access) -> None:
    made, key = access.ring.add("laptop")
    client = doors(token=key)

    assert client.get("/v1/who").json() == {"id": made.id, "owner": False, "query": ""}
    assert access.ring.keys()[0].last_used_at is not None
    assert code_of(client.get("/metrics")) == (403, "forbidden")
    access.ring.revoke(made.id)
    assert code_of(client.get("/v1/who")) == (401, "unauthorized")


def test_what_is_for_the_owner_is_for_nobody_else_whatever_the_address_looks_like(doors: Doors, access: Access) -> None:
    client = doors(token=access.ring.add("laptop")[1])

    for path in ("/metrics%0A", "/metrics%0a", "/metrics%00", "/%0Dmetrics", "/v1/who%0A", "/v1/sessions/a%0A/files/b"):
        assert code_of(client.get(path)) == (400, "malformed")
    for name in ("b%0A", "%0Ab", "b%7F"):  # of a file it may be the name
        assert client.put(f"/v1/sessions/a/files/{name}", content=b"123").status_code != 400


async def test_the_metrics_themselves_are_for_the_owner() -> None:
    asked = Request({"type": "http", "state": {"principal": Principal("abc", "laptop")}})

    with pytest.raises(Forbidden):
        await app.metrics(asked)


@pytest.mark.parametrize("value", ["Basic {}", "Bearer", "{}", "Bearer {}x", "Bearer  ", "Token {}"])
def test_other_ways_to_send_a_token_are_none(doors: Doors, access: Access, value: str) -> None:
    answer = doors(token=None).get("/v1/who", headers={"authorization": value.format(access.token)})

    assert code_of(answer) == (401, "unauthorized")


def test_two_tokens_are_no_token(doors: Doors, access: Access) -> None:
    both = [("authorization", "Bearer wrong"), ("authorization", f"Bearer {access.token}")]

    assert code_of(doors(token=None).get("/v1/who", headers=both)) == (401, "unauthorized")


def test_a_token_in_the_address_is_for_pages_that_people_open_and_nobody_behind_sees_it(
    doors: Doors, access: Access
) -> None:
    nobody = doors(token=None)

    assert nobody.get(f"/docs?token={access.token}").text == "docs"
    seen = nobody.get(f"/openapi.json?a=1&token={access.token}&b=2").json()
    assert (seen["owner"], seen["query"]) == (True, "a=1&b=2")
    assert code_of(nobody.get(f"/v1/who?token={access.token}"))[0] == 401
    assert code_of(nobody.post(f"/docs?token={access.token}"))[0] == 401
    assert code_of(nobody.get(f"/docs?token=wrong&token={access.token}"))[0] == 401
    assert doors().get(f"/v1/who?%74oken={access.token}").json()["query"] == ""


def test_wrong_tokens_are_limited_by_address_and_right_ones_are_not(doors: Doors, caplog: Any) -> None:
    client = doors(failures_at_once=3, failures_per_s=0.01)
    with caplog.at_level(logging.WARNING, logger="holdfast.server"):
        wrong = [client.get("/v1/who", headers={"authorization": "Bearer guess-guess"}) for _ in range(5)]

    assert [one.status_code for one in wrong] == [401, 401, 401, 429, 429]
    assert 1 <= int(wrong[-1].headers["retry-after"]) <= 100
    assert client.get("/v1/who").status_code == 200
    assert caplog.text.count("a wrong token from 203.0.113.7") == 3
    assert "guess-guess" not in caplog.text


def test_keys_that_cannot_be_read_open_nothing_and_the_token_still_does(
    doors: Doors, access: Access, tmp_path: Path
) -> None:
    _, key = access.ring.add("laptop")
    (tmp_path / "keys/access.json").write_bytes(b"broken")

    assert code_of(doors(token=key).get("/v1/who"))[0] == 401
    assert doors().get("/v1/who").status_code == 200


# -- which host, which page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8787", "localhost:8787", "[::1]:8787", "LOCALHOST:8787", "box.lan:8787", "box.lan"]
)
def test_our_own_names_are_answered(doors: Doors, host: str) -> None:
    assert doors().get("/v1/who", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8787", "127.0.0.1:9999", "127.0.0.1", "127.0.0.1.evil.example:8787", "box.lan:9", "",
     "localhost:8787@evil.example", "localhost:8787, evil.example", "[::2]:8787", "localhost:08787x", "localhost:-1"],
)  # fmt: skip
def test_names_that_were_made_to_point_here_are_not(doors: Doors, host: str) -> None:
    for path in ("/v1/who", "/v1/health", "/docs"):
        assert code_of(doors().get(path, headers={"host": host})) == (421, "wrong_host")


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "file://", "x"]
)
def test_a_page_of_another_site_changes_nothing_and_reads_nothing(doors: Doors, origin: str) -> None:
    client = doors()

    assert code_of(client.post("/v1/size", json=1, headers={"origin": origin})) == (403, "forbidden")
    assert code_of(client.put("/v1/sessions/a/files/b", content=b"1", headers={"origin": origin})) == (403, "forbidden")
    read = client.get("/v1/who", headers={"origin": origin})
    asked = client.options("/v1/size", headers={"origin": origin, "access-control-request-method": "POST"})
    assert code_of(asked) == (403, "forbidden")
    assert not [name for name in (*read.headers, *asked.headers) if name.startswith("access-control")]


def test_browsers_that_say_cross_site_are_believed_except_for_a_link(doors: Doors) -> None:
    client = doors()
    cross = {"sec-fetch-site": "cross-site"}

    assert code_of(client.get("/v1/who", headers={**cross, "sec-fetch-mode": "no-cors"})) == (403, "forbidden")
    assert code_of(client.post("/v1/size", json=1, headers={**cross, "sec-fetch-mode": "navigate"})) == (
        403,
        "forbidden",
    )
    assert client.get("/docs", headers={**cross, "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.post("/v1/size", json=1, headers={"sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [(HERE, "127.0.0.1:8787"), ("http://localhost:8787", "localhost:8787"), ("https://box.lan", "box.lan")],
)
def test_our_own_pages_may_ask(doors: Doors, origin: str, host: str) -> None:
    assert doors().post("/v1/size", json=1, headers={"origin": origin, "host": host}).json() == 1


def test_a_site_that_was_let_in_may_ask_and_read(doors: Doors) -> None:
    page = {"origin": "https://console.example.org", "sec-fetch-site": "cross-site"}

    asked = doors(token=None).options("/v1/size", headers={**page, "access-control-request-method": "POST"})
    assert asked.status_code == 204
    assert "Authorization" in asked.headers["access-control-allow-headers"]
    answer = doors().post("/v1/size", json=1, headers=page)
    assert answer.status_code == 200
    for one in (asked, answer, doors(token=None).get("/v1/who", headers=page)):
        assert one.headers["access-control-allow-origin"] == "https://console.example.org"
        assert one.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in one.headers


@pytest.mark.parametrize(
    "sent", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_what_a_form_can_send_is_not_taken_for_json(doors: Doors, sent: str) -> None:
    answer = doors().post("/v1/size", content=b'{"code": "1"}', headers={"content-type": sent})

    assert code_of(answer) == (415, "wrong_media_type")


def test_json_is_json_and_files_are_anything(doors: Doors) -> None:
    client = doors()

    assert (
        client.post("/v1/size", content=b"{}", headers={"content-type": "Application/JSON; charset=utf-8"}).json() == 2
    )
    assert client.post("/v1/who").status_code == 200
    assert client.put("/v1/sessions/a/files/b.bin", content=b"123", headers={"content-type": "text/plain"}).json() == 3


@pytest.mark.parametrize("path", ["/v1/who", "/v1/nowhere", "/v1/boom", "/docs"])
def test_every_answer_has_the_headers_that_protect_it(doors: Doors, path: str) -> None:
    client = doors()
    headers = client.get(path).headers

    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    expected = "default-src 'self'" if path == "/docs" else "default-src 'none'; frame-ancestors 'none'"
    assert headers.get_list("content-security-policy") == [expected]


@pytest.mark.parametrize(
    "wrong",
    [Hosts(names=("a b",)), Hosts(names=("http://a",)), Hosts(origins=("evil",)), Hosts(origins=("https://a/b",))],
)
def test_names_and_origins_that_mean_nothing_are_refused_at_the_start(wrong: Hosts) -> None:
    with pytest.raises(errors.InvalidSetting):
        hosts.checked(wrong)


# -- how much --------------------------------------------------------------------------------------------------------


def test_a_body_that_says_that_it_is_too_large_is_not_read(doors: Doors) -> None:
    client = doors(json_bytes=10, upload_bytes=lambda session: {"big": 100}.get(session, 20))

    assert code_of(client.post("/v1/size", content=b"1" * 11, headers={"content-type": "application/json"})) == (
        413,
        "too_large",
    )
    assert client.put("/v1/sessions/a/files/b", content=b"1" * 20).json() == 20
    assert code_of(client.put("/v1/sessions/a/files/b", content=b"1" * 21)) == (413, "too_large")
    assert client.put("/v1/sessions/big/files/b", content=b"1" * 100).json() == 100


def test_a_body_that_does_not_say_it_is_counted(doors: Doors) -> None:
    def chunks(count: int) -> Iterator[bytes]:
        yield from (b"12345" for _ in range(count))

    client = doors(upload_bytes=lambda session: 20)

    assert client.put("/v1/sessions/a/files/b", content=chunks(4)).json() == 20
    assert code_of(client.put("/v1/sessions/a/files/b", content=chunks(5))) == (413, "too_large")


def test_too_many_or_too_long_headers_are_refused(doors: Doors) -> None:
    client = doors()

    assert code_of(client.get("/v1/who", headers=[(f"x-{n}", "1") for n in range(101)])) == (431, "headers_too_large")
    assert code_of(client.get("/v1/who", headers={"x": "1" * 40_000})) == (431, "headers_too_large")
    assert code_of(client.get("/v1/who?" + "a" * 40_000)) == (431, "headers_too_large")


def test_each_caller_has_a_rate_of_his_own(doors: Doors, access: Access) -> None:
    client = doors(requests_at_once=3, requests_per_s=0.01)
    keys = [access.ring.add(name)[1] for name in ("laptop", "phone")]
    laptop, phone = ({"authorization": f"Bearer {key}"} for key in keys)

    answers = [client.get("/v1/who", headers=laptop) for _ in range(4)]

    assert [one.status_code for one in answers] == [200, 200, 200, 429]
    assert code_of(answers[-1]) == (429, "rate_limited")
    assert int(answers[-1].headers["retry-after"]) <= 100
    assert client.get("/v1/who", headers=phone).status_code == 200
    assert {client.get("/v1/who").status_code for _ in range(5)} == {200}, "the server's owner has none"


def test_a_bucket_fills_again_and_callers_without_end_are_forgotten() -> None:
    now = [0.0]
    rate = Rate(per_s=2, at_once=2, clock=lambda: now[0])
    assert [rate.wait_s("ann") for _ in range(3)] == [0.0, 0.0, 0.5]
    now[0] = 0.5
    assert [rate.wait_s("ann"), rate.wait_s("ann")] == [0.0, 0.5]
    now[0] = 1000.0
    assert [rate.wait_s("ann") for _ in range(3)] == [0.0, 0.0, 0.5]

    for caller in range(20_000):
        rate.wait_s(str(caller))
    assert len(rate._buckets) == 10_000


# -- what is told ----------------------------------------------------------------------------------------------------


def _all_errors(kind: type[HoldfastError] = HoldfastError) -> Iterator[type[HoldfastError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _all_errors(one)


def test_every_error_of_ours_has_a_status() -> None:
    codes = {kind.code for kind in _all_errors() if kind.__module__ == "holdfast.errors"}

    assert codes == set(STATUSES)


def test_what_differs_and_when_to_retry_are_in_the_answer() -> None:
    moved = problem_response(StateMoved("moved", hint="recover", differs={"files": ["a"]}))
    limited = problem_response(RateLimited("slow down", hint="wait", retry_after_s=1.2))

    assert moved.status_code == 412
    assert b'"differs":{"files":["a"]}' in bytes(moved.body)
    assert limited.headers["retry-after"] == "2"


def test_failures_of_routes_are_problems(doors: Doors) -> None:
    client = doors()

    assert code_of(client.get("/v1/missing")) == (404, "file_unknown")
    assert code_of(client.get("/v1/nowhere")) == (404, "not_found")
    assert code_of(client.delete("/v1/who")) == (405, "method_not_allowed")


@pytest.mark.parametrize("handlers", [HANDLERS, {}])
def test_a_mistake_of_ours_is_an_incident_in_the_log_and_not_shown(access: Access, caplog: Any, handlers: Any) -> None:
    app = Starlette(routes=ROUTES, exception_handlers=handlers)
    door = guarded(app, DoorSettings(access=access, hosts=NAMES))
    with caplog.at_level(logging.ERROR, logger="holdfast.server"):
        answer = TestClient(door, base_url=HERE, headers={"authorization": f"Bearer {access.token}"}).get("/v1/boom")

    assert answer.status_code == 500
    assert "secret of ours" not in answer.text
    assert "Traceback" not in answer.text
    assert caplog.text.count("ZeroDivisionError: a secret of ours") == 1
    if handlers:
        incident = answer.json()["instance"].rpartition(":")[2]
        assert code_of(answer) == (500, "incident")
        assert f"incident {incident}" in caplog.text


def test_an_answer_that_breaks_off_is_not_taken_for_whole(doors: Doors) -> None:
    with pytest.raises(ConnectionAbortedError):
        doors().get("/v1/halves")


def test_nothing_here_speaks_websocket(doors: Doors) -> None:
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), doors().websocket_connect("/v1/who"):
        pass


# -- what is counted -------------------------------------------------------------------------------------------------


def test_prometheus_reads_what_was_counted(doors: Doors, metrics: Metrics) -> None:
    client = doors()
    client.get("/v1/who")
    client.get("/v1/who")
    client.put("/v1/sessions/secret-id/files/secret.txt", content=b"12345")
    client.get("/v1/nowhere-1")
    client.request("FROB", "/v1/nowhere-2")
    metrics.run_ended(status="committed", seconds=0.2)
    metrics.run_ended(status="rolled_back", code='out_of_"memory"\n', seconds=400)

    text = metrics.text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {(one.name, *one.labels.values()): one.value for family in families.values() for one in family.samples}

    assert found["holdfast_requests_total", "/v1/who", "GET", "2xx"] == 2
    assert found["holdfast_requests_total", "/v1/sessions/{id}/files/{path:path}", "PUT", "2xx"] == 1
    assert found["holdfast_requests_total", "none", "GET", "4xx"] == 1
    assert found["holdfast_requests_total", "none", "other", "4xx"] == 1
    assert found["holdfast_received_bytes_total",] == 5
    assert found["holdfast_runs_total", "rolled_back", 'out_of_"memory"\n'] == 1
    assert [found["holdfast_run_seconds_bucket", le] for le in ("0.1", "0.25", "300.0", "+Inf")] == [0, 1, 1, 2]
    assert (found["holdfast_run_seconds_count",], found["holdfast_run_seconds_sum",]) == (2, 400.2)
    assert (found["holdfast_sessions",], found["holdfast_kernels",], found["holdfast_memory_bytes",]) == (3, 2, 1 << 30)
    assert found["holdfast_uptime_seconds",] > 0
    assert "secret" not in text
    assert {family.type for family in families.values()} == {"counter", "histogram", "gauge"}


@pytest.mark.parametrize("module", ["hosts", "limits", "metrics"])
def test_the_examples_in_the_modules_are_true(module: str) -> None:
    tried = doctest.testmod(sys.modules[f"holdfast.server.doors.{module}"])

    assert (tried.failed, tried.attempted > 0) == (0, True)
