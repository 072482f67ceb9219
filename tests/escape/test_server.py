"""Attacks on the HTTP face with the real application behind it: other people's sessions, and paths that lead out.

What happens at the door (tokens, hosts, bodies, slow clients) is in test_doors.py.
"""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from holdfast.access import KeyRing

SECRET = "the-host's-own"


@pytest.fixture(scope="module")
def owner(server: Any) -> Iterator[httpx2.Client]:
    with client(server, server.token) as owner:
        yield owner


def client(server: Any, token: str) -> httpx2.Client:
    headers = {"authorization": f"Bearer {token}"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def at(owner: httpx2.Client, server: Any) -> Iterator[str]:
    """A session, with a file of the host's beside its workspace that nobody may get at."""
    address = owner.post("/v1/sessions", json={"memory": "256M"}).headers["location"]
    (server.home / "secret.txt").write_text(SECRET)
    (server.home / "sessions" / address.rpartition("/")[2] / "secret.txt").write_text(SECRET)
    run(owner, address, "open('mine.txt', 'w').write('mine')")
    yield address
    assert run(owner, address, "6 * 7")["text"] == "42"
    owner.delete(address)


def run(http: httpx2.Client, at: str, code: str) -> dict[str, Any]:
    answer = http.post(f"{at}/runs", json={"code": code}, headers={"accept": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def raw(server: Any, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """A request whose path no client library has tidied up."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {server.token}\r\n"
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


OUTSIDE = (
    "../secret.txt", "../../secret.txt", "../../../secret.txt", "a/../../../../secret.txt", "%2e%2e/secret.txt",
    "%2e%2e%2f%2e%2e%2fsecret.txt", "..%2f..%2f..%2fsecret.txt", "%252e%252e%252fsecret.txt", "..%5c..%5csecret.txt",
    "/etc/passwd", "%2fetc%2fpasswd", "//etc/passwd", "/mnt/data/../../etc/passwd", "%2e/%2e%2e/secret.txt",
    "mine.txt%00.png", "..%00/secret.txt", "%c0%ae%c0%ae/secret.txt", "%ef%bc%8e%ef%bc%8e/secret.txt",
    "..;/secret.txt", "./../secret.txt", "%2e%2e", "..", "%5cx2e%5cx2e/secret.txt", "\\x2e\\x2e/secret.txt",
)  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_leads_out_of_the_workspace(server: Any, owner: httpx2.Client, at: str, path: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        status, body = raw(server, method, f"{at}/files/{path}", b"planted" if method == "PUT" else b"")
        assert SECRET.encode() not in body
        assert b"root:" not in body
        assert status in (200, 400, 404, 405, 422), (method, body)  # 200: an odd name, inside
    assert (server.home / "secret.txt").read_text() == SECRET
    assert not any("planted" in names for _, _, names in os.walk(server.home))  # sessions come and go meanwhile
    assert [p for p in server.home.glob("*") if p.name not in KNOWN] == []
    assert owner.get(f"{at}/files/mine.txt").text == "mine"


KNOWN = {
    "secret.txt", "lock", "epoch", "id", "journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm", "keys",
    "sessions", "envs", "logs", "root", "socket", "starting.lock", "mcp", "place", "journal.seen", "keys.chain",
}  # fmt: skip


def test_a_link_leads_nobody_out(server: Any, owner: httpx2.Client, at: str) -> None:
    """Links are committed as links: from outside they are no files, and nothing is read or written through one."""
    home = server.home
    run(
        owner, at,
        f"import os\nos.symlink('{home}/secret.txt', 'link')\nos.symlink('{home}', 'linked')\n"
        "os.symlink('../..', 'up')\nos.symlink('/etc', 'etc')",
    )  # fmt: skip

    for path in ("link", "linked/secret.txt", "up/secret.txt", "etc/passwd"):
        assert owner.get(f"{at}/files/{path}").status_code == 404
    for path in ("linked/planted.txt", "up/planted.txt", "etc/planted.txt"):
        owner.put(f"{at}/files/{path}", content=b"planted")
    assert not [*home.glob("planted.txt"), *home.glob("sessions/*/planted.txt")]
    owner.put(f"{at}/files/link", content=b"mine now")
    assert (home / "secret.txt").read_text() == SECRET
    assert owner.get(f"{at}/files/link").text == "mine now"


def test_a_page_that_a_guest_wrote_is_never_a_page_of_the_server(owner: httpx2.Client, at: str) -> None:
    owner.put(f"{at}/files/page.html", content=b"<script>fetch('/v1/sessions')</script>")
    run(owner, at, "print('<script>')")
    last = owner.get(f"{at}/runs").json()[-1]["run"]
    for path in ("files/page.html", f"runs/{last}/output", f"runs/{last}/code", "manifest"):
        headers = owner.get(f"{at}/{path}").headers
        assert headers["content-disposition"].startswith("attachment")
        assert headers["content-security-policy"].startswith("sandbox;")
        assert headers["x-content-type-options"] == "nosniff"
        assert "html" not in headers["content-type"]


def test_a_name_makes_no_header(owner: httpx2.Client, at: str) -> None:
    run(owner, at, 'open(\'a"\\r\\nX-Evil: 1\\r\\n\', "w").write("x")')
    (entry,) = [each for each in owner.get(f"{at}/files").json() if "Evil" in each["path"]]
    answer = owner.get(f"{at}/files/a%22%0D%0AX-Evil%3A%201%0D%0A")

    assert (answer.status_code, answer.headers["etag"]) == (200, f'"{entry["sha256"]}"')
    assert "x-evil" not in answer.headers


EVIL = {"origin": "https://evil.example"}
FORM = {"content-type": "text/plain"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421), (EVIL, 403), ({"sec-fetch-site": "cross-site"}, 403), (FORM, 415),
        ({**EVIL, **FORM}, 403), ({"authorization": "Bearer nobody"}, 401), ({"authorization": ""}, 401),
    ],
)  # fmt: skip
def test_every_face_of_the_real_server_is_behind_the_door(
    owner: httpx2.Client, at: str, headers: dict[str, str], status: int
) -> None:
    """What a page of another site, a name that was made to point here, or a stranger can send."""
    before = owner.get(at).json()["version"]
    for path in (f"{at}/runs", "/v1/sessions", f"{at}/reset", "/mcp"):
        answer = owner.post(path, content=b'{"code": "1"}', headers={"content-type": "application/json", **headers})
        assert answer.status_code == status, (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["hint"]
        assert "access-control-allow-origin" not in answer.headers
    now = owner.get(at).json()
    assert (now["version"], now["generation"]) == (before, 1)


def test_a_body_too_large_for_the_real_server_is_refused(owner: httpx2.Client, at: str) -> None:
    answer = owner.post(f"{at}/runs", json={"code": "#" * (17 << 20)})

    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert run(owner, at, "1")["text"] == "1"


# -- other people's sessions ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ann(server: Any) -> Iterator[httpx2.Client]:
    with client(server, KeyRing(server.home / "keys").add("ann")[1]) as ann:
        yield ann


def test_another_key_s_session_is_not_there(server: Any, ann: httpx2.Client, owner: httpx2.Client) -> None:
    at = ann.post("/v1/sessions", json={"memory": "256M", "keep": True}).headers["location"]
    session = at.rpartition("/")[2]
    done = run(ann, at, "open('a.txt', 'w').write('secret')")
    document, checked = owner.get("/openapi.json").json(), 0
    with client(server, KeyRing(server.home / "keys").add("eve")[1]) as eve:
        nowhere = eve.get("/v1/sessions/0000000000").json()
        for path, methods in document["paths"].items():
            if "{id}" not in path:
                continue
            address = path.replace("{id}", session).replace("{run}", done["id"]).replace("{path}", "a.txt")
            for method in methods:
                body = {"code": "1", "ckpt": done["ckpt"], "text": "x", "number": 0}
                sent = {"json": body} if method == "post" else {"content": b"x"} if method == "put" else {}
                answer = eve.request(method, address, **sent)
                expected = {**nowhere, "detail": nowhere["detail"].replace("0000000000", session)}
                assert (answer.status_code, answer.json()) == (404, expected), (method, address)
                checked += 1
        assert checked > 25
        assert eve.get("/v1/sessions").json() == []
        taken = eve.post("/v1/sessions", json={"resume": session})
        ann.delete(at, params={"keep": True})
        taken_when_kept = eve.post("/v1/sessions", json={"resume": session})
        assert (taken.status_code, taken_when_kept.status_code) == (404, 404)

    back = ann.post("/v1/sessions", json={"resume": session}).json()
    assert (back["owner"], ann.get(f"{at}/files/a.txt").text) == (ann_id(ann), "secret")
    assert owner.get(at).json()["id"] == session  # the server's owner sees all
    ann.delete(at)


def ann_id(ann: httpx2.Client) -> str:
    return ann.headers["authorization"].split("_")[1]


def test_a_key_chooses_no_path_of_the_server(ann: httpx2.Client) -> None:
    answer = ann.post("/v1/sessions", json={"env": "/usr"})

    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert ann.get("/metrics").status_code == 403
    assert ann.get("/metrics%0A").status_code == 400


def test_a_run_of_another_session_is_not_seen_through_one_s_own(
    ann: httpx2.Client, owner: httpx2.Client, at: str
) -> None:
    theirs = run(owner, at, "print('theirs')")["id"]
    own = ann.post("/v1/sessions", json={"memory": "256M"}).headers["location"]
    for what in ("", "/card", "/code", "/receipt", "/output", "/events"):
        assert ann.get(f"{own}/runs/{theirs}{what}").status_code == 404
    assert ann.post(f"{own}/runs/{theirs}/interrupt").status_code == 404
    assert ann.post(f"{own}/restore", json={"ckpt": owner.get(at).json()["ckpt"]}).status_code == 404
    ann.delete(own)


@pytest.mark.parametrize("run_id", ["..%2f..%2fsecret", "%2e%2e", "..", "a%00b", "%2fetc%2fpasswd"])
def test_a_run_id_is_no_path(server: Any, at: str, run_id: str) -> None:
    status, body = raw(server, "GET", f"{at}/runs/{run_id}/output")

    assert status in (400, 404, 422), body
    assert SECRET.encode() not in body


def test_what_nests_without_end_is_refused(owner: httpx2.Client, at: str) -> None:
    deep = '{"code": "1", "outputs": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    answer = owner.post(f"{at}/runs", content=deep.encode(), headers={"content-type": "application/json"})

    assert answer.status_code in (400, 422)
    surrogate = owner.post(f"{at}/runs", content=rb'{"code": "\ud800"}', headers={"content-type": "application/json"})
    assert surrogate.status_code in (400, 422)
    assert json.loads(owner.get("/v1/health").content)["status"] == "ok"
