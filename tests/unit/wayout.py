"""A way out with real sockets at both of its ends: a proxy, servers behind it, and what a client writes and reads."""

import asyncio
import datetime
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import anyio
import httpx2
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.egress.allowed import AllowList
from holdfast.egress.gate import Bounds, Note, Resolve
from holdfast.egress.log import Log, Outgoing
from holdfast.egress.names import Address
from holdfast.egress.proxy import Proxy

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NAME = "api.example.com"


class Upstream:
    """A server on loopback: what reached it, byte by byte."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        self.connections = 0
        self.received = b""
        self.port = 0
        self.failures: list[Exception] = []
        self._handler = handler
        self._tls = tls

    async def __aenter__(self) -> "Upstream":
        self._server = await asyncio.start_server(self._attend, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.failures.append(error)
        finally:
            writer.close()

    @property
    def here(self) -> str:
        return f"127.0.0.1:{self.port}"


def answering(answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", *, wants: bytes = b"") -> Upstream:
    """Reads a head (or until it has what it `wants`), keeps it, and says the same to everybody."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken = b""
        while (wants or b"\r\n\r\n") not in taken:
            data = await reader.read(65536)
            taken += data
            upstream.received += data
            if not data:
                return
        writer.write(answer)
        await writer.drain()

    upstream = Upstream(handler)
    return upstream


class Way:
    """A proxy that is open for one run."""

    def __init__(self, proxy: Proxy, port: int, noted: list[Outgoing], withdrawn: list[Outgoing]) -> None:
        self.proxy = proxy
        self.port = port
        self.noted = noted
        self.withdrawn = withdrawn
        self.log = Log("none")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, data: bytes) -> bytes:
        """All that comes back for these bytes."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()

    def client(self, tls: ssl.SSLContext | bool = False) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(proxy=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=60, verify=tls)

    @property
    def reasons(self) -> list[str]:
        return [refusal.reason for refusal in self.log.refusals]


@asynccontextmanager
async def serving(
    *entries: str, note: Note | None = None, resolve: Resolve | None = None, **bounds: float
) -> AsyncIterator[Way]:
    """Served, and not open yet."""
    noted, withdrawn = list[Outgoing](), list[Outgoing]()

    async def withdraw(outgoing: Outgoing) -> None:
        withdrawn.append(outgoing)

    async def keep(outgoing: Outgoing) -> None:
        if note is not None:
            await note(outgoing)
        noted.append(outgoing)

    proxy = Proxy(
        AllowList.parse(entries),
        note=keep,
        withdraw=withdraw,
        resolve=resolve,
        bounds=Bounds(**bounds),  # type: ignore[arg-type]
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.serve, listener)
            yield Way(proxy, listener.getsockname()[1], noted, withdrawn)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def way_out(
    *entries: str, note: Note | None = None, resolve: Resolve | None = None, **bounds: float
) -> AsyncIterator[Way]:
    async with (
        serving(*entries, note=note, resolve=resolve, **bounds) as way,
        way.proxy.open("run_1") as way.log,
    ):
        yield way


def to(*addresses: str) -> Resolve:
    """Every name leads there."""

    async def resolve(name: str) -> Sequence[Address]:
        return [ip_address(address) for address in addresses]

    return resolve


def to_a_name(upstream: Upstream, **more: object) -> AbstractAsyncContextManager[Way]:
    """`NAME` is listed, and leads to this server, which is listed too."""
    return way_out(f"{NAME}:{upstream.port}", upstream.here, resolve=to("127.0.0.1"), **more)  # type: ignore[arg-type]


def certify(directory: Path, name: str = NAME) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For a server of that name, and for clients who trust it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = directory / "server.pem"
    pem.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )  # fmt: skip
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    return server, ssl.create_default_context(cafile=str(pem))


def break_off(writer: asyncio.StreamWriter) -> None:
    """Not an end: a reset."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def open_sockets() -> set[str]:
    """Of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
