"""Two sessions of one host are strangers."""

import os

import pytest

from holdfast import Session


@pytest.fixture
def pair(open_session) -> tuple[Session, Session]:
    return open_session(), open_session()


def test_they_have_host_uids_of_their_own_where_root_gives_them(pair, tools):
    owners = [(tools.directory_of(session) / "files/data").stat().st_uid for session in pair]

    if os.geteuid() == 0:
        assert owners[0] != owners[1]
    else:
        assert owners == [os.geteuid()] * 2


@pytest.mark.parametrize("place", ["/mnt/data", "/tmp", "/home/user", "/dev/shm", "/var/tmp"])
def test_a_file_of_one_is_not_seen_by_the_other(pair, tools, place):
    one, other = pair
    tools.try_in(one, f'open("{place}/mine", "w").write("secret")')

    assert (
        tools.try_in(other, f'print(tries(reads, "{place}/mine"), os.listdir("{place}").count("mine"))') == "ENOENT 0"
    )


def test_a_process_of_one_is_not_seen_by_the_other(pair, tools):
    one, other = pair
    one.run("import subprocess; child = subprocess.Popen(['sleep', '98765'])")

    printed = tools.try_in(other, 'print([n for n in os.listdir("/proc") if n.isdigit()] == [str(os.getpid())])')
    assert printed == "True"


def test_system_v_ipc_of_one_is_not_seen_by_the_other(pair, tools):
    one, other = pair
    make = 'print(call("shmget", 4242, 4096, 0o1666), call("semget", 4242, 1, 0o1666), call("msgget", 4242, 0o1666))'
    find = 'print(call("shmget", 4242, 4096, 0), call("semget", 4242, 1, 0), call("msgget", 4242, 0))'

    assert tools.try_in(one, make).count("SUCCESS") == 3
    assert tools.try_in(other, find) == "ENOENT ENOENT ENOENT"


def test_a_posix_queue_of_one_is_not_seen_by_the_other(pair, tools):
    one, other = pair
    assert tools.try_in(one, 'print(call("mq_open", b"shared", 0o102, 0o666, None))').startswith("SUCCESS")

    assert tools.try_in(other, 'print(call("mq_open", b"shared", 2, 0, None))') == "ENOENT"


def test_shared_memory_of_one_is_not_seen_by_the_other(pair, tools):
    one, other = pair
    tools.try_in(
        one, "from multiprocessing import shared_memory as m; keep = m.SharedMemory('shared', create=True, size=64)"
    )

    printed = tools.try_in(
        other, "from multiprocessing import shared_memory as m; print(tries(m.SharedMemory, 'shared'))"
    )
    assert printed == "ENOENT"


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET"])
def test_an_abstract_socket_of_one_is_not_reached_by_the_other(pair, tools, kind):
    one, other = pair
    tools.try_in(
        one,
        f"""
        keep = socket.socket(socket.AF_UNIX, socket.{kind}); keep.bind("\\0shared")
        tries(keep.listen)
        """,
    )

    connect = f'print(tries(socket.socket(socket.AF_UNIX, socket.{kind}).connect, "\\0shared"))'
    assert tools.try_in(other, connect) == "ECONNREFUSED"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_loopback_port_of_one_is_not_reached_by_the_other_and_both_can_have_it(pair, tools, address):
    one, other = pair
    family = "AF_INET6" if ":" in address else "AF_INET"
    serve = f'keep = socket.create_server(("{address}", 8123), family=socket.{family}); print("serving")'
    connect = f'print(tries(socket.socket(socket.{family}).connect, ("{address}", 8123)))'

    assert tools.try_in(one, serve) == "serving"
    assert tools.try_in(other, connect) == "ECONNREFUSED"
    assert tools.try_in(other, serve) == "serving"


def test_their_namespaces_are_all_different(pair, tools):
    look = """
        for kind in ("mnt", "uts", "ipc", "user", "pid", "net"):
            print(os.readlink("/proc/self/ns/" + kind))
    """
    one, other = (tools.try_in(session, look).splitlines() for session in pair)
    host = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "uts", "ipc", "user", "pid", "net")]

    assert all(len({a, b, c}) == 3 for a, b, c in zip(one, other, host, strict=True))


def test_their_memory_is_not_shared_after_the_fork(pair, tools):
    """Both were forked from one zygote: what one writes must not appear in the other, nor in later ones."""
    one, other = pair
    poison = "import sys, json, builtins; json.dumps = None; builtins.len = None; sys.path.insert(0, '/tmp')"
    one.run(poison)

    honest = "import json, sys; (json.dumps([1]), len([1]), '/tmp' in sys.path)"
    assert other.run(honest).text == "('[1]', 1, False)"
    with Session() as later:
        assert later.run(honest).text == "('[1]', 1, False)"
    one.reset()


def test_the_memory_of_one_is_not_read_by_the_other(pair, tools):
    """By the numbers that the host knows its processes by, and by those that it has in its own session."""
    one, other = pair
    one.run("secret = bytearray(b'the-secret-of-another')")
    processes = tools.host_pids(one)
    address = one.run(
        "import ctypes, os; print(os.getpid(), ctypes.addressof(ctypes.c_char.from_buffer(secret)))"
    ).stdout
    inside, at = (int(word) for word in address.split())

    printed = tools.try_in(
        other,
        f"""
        class Span(_ctypes.Structure):
            _fields_ = [("base", _ctypes.c_void_p), ("length", _ctypes.c_size_t)]
        for pid in {[*processes, inside]}:
            found = _ctypes.create_string_buffer(30)
            here, there = Span(_ctypes.addressof(found), 21), Span({at}, 21)
            print(call("process_vm_readv", pid, _ctypes.byref(here), 1, _ctypes.byref(there), 1, 0),
                  call("ptrace", 16, pid, 0, 0), found.value == b"")
            if pid != os.getpid():
                print(tries(os.open, f"/proc/{{pid}}/mem", os.O_RDONLY), tries(os.pidfd_open, pid))
        """,
    )

    assert set(printed.split()) <= {"EPERM", "ESRCH", "ENOENT", "EACCES", "EINVAL", "True"}


def test_they_draw_different_random_numbers(pair, tools):
    sources = "random.random(), numpy.random.random(), os.urandom(8).hex(), uuid.uuid4()"
    draw = f"import os, random, uuid, numpy; print({sources})"
    one, other = (session.run(draw).stdout.split() for session in pair)

    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_new_session_finds_nothing_of_one_that_had_its_place(open_session, tools):
    with Session() as first:
        tools.try_in(first, 'open("/mnt/data/left", "w"); open("/tmp/left", "w"); open("/dev/shm/left", "w")')
    second = open_session()

    look = 'print([p for p in ("/mnt/data", "/tmp", "/dev/shm", "/home/user") if "left" in os.listdir(p)])'
    assert tools.try_in(second, look) == "[]"


def test_a_kernel_after_a_reset_finds_nothing_in_memory_of_the_one_before(session, attack):
    attack('open("/dev/shm/left", "w").close(); call("shmget", 77, 4096, 0o1666); secret = 1')
    session.reset()

    assert (
        attack('print(os.listdir("/dev/shm"), call("shmget", 77, 4096, 0), "secret" in globals())') == "[] ENOENT False"
    )


def test_one_that_dies_of_hunger_does_not_take_the_other_along(open_session, tools):
    greedy, other = open_session(memory="192M"), open_session()
    other.run("kept = 1")
    run = greedy.run("x = bytearray(b'x') * (400 << 20)")

    assert run.error is not None
    assert run.error.code in ("out_of_memory", "exception")
    assert other.run("kept").text == "1"
    assert other.generation == 1
