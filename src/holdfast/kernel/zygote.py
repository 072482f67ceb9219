"""The zygote: a Python that has imported everything a guest is likely to want, and forks sessions from that.

It never runs user code. It is single threaded towards us, synchronous, and holds no secret: all that is in its
memory is in every guest's memory. Runs inside the guests' root, in the guests' environment; started by the keeper.

    host ── ForkSession + fds ──▶ zygote ─ fork ─▶ pid 1 ─ fork ─▶ kernel
         ◀── Forked + fds ──         ◀─ "map me" + fds ──┘

What comes back is then open in the host alone: the file behind the session's /proc/meminfo, and, of sessions that may
reach something, a listener in their network. Of the way out nothing is inside.
"""

import faulthandler
import gc
import importlib
import os
import random
import signal
import socket
import sys
import traceback
from contextlib import suppress

import msgspec

from holdfast.guest import renames
from holdfast.guest.main import Guest
from holdfast.guest.shell import GuestShell, make_shell
from holdfast.guest.snapshots import Snapshots, share_memory
from holdfast.kernel import framing, wire
from holdfast.sandbox import linux, mounts, namespaces, pid1, privileges, seccomp
from holdfast.sandbox.confine import confine_init, confine_kernel, confine_session

_PRELOAD = ("numpy", "pandas", "pyarrow", "pyarrow.compute", "matplotlib.pyplot")
_WARM_CELLS = ("1 + 1", "1 / 0", "%who", "await __import__('asyncio').sleep(0)")
# What a data cell touches first: done here, its pages are shared by all sessions instead of copied into each.
_WARM_DATA = """
import io, numpy, pandas
frame = pandas.read_csv(io.StringIO("k,v\\na,1\\nb,2\\na,3"))
frame.groupby("k").v.agg(["sum", "mean"]).reset_index().merge(frame, on="k").sort_values("v").describe()
numpy.linalg.inv(numpy.random.rand(3, 3)).sum()
display(frame)
frame
"""
_WARM_PLOT = "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.title('warm'); plt.show()"
_EVERYDAY_CELLS = ("1 + 1", "import sys; path = sys.path")
_UNTIL_SETTLED = 10
"""Python 3.11 fits code to its values at the eighth call, and once more where that did not succeed."""
_decoder = msgspec.msgpack.Decoder(wire.ForkSession)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    # exec'd children and tracebacks of guests are not to see how the zygote was started.
    sys.argv[:] = [""]
    privileges.forgo_oom_protection()
    shell = _warm_up()
    program = seccomp.compile_filter()
    mounts.seal_root()
    # All that is alive now lives for ever: a collection in a kernel must not touch (and so copy) these pages.
    gc.collect()
    gc.disable()
    gc.freeze()
    own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    # The last that is done before kernels are forked: what is written from here on is no part of it.
    if (reason := share_memory()) is not None:
        print(f"kernels will not share what they have written to and left as it was: {reason}", file=sys.stderr)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # sessions that ended are reaped by Linux itself
    framing.send_with_fds(control, wire.Forked(pid=os.getpid()), [])
    while True:
        body, fds = framing.receive_with_fds(control)
        if not body:
            os._exit(0)
        reply, for_host = _fork_session(_decoder.decode(body), fds, shell, program, own_pid_namespace)
        try:
            framing.send_with_fds(control, reply, for_host)
        finally:
            for fd in (*fds, *for_host):
                os.close(fd)


def _warm_up() -> GuestShell:
    """Import, and run what compiles caches and builds tables at its first use."""
    loaded = {name for name in _PRELOAD if _import(name)}
    shell = make_shell()
    for cell in _WARM_CELLS:
        shell.run_cell(cell, silent=False)
    if "pandas" in loaded:
        shell.run_cell(_WARM_DATA)
    if "matplotlib.pyplot" in loaded:
        shell.run_cell(_WARM_PLOT)
    _settle_caches(shell, [_WARM_DATA] if "pandas" in loaded else [])
    shell.forget()
    renames.install()
    return shell


def _settle_caches(shell: GuestShell, data: list[str]) -> None:
    """Leave nothing for a kernel to write that the next kernel writes as well.

    Python counts the calls of a function until it has fitted its code to what it sees, and keeps the methods that were
    looked up last under their names: each such count, and each name that comes or goes, is a page of the kernel's own.
    """
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()  # the latter until Python 3.12
    for _ in range(_UNTIL_SETTLED):
        for cell in data:
            shell.run_cell(cell)
    for _ in range(2 * _UNTIL_SETTLED):
        for cell in _EVERYDAY_CELLS:
            shell.execute(cell)
        shell.touch_hot_pages()


def _import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:  # an environment that the user chose may lack it
        return False
    return True


def _fork_session(
    request: wire.ForkSession, fds: list[int], shell: GuestShell, program: bytes, own_pid_namespace: int
) -> tuple[wire.Supervision, list[int]]:
    """What came of it, and the descriptors that go with that."""
    here, there = socket.socketpair()
    # unshare(CLONE_NEWPID) works once per process, unless one goes back by setns afterwards.
    linux.unshare(linux.CLONE_NEWPID)
    try:
        pid = os.fork()
        if pid == 0:
            here.close()
            _become_session(request, fds, shell, program, there)
    finally:
        linux.setns(own_pid_namespace, linux.CLONE_NEWPID)
    there.close()
    with here:
        complaint, for_host, _, _ = socket.recv_fds(here, 4096, wire.MOST_FDS_BACK)
        if complaint != b"map me":
            return wire.Refused(reason=complaint.decode(errors="replace") or "pid 1 died while it was set up"), []
        try:
            namespaces.map_guest_ids(pid, kernel_id=request.kernel_id, init_id=request.init_id)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            for fd in for_host:
                os.close(fd)
            return wire.Refused(reason=f"mapping the guest's ids: {error}"), []
        here.send(b"mapped")
    return wire.Forked(pid=pid), for_host


def _become_session(
    request: wire.ForkSession, fds: list[int], shell: GuestShell, program: bytes, zygote: socket.socket
) -> None:
    """The whole life of pid 1 and, in its child, of the kernel. Never returns."""
    control, reports, wake, trace, stdout, stderr, *cgroup_fds = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def map_ids(for_host: list[int]) -> None:
        socket.send_fds(zygote, [b"map me"], for_host)
        if zygote.recv(16) != b"mapped":
            os._exit(1)

    try:
        confine_session(request, cgroup_fds=cgroup_fds, map_ids=map_ids)
        if os.fork() == 0:
            _attach_output(stdout, stderr)
            confine_kernel(request, program=program, keep_fds={control, wake, trace})
            _become_kernel(request, shell, control=control, wake=wake, trace=trace)
        confine_init(request, program=program, keep_fds={reports})
        pid1.run(reports)
    except BaseException as error:
        # A process edge: whatever it was, it must end here and be told.
        complaint = "".join(traceback.format_exception(error))[-4000:]
        os.write(2, complaint.encode())
        with suppress(OSError):
            zygote.send(complaint.encode())
    finally:
        os._exit(1)  # whatever a cell did to this process, it never goes on as a zygote


def _attach_output(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)


def _become_kernel(request: wire.ForkSession, shell: GuestShell, *, control: int, wake: int, trace: int) -> None:
    # Forks share the zygote's generators; two sessions must not draw the same numbers.
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    os.environ["OMP_NUM_THREADS"] = str(request.processors)  # `nproc` goes by it, and by the affinity otherwise
    if request.past_proxy is not None:
        os.environ.update(_by_way_of_proxy(request.past_proxy))
    gc.enable()
    # A crash, and a kill that is announced, leave a trace of the line that was running.
    faulthandler.enable(trace, all_threads=False)
    faulthandler.register(wire.LOCATION_SIGNAL, trace, all_threads=False, chain=False)
    snapshots = Snapshots(socket.socket(fileno=wake), trace)
    Guest(socket.socket(fileno=control), shell, snapshots, memory_bytes=request.memory_bytes).serve()
    os._exit(0)


def _by_way_of_proxy(past: tuple[str, ...]) -> dict[str, str]:
    """What requests, httpx, urllib, curl, git and pip go by: some read the one spelling, some the other."""
    host, port = wire.EGRESS_ADDRESS
    proxy = f"http://{host}:{port}"
    lower = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": ",".join(past)}
    return {**lower, **{name.upper(): value for name, value in lower.items()}}
