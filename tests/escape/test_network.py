"""The network boundary: there is none to reach. Listeners on the host are real."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def heard(listener: socket.socket) -> Iterator[list[bytes]]:
    """What reaches a listener of the host."""
    words: list[bytes] = []
    listener.settimeout(0.2)
    stop = threading.Event()

    def listen() -> None:
        while not stop.is_set():
            try:
                if listener.type == socket.SOCK_DGRAM:
                    words.append(listener.recv(100))
                else:
                    listener.accept()[0].close()
                    words.append(b"connected")
            except TimeoutError:
                continue

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield words
    finally:
        stop.set()
        thread.join()
        listener.close()


def listener_on(family: int, kind: int, address: object) -> socket.socket:
    listener = socket.socket(family, kind)
    try:
        listener.bind(address)  # type: ignore[arg-type]
    except OSError:
        listener.close()
        pytest.skip("the host itself has no such network")
    if kind != socket.SOCK_DGRAM:
        listener.listen()
    return listener


@pytest.mark.parametrize(
    ("family", "where"), [("AF_INET", "127.0.0.1"), ("AF_INET", "0.0.0.0"), ("AF_INET6", "::1"), ("AF_INET6", "::")]
)
def test_tcp_to_a_listener_of_the_host_does_not_arrive(probe, family, where):
    listener = listener_on(getattr(socket, family), socket.SOCK_STREAM, (where, 0))
    port = listener.getsockname()[1]
    with heard(listener) as words:
        printed = probe(f'print(tries(socket.socket(socket.{family}).connect, ("{where}", {port})))')

    assert printed in ("ECONNREFUSED", "ENETUNREACH", "EADDRNOTAVAIL")
    assert words == []


@pytest.mark.parametrize(("family", "where"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")])
def test_udp_to_a_listener_of_the_host_does_not_arrive(probe, family, where):
    listener = listener_on(getattr(socket, family), socket.SOCK_DGRAM, (where, 0))
    port = listener.getsockname()[1]
    with heard(listener) as words:
        probe(f"""
            import time
            sender = socket.socket(socket.{family}, socket.SOCK_DGRAM)
            for _ in range(20):
                tries(sender.sendto, b"escaped", ("{where}", {port}))
            time.sleep(0.1)
        """)

    assert words == []


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET"])
def test_an_abstract_socket_of_the_host_is_not_there(probe, kind):
    listener = listener_on(socket.AF_UNIX, getattr(socket, kind), "\0holdfast-escape-test")
    with heard(listener) as words:
        printed = probe(
            f'print(tries(socket.socket(socket.AF_UNIX, socket.{kind}).connect, "\\0holdfast-escape-test"))'
        )

    assert printed == "ECONNREFUSED"
    assert words == []


def test_the_hosts_own_address_is_not_reached(probe):
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with own:
        try:
            own.connect(("192.0.2.1", 9))
            address = own.getsockname()[0]
        except OSError:
            address = "192.0.2.1"
    assert probe(f'print(tries(socket.socket().connect, ("{address}", 22)))') in ("ENETUNREACH", "EHOSTUNREACH")


@pytest.mark.parametrize("address", ["1.1.1.1", "169.254.169.254", "10.0.0.1", "172.17.0.1", "255.255.255.255"])
def test_no_address_outside_has_a_route(probe, address):
    printed = probe(f"""
        print(tries(socket.socket().connect, ("{address}", 80)),
              tries(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b"x", ("{address}", 53)))
    """)

    assert set(printed.split()) <= {"ENETUNREACH", "EACCES", "EHOSTUNREACH"}


def test_there_is_no_interface_but_loopback(probe):
    printed = probe("""
        tunnels = ("sit", "tunl", "ip6tnl", "gre", "erspan")  # Linux may make these, down, in every namespace
        print([name for _, name in socket.if_nameindex() if not name.startswith(tunnels)])
        print(len(reads("/proc/self/net/route").splitlines()))
    """)

    assert printed.splitlines() == ["['lo']", "1"]


def test_no_name_outside_resolves(probe):
    printed = probe("""
        try:
            print("SUCCESS", socket.getaddrinfo("example.com", 80))
        except socket.gaierror as error:
            print("refused")
    """)

    assert printed == "refused"


SOCKETS = {
    "raw": "socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP",
    "raw_ipv6": "socket.AF_INET6, socket.SOCK_RAW, 58",
    "raw_with_flags": "socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 255",
    "ping": "socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP",
    "packet": "socket.AF_PACKET, socket.SOCK_RAW, 0x0300",
    "packet_datagram": "socket.AF_PACKET, socket.SOCK_DGRAM, 0",
    "old_packet": "socket.AF_INET, 10, 0x0300",
    "vsock": "40, socket.SOCK_STREAM, 0",
    "kernel_crypto": "38, socket.SOCK_SEQPACKET, 0",
    "bluetooth": "31, socket.SOCK_RAW, 1",
    "can": "29, socket.SOCK_RAW, 1",
    "sctp": "socket.AF_INET, socket.SOCK_STREAM, 132",
    "sctp_by_type": "socket.AF_INET, socket.SOCK_SEQPACKET, 132",
    "mptcp": "socket.AF_INET, socket.SOCK_STREAM, 262",
    "udp_lite": "socket.AF_INET, socket.SOCK_DGRAM, 136",
    "xdp": "44, socket.SOCK_RAW, 0",
    "rds": "21, socket.SOCK_SEQPACKET, 0",
    "tipc": "30, socket.SOCK_SEQPACKET, 0",
    "smc": "43, socket.SOCK_STREAM, 0",
    "netfilter": "socket.AF_NETLINK, socket.SOCK_RAW, 12",
    "audit": "socket.AF_NETLINK, socket.SOCK_RAW, 9",
    "uevents": "socket.AF_NETLINK, socket.SOCK_DGRAM, 15",
    "generic_netlink": "socket.AF_NETLINK, socket.SOCK_RAW, 16",
    "socket_diagnosis": "socket.AF_NETLINK, socket.SOCK_RAW, 4",
    "xfrm": "socket.AF_NETLINK, socket.SOCK_RAW, 6",
}


@pytest.mark.parametrize("kind", SOCKETS)
def test_a_socket_of_a_strange_kind_is_refused(probe, kind):
    # By raw call: the socket module would object to some by itself.
    printed = probe(f'print(call("socket", *({SOCKETS[kind]},)))')

    assert printed in ("EPERM", "EAFNOSUPPORT", "EPROTONOSUPPORT")


def test_a_socket_pair_is_a_unix_pair_or_nothing(probe):
    printed = probe("""
        buffer = _ctypes.create_string_buffer(8)
        print(*[call("socketpair", family, kind, 0, buffer) for family, kind in ((30, 5), (2, 1), (40, 1))])
    """)

    assert set(printed.split()) == {"EAFNOSUPPORT"}


def test_the_network_cannot_be_changed_by_netlink(probe):
    printed = probe("""
        import struct
        route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        def ask(kind, body):
            route.send(struct.pack("IHHII", 16 + len(body), kind, 0x605, 1, 0) + body)
            return _errno.errorcode.get(-struct.unpack_from("i", route.recv(4096), 16)[0], "SUCCESS")
        link = struct.pack("BxHiII", 0, 0, 1, 0, 1)                      # RTM_NEWLINK: lo down
        address = struct.pack("BBBBi", 2, 24, 0, 0, 1) + struct.pack("HH4s", 8, 2, b"\\n\\0\\0\\1")
        new = struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH6sxx", 10, 3, b"evil0") + struct.pack(
            "HHHH5sxxx", 16, 18, 9, 1, b"dummy")
        print(ask(16, link), ask(20, address), ask(16, new))
    """)

    assert printed == "EPERM EPERM EPERM"


def test_the_network_cannot_be_changed_by_ioctl(probe):
    printed = probe("""
        import fcntl, struct
        handle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        request = struct.pack("16sH14s", b"lo", 0, b"")
        print(tries(fcntl.ioctl, handle, 0x8914, request), tries(fcntl.ioctl, handle, 0x8916, request),
              tries(fcntl.ioctl, handle, 0x89A0, b"br0\\0"), tries(fcntl.ioctl, handle, 0x894C, 0))
    """)

    assert set(printed.split()) <= {"EPERM", "ENOPKG", "EINVAL", "ENOTTY"}


def test_packets_of_the_guests_own_loopback_work_and_stay_there(probe):
    printed = probe("""
        a = socket.create_server(("127.0.0.1", 0))
        b = socket.create_connection(a.getsockname()); c = a.accept()[0]; b.send(b"inside"); print(c.recv(10))
    """)

    assert printed == "b'inside'"
