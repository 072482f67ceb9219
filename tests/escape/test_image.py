"""Attacks on what all kernels of a zygote share: a guest changes a copy of its own, pays, and gets no further."""

import pytest

from holdfast import Session

IMAGE = """
import ctypes, os, sys
def image(may="rw-p"):
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps if "/memfd:holdfast-image" in line]
    return [tuple(int(part, 16) for part in line[0].split("-")) for line in lines if line[1] == may]
def is_copy(address):
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // 4096 * 8)
        entry = int.from_bytes(pagemap.read(8), sys.byteorder)
    return bool(entry >> 63 & 1) and not entry >> 61 & 1
def touch(areas):
    'Write to each page what it says already.'
    for start, end in areas:
        for address in range(start, end, 4096):
            ctypes.memset(address, ctypes.string_at(address, 1)[0], 1)
import pandas
# A long text of the zygote's, in several pages that nobody else has a reason to write to.
doc = pandas.read_csv.__doc__
page = (id(doc) // 4096 + 1) * 4096
"""


@pytest.fixture
def pair(open_session) -> tuple[Session, Session]:
    return open_session(), open_session()


def says(session: Session, code: str) -> str:
    run = session.run(IMAGE + code)
    assert run.error is None, run.error.traceback or run.error.message
    return run.stdout.strip()


def test_what_one_writes_into_the_image_no_other_sees(pair, open_session):
    one, other = pair
    before = says(one, "print(page, any(start <= page < end for start, end in image()), ctypes.string_at(page, 16))")
    says(one, "ctypes.memset(page, 33, 16)")

    assert "True" in before
    assert says(one, "print(ctypes.string_at(page, 16), is_copy(page))") == f"{b'!' * 16} True"
    for session in (other, open_session()):
        there = "print(page, any(start <= page < end for start, end in image()), ctypes.string_at(page, 16))"
        assert says(session, there) == before


def test_a_page_that_is_written_to_and_as_it_was_again_is_shared_again(open_session):
    """The first run's snapshot gives it back."""
    session = open_session()
    written = says(
        session,
        "old = ctypes.string_at(page, 4096); ctypes.memset(page, 33, 4096); ctypes.memmove(page, old, 4096)\n"
        "ctypes.memset(page + 4096, 33, 1)\nprint(is_copy(page), is_copy(page + 4096))",
    )

    assert written == "True True"
    assert says(session, "print(is_copy(page), is_copy(page + 4096), doc.isascii())") == "False True True"


def test_the_image_has_no_descriptor_and_no_other_way_in(open_session):
    session = open_session()
    printed = says(
        session,
        "links = []\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try: links.append(os.readlink(f'/proc/self/fd/{name}'))\n"
        "    except OSError: pass\n"
        "print([link for link in links if 'image' in link])\n"
        "start, end = image()[0]\n"
        "for how in (os.O_RDONLY, os.O_RDWR):\n"
        "    try: os.open(f'/proc/self/map_files/{start:x}-{end:x}', how); print('open')\n"
        "    except OSError as error: print(type(error).__name__)\n",
    )

    assert printed == "[]\nPermissionError\nPermissionError"


def test_the_image_to_compare_with_can_be_spoilt_for_oneself_alone(pair):
    one, other = pair
    spoil = (
        "change = ctypes.CDLL(None).mprotect; change.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n"
        "for start, end in image('r--p'):\n"
        "    change(start, end - start, 3); ctypes.memset(start, 0, end - start)\n"
        "print('spoilt')"
    )

    assert says(one, spoil) == "spoilt"
    assert says(one, "print(len(doc) > 3 * 4096)") == "True"
    assert says(other, "print(len(doc) > 3 * 4096, pandas.Series([1, 2]).sum())") == "True 3"


def test_without_the_image_to_compare_with_a_kernel_dies_alone(pair):
    one, other = pair
    one.run(
        f"{IMAGE}libc = ctypes.CDLL(None); libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
        "for start, end in image('r--p'): libc.munmap(start, end - start)"
    )

    assert one.run("1 + 1").text == "2" or one.run("1 + 1").text == "2"
    assert other.run("1 + 1").text == "2"


def test_copies_of_the_image_count_against_the_cap():
    with Session(memory="256M", timeout=60) as session:
        assert session.run(f"{IMAGE}import numpy; kept = 1").error is None
        size = int(says(session, "print(sum(end - start for start, end in image()))"))
        run = session.run(f"touch(image()); big = numpy.ones({(256 << 20) - size} // 8); big.sum()")

        assert size > 32 << 20
        assert run.error is not None
        assert (run.error.code, run.memory) == ("out_of_memory", "restored")
        assert session.run("kept").text == "1"


def test_a_snapshot_that_alone_maps_pages_of_the_image_raises_no_cap():
    """They are the zygote's. Taken for copies that the snapshot causes, they would be so much above the cap."""
    with Session(memory="256M", timeout=60) as session:
        read = "for start, end in image(): ctypes.string_at(start, end - start)"
        assert session.run(f"{IMAGE}import numpy; kept = 1\n{read}").error is None
        assert session.run("1 + 1").text == "2"
        size = int(says(session, "print(sum(end - start for start, end in image()))"))
        run = session.run(f"touch(image()); big = numpy.ones({(264 << 20) - size} // 8); big.sum()")

        assert run.error is not None
        assert run.error.code == "out_of_memory"
        assert session.run("kept").text == "1"
