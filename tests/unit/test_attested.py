"""What is heard of a kernel: words, as many as we take, and nothing else."""

import os
import socket
from collections.abc import Iterator

import pytest

from holdfast.kernel import attested, framing

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        attested.hear_only_words(ours)
        yield ours, theirs


def test_what_was_left_is_read_to_its_end(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send(b"one")
    theirs.send(bytes(framing.PACKET_BYTES + 100))  # no packet of ours, and no reason to stop
    theirs.send(b"two")

    assert attested.drain(ours)
    with pytest.raises(BlockingIOError):
        ours.recv(10)


def test_who_never_stops_sending_is_not_read_for_ever(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair

    def receive_and_send(sock: socket.socket, size: int) -> tuple[bytes, int]:
        theirs.send(b"more")
        return sock.recv(size), 0

    monkeypatch.setattr(attested, "receive", receive_and_send)

    assert not attested.drain(ours)


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (6, 16), reason="Linux cannot refuse them yet")
def test_no_descriptor_comes_with_words(pair: Pair) -> None:
    _, theirs = pair
    with open(os.devnull) as file, pytest.raises(PermissionError):
        socket.send_fds(theirs, [b"take this"], [file.fileno()])
