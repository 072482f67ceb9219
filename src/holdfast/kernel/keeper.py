"""The keeper: pid 1 of the outer pid namespace, in which everything that Holdfast starts lives.

It exists for one property: however the host dies, the keeper sees it and exits, and Linux then ends every
process of the namespace and, with them, every mount. Nothing can be left running.

On request it starts zygotes and gives live sessions another stage; it reaps, and does nothing else. Started by
`nodes.local` as `python -c … <control fd> <host pidfd> <fd of the sessions' freezers, or -1> <fd of a pipe>`. Only the
keeper and its children have the pipe open for writing: by the other end the host sees that the keeper has ended.
"""

import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress

import msgspec

from holdfast.kernel import framing, wire
from holdfast.sandbox import linux, mounts, namespaces, overlay

_decoder: "msgspec.msgpack.Decoder[wire.StartZygote | wire.Stage]" = msgspec.msgpack.Decoder(
    wire.StartZygote | wire.Stage
)
_stagers: set[int] = set()
"""Children that mount a stage and have not been reaped."""
_ZYGOTE = f"import sys; sys.path.append({mounts.PACKAGE_ROOT!r}); from holdfast.kernel.zygote import main; main()"


def main() -> None:
    """Make the outer namespaces, then keep them from a child that is their pid 1."""
    control, host, freezers = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    _mind_signals()
    try:
        namespaces.enter_outer(as_root=os.geteuid() == 0)
    except OSError as error:
        framing.send_with_fds(control, wire.Refused(reason=str(error)), [])
        sys.exit(1)
    if os.fork() == 0:
        _keep(control, host, freezers)
    os._exit(0)


def _mind_signals() -> None:
    """Undo what the host inherited: a shell has its background jobs ignore SIGINT and SIGQUIT, and nohup SIGHUP. Guests
    would inherit it from us, and live through signals that end a process elsewhere."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python itself ignores these
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _keep(control: socket.socket, host: int, freezers: int) -> None:
    # In a group of its own: Ctrl-C in a terminal is the host's to handle, which then ends us in order.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    framing.send_with_fds(control, wire.Forked(pid=os.getpid()), [])
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(host, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(1000)}
        _reap(control)
        if host in ready or (control.fileno() in ready and not _answer(control)):
            _end(freezers)


def _end(freezers: int) -> None:
    """Our end is everybody's. On cgroup v1 a frozen process dies only when it is thawed, and nobody may open this home
    again: we thaw what is left. It is killed first, and so runs nothing of its own any more."""
    if freezers >= 0:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        for name in os.listdir(freezers):
            with suppress(OSError):  # no session's, or removed meanwhile
                state = os.open(f"{name}/freezer.state", os.O_WRONLY, dir_fd=freezers)
                os.write(state, b"THAWED")
    os._exit(0)


def _reap(control: socket.socket) -> None:
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in _stagers and status != 0:  # it answers, or ends otherwise than by 0
                framing.send_with_fds(control, wire.Refused(reason="whoever was to mount it died"), [])
            _stagers.discard(pid)
    except ChildProcessError:
        pass


def _answer(control: socket.socket) -> bool:
    """False: the host has hung up."""
    body, fds = framing.receive_with_fds(control)
    if not body:
        return False
    request = _decoder.decode(body)
    pid = os.fork()
    if pid == 0:
        _carry_out(control, request, fds)
    for fd in fds:
        os.close(fd)
    if isinstance(request, wire.Stage):
        _stagers.add(pid)
    else:
        framing.send_with_fds(control, wire.Forked(pid=pid), [])
    return True


def _carry_out(control: socket.socket, request: wire.StartZygote | wire.Stage, fds: list[int]) -> None:
    match request:
        case wire.StartZygote():
            _become_zygote(request, fds)
        case wire.Stage():
            _stage(control, request, fds)


def _stage(control: socket.socket, request: wire.Stage, fds: list[int]) -> None:
    """In a child: whoever has entered a session's mount namespace never comes back."""
    try:
        (init,) = fds
        reply: wire.Message = wire.Staged()
        try:
            overlay.replace(request.directory, request.stage, request.shared, init=init)
        except OSError as error:
            reply = wire.Refused(reason=f"{type(error).__name__}: {error}")
        framing.send_with_fds(control, reply, [])
        os._exit(0)
    finally:
        os._exit(1)


def _become_zygote(request: wire.StartZygote, fds: list[int]) -> None:
    """Build the guests' root in a mount namespace of this process's own and start the zygote in it."""
    control, log = fds
    try:
        linux.close_all_fds_except({control, log})
        os.dup2(log, 1)
        os.dup2(log, 2)
        linux.unshare(linux.CLONE_NEWNS)
        python = mounts.build_root(
            root=request.root,
            prefix=request.prefix,
            base_prefix=request.base_prefix,
            python=request.python,
            package=request.package,
            sessions=request.sessions,
            shared=request.shared,
        )
        os.set_inheritable(control, True)
        os.execve(python, [python, "-B", "-u", "-c", _ZYGOTE, str(control)], _zygote_environment())
    except BaseException:
        # A process edge: whatever it was, the host reads it in the log and says so.
        os.write(2, traceback.format_exc().encode())
    os._exit(1)


def _zygote_environment() -> dict[str, str]:
    """What guests inherit: nothing of the host's environment."""
    environment = {
        "PATH": f"{mounts.ENV}/bin:{mounts.INSTALLERS}:{mounts.PYTHON}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": mounts.HOME,
        "USER": "user",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "GIT_PAGER": "cat",
        "PAGER": "cat",
    }
    if os.path.isdir(mounts.LIBPYTHON):
        environment["LD_LIBRARY_PATH"] = mounts.LIBPYTHON
    return environment
