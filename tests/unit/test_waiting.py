"""Waiting for a kernel: for a moment without falling asleep, where nobody else is kept waiting by that."""

import os
import select
import threading
from collections.abc import Iterator

import pytest

from holdfast.kernel.waiting import watch
from holdfast.nodes.local import LocalNode


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def watched(fd: int) -> select.epoll:
    epoll = select.epoll()
    epoll.register(fd, select.EPOLLIN)
    return epoll


def test_what_comes_while_one_looks_on_is_seen(pipe: tuple[int, int]) -> None:
    source, sink = pipe
    with watched(source) as epoll:
        later = threading.Timer(0.05, os.write, (sink, b"x"))
        later.start()
        assert watch(epoll, 60.0)
        later.join()


def test_who_sees_nothing_goes_on_when_the_moment_is_over(pipe: tuple[int, int]) -> None:
    with watched(pipe[0]) as epoll:
        assert not watch(epoll, 0.01)


@pytest.fixture
def node() -> LocalNode:
    node = object.__new__(LocalNode)  # of a node this is all that is looked at
    node._at_work = 0
    return node


def test_there_is_time_only_while_one_kernel_alone_is_at_work(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    seen = [node.has_time]
    with node.at_work():
        seen.append(node.has_time)
        with node.at_work():
            seen.append(node.has_time)
        seen.append(node.has_time)

    assert seen == [False, True, False, True]


def test_there_is_none_where_the_kernel_needs_our_processor(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with node.at_work():
        assert not node.has_time
