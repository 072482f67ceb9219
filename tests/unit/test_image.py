"""The zygote's image, in a process of its own: nothing that memory is used for notices it, and what is written and
taken back is shared again.
"""

import mmap
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from holdfast.sandbox import procfs

pytest.importorskip("holdfast._snapshot")

_BEGIN = """
import ctypes, gc, os, sys
from holdfast import _snapshot
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.calloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.sbrk.restype = ctypes.c_void_p
libc.sbrk.argtypes = [ctypes.c_ssize_t]
PAGE = os.sysconf("SC_PAGE_SIZE")
text = b"here since before" * PAGE

def mapped():
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps if "/memfd:tried" in line and " rw-p " in line]
    return [tuple(int(part, 16) for part in line[0].split("-")) for line in lines]

def in_image(address):
    return any(start <= address < end for start, end in mapped())

def is_copy(address):
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entry = int.from_bytes(pagemap.read(8), sys.byteorder)
    return bool(entry >> 63 & 1) and not entry >> 61 & 1
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_holds_small_objects_large_ones_and_pythons_own() -> None:
    printed = run("""
        small, large = [object() for _ in range(100)], [bytes(2000) for _ in range(100)]
        _snapshot.make_image("tried")
        print(all(map(in_image, map(id, [*small, *large, None, int]))))
    """)

    assert printed == "True"


def test_a_page_that_is_as_it_was_is_given_back_and_one_that_changed_is_not() -> None:
    printed = run("""
        blocks = [libc.malloc(8 * PAGE) for _ in range(4)]
        for block in blocks:
            ctypes.memset(block, 7, 8 * PAGE)
        _snapshot.make_image("tried")
        same, changed = (block + 4 * PAGE for block in blocks[1:3])
        ctypes.memset(same, 8, 100)
        ctypes.memset(same, 7, 100)
        ctypes.memset(changed, 8, 100)
        before = is_copy(same), is_copy(changed)
        given = _snapshot.give_back()
        print(before, (is_copy(same), is_copy(changed)), given > 0)
        print(ctypes.string_at(same, 100) == b"\\7" * 100, ctypes.string_at(changed, 101) == b"\\x08" * 100 + b"\\7")
    """)

    assert printed == "(True, True) (False, True) True\nTrue True"


def test_the_heap_shrinks_below_the_image_and_grows_again_as_zeros() -> None:
    printed = run("""
        blocks = [libc.malloc(60_000) for _ in range(1000)]
        for block in blocks:
            ctypes.memset(block, 7, 60_000)
        _snapshot.make_image("tried")
        top = libc.sbrk(0)
        for block in blocks:
            libc.free(block)
        libc.malloc_trim(0)
        low = libc.sbrk(0)
        clear = True
        for _ in range(1000):
            block = libc.calloc(1, 60_000)
            clear &= ctypes.string_at(block, 60_000) == bytes(60_000)
            ctypes.memset(block, 9, 60_000)
        _snapshot.give_back()
        print(low < top, libc.sbrk(0) > low, clear)
    """)

    assert printed == "True True True"


def test_free_memory_in_the_midst_of_the_heap_may_be_given_to_linux() -> None:
    """`malloc_trim` drops the pages of free blocks, which are the image's again and not zeros: nobody may notice."""
    printed = run("""
        blocks = [libc.malloc(60_000) for _ in range(1000)]
        for block in blocks:
            ctypes.memset(block, 7, 60_000)
        _snapshot.make_image("tried")
        for block in blocks[::2]:
            libc.free(block)
        libc.malloc_trim(0)
        clear = all(ctypes.string_at(libc.calloc(1, 60_000), 60_000) == bytes(60_000) for _ in range(600))
        kept = all(ctypes.string_at(block, 60_000) == b"\\7" * 60_000 for block in blocks[1::2])
        print(clear, kept)
    """)

    assert printed == "True True"


def test_arenas_that_python_gives_up_may_be_anything_afterwards() -> None:
    printed = run("""
        objects = [[number] for number in range(600_000)]
        _snapshot.make_image("tried")
        size = sum(end - start for start, end in mapped())
        del objects
        gc.collect()
        left = sum(end - start for start, end in mapped())
        others = [bytearray(b"x" * 300_000) for _ in range(200)]
        again = [[number] for number in range(600_000)]
        _snapshot.give_back()
        print(left < size, all(other == b"x" * 300_000 for other in others), sum(item[0] for item in again))
    """)

    assert printed == f"True True {sum(range(600_000))}"


def test_a_fork_of_a_fork_gives_back_as_well_and_none_sees_the_others_writes() -> None:
    printed = run("""
        block = libc.malloc(8 * PAGE)
        ctypes.memset(block, 7, 8 * PAGE)
        _snapshot.make_image("tried")
        if os.fork() == 0:
            ctypes.memset(block, 8, 8 * PAGE)
            if os.fork() == 0:
                ctypes.memset(block, 7, 8 * PAGE)
                _snapshot.give_back()
                os._exit(is_copy(block + 4 * PAGE))
            status = os.wait()[1]
            os._exit(status or ctypes.string_at(block, 8 * PAGE) != b"\\x08" * 8 * PAGE)
        print(os.wait()[1], ctypes.string_at(block, 8 * PAGE) == b"\\7" * 8 * PAGE)
    """)

    assert printed == "0 True"


def test_it_is_made_and_given_back_to_while_threads_are_at_work() -> None:
    printed = run("""
        import threading
        going, counts = True, [0] * 4
        def work(number):
            while going:
                counts[number] += len([str(each) for each in range(50)]) == 50
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        _snapshot.make_image("tried")
        for _ in range(50):
            _snapshot.give_back()
        going = False
        for thread in threads:
            thread.join()
        print(all(counts))
    """)

    assert printed == "True"


def test_nothing_of_it_is_open_and_its_file_cannot_be_changed_by_its_mappings() -> None:
    printed = run("""
        _snapshot.make_image("tried")
        start, _ = mapped()[0]
        ctypes.memset(start, ctypes.string_at(start, 1)[0], 1)
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name != "3"]
        print([link for link in links if "memfd" in link])
        try:
            _snapshot.make_image("tried")
        except OSError as error:
            print(error.strerror)
    """)

    assert printed == "[]\nthere is an image"


def test_pages_of_a_file_that_one_process_maps_alone_are_counted_without_its_own_copies() -> None:
    page, few = mmap.PAGESIZE, 256  # others are touched meanwhile
    before = procfs.alone_in_file_bytes(os.getpid())
    file = os.memfd_create("counted")
    os.write(file, b"x" * (4096 * page))
    with mmap.mmap(file, 4096 * page, flags=mmap.MAP_PRIVATE) as memory:
        os.close(file)
        assert sum(memory[at] for at in range(0, 4096 * page, page)) == 4096 * ord("x")
        read = procfs.alone_in_file_bytes(os.getpid())
        memory[: 2048 * page] = bytes(2048 * page)
        rewritten = procfs.alone_in_file_bytes(os.getpid())

    assert before is not None
    assert read is not None
    assert rewritten is not None
    assert abs((read - before) // page - 4096) < few
    assert abs((read - rewritten) // page - 2048) < few


def test_of_too_many_pages_of_files_nothing_is_said() -> None:
    file = os.memfd_create("huge")
    os.ftruncate(file, 16 << 30)
    with mmap.mmap(file, 16 << 30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ):
        os.close(file)
        assert procfs.alone_in_file_bytes(os.getpid()) is None
