"""What Linux says of processes whose names try to say it for Linux."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.kernel.attested import number_inside
from holdfast.sandbox import procfs

RENAMED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(15, os.fsencode(sys.argv[1]), 0, 0, 0)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_list_without_end_is_not_read_to_it() -> None:
    with pytest.raises(procfs.TooLong):
        procfs.lines("/dev/zero", most_bytes=1000)


@contextmanager
def renamed(name: str) -> Iterator[int]:
    """A process of that name."""
    words = [sys.executable, "-c", RENAMED, name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid
        process.kill()


@pytest.mark.parametrize("end", ["\x0c", "\r", "\x0b", "\x1c", "\x85", "\n", "\udcff"], ids=ascii)
def test_no_name_of_a_process_is_taken_for_a_line_of_linux(end: str) -> None:
    with renamed(f"{end}NSpid:\t7") as pid:
        assert number_inside(pid) == pid
        assert procfs.status(pid, b"Pid") == [str(pid).encode()]


@pytest.mark.parametrize("name", ["\x0cRssAnon: x", "\rRssAnon:\t9 kB"], ids=ascii)
def test_no_name_of_a_process_hides_its_size(name: str) -> None:
    with renamed(name) as pid:
        assert procfs.sizes_bytes(f"/proc/{pid}/status", b"RssAnon") > 1 << 20


def test_a_process_that_is_gone_says_nothing() -> None:
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)

    assert procfs.status(gone, b"Pid") == []
    assert procfs.sizes_bytes(f"/proc/{gone}/smaps_rollup", b"Pss") == 0
    assert number_inside(gone) == 0
