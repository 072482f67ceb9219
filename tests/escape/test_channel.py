"""The channel to the host: whatever a guest sends there, the host stays up, stays within bounds, and is not lied into
another session's business. A guest that breaks the protocol loses its kernel and nothing else.
"""

import os
import threading
import time

import msgspec
import pytest

MIB = 1 << 20

SHOWN = "b'\\x84\\xa4type\\xa5Shown\\xa4kind\\xa7display\\xa4data\\x80\\xa8metadata\\x81\\xa1x'"
"""A display message up to the value of its metadata's only entry."""

GARBAGE = {
    "nothing": "b''",
    "one_byte": "b'x'",
    "a_flag_and_nothing": "b'\\0'",
    "noise": "os.urandom(5000)",
    "zeros": "bytes(50_000)",
    "oversized_packet": "b'\\0' + bytes(100_000)",
    "wrong_type": "b'\\0' + msgspec.msgpack.encode({'type': 'Finished', 'count': 'many'})",
    "unknown_type": "b'\\0' + msgspec.msgpack.encode({'type': 'StartZygote', 'python': '/bin/sh'})",
    "a_host_request": "b'\\0' + msgspec.msgpack.encode({'type': 'Execute', 'code': 'x'})",
    "supervision": "b'\\0' + msgspec.msgpack.encode({'type': 'Forked', 'pid': 1})",
    "not_a_map": "b'\\0' + msgspec.msgpack.encode([1, 2, 3])",
    "huge_array_header": "b'\\0\\xdd\\xff\\xff\\xff\\xff'",
    "huge_map_header": "b'\\0\\xdf\\xff\\xff\\xff\\xff'",
    "huge_string_header": "b'\\0\\xdb\\xff\\xff\\xff\\xff'",
    "invalid_utf_8": "b'\\0\\x81\\xa4type\\xa4\\xff\\xfe\\xff\\xfe'",
    "deep_nesting": "b'\\0\\x81\\xa4type' + b'\\x91' * 59_000",
    "deep_metadata": f"b'\\0' + {SHOWN} + b'\\x91' * 59_000",
    "unhashable_keys": f"b'\\0' + {SHOWN} + b'\\x81\\x80\\x01'",
    "huge_integer": "b'\\0' + msgspec.msgpack.encode({'type': 'Finished', 'count': 2**64 - 1, 'exit_code': -2**63})",
    "a_second_ready": "b'\\0' + msgspec.msgpack.encode({'type': 'Ready', 'pid': 1})",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_costs_the_guest_its_kernel_at_most(session, tools, garbage):
    run = tools.storm(
        session, f"import msgspec, time\ncontrol().send({GARBAGE[garbage]})\ntime.sleep(0.2)\nprint('went on')"
    )

    assert run.error is None or run.error.code == "killed"
    if run.error is None:
        # A message that is well formed, if a lie: the guest may tell lies about its own run.
        assert garbage in ("huge_integer", "a_second_ready")
        session.reset()


def test_a_message_in_endless_parts_is_cut_off(session, tools):
    run = tools.storm(
        session,
        "import time\ngate = control()\nfor _ in range(1700): gate.send(b'\\1' + bytes(60_000))\ntime.sleep(5)",
    )

    assert run.error is not None
    assert "protocol" in run.error.message


def test_a_message_of_empty_parts_does_not_grow_in_the_host(session, tools):
    """A part of no bytes never reaches a limit that counts bytes."""
    held: list[int] = []
    tools.storm(
        session,
        "import time\ngate = control()\nfor _ in range(100_000): gate.send(b'\\1')\n"
        "time.sleep(0.3)\nprint('sent', flush=True)\ntime.sleep(0.3)",
        on_stdout=lambda _: held.append(len(tools.host_end(session)._assembler._parts)),
    )

    assert max(held, default=0) < 10_000


def test_a_message_with_colliding_keys_does_not_stop_the_host(session, tools):
    """hash(-1) == hash(-2), so tuples of them all collide, and a dict of n such keys takes time n². Half a megabyte
    takes 18 s, what fits into one message takes a day; and the host has one loop for all its sessions."""
    attack = """
import itertools, time
keys = list(itertools.islice(itertools.product((0xFF, 0xFE), repeat=15), 32_000))
body = b"".join(b"\\x9f" + bytes(key) + b"\\xc0" for key in keys)
head = b"\\x84\\xa4type\\xa5Shown\\xa4kind\\xa7display\\xa4data\\x80\\xa8metadata\\x81\\xa1x\\xde"
gate, whole = control(), head + len(keys).to_bytes(2, "big") + body
for at in range(0, len(whole), 60_000):
    if at + 60_000 >= len(whole):
        open("/mnt/data/sent", "w").close()
    gate.send((b"\\1" if at + 60_000 < len(whole) else b"\\0") + whole[at : at + 60_000])
time.sleep(1)
"""
    victim = threading.Thread(target=lambda: tools.storm(session, attack))
    victim.start()
    pauses, sent = [0.0], False
    while victim.is_alive():
        before = time.monotonic()
        victim.join(0.05)
        pauses.append(time.monotonic() - before)
        sent = sent or any(tools.directory_of(session).glob("stages/*/data/sent"))

    assert sent
    assert max(pauses) < 8, f"the whole host process stood still for {max(pauses):.0f} s"


@pytest.mark.parametrize("by", ["metadata", "updates", "many", "ids", "names_of_forms"])
def test_displays_are_bounded_however_they_come(session, tools, by):
    code = {
        "metadata": "for n in range(12): show(wire.Mime(), metadata={'x': 'y' * (8 << 20)})",
        "updates": """
for n in range(12): show(wire.Mime(text={'text/plain': 'x'}), display_id=str(n))
for n in range(12): show(wire.Mime(text={'text/plain': 'x' * (8 << 20)}), display_id=str(n), update=True)
""",
        "many": "for n in range(12): show(wire.Mime(text={'text/plain': 'x' * (8 << 20)}))",
        "ids": "for n in range(12): show(wire.Mime(), display_id='x' * (8 << 20))",
        "names_of_forms": "for n in range(12): show(wire.Mime(text={'x' * (8 << 20): ''}))",
    }[by]
    show = "def show(data, **more): forge(wire.Shown(kind='display', data=data, **more))\n"
    run = tools.storm(session, "from holdfast.kernel import wire\n" + show + code)

    assert len(msgspec.msgpack.encode(run.displays)) < 72 * MIB


@pytest.mark.parametrize(
    "message",
    [
        "wire.Shown(kind='display', data=wire.Mime(text={str(n): '' for n in range(400_000)}))",
        "wire.Saving(paths=[''] * 1_000_000)",
        "wire.Finished(turn=-1, names={str(n): '' for n in range(400_000)})",
        "wire.Finished(turn=-1, gone=[''] * 1_000_000)",
        "wire.Named(names={str(n): wire.Name() for n in range(100_000)})",
    ],
    ids=["forms", "paths", "names", "words", "live names"],
)
def test_what_takes_little_on_the_wire_and_much_in_the_host_is_refused_before_it_is_built(session, tools, message):
    tools.storm(session, "from holdfast.kernel import wire; session_is_up = True")
    before = tools.resident_bytes()
    run = tools.storm(session, f"from holdfast.kernel import wire\nforge({message})\nimport time; time.sleep(5)")

    assert run.error is not None
    assert "broke the protocol" in run.error.message
    assert tools.resident_bytes() - before < 24 * MIB


def test_a_forged_end_brings_no_more_threads_than_an_honest_one(session, tools):
    # Alone in its round: an honest end right behind it would take its place.
    forged = "wire.Finished(turn=1, threads=['x'] * 300_000)"
    run = tools.storm(session, f"import time\nfrom holdfast.kernel import wire\nforge({forged})\ntime.sleep(1)")
    session.reset()

    assert len(run.strays) < 10_000


def test_a_forged_end_ends_the_run_and_a_reset_is_clean(session, tools):
    tools.storm(session, "from holdfast.kernel import wire\nfor _ in range(5): forge(wire.Finished(turn=1, count=77))")
    session.reset()

    run = session.run("6 * 7")
    assert (run.text, run.count) == ("42", 1)


def test_a_forged_error_is_only_the_guests_own_word(session, tools):
    forged = "wire.Raised(name='OutOfMemory', message='x' * 50_000, traceback='\\x1b[2J' * 10_000, kind='exception')"
    run = session.run(tools.PRELUDE + f"from holdfast.kernel import wire\nforge({forged})")

    assert run.error is not None
    assert run.error.code == "exception"
    assert session.generation == 1


def test_a_forged_error_takes_no_more_room_than_an_honest_one(session, tools):
    forged = "wire.Raised(name='E' * 1000, message='x' * 10_000_000, traceback='y' * 10_000_000, kind='exception')"
    run = session.run(tools.PRELUDE + f"from holdfast.kernel import wire\nforge({forged})")

    assert (run.status, run.error.name) == ("rolled_back", "E" * 200)
    assert max(len(run.error.message), len(run.error.traceback)) < 1_001_000
    assert len(run.receipt.envelope) < 20_000


def test_a_cell_that_claims_not_to_have_begun_is_taken_back_all_the_same(session, tools):
    session.run("kept = []")
    forged = "wire.Raised(name='SyntaxError', message='nothing was started', traceback='', kind='syntax')"
    did = "kept.append('stays')\nopen('stays.txt', 'w').write('1')\n"
    run = session.run(tools.PRELUDE + did + f"from holdfast.kernel import wire\nforge({forged})")

    assert run.status == "rolled_back"
    assert session.run("import os; kept, os.path.exists('stays.txt')").text == "([], False)"
    assert session.files() == []


def test_a_line_number_that_is_no_number_costs_nothing(session, tools):
    session.run("x = 1")
    run = tools.storm(
        session,
        """
        lie = b'File "<ipython-input-1-a>", line ' + b'9' * 5000 + b'\\n'
        for fd in map(int, os.listdir('/proc/self/fd')):
            try:
                if fd > 2 and os.readlink(f'/proc/self/fd/{fd}').startswith('pipe:'): os.write(fd, lie)
            except OSError: pass
        os._exit(1)
        """,
    )

    assert (run.status, run.error.code) == ("rolled_back", "killed")
    assert session.run("x").text == "1"


@pytest.mark.parametrize(
    "message", ["Asked(prompt='password?')", "Named(names={})", "Completed(matches=[], start=-9, end=2**60)"]
)
def test_a_message_out_of_place_costs_the_guest_its_kernel_at_most(session, tools, message):
    run = tools.storm(session, f"from holdfast.kernel import wire\nimport time\nforge(wire.{message})\ntime.sleep(2)")

    assert run.error is None or run.error.code == "killed"


def test_messages_without_end_do_not_outlast_the_deadline(session, tools):
    run = tools.storm(session, "from holdfast.kernel import wire\nwhile True: forge(wire.Cleared())", timeout=2)

    assert run.error is not None
    assert run.error.code == "timeout"


def test_messages_of_a_thread_after_the_run_disturb_no_later_one(session, tools):
    tools.storm(
        session,
        """
import threading
from holdfast.kernel import wire
def flood():
    while True: forge(wire.Shown(kind="display", data=wire.Mime(text={"text/plain": "spam"})))
threading.Thread(target=flood, daemon=True).start()
""",
    )
    assert isinstance(session.names(), dict)
    session.reset()

    assert session.run("6 * 7").displays == [] or session.run("6 * 7").text == "42"


def test_descriptors_sent_to_the_host_do_not_stay_there(session, attack):
    before = len(os.listdir("/proc/self/fd"))
    attack("""
        from holdfast.kernel import framing, wire
        packet = framing.packets(wire.Cleared())[0]
        gate = control()
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
        for _ in range(40):
            tries(socket.send_fds, gate, [packet], files)  # from Linux 6.16 on it is not even sent
        for fd in files: os.close(fd)
    """)

    assert len(os.listdir("/proc/self/fd")) < before + 50, "a spare session may have started; two thousand were sent"


def test_forged_credentials_are_refused(session, attack):
    printed = attack("""
        import struct
        def send_as(pid, uid):
            ancillary = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iii", pid, uid, uid))]
            return control().sendmsg([b"\\0"], ancillary)
        print(tries(send_as, 1, 1000), tries(send_as, os.getpid(), 0), tries(send_as, os.getpid(), 999))
    """)

    assert set(printed.split()) <= {"EPERM", "EINVAL", "ESRCH"}


def test_a_child_that_speaks_for_the_kernel_is_not_mistaken_for_it(session, tools):
    """Interrupts and kills go to the process that started as the kernel."""
    kernel = tools.host_end(session).pid
    tools.storm(
        session,
        """
from holdfast.kernel import framing, wire
import time
gate = control()
if os.fork() == 0:
    for packet in framing.packets(wire.Cleared()): gate.send(packet)
    os._exit(0)
os.wait()
""",
    )

    assert tools.host_end(session).pid == kernel


@pytest.mark.parametrize("how", ["os.close(found)", "gate.shutdown(socket.SHUT_RDWR)", "gate.shutdown(socket.SHUT_RD)",
                                 "gate.shutdown(socket.SHUT_WR)", "os.closerange(0, 4096)"])  # fmt: skip
def test_a_guest_that_hangs_up_is_replaced(session, tools, how):
    run = tools.storm(
        session,
        f"""
gate = control()
found = next(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)
             and os.path.samefile("/proc/self/fd/" + n, f"/proc/self/fd/{{gate.fileno()}}"))
{how}
gate.close()
""",
        timeout=5,
    )

    after = session.run("6 * 7")
    assert after.text == "42"
    if run.error is None:  # it could still speak: its end came when it was spoken to after the run, and fails no other
        assert how == "gate.shutdown(socket.SHUT_RD)"
        assert "the kernel was ended" in after.kernel_replaced


def test_a_guest_that_never_answers_is_replaced(session):
    run = session.run(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)", timeout=1
    )

    assert run.error is not None
    assert run.error.code == "timeout"
    assert run.memory == "restored"


def test_a_guest_that_stopped_itself_is_replaced(session):
    run = session.run("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", timeout=1)

    assert run.error is not None
    assert run.memory == "restored"


DEAF = """
import signal, time
from holdfast.kernel import wire
signal.signal(signal.SIGINT, signal.SIG_IGN)
forge(wire.Finished(turn=1))
while True: time.sleep(1)
"""


def test_a_guest_that_stops_listening_cannot_hold_a_run_past_its_deadline(session, tools):
    """It says that it is done and never reads again; a cell larger than the socket's buffer then has nowhere to go."""
    tools.storm(session, DEAF)

    run = tools.within(
        15, lambda: session.run("#" * 4_000_000, timeout=2), rescue=lambda: tools.host_end(session).kill()
    )
    assert run.error is not None


@pytest.mark.parametrize(
    ("message", "because"),
    [
        ("Printing()", "it does not read what it asks for"),
        ("Saving(paths=['x'])", "it saves and waits for no answer"),
    ],
)
def test_a_guest_that_asks_and_does_not_read_cannot_hold_a_run_past_its_deadline(session, tools, message, because):
    attack = f"""
import signal
from holdfast.kernel import framing, wire
signal.signal(signal.SIGINT, signal.SIG_IGN)
gate, packets = control(), list(framing.packets(wire.{message}))
while True:
    for packet in packets: gate.send(packet)
"""
    run = tools.within(
        20, lambda: tools.storm(session, attack, timeout=10), rescue=lambda: tools.host_end(session).kill()
    )

    assert run.error is not None
    assert because in run.error.message


def test_a_guest_that_stops_listening_cannot_hold_a_question_for_ever(session, tools, monkeypatch):
    monkeypatch.setattr("holdfast.sessions._QUICK_S", 1.0, raising=False)
    tools.storm(session, DEAF)

    tools.within(15, lambda: session.complete("#" * 4_000_000), rescue=lambda: tools.host_end(session).kill())


def test_a_guest_that_stops_listening_cannot_keep_its_session_open(tools):
    from holdfast import Session

    session = Session(timeout=30)
    tools.storm(session, DEAF)
    kernel, path = tools.host_end(session), tools.directory_of(session)
    stuck = threading.Thread(target=lambda: session.run("#" * 4_000_000, timeout=1), daemon=True)
    stuck.start()
    stuck.join(0.5)
    tools.within(15, session.close, rescue=kernel.kill)

    stuck.join(30)
    assert not path.exists()


def test_gigabytes_on_stdout_stop_at_the_limit(session, tools):
    run = session.run("import os\nwhile True: os.write(1, b'x' * 65536)")

    assert run.error is not None
    assert run.error.code == "output_limit"
    assert len(run.stdout) < 2 * MIB
    logs = tools.directory_of(session) / "log"
    assert sum(file.stat().st_size for file in logs.iterdir()) <= 66 * MIB


def test_output_of_all_kinds_of_bytes_is_text(session):
    run = session.run("import os; os.write(1, bytes(range(256)) * 100); os.write(2, b'\\xed\\xa0\\x80' * 100)")

    assert run.error is None
    run.stdout.encode()
    run.stderr.encode()


EVIL = {
    "attributes_that_explode": "class E:\n    def __getattr__(self, n): raise RuntimeError(n)\nevil = E()",
    "a_size_that_explodes": "class E:\n    def __sizeof__(self): raise RuntimeError\nevil = E()",
    "a_size_beyond_integers": "class E:\n    nbytes = 10 ** 40\nevil = E()",
    "a_negative_size": "class E:\n    nbytes = -5\nevil = E()",
    "a_size_that_exits": "class E:\n    @property\n    def nbytes(self): raise SystemExit(3)\nevil = E()",
    "a_size_that_interrupts": "class E:\n    @property\n    def nbytes(self): raise KeyboardInterrupt\nevil = E()",
    "a_huge_name": "globals()['n' * 5_000_000] = 1",
    "a_huge_type_name": "evil = type('T' * 5_000_000, (), {})()",
    "lone_surrogates": "globals()['\\ud800evil'] = 1",
    "names_that_are_no_strings": "globals()[1] = 2; globals()[None] = 3",
    "a_name_of_a_strange_string": (
        "class S(str):\n    def startswith(self, *a): raise RuntimeError\nglobals()[S('evil')] = 1"
    ),
    "a_type_with_an_evil_meta_class": (
        "class M(type):\n    def __getattribute__(c, n): raise RuntimeError\nclass E(metaclass=M): pass\nevil = E()"
    ),
    "a_module_name_of_no_string": "class E: pass\nE.__module__ = 7\nevil = E()",
    "a_hundred_thousand_names": "globals().update({f'name{i}': i for i in range(100_000)})",
    "a_dict_that_changes": (
        "class D(dict):\n    def items(self): raise RuntimeError\n    __len__ = items\nevil = D(a=1)"
    ),
}


@pytest.mark.parametrize("evil", EVIL)
def test_an_evil_object_survives_being_asked_about(session, evil):
    """The host gets an answer, and the guest keeps its memory: a question is not to cost it that."""
    session.run("kept = 1")
    assert session.run(EVIL[evil]).error is None

    names = session.names()
    session.complete("evil.")
    session.complete("ev")
    session.inspect("evil", 2)

    assert all(isinstance(name, str) and value.approx_bytes >= 0 for name, value in names.items())
    msgspec.json.encode(names)
    assert session.generation == 1
    assert session.run("kept").text == "1"


@pytest.mark.parametrize("question", ["names", "complete", "inspect"])
def test_an_object_that_never_answers_costs_the_guest_its_kernel_at_most(session, monkeypatch, question):
    monkeypatch.setattr("holdfast.sessions._QUICK_S", 1.0, raising=False)
    session.run("""
import time
class E:
    @property
    def nbytes(self): time.sleep(1000)
    def __dir__(self): time.sleep(1000)
    def __repr__(self): time.sleep(1000)
    __doc__ = property(lambda self: time.sleep(1000))
evil = E()
""")
    ask = {
        "names": session.names,
        "complete": lambda: session.complete("evil."),
        "inspect": lambda: session.inspect("evil", 3),
    }[question]

    assert ask() is not None


def test_evil_displays_reach_the_host_as_plain_data(session):
    run = session.run("""
from IPython.display import display
class E:
    def _repr_mimebundle_(self, **_):
        return {"text/plain": "\\ud800", "image/png": "not base64!", "\\udcff": b"x", "application/json": {"a": {1, 2}},
                "text/html": 7}, {"text/plain": {"x": object()}}
display(E())
display({"a": 1}, raw=True)
""")

    msgspec.json.encode(run)


def test_an_evil_exception_reaches_the_host_as_plain_data(session):
    run = session.run("""
class E(Exception):
    def __str__(self): raise RuntimeError
    def __repr__(self): raise RuntimeError
E.__name__ = "\\ud800" * 100
raise E()
""")

    assert run.error is not None
    msgspec.json.encode(run)


def test_many_kernels_leave_no_descriptor_in_the_host(session):
    session.reset()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        session.run("import os; os._exit(1)")

    a_spare_session = 16  # may have come meanwhile: the one kept ready for whoever asks next
    assert len(os.listdir("/proc/self/fd")) <= before + a_spare_session


def test_the_host_does_not_wait_for_a_socket_that_a_guest_sends_it(session, tools):
    """Whoever closes the last descriptor of a TCP socket waits, if it lingers: here that would be the host."""
    started = time.monotonic()
    run = tools.storm(session, """
        import array, os, socket, struct
        listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen()
        sender = socket.create_connection(listener.getsockname()); receiver, _ = listener.accept()
        sender.setblocking(False)
        try:
            while True: sender.send(bytes(65536))
        except BlockingIOError: pass
        try: sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
        except PermissionError: print("may not linger")
        sender.setblocking(True)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sender.fileno()]))]
        tries(control().sendmsg, [b"\\0\\x81\\xa4type\\xa7Cleared"], rights)  # from Linux 6.16 on it is not even sent
        sender.close()
    """)  # fmt: skip

    assert (run.error, run.stdout) == (None, "may not linger\n")
    assert time.monotonic() - started < 50


TALKS = "for _ in range(3200): os.write(1, bytes(65536))"


def test_an_assertion_that_prints_without_end_ends_its_own_run_and_costs_no_other(session, tools):
    before = tools.resident_bytes()
    run = session.run(tools.PRELUDE, asserts=[TALKS])

    assert run.error is not None
    assert run.error.code == "output_limit"
    assert tools.resident_bytes() - before < 64 * MIB
    honest = session.run("3")
    assert (honest.error, honest.text, honest.stdout) == (None, "3", "")


@pytest.mark.parametrize("how", [TALKS, "for n in range(400_000): os.write(1 + n % 2, b'x')"], ids=["much", "often"])
def test_what_is_printed_while_nothing_runs_is_bounded_and_charged_to_no_run(session, tools, how):
    tools.storm(session, f"class Talks:\n    def __sizeof__(self):\n        {how}\n        return 1\ntalks = Talks()")
    before = tools.resident_bytes()
    assert "talks" in session.names()

    kept = tools.host_end(session)._early
    assert 0 < sum(len(printed.data) for printed in kept) <= 16 * MIB
    assert len(kept) < 1000
    assert tools.resident_bytes() - before < 64 * MIB
    honest = session.run("for _ in range(1023): os.write(1, bytes(65536));")
    assert honest.error is None, "it printed less than it may"
