"""Hosts that die where they are told: `host.py FD`.

Each is forked from this process, which has imported everything and opened nothing: a host is started for each crash,
and imports would be most of what it does. Through the socket comes who is wanted, a home and where to die, with his
stdin, stdout and stderr; back goes his pid, and, when that is asked for, how he ended. A host reads commands and writes
answers, one JSON object a line.
"""

import json
import os
import socket
import sys
from typing import Any

from scenarios import BASE, SCENARIOS

from holdfast import Session, client, faults, service  # noqa: F401 (all of it is imported before points are noted)
from holdfast.errors import SessionHalted

passed: list[str] = []
sessions: dict[str, Session] = {}
home = ""


def note_points() -> None:
    """Write down each point that is passed, on its way to the real one."""
    real = faults.crashpoint

    def noted(name: str) -> None:
        passed.append(name)
        real(name)

    for name, module in list(sys.modules.items()):
        if name.startswith("holdfast.") and getattr(module, "crashpoint", None) is real:
            module.crashpoint = noted


def create(scenario: str) -> dict[str, Any]:
    chosen = SCENARIOS[scenario]
    session = Session(memory="256M", timeout=30, home=home, undo=chosen.undo, egress=chosen.egress)
    sessions[session.id] = session
    assert session.run(BASE).status == "committed"
    SCENARIOS[scenario].prepare(session)
    return told(session)


def resume(session: str, scenario: str = "changes") -> dict[str, Any]:
    sessions[session] = Session(resume=session, home=home, egress=SCENARIOS[scenario].egress)
    return told(sessions[session])


def refuse(session: str) -> dict[str, Any]:
    """What is said when nobody is to go on with a session."""
    try:
        Session(resume=session, home=home)
    except SessionHalted as error:
        return {"message": error.message}
    raise AssertionError(f"{session} goes on")


def play(session: str, scenario: str, at: str) -> dict[str, Any]:
    passed.clear()
    faults.arm(at)
    done = SCENARIOS[scenario].play(sessions[session])
    faults.arm("")
    points = list(passed)
    return {
        **told(sessions[session]),
        "passed": points,
        "run": done.id,
        "replayed": getattr(done, "replayed", False),
        "receipt": done.receipt.sha256,
        "sent": done.receipt.facts().egress,
        "may_have_happened": getattr(done, "may_have_happened", []),
    }


def go_on(session: str) -> dict[str, Any]:
    run = sessions[session].run("open('afterwards.txt', 'w').write('on we go')\nafterwards = 6")
    assert run.status == "committed"
    return told(sessions[session])


def close(session: str, keep: bool, at: str = "") -> dict[str, Any]:
    passed.clear()
    faults.arm(at)
    sessions.pop(session).close(keep=keep)
    faults.arm("")
    return {"passed": list(passed)}


def told(session: Session) -> dict[str, Any]:
    """Where a session says that it is."""
    live = session._session._transport._session
    recovery = session.recover()
    now = live.computer.now
    return {
        "session": session.id,
        "version": session.version,
        "generation": session.generation,
        "ckpt": session.ckpt,
        "files": {entry.path: entry.sha256 for entry in session.files()},
        "live": sorted(live.books.state.live()),
        "labels": recovery.names,
        "cause": recovery.cause,
        "may_have_happened": recovery.may_have_happened,
        "stage": live.computer.staging.name,
        "pids": [now.kernel.pid, now.kernel.init_pid, session._session._transport._service.node._keeper.peer_pid],
        "passed": list(passed),
    }


COMMANDS = {each.__name__: each for each in (create, resume, refuse, play, go_on, close)}


def wanted(line: socket.socket) -> bool:
    """Fork hosts and tell how they ended, until nobody asks. True in each of those: it is a host from now on."""
    global home
    while True:
        packet, fds, _, _ = socket.recv_fds(line, 4096, 3)
        if not packet:
            return False
        match json.loads(packet):
            case {"wait": pid}:
                line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            case {"home": home, "crash_at": at}:
                if (pid := os.fork()) == 0:
                    os.setsid()
                    for number, fd in enumerate(fds):
                        os.dup2(fd, number)
                        os.close(fd)
                    line.close()
                    faults.arm(at)
                    return True
                for fd in fds:
                    os.close(fd)
                line.send(b"%d" % pid)


def make_no_spares() -> None:
    """Whoever makes a spare kernel passes points as well, at any moment; and a point is known by how often it was
    passed before."""
    service.Service._refill = lambda *_: None  # type: ignore[method-assign]


if __name__ == "__main__":
    note_points()
    make_no_spares()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        is_host = wanted(asked)
    if is_host:
        for command_line in sys.stdin:
            command = json.loads(command_line)
            print(json.dumps(COMMANDS[command.pop("do")](**command)), flush=True)
