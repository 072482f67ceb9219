"""The way out: what a guest can do to it, and past it. The servers of the host that it must not reach are real."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
from tests.escape.conftest import AS_ROOT, PRELUDE, storm, try_in
from tests.upstream import Upstream, serving

from holdfast import Session
from holdfast.model import Run

ASKS = """
def ask(target, first=b"GET %b HTTP/1.1\\r\\nHost: %b\\r\\nConnection: close\\r\\n\\r\\n", wait=True):
    "One request to the proxy, as bytes; what came back, or the connection."
    way = socket.create_connection(("127.0.0.1", 3128), timeout=20)
    host = target.split("/")[2] if "//" in target else target
    way.sendall(first % (target.encode(), host.encode()) if b"%b" in first else first)
    if not wait:
        return way
    answer = b""
    while piece := way.recv(65536):
        answer += piece
    return answer
"""


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    """Listed."""
    with serving() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def private() -> Iterator[Upstream]:
    """On the same machine, and not listed."""
    with serving() as upstream:
        yield upstream


@pytest.fixture
def guest(open_session, upstream) -> Session:
    return open_session(memory="512M", timeout=60, egress=[upstream.at])


def attack(session: Session, code: str) -> str:
    return try_in(session, ASKS + code)


# -- the listener ----------------------------------------------------------------------------------------------------


def test_nothing_of_the_listener_is_inside(guest):
    """Neither the kernel nor pid 1 nor any process has a descriptor of it: the host alone listens."""
    printed = attack(
        guest,
        """
inodes = {line.split()[9] for line in reads("/proc/self/net/tcp").decode().splitlines()[1:] if line.split()[3] == "0A"}
held = set()
for process in os.listdir("/proc"):
    if process.isdigit():
        try:
            names = os.listdir(f"/proc/{process}/fd")
        except OSError:
            continue
        for name in names:
            try:
                held.add(os.readlink(f"/proc/{process}/fd/{name}"))
            except OSError:
                pass
print(len(inodes), [inode for inode in inodes if f"socket:[{inode}]" in held])
""",
    )

    assert printed == "1 []"


@pytest.mark.skipif(not AS_ROOT, reason="only root may look into pid 1")
def test_pid_1_does_not_have_it_either(guest):
    """As the host sees it: the guest may not look there."""
    pids = guest._session._transport._session.computer.pids()  # type: ignore[union-attr]
    listener = guest._session._transport._session.computer.now.listener  # type: ignore[union-attr]
    inode = os.readlink(f"/proc/self/fd/{listener.fileno()}")
    held = {os.readlink(entry.path) for pid in pids for entry in os.scandir(f"/proc/{pid}/fd")}
    assert inode.startswith("socket:")
    assert inode not in held
    assert len(held) > 3


@pytest.mark.skipif(not AS_ROOT, reason="only root may look into the zygote")
def test_neither_zygote_nor_host_keeps_the_listener_of_a_kernel_that_is_gone(guest, open_session):
    transport = guest._session._transport
    computer, node = transport._session.computer, transport._service.node  # type: ignore[union-attr]
    zygotes, gone = [zygote.line.peer_pid for zygote in node._zygotes.values()], []
    for _ in range(5):
        gone.append(computer.now.listener)
        guest.reset()
        open_session()  # one without, in between
    now = computer.now.listener

    assert [listener.fileno() for listener in gone] == [-1] * 5
    assert now.getsockname() == ("127.0.0.1", 3128)
    give_up_at = time.monotonic() + 30
    while [sockets_of(pid) for pid in zygotes] != [1] * len(zygotes):  # it may be forking the next session just now
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def sockets_of(pid: int) -> int:
    return sum(os.readlink(entry.path).startswith("socket:") for entry in os.scandir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_the_port_cannot_be_taken_over(guest, address):
    printed = attack(
        guest,
        f"""
family = socket.AF_INET6 if ":" in "{address}" else socket.AF_INET
found = []
for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
    taken = socket.socket(family)
    for option in options:
        taken.setsockopt(socket.SOL_SOCKET, option, 1)
    bound = tries(taken.bind, ("{address}", 3128))
    found.append(tries(taken.listen) if bound.startswith("SUCCESS") else bound)
print(*found)
""",
    )

    assert set(printed.split()) == {"EADDRINUSE"}


def test_each_session_has_a_listener_of_its_own(open_session, upstream, private):
    """What one may reach the other may not, though both find their proxy at the same address."""
    one, other = open_session(egress=[upstream.at]), open_session(egress=[private.at])
    look = """print(ask("http://{}/").split()[1].decode(), ask("http://{}/").split()[1].decode())"""
    assert attack(one, look.format(upstream.at, private.at)) == "200 403"
    assert attack(other, look.format(upstream.at, private.at)) == "403 200"


def test_a_session_without_egress_beside_it_has_nothing(guest, open_session, upstream):
    printed = attack(
        open_session(),
        """print(tries(socket.create_connection, ("127.0.0.1", 3128), 5), "http_proxy" in os.environ)""",
    )

    assert printed == "ECONNREFUSED False"


# -- when it is open -------------------------------------------------------------------------------------------------


def test_a_thread_gets_nothing_out_between_two_runs(guest, upstream):
    """It tries without end, before, between and after runs: what arrives is in a run's receipt, each request once."""
    upstream.seen.clear()
    first = guest.run(
        PRELUDE
        + ASKS
        + f"""
import threading, time
def knock():
    number = 0
    while not over:
        number += 1
        try:
            ask(f"http://{upstream.at}/thread-{{number}}")
        except OSError:
            pass
over = False
thread = threading.Thread(target=knock, daemon=True)
thread.start()
time.sleep(0.5)
"""
    )
    told = list(first.egress)
    for number in range(10):
        told += guest.run(f"import time; quick = {number}; time.sleep(0.02)").egress
        guest.names()  # a question, for which the guest is awake and no run goes on
        guest.complete("os.pa")
    told += guest.run("over = True; thread.join()").egress

    sent = [line.replace(f"http://{upstream.at}", "") for line in told if not line.startswith("refused")]
    assert upstream.seen
    assert set(upstream.seen) <= set(sent)
    assert len(upstream.seen) == len(set(upstream.seen))


def test_a_connection_of_an_earlier_run_is_of_no_use_in_the_next(guest, upstream):
    upstream.seen.clear()
    assert guest.run(PRELUDE + ASKS + 'way = ask("", first=b"", wait=False)').error is None
    late = guest.run(
        f"""
try:
    way.sendall(b"GET http://{upstream.at}/kept HTTP/1.1\\r\\nHost: {upstream.at}\\r\\n\\r\\n")
    print(way.recv(100))
except OSError as error:
    print(type(error).__name__)
"""
    )

    assert late.stdout.strip() in ("b''", "ConnectionResetError", "BrokenPipeError")
    assert (late.egress, upstream.seen) == ([], [])


def test_a_tunnel_that_is_kept_open_is_cut_at_the_end_of_its_run(guest, upstream):
    upstream.seen.clear()
    began = guest.run(
        PRELUDE + ASKS + f'kept = ask("http://{upstream.at}/slow", wait=False); print(kept.recv(100)[:12])'
    )
    printed = try_in(
        guest,
        """
got, kept = b"", kept
try:
    while piece := kept.recv(100):
        got += piece
except OSError:
    pass
print(b"hello" in got)
""",
    )
    upstream.released.set()

    assert (began.error, began.stdout.strip()) == (None, "b'HTTP/1.1 200'")
    assert printed == "False"


def test_nothing_gets_out_while_a_rehearsal_runs_or_after_it(guest, upstream):
    upstream.seen.clear()
    code = PRELUDE + ASKS + f'print(ask("http://{upstream.at}/r").split()[1]); way = ask("x", first=b"", wait=False)'
    rehearsed = guest.run(code, rehearse=True)

    assert (rehearsed.stdout.strip(), upstream.seen) == ("b'403'", [])


# -- past it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "http://{private}/",
        "http://localhost:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://127.1:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f000001:{port}/",
        "http://0:{port}/",
        "http://{listed}@{private}/",
        "http://{listed}#@{private}/",
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "ftp://{private}/",
    ],
)
def test_no_spelling_reaches_what_is_not_listed(guest, upstream, private, target):
    private.seen.clear()
    target = target.format(private=private.at, port=private.at.split(":")[1], listed=upstream.at)
    printed = attack(guest, f"""print(ask({target!r}).split()[1].decode())""")

    assert int(printed) >= 400
    assert private.seen == []


def test_the_host_header_does_not_choose_the_server(guest, upstream, private):
    private.seen.clear()
    printed = attack(
        guest,
        f"""
print(ask("http://{upstream.at}/", first=b"GET %b HTTP/1.1\\r\\nHost: {private.at}\\r\\nConnection: close\\r\\n\\r\\n"
          .replace(b"%b", b"http://{upstream.at}/")).split()[1].decode())
""",
    )

    assert printed in ("200", "400")
    assert private.seen == []


def test_a_second_request_cannot_ride_on_the_first(guest, upstream, private):
    """Smuggled behind a body whose length two readers could read in two ways."""
    upstream.seen.clear()
    attack(
        guest,
        f"""
inner = b"GET http://{private.at}/smuggled HTTP/1.1\\r\\nHost: {private.at}\\r\\n\\r\\n"
for head in (b"Content-Length: 0\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n",
             b"Content-Length: 5\\r\\nContent-Length: 0\\r\\n\\r\\n", b"Transfer-Encoding: xchunked\\r\\n\\r\\n",
             b"Content-Length: 0\\r\\n\\r\\n"):
    try:
        ask("x", first=b"POST http://{upstream.at}/a HTTP/1.1\\r\\nHost: {upstream.at}\\r\\n" + head + inner)
    except OSError:
        pass
""",
    )

    assert private.seen == []
    assert not any("smuggled" in seen for seen in upstream.seen)


def test_a_tunnel_carries_tls_for_its_host_and_nothing_else(guest, upstream):
    upstream.seen.clear()
    attack(
        guest,
        f"""
way = ask("x", first=b"CONNECT {upstream.at} HTTP/1.1\\r\\nHost: {upstream.at}\\r\\n\\r\\n", wait=False)
way.recv(1000)
tries(way.sendall, b"GET /plain HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
tries(way.recv, 1000)
""",
    )

    assert upstream.seen == []


# -- floods ----------------------------------------------------------------------------------------------------------


def test_a_flood_of_connections_harms_nobody_else(guest, open_session, upstream):
    """Thousands of connections, half of them silent: the session's own run ends, and another's requests get through."""
    other = open_session(egress=[upstream.at])
    flooded: list[Run] = []
    flood = """
held = []
for number in range(3000):
    way = socket.socket(); way.setblocking(False)
    way.connect_ex(("127.0.0.1", 3128))
    if number % 2:
        try: way.send(b"GET http://")
        except OSError: pass
    held.append(way)
    if len(held) > 1000:
        held.pop(0).close()
"""
    thread = threading.Thread(target=lambda: flooded.append(storm(guest, flood)))
    thread.start()
    while thread.is_alive():
        assert attack(other, f'print(ask("http://{upstream.at}/other").split()[1].decode())') == "200"
    thread.join()

    assert flooded[0].error is None
    assert len(flooded[0].egress) <= 101


def test_what_a_guest_calls_its_targets_stays_one_printable_line(guest):
    printed = storm(
        guest,
        ASKS
        + r"""
for target in (b"http://a/\x1b[31m", b"http://a/" + b"x" * 5000, b"http://" + b"a" * 3000 + b"/", "http://ü/".encode()):
    try:
        ask("x", first=b"GET " + target + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    except OSError:
        pass
""",
    )

    assert printed.egress
    assert all(line.isascii() and line.isprintable() and len(line) < 600 for line in printed.egress)
    assert printed.receipt is not None
    assert printed.receipt.facts().egress == printed.egress
