"""When the way out is open, and what is left of it afterwards: nothing."""

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
import threading
from ipaddress import ip_address

import anyio
import pytest

from holdfast.egress import addresses
from holdfast.egress.addresses import MOST_LOOKUPS, Lookups
from holdfast.egress.allowed import AllowList
from holdfast.egress.log import Outgoing
from holdfast.egress.proxy import Proxy
from holdfast.egress.tunnels import ESTABLISHED

from .test_egress_hello import hello_of
from .test_egress_tunnels import connect
from .wayout import NAME, Upstream, answering, open_sockets, serving, to, way_out


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_only_while_a_run_is_open_is_anything_served() -> None:
    async with answering() as upstream, serving(upstream.here) as way:
        request = f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        reader, writer = await way.connect()
        writer.write(request)
        await writer.drain()
        async with way.proxy.open("run_1") as log:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)  # it was begun before
            writer.close()
            assert (await way.say(request)).endswith(b"ok")
            assert log.sent == 1
        between = await asyncio.open_connection("127.0.0.1", way.port)
        between[1].write(request)
        await between[1].drain()
        for _ in range(100):
            await anyio.sleep(0)
        assert upstream.connections == 1
        async with way.proxy.open("run_2") as log:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await between[0].readexactly(1)
            assert log.sent == 0
            assert (await way.say(request)).endswith(b"ok")
        between[1].close()

    assert [outgoing.run for outgoing in way.noted] == ["run_1", "run_2"]


async def test_at_its_end_every_connection_is_closed_and_nothing_is_under_way() -> None:
    resets: list[str] = []

    async def waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(65536):
                pass
            resets.append("end")
        except ConnectionResetError:
            resets.append("reset")

    async with (
        Upstream(waiting) as upstream,
        serving(f"{NAME}:{upstream.port}", upstream.here, resolve=to("127.0.0.1")) as way,
    ):
        before, tasks_before = open_sockets(), len(asyncio.all_tasks())
        async with way.proxy.open("run_1") as log:
            idle = await way.connect()
            tunnels = [await way.connect() for _ in range(3)]
            for _, writer in tunnels:
                writer.write(connect(f"{NAME}:{upstream.port}") + hello_of(NAME))
            plain = await way.connect()
            plain[1].write(f"PUT http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf".encode())
            while upstream.connections < 4 or log.bytes_out < 4:
                await anyio.sleep(0.01)
        assert way.noted[0].run == "run_1"
        for reader, writer in (idle, *tunnels, plain):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(100_000)
            writer.close()
        while len(resets) < 4:
            await anyio.sleep(0.01)
        while len(asyncio.all_tasks()) > tasks_before:
            await anyio.sleep(0.01)
        while open_sockets() - before:
            await anyio.sleep(0.01)

    assert resets == ["reset"] * 4


async def test_a_run_that_is_cancelled_while_a_request_is_noted_sends_nothing() -> None:
    noting, gone = anyio.Event(), anyio.Event()

    async def note(outgoing: Outgoing) -> None:
        noting.set()
        try:
            await anyio.sleep_forever()
        finally:
            gone.set()

    async with answering() as upstream, serving(upstream.here, note=note) as way:
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                async with way.proxy.open("run_1"):
                    await anyio.sleep_forever()

            tasks.start_soon(run)
            _, writer = await way.connect()
            while not noting.is_set():
                writer.write(f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                with anyio.move_on_after(0.5):
                    await noting.wait()
                if not noting.is_set():  # it may have been begun before the run was
                    writer.close()
                    _, writer = await way.connect()
            tasks.cancel_scope.cancel()
        assert gone.is_set()
        writer.close()

    assert upstream.connections == 0


async def test_a_run_opens_what_another_has_left_and_two_at_once_are_a_mistake() -> None:
    async with serving(NAME) as way:
        async with way.proxy.open("run_1"):
            with pytest.raises(RuntimeError):
                async with way.proxy.open("run_2"):
                    pass
        with pytest.raises(ZeroDivisionError):
            async with way.proxy.open("run_3"):
                raise ZeroDivisionError
        async with way.proxy.open("run_4") as log:
            answer = await way.say(b"GET http://evil.example/ HTTP/1.1\r\nHost: x\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 403")
    assert log.refusals[0].run == "run_4"


async def test_a_proxy_that_is_not_served_any_more_hangs_nobody() -> None:
    async with serving(NAME) as way:
        pass
    async with way.proxy.open("run_1") as log:
        pass
    assert log.sent == 0


async def test_a_listener_that_fails_ends_the_serving_and_no_run() -> None:
    async def note(outgoing: Outgoing) -> None:
        raise AssertionError

    proxy = Proxy(AllowList.parse([NAME]), note=note)
    outcome: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        async def serve() -> None:
            try:
                await proxy.serve(listener)
            except OSError as error:
                outcome.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            async with proxy.open("run_1"):
                listener.shutdown(socket.SHUT_RDWR)
                while not outcome:
                    await anyio.sleep(0.01)

    assert isinstance(outcome[0], OSError)


async def test_many_at_once_are_all_served_each_with_its_own() -> None:
    async def echoing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[-100_000:])
        await writer.drain()

    async with (
        Upstream(echoing) as upstream,
        serving(f"{NAME}:{upstream.port}", upstream.here, resolve=to("127.0.0.1")) as way,
        way.proxy.open("run_1") as log,
    ):
        answers: dict[int, bytes] = {}
        first = connect(f"{NAME}:{upstream.port}") + hello_of(NAME)

        async def ask(number: int) -> None:
            reader, writer = await way.connect()
            writer.write(first + bytes([number]) * 100_000)
            writer.write_eof()
            answers[number] = await reader.read()
            writer.close()

        async with anyio.create_task_group() as tasks:
            for number in range(64):
                tasks.start_soon(ask, number)

    assert answers == {number: ESTABLISHED + bytes([number]) * 100_000 for number in range(64)}
    assert (log.sent, log.refused) == (64, 0)


async def test_lookups_that_hang_are_bounded_even_if_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    under_way: list[str] = []

    def hang(name: str) -> list[object]:
        under_way.append(name)
        go_on.wait(60)
        return [ip_address("8.8.8.8")]

    monkeypatch.setattr(addresses, "_look_up", hang)
    lookups = Lookups()
    for _ in range(3):
        with anyio.move_on_after(0.2):
            async with anyio.create_task_group() as tasks:
                for number in range(MOST_LOOKUPS):
                    tasks.start_soon(lookups, f"{number}.example.org")
    assert len(under_way) == MOST_LOOKUPS
    go_on.set()
    with anyio.fail_after(60):
        assert await lookups("last.example.org") == [ip_address("8.8.8.8")]


async def test_a_name_that_does_not_exist_has_no_address() -> None:
    with pytest.raises(OSError, match="no address"):
        await Lookups()("nowhere.invalid")


def test_a_name_that_leads_to_this_very_machine_by_its_public_address_does_not_get_there() -> None:
    """In a network of its own, where loopback has a public address."""
    script = textwrap.dedent("""
        import asyncio, subprocess, sys
        from ipaddress import ip_address
        sys.path.insert(0, ".")
        from tests.unit.wayout import NAME, answering, to, way_out

        async def main():
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            subprocess.run(["ip", "address", "add", "8.8.8.8/32", "dev", "lo"], check=True)
            async with answering() as upstream:
                server = await asyncio.start_server(upstream._attend, "8.8.8.8", upstream.port)
                request = f"GET http://{NAME}:{upstream.port}/ HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n".encode()
                for listed in ((), (f"8.8.8.8:{upstream.port}",)):
                    async with way_out(f"{NAME}:{upstream.port}", *listed, resolve=to("8.8.8.8")) as way:
                        print((await way.say(request)).split(b" ")[1].decode(), upstream.received.count(b"GET"))
                server.close()

        asyncio.run(main())
    """)
    root = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-Urn"]
    done = subprocess.run([*root, sys.executable, "-c", script], capture_output=True, text=True, timeout=100)

    assert done.stdout.split("\n")[:2] == ["403 0", "200 1"], done.stderr


async def test_the_proxy_of_a_test_is_the_real_one() -> None:
    """Nothing listed, nothing gets out: not even what the other tests reach."""
    async with answering() as upstream, way_out() as way:
        answer = await way.say(f"GET http://{upstream.here}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    assert answer.startswith(b"HTTP/1.1 403 not_allowed")
    assert upstream.connections == 0
