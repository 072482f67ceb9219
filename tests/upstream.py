"""A web server of the host's, for tests of egress: what reached it is known."""

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Upstream:
    """Listens on the host's loopback. `/slow` sends its head and then nothing until it is released."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.seen: list[str] = []
        """Method and path of each request, in order."""
        self.released = threading.Event()
        self._changed = threading.Condition()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                upstream._note(f"{self.command} {self.path}")
                self.send_response(200)
                self.send_header("Content-Length", "5")
                self.end_headers()
                self.wfile.flush()
                if self.path == "/slow":
                    upstream.released.wait(60)
                self.wfile.write(b"hello")

            do_POST = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.at = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def _note(self, request: str) -> None:
        with self._changed:
            self.seen.append(request)
            self._changed.notify_all()

    def wait_for(self, request: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request in self.seen, 60), self.seen

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections are cut in these tests: that is no error."""


@contextmanager
def serving(certificate: Path | None = None) -> Iterator[Upstream]:
    upstream = Upstream(certificate)
    try:
        yield upstream
    finally:
        upstream.close()


def certify(place: Path) -> Path:
    """A key and a certificate of its own for 127.0.0.1, in one file; the certificate comes last."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "upstream")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    place.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return place
