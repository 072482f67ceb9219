"""What a cell prints: in order, at once, bounded, and never the host's problem."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import Session
from holdfast.guest import scripts
from holdfast.kernel import wire
from holdfast.server.mcp import answers

MIB = 1 << 20


@pytest.fixture
def other() -> Iterator[Session]:
    """A second session, to see that the first one harms nobody."""
    with Session(memory="256M") as session:
        yield session


# -- what is captured --------------------------------------------------------------------------------------------


def test_both_streams_are_captured_apart(session: Session) -> None:
    run = session.run("import sys\nprint('out')\nprint('err', file=sys.stderr)")

    assert (run.stdout, run.stderr) == ("out\n", "err\n")


def test_warnings_and_logs_go_to_stderr(session: Session) -> None:
    run = session.run("import logging, warnings\nwarnings.warn('careful')\nlogging.warning('logged')")

    assert "UserWarning: careful" in run.stderr
    assert "WARNING:root:logged" in run.stderr
    assert run.stdout == ""


def test_python_c_and_children_print_in_order(session: Session) -> None:
    run = session.run(
        "import ctypes, os, subprocess\n"
        "libc = ctypes.CDLL(None)\n"
        "print('1 python', end=' ')\n"
        "libc.printf(b'2 printf\\n'); libc.fflush(None)\n"
        "subprocess.run(['echo', '3 child'])\n"
        "os.write(1, b'4 write\\n')\n"
        "print('5 python')\n"
        "!echo 6 command\n"
        "libc.puts(b'7 puts');"
    )

    assert run.stdout == "1 python 2 printf\n3 child\n4 write\n5 python\n6 command\n7 puts\n"


def test_what_c_code_holds_back_is_flushed_at_the_end_of_its_own_cell(session: Session) -> None:
    run = session.run("import ctypes\nctypes.CDLL(None).printf(b'no newline');")

    assert run.stdout == "no newline"
    assert session.run("pass").stdout == ""


def test_threads_print_too(session: Session) -> None:
    run = session.run(
        "import threading\n"
        "def work(n):\n"
        "    for i in range(100): print(f'{n}:{i}\\n', end='')\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()"
    )

    assert sorted(run.stdout.split()) == sorted(f"{n}:{i}" for n in range(4) for i in range(100))


def test_each_run_has_its_own_output(session: Session) -> None:
    assert [session.run(f"print({n})").stdout for n in range(3)] == ["0\n", "1\n", "2\n"]


def test_bytes_that_are_no_text_are_replaced(session: Session) -> None:
    assert session.run("import os; os.write(1, b'a\\xff\\xfeb');").stdout == "a\ufffd\ufffdb"
    assert session.run("print('a\\udc80b')").stdout == "a\ufffdb\n"


def test_nul_and_control_characters_pass(session: Session) -> None:
    assert session.run("print('a\\0b\\rc\\x1b[0m')").stdout == "a\0b\rc\x1b[0m\n"


def test_a_buffer_of_ones_own_is_possible(session: Session) -> None:
    run = session.run(
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()) as kept: print('hidden')\n"
        "kept.getvalue()"
    )

    assert (run.stdout, run.text) == ("", "'hidden\\n'")


def test_stdout_has_a_binary_side(session: Session) -> None:
    assert session.run("import sys; sys.stdout.buffer.write(b'raw\\n'); sys.stdout.flush()").stdout == "raw\n"


# -- while it runs -----------------------------------------------------------------------------------------------


def test_what_is_printed_is_seen_before_the_cell_ends(session: Session, inside: Callable[[Session], Path]) -> None:
    """The cell waits for a file that only the one who saw its output writes."""
    answered = threading.Event()

    def answer(text: str) -> None:
        if "no newline" in text:
            (inside(session) / "mnt/data/go").touch()
            answered.set()

    run = session.run(
        "import os, time\nprint('no newline', end='')\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('!')",
        on_stdout=answer,
    )

    assert answered.is_set()
    assert run.stdout == "no newline!\n"


def test_the_pieces_put_together_are_the_whole(session: Session) -> None:
    out: list[str] = []
    err: list[str] = []
    run = session.run(
        "import sys\nfor i in range(3000): print('line', i); print('err', i, file=sys.stderr)",
        on_stdout=out.append,
        on_stderr=err.append,
    )

    assert "".join(out) == run.stdout == "".join(f"line {i}\n" for i in range(3000))
    assert "".join(err) == run.stderr == "".join(f"err {i}\n" for i in range(3000))


def test_a_character_cut_in_two_is_put_together(session: Session) -> None:
    pieces: list[str] = []
    run = session.run(
        "import os, time\nfor b in 'é€😀'.encode(): os.write(1, bytes([b])); time.sleep(0.01)", on_stdout=pieces.append
    )

    assert "".join(pieces) == run.stdout == "é€😀"


def test_a_character_that_never_ends_is_told_as_such_in_the_stream_too(session: Session) -> None:
    pieces: list[str] = []
    run = session.run("import os; os.write(1, b'a\\xe2\\x82');", on_stdout=pieces.append)

    assert "".join(pieces) == run.stdout == "a\ufffd"


def test_what_is_printed_as_one_arrives_as_one(session: Session) -> None:
    for number in range(100):
        pieces: list[str] = []
        session.run(f"print('x{number}')", on_stdout=pieces.append)

        assert pieces == [f"x{number}\n"]


def test_no_line_is_torn_however_much_is_printed(session: Session) -> None:
    code = "for n in range(60_000): print('é' * (n % 90), n)\nprint('漢' * 300_000)"
    pieces: list[str] = []
    run = session.run(f"{code}\nprint('end', end='')", on_stdout=pieces.append)

    assert [piece[-9:] for piece in pieces[:-1] if not piece.endswith("\n")] == []
    assert pieces[-1].endswith("end")
    assert "".join(pieces).startswith(" 0\né 1\n")
    assert "".join(pieces).count("\n") == 60_001
    assert run.error is None


def test_a_line_without_its_end_is_seen_while_the_cell_sleeps_and_streams_keep_their_order(session: Session) -> None:
    pieces: list[tuple[str, str]] = []
    seen = threading.Event()

    def take(text: str) -> None:
        pieces.append(("out", text))
        seen.set()

    running = threading.Thread(
        target=lambda: session.run(
            "import sys, time\nprint('name? ', end='')\ntime.sleep(600)", on_stdout=take, timeout=60
        )
    )
    running.start()
    assert seen.wait(30)
    session.interrupt()
    running.join()
    assert pieces == [("out", "name? ")]

    pieces.clear()
    session.run(
        "import sys, time\nprint('a', end='')\nprint('b', end='', file=sys.stderr)\ntime.sleep(1)\nprint('c', end='')",
        on_stdout=lambda text: pieces.append(("out", text)),
        on_stderr=lambda text: pieces.append(("err", text)),
    )
    assert pieces == [("out", "a"), ("err", "b"), ("out", "c")]


def test_a_slow_watcher_slows_the_cell_down_and_loses_nothing(session: Session, other: Session) -> None:
    sizes: list[int] = []
    answers: list[str | None] = []

    def slowly(text: str) -> None:
        sizes.append(len(text))
        time.sleep(0.005)
        if len(sizes) == 5:
            answers.append(other.run("1 + 1").text)

    run = session.run("for i in range(4000): print('x' * 999)", on_stdout=slowly)

    assert sum(sizes) == 4000 * 1000
    assert answers == ["2"]
    assert run.error is None


def test_a_watcher_that_raises_is_told_after_the_run(session: Session) -> None:
    def fail(text: str) -> None:
        raise LookupError(text)

    with pytest.raises(LookupError, match="one"):
        session.run("print('one'); x = 5", on_stdout=fail)

    assert session.run("x").text == "5"
    assert session.generation == 1


def test_a_command_streams_as_a_cell_does(session: Session) -> None:
    out: list[str] = []
    result = session.shell("echo a; echo b >&2; echo c", on_stdout=out.append)

    assert ("".join(out), result.stdout, result.stderr) == ("a\nc\n", "a\nc\n", "b\n")


# -- bounds ------------------------------------------------------------------------------------------------------


def test_a_mebibyte_is_kept_whole(session: Session) -> None:
    run = session.run(f"print('x' * {MIB - 1})")

    assert (len(run.stdout), run.dropped_bytes) == (MIB, 0)


def test_more_loses_its_middle_and_says_how_much(session: Session) -> None:
    run = session.run("for i in range(150_000): print(f'{i:09}')", timeout=600)

    whole = "".join(f"{i:09}\n" for i in range(150_000))
    head, tail = whole[: MIB // 2], whole[-MIB // 2 :]
    assert run.dropped_bytes == len(whole) - MIB
    assert run.stdout.startswith(head)
    assert run.stdout.endswith(tail)
    assert f"{run.dropped_bytes:,} bytes left out" in run.stdout[MIB // 2 : -MIB // 2]
    assert session.output(run) == whole
    assert session.output(run.id) == whole


def test_a_message_past_a_megabyte_is_cut_and_says_so(session: Session) -> None:
    whole = session.run("raise ValueError('x' * 999_999)").error
    cut = session.run("raise ValueError('é' * 5_000_000)")
    script = scripts._raised(ValueError("x" * 5_000_000), None)

    assert whole is not None
    assert whole.message == "x" * 999_999
    assert cut.error is not None
    for message, traceback in ((cut.error.message, cut.error.traceback), (script.message, script.traceback)):
        assert len(message) == wire.MAX_TEXT >= len(traceback)
        assert message.endswith("… [cut here: 5,000,000 characters in all]")
        assert "… [cut here: 5,0" in traceback
    assert "ValueError" in cut.error.traceback[:1000], "a traceback begins where it begins"
    assert cut.recovery is not None
    assert len(cut.recovery.text) < 30_000
    assert "characters in all; the run's error has more]" in cut.recovery.cause
    assert len(answers.of_run(cut).text) + len(str(answers.of_run(cut).facts)) < 200_000


def test_the_streams_are_bounded_apart(session: Session) -> None:
    run = session.run(f"import sys\nprint('o' * {2 * MIB})\nprint('small', file=sys.stderr)")

    assert run.stderr == "small\n"
    assert run.dropped_bytes == MIB + 1
    assert session.output(run, "stderr") == "small\n"


def test_the_output_of_an_earlier_run_stays_readable(session: Session) -> None:
    first = session.run("print('first')")
    session.run("print('second')")
    session.reset()

    assert session.output(first) == "first\n"
    assert session.output(session.run("pass")) == ""


def test_a_command_has_its_output_kept_too(session: Session) -> None:
    result = session.shell("head -c 3000000 /dev/zero | tr '\\0' y")

    assert session.output(result) == "y" * 3_000_000
    assert len(result.stdout) < 1_100_000


def test_endless_output_is_ended_by_its_limit(session: Session, other: Session) -> None:
    seen = threading.Event()
    answers: list[str | None] = []

    def ask_the_other() -> None:
        seen.wait(20)
        answers.append(other.run("1 + 1").text)

    session.run("kept = [1]")
    asker = threading.Thread(target=ask_the_other)
    asker.start()
    run = session.run("kept.append(2)\nwhile True: print('y' * 9999)", on_stdout=lambda _: seen.set())
    asker.join()

    assert run.error is not None
    assert run.error.code == "output_limit"
    assert "67,108,864 bytes" in run.error.message
    assert answers == ["2"]
    assert len(session.output(run)) == 64 * MIB
    assert run.error.message.endswith("Variables are as they were before the run.")
    assert run.memory == "restored"
    assert session.run("kept").text == "[1]"
    assert session.generation == 1


def test_a_command_that_never_stops_printing_is_ended(session: Session) -> None:
    result = session.shell("yes")

    assert result.error is not None
    assert result.error.code == "output_limit"
    assert session.shell("echo on").stdout == "on\n"


def test_old_logs_make_room_for_new_ones(session: Session) -> None:
    runs = [session.run("import sys\nfor i in range(60): sys.stdout.write('z' * 1_000_000);") for _ in range(5)]
    kept = [len(session.output(run)) for run in runs]

    assert [run.error for run in runs] == [None] * 5
    assert kept[-1] == 60_000_000
    assert kept[0] == 0
    assert sum(kept) <= 4 * 64 * MIB


def test_a_hundred_thousand_small_writes_arrive(session: Session) -> None:
    run = session.run("import os\nfor i in range(100_000): os.write(1, b'.')")

    assert run.stdout == "." * 100_000


def test_a_child_that_holds_stdout_open_holds_nobody_up(session: Session) -> None:
    run = session.run("import subprocess\np = subprocess.Popen('sleep 1000; echo late', shell=True)\nprint('done')")

    assert run.stdout == "done\n"
    assert [stray.outcome for stray in run.strays] == ["killed"] * len(run.strays)
    assert session.run("print('next')").stdout == "next\n"


def test_output_of_a_large_write_that_the_freezer_cuts_is_not_lost(session: Session) -> None:
    """A thread in the midst of one write when its run ends goes on with it in the next."""
    first = session.run(
        "import sys, threading, time\n"
        "t = threading.Thread(target=lambda: [sys.stdout.write('w' * 3_000_000) for _ in range(3)])\n"
        "t.start()"
    )
    second = session.run("t.join()")

    assert len(session.output(first)) + len(session.output(second)) == 9_000_000
