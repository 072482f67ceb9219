"""`kit.save`: over a kernel's real channel, and where there is no sandbox at all."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast import kit
from holdfast.guest import saving
from holdfast.guest.channel import Channel
from holdfast.kernel import framing, wire
from holdfast.kit import inside

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # what forks here only saves and exits
_decoder = msgspec.msgpack.Decoder(wire.KernelMessage)


class Host:
    """The other end of a kernel's control socket."""

    def __init__(self, workspace: Path) -> None:
        self.sock, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(30)
        self.channel = saving.install(Channel(guest), root=os.fsencode(workspace.resolve()))
        self.guest = guest

    def next(self) -> wire.KernelMessage:
        return _decoder.decode(self.sock.recv(framing.PACKET_BYTES + 1)[1:])

    def send(self, message: wire.Message, *, to: int = 0) -> None:
        for packet in framing.addressed(message, to=to or os.getpid()):
            self.sock.send(packet)


@pytest.fixture
def host(workspace: Path) -> Iterator[Host]:
    host = Host(workspace)
    yield host
    inside.provide_save(None)
    host.sock.close()
    host.guest.close()


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("id\n1\n")
    return tmp_path


def in_thread(call: object, *arguments: object) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def body() -> None:
        try:
            outcome.append(call(*arguments))  # type: ignore[operator]
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, outcome


def answering(host: Host, *replies: wire.SavedReply) -> tuple[threading.Thread, list[object]]:
    def answer() -> list[wire.KernelMessage]:
        seen = []
        for reply in replies:
            seen.append(host.next())
            host.send(reply)
        return seen

    return in_thread(answer)


# -- inside ------------------------------------------------------------------------------------------------------


def test_the_host_is_asked_and_the_call_returns_when_it_has_answered(host: Host, workspace: Path) -> None:
    (workspace / "\udcff\n").write_text("odd")
    (workspace / "link").symlink_to("a.csv")
    thread, seen = answering(host, wire.SavedReply())

    kit.save("a.csv", Path("\udcff\n"), b"link", step="part 1")

    thread.join(30)
    assert seen == [[wire.Saving(paths=["a.csv", "\\xff\\n", "a.csv"], step="part 1")]]


def test_a_refusal_is_an_exception_with_the_reason(host: Host, workspace: Path) -> None:
    answering(host, wire.SavedReply(refused="a rehearsal saves nothing"))

    with pytest.raises(kit.SaveRefused, match="a rehearsal saves nothing"):
        kit.save("a.csv")


def test_what_cannot_be_saved_is_refused_without_asking(host: Host, workspace: Path) -> None:
    (workspace / "directory").mkdir()

    with pytest.raises(FileNotFoundError):
        kit.save("none.csv")
    with pytest.raises(ValueError, match="not a regular file"):
        kit.save("directory")
    with pytest.raises(ValueError, match="not in /mnt/data"):
        kit.save("/etc/passwd")
    with pytest.raises(ValueError, match="at least one"):
        kit.save()


def test_threads_save_while_the_main_loop_waits_for_requests(host: Host, workspace: Path) -> None:
    main, requests = in_thread(host.channel.receive)
    answerer, _ = answering(host, *[wire.SavedReply(refused=str(n)) for n in range(20)])
    savers = [in_thread(kit.save, "a.csv") for _ in range(20)]
    for thread, _ in savers:
        thread.join(30)
    answerer.join(30)
    assert main.is_alive()

    host.send(wire.ListNames())

    main.join(30)
    assert requests == [wire.ListNames()]
    # "0" is a refusal like the others: an empty one alone is none.
    assert sorted(int(outcome[0].reason) for _, outcome in savers) == list(range(20))  # type: ignore[attr-defined]


def test_a_request_that_a_saving_thread_reads_goes_to_the_main_loop(host: Host, workspace: Path) -> None:
    saver, outcome = in_thread(kit.save, "a.csv")
    assert isinstance(host.next(), wire.Saving)
    host.send(wire.Execute(turn=1, code="1"))
    host.send(wire.SavedReply())

    assert host.channel.receive() == wire.Execute(turn=1, code="1")
    saver.join(30)
    assert outcome == [None]


def test_an_interrupt_waits_for_the_answer(host: Host, workspace: Path) -> None:
    def interrupt_and_answer() -> None:
        host.next()
        os.kill(os.getpid(), signal.SIGINT)
        host.send(wire.SavedReply())

    in_thread(interrupt_and_answer)
    with pytest.raises(KeyboardInterrupt):
        kit.save("a.csv")

    answering(host, wire.SavedReply(refused="the second's own answer"))
    with pytest.raises(kit.SaveRefused, match="the second's own"):
        kit.save("a.csv")


def test_an_interrupt_of_the_main_loop_leaves_the_channel_usable(host: Host) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        host.channel.receive()

    host.send(wire.ListNames())
    assert host.channel.receive() == wire.ListNames()


def test_an_answer_that_nobody_waits_for_is_dropped(host: Host, workspace: Path) -> None:
    host.send(wire.SavedReply(refused="stale"))
    host.send(wire.ListNames())
    assert host.channel.receive() == wire.ListNames()

    answering(host, wire.SavedReply())
    kit.save("a.csv")


def test_a_forked_child_is_told_that_it_cannot(host: Host, workspace: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            kit.save("a.csv")
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_woken_copy_is_the_kernel_now(host: Host, workspace: Path) -> None:
    child = os.fork()
    if child == 0:
        host.channel.send(wire.Woken(pid=os.getpid()))
        kit.save("a.csv")
        os._exit(7)

    assert isinstance(host.next(), wire.Woken)
    assert host.next() == wire.Saving(paths=["a.csv"])
    host.send(wire.SavedReply(), to=child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_thread_that_waited_across_a_wake_is_told(host: Host, workspace: Path) -> None:
    saver, outcome = in_thread(kit.save, "a.csv")
    host.next()
    host.channel.send(wire.Woken(pid=os.getpid()))
    host.send(wire.ListNames())

    assert host.channel.receive() == wire.ListNames()
    saver.join(30)
    assert "restored" in str(outcome[0])


def test_what_was_for_a_dead_kernel_is_not_carried_out_by_who_takes_its_place(host: Host, workspace: Path) -> None:
    """A thread that waits in `kit.save` may read before the woken copy has said that it is the kernel now."""
    saver, outcome = in_thread(kit.save, "a.csv")
    host.next()
    dead = os.getpid() + 1
    host.send(wire.SavedReply(), to=dead)
    host.send(wire.Execute(turn=1, code="rolled_back()"), to=dead)
    host.send(wire.Execute(turn=1, code="x" * 2 * framing.PACKET_BYTES), to=dead)
    host.send(wire.ListNames())

    assert host.channel.receive() == wire.ListNames()
    assert outcome == []
    host.send(wire.SavedReply(refused="its own"))
    host.send(wire.ListNames())
    assert host.channel.receive() == wire.ListNames()
    saver.join(30)
    assert "its own" in str(outcome[0])


def test_a_host_that_hangs_up_is_a_refusal(host: Host, workspace: Path) -> None:
    saver, outcome = in_thread(kit.save, "a.csv")
    host.next()
    host.sock.shutdown(socket.SHUT_RDWR)

    saver.join(30)
    assert "hung up" in str(outcome[0])
    assert host.channel.receive() is None


# -- outside -----------------------------------------------------------------------------------------------------


def test_outside_of_a_sandbox_files_anywhere_are_synced_where_they_are(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("id\n")

    kit.save(tmp_path / "a.csv", str(tmp_path / "b.csv"), step="part 1")

    with pytest.raises(FileNotFoundError):
        kit.save(tmp_path / "none.csv")
