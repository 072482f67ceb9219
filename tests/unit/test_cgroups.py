"""Session cgroups against the real kernel: the same tests for v1 and v2, as root or as a user."""

import contextlib
import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.sandbox import cgroups
from holdfast.sandbox.cgroups import (
    Cgroup,
    CgroupUnavailable,
    Limits,
    Tree,
    WatchdogCgroup,
    WatchdogTree,
    delegation,
    hierarchies,
)
from holdfast.sandbox.cgroups.scoped import ScopedTree
from holdfast.sandbox.cgroups.v1 import V1Cgroup
from holdfast.sandbox.cgroups.v2 import V2Cgroup
from holdfast.sandbox.pid1 import EXECUTABLE

MIB = 2**20
ROOMY = Limits(memory_bytes=128 * MIB, pids=64, cpus=1.5)
NOBODY = 65534
OWNER = f"test-{os.getpid()}"
Make = Callable[..., Cgroup]

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root delegates")

# What a session's first process does: enter, then run.
ENTER = """
import os, sys, time
for fd in sys.argv[1].split(",") if sys.argv[1] else []:
    os.write(int(fd), b"0")
    os.close(int(fd))
"""


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    try:
        found = cgroups.find(OWNER)
    except CgroupUnavailable as refusal:
        pytest.skip(refusal.reason)
    found.adopt(os.getpid())
    yield found
    found.sweep()
    # An ordinary user's test process sits in the keeper's leaf: that one cannot go before we do.
    with contextlib.suppress(OSError) if os.geteuid() else contextlib.nullcontext():
        found.remove()


@pytest.fixture
def make(tree: Tree) -> Iterator[Make]:
    made: list[Cgroup] = []

    def create(limits: Limits = ROOMY) -> Cgroup:
        made.append(tree.create(f"s{len(made)}", limits))
        return made[-1]

    yield create
    for cgroup in made:
        cgroup.kill_all()
        cgroup.remove()


class Spawner:
    """Starts children in a cgroup; none outlives the test."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, cgroup: Cgroup, code: str) -> subprocess.Popen[str]:
        fds = cgroup.join_fds()
        child = subprocess.Popen(
            [sys.executable, "-ISc", ENTER + code, ",".join(map(str, fds))],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            text=True,
        )
        for fd in fds:
            os.close(fd)
        self._started.append(child)
        return child

    def end(self) -> None:
        for child in self._started:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def spawn() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.end()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.005)
    return True


def test_a_child_that_takes_more_memory_than_the_cap_is_killed_and_counted(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=32 * MIB, pids=16, cpus=None))

    child = spawn(cgroup, "x = bytearray(100 << 20)")

    assert child.wait(10) == -signal.SIGKILL
    assert cgroup.oom_kills() == 1


# A session's first process, whose children are in no cgroup and end when they are let go.
FIRST_PROCESS = """
import os, sys
from pathlib import Path
from holdfast.sandbox import pid1
fds, host, gate, alive, compiled = sys.argv[1].split(","), *map(int, sys.argv[2:])
for _ in range(40):
    if os.fork() == 0:
        os.read(gate, 1)
        os._exit(7)
os.close(gate), os.close(alive)
for fd in fds: os.write(int(fd), b"0"), os.close(int(fd))
if not compiled: pid1.EXECUTABLE = Path("/nowhere")
pid1.run(host)
"""


@pytest.mark.parametrize("compiled", [True, False])
def test_a_first_process_that_cannot_report_at_the_cap_reports_later(
    make: Make, spawn: Spawner, compiled: bool
) -> None:
    """A packet costs memory. If it ended for want of that, it would take its session along."""
    if compiled and not EXECUTABLE.exists():
        pytest.skip("no compiler was at hand")
    cgroup = make(Limits(memory_bytes=32 * MIB, pids=16, cpus=None))
    cgroup.watch_memory(soft_bytes=24 * MIB, cap_bytes=32 * MIB)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (gate, let_go), (ended, alive), join = os.pipe(), os.pipe(), cgroup.join_fds()
    theirs = [*join, there.fileno(), gate, alive]
    arguments = [",".join(map(str, join)), *map(str, theirs[len(join) :]), str(int(compiled))]
    first = subprocess.Popen([sys.executable, "-c", FIRST_PROCESS, *arguments], pass_fds=theirs)
    try:
        for fd in (*join, gate, alive):
            os.close(fd)
        there.close()
        here.settimeout(20)
        assert here.recv(8) == bytes(8)
        hog = spawn(cgroup, "hoard = []\nwhile True: hoard.append(bytearray(b'x') * 65536)")
        assert wait_until(cgroup.is_held_up)
        os.write(let_go, bytes(40))
        assert os.read(ended, 1) == b""  # all of them
        wait_until(lambda: first.poll() is not None, 0.3)
        hog.kill()

        assert [struct.unpack("ii", here.recv(8))[1] >> 8 for _ in range(40)] == [7] * 40
        assert first.wait(20) == 0  # nobody is left
    finally:
        first.kill()
        first.wait()
        here.close()
        os.close(let_go)
        os.close(ended)


def test_memory_taken_through_tmpfs_counts_against_the_cap(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=32 * MIB, pids=16, cpus=None))
    fill = "fd = os.memfd_create('x')\nfor _ in range(100): os.write(fd, bytes(1 << 20))"

    child = spawn(cgroup, fill)

    assert child.wait(10) == -signal.SIGKILL
    assert cgroup.oom_kills() == 1


def test_one_process_dies_at_the_cap_and_the_others_live_on(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=48 * MIB, pids=16, cpus=None))
    small = spawn(cgroup, "print('up', flush=True); time.sleep(60)")
    assert line_of(small) == "up"

    assert spawn(cgroup, "x = bytearray(100 << 20)").wait(10) == -signal.SIGKILL

    assert small.poll() is None
    assert cgroup.pids() == [small.pid]


def test_the_peak_is_what_was_in_use_at_most_and_can_be_reset(make: Make, spawn: Spawner) -> None:
    cgroup = make()
    child = spawn(cgroup, "x = bytearray(40 << 20); del x; print('done', flush=True); time.sleep(60)")
    line_of(child)
    assert 40 * MIB <= cgroup.memory_peak_bytes() <= 70 * MIB
    assert cgroup.memory_now_bytes() < 30 * MIB

    cgroup.reset_peak()

    assert cgroup.memory_peak_bytes() < 30 * MIB


def test_a_peak_above_the_one_before_the_reset_is_exact_even_where_it_cannot_be_reset(
    make: Make, spawn: Spawner
) -> None:
    cgroup = make()
    child = spawn(cgroup, "print(1, flush=True); time.sleep(.2); x = bytearray(40 << 20); del x; print(2, flush=True)")
    line_of(child)
    cgroup.reset_peak()

    line_of(child)

    assert 40 * MIB <= cgroup.memory_peak_bytes() <= 70 * MIB


def test_the_cap_can_be_raised_and_lowered(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=32 * MIB, pids=16, cpus=None))

    cgroup.set_memory(96 * MIB)
    assert spawn(cgroup, "x = bytearray(60 << 20)").wait(10) == 0

    cgroup.set_memory(32 * MIB)
    assert spawn(cgroup, "x = bytearray(60 << 20)").wait(10) == -signal.SIGKILL


def test_a_fork_loop_stops_at_the_process_limit(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=128 * MIB, pids=10, cpus=None))
    loop = """
made = 0
try:
    while made < 50:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made, flush=True)
"""
    assert line_of(spawn(cgroup, loop)) == "9"


def test_the_cpu_quota_slows_a_busy_child_down(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=64 * MIB, pids=16, cpus=0.1))
    spawn(cgroup, "while True: pass")
    wait_until(lambda: cgroup.cpu_seconds() > 0.05)

    before, began = cgroup.cpu_seconds(), time.monotonic()
    time.sleep(1.0)
    used = (cgroup.cpu_seconds() - before) / (time.monotonic() - began)

    # Startup of the interpreter may have left some burst; a whole core it is not.
    assert 0.01 < used < 0.35


def test_the_share_the_quota_and_the_burst_are_the_kernels_to_keep(make: Make) -> None:
    cgroup = make(Limits(memory_bytes=64 * MIB, pids=16, cpus=0.5, cpu_weight=50))
    if isinstance(cgroup, V1Cgroup):
        place, told = Path(cgroup._cpu), {"cpu.shares": "512", "cpu.cfs_quota_us": "50000", "cpu.cfs_burst_us": "50000"}
    else:
        assert isinstance(cgroup, V2Cgroup)
        place, told = Path(cgroup._path), {"cpu.weight": "50", "cpu.max": "50000 100000", "cpu.max.burst": "50000"}

    found = {name: (place / name).read_text().strip() for name in told if (place / name).exists()}
    assert found == {name: value for name, value in told.items() if name in found}
    assert len(found) >= 2, "only the burst may be missing, on an older Linux"


def test_freezing_stops_a_counting_child_and_thawing_lets_it_go_on(make: Make, spawn: Spawner, tmp_path: Path) -> None:
    cgroup = make()
    place = tmp_path / "count"
    count = f"n = 0\nwhile True:\n n += 1\n open({str(place)!r}, 'w').write(str(n))\n time.sleep(.001)"
    spawn(cgroup, count)
    assert wait_until(lambda: place.exists() and place.read_text() > "0")

    cgroup.freeze()
    assert cgroup.wait_frozen(2.0)
    stopped_at = place.read_text()
    time.sleep(0.1)
    assert place.read_text() == stopped_at

    cgroup.thaw()
    assert wait_until(lambda: place.read_text() not in ("", stopped_at))


def test_waiting_for_a_cgroup_nobody_froze_ends_in_time(make: Make, spawn: Spawner) -> None:
    cgroup = make()
    line_of(spawn(cgroup, "print('up', flush=True); time.sleep(60)"))

    assert cgroup.wait_frozen(0.05) is False


BOMB = """
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


def test_killing_all_but_one_beats_a_fork_bomb_and_keeps_the_one(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=512 * MIB, pids=60, cpus=1.0))
    kept = spawn(cgroup, "print('up', flush=True); time.sleep(60)")
    line_of(kept)
    spawn(cgroup, BOMB)
    assert wait_until(lambda: len(cgroup.pids()) >= 50)

    killed = cgroup.kill_except({kept.pid})

    assert cgroup.pids() == [kept.pid]
    assert kept.poll() is None
    assert len(killed) >= 49
    assert all("os.fork()" in process.command for process in killed)


def test_a_frozen_fork_bomb_is_killed_whole(make: Make, spawn: Spawner) -> None:
    cgroup = make(Limits(memory_bytes=512 * MIB, pids=40, cpus=1.0))
    spawn(cgroup, BOMB)
    assert wait_until(lambda: len(cgroup.pids()) >= 30)
    cgroup.freeze()

    cgroup.kill_all()

    assert cgroup.pids() == []


def test_killing_nothing_names_nothing(make: Make, spawn: Spawner) -> None:
    cgroup = make()
    kept = spawn(cgroup, "print('up', flush=True); time.sleep(60)")
    line_of(kept)

    assert cgroup.kill_except({kept.pid}) == []


def test_one_process_is_killed_only_if_it_is_the_cgroups_own(make: Make, spawn: Spawner) -> None:
    cgroup, another = make(), make()
    kept, hog = (spawn(cgroup, "print('up', flush=True); time.sleep(60)") for _ in range(2))
    stranger = spawn(another, "print('up', flush=True); time.sleep(60)")
    for child in (kept, hog, stranger):
        line_of(child)

    cgroup.kill_one(stranger.pid)  # a number that has passed to somebody else since it was looked up
    cgroup.kill_one(hog.pid)
    assert hog.wait(10) == -signal.SIGKILL
    cgroup.kill_one(hog.pid)  # and one that is nobody's any more
    assert (stranger.poll(), cgroup.pids()) == (None, [kept.pid])


def test_a_name_is_used_once_and_never_escapes_the_tree(tree: Tree, make: Make) -> None:
    cgroup = make()
    with pytest.raises(FileExistsError):
        tree.create(cgroup.name, ROOMY)
    for name in ("../other", "", "a/b", "."):
        with pytest.raises(ValueError, match="not a usable"):
            tree.create(name, ROOMY)


def test_a_cgroup_that_cannot_be_limited_is_not_left_behind(tree: Tree) -> None:
    with pytest.raises(OSError):  # noqa: PT011 (which errno depends on the kernel)
        tree.create("wrong", Limits(memory_bytes=64 * MIB, pids=-5, cpus=None))

    assert "wrong" not in tree.existing()


@root_only
def test_sweeping_kills_and_removes_what_a_crashed_owner_left_and_nothing_else(tree: Tree, make, spawn) -> None:
    mine = make()
    survivor = spawn(mine, "print('up', flush=True); time.sleep(60)")
    line_of(survivor)
    crashed = cgroups.find(f"{OWNER}-crashed")
    orphaned = crashed.create("left", ROOMY)
    orphan = spawn(orphaned, "print('up', flush=True); time.sleep(60)")
    line_of(orphan)
    orphaned.freeze()
    orphaned.close()

    restarted = cgroups.find(f"{OWNER}-crashed")
    assert restarted.existing() == ["left"]
    restarted.sweep()

    assert orphan.wait(5) == -signal.SIGKILL
    assert restarted.existing() == []
    assert survivor.poll() is None
    assert mine.name not in tree.existing(), "what this owner made itself is no left-over"
    restarted.remove()


@root_only
def test_a_left_over_in_some_hierarchies_only_is_swept_too(tree: Tree) -> None:
    crashed = cgroups.find(f"{OWNER}-half")
    crashed.create("left", ROOMY).close()
    if (freezer := hierarchies.mounted().v1.get("freezer")) and crashed.kind == "v1":
        Path(freezer.top, "holdfast", f"{OWNER}-half", "left").rmdir()

    restarted = cgroups.find(f"{OWNER}-half")
    restarted.sweep()

    assert restarted.existing() == []
    restarted.remove()


def as_user(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program as an ordinary user who shares nothing with us but the machine."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]}
    become = f"import os\nos.setgroups([])\nos.setresgid({NOBODY}, {NOBODY}, {NOBODY})\n"
    become += f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
    # Imported before the change of user: the source tree may be closed to others.
    imports = "import json, os, signal, sys, time\nfrom holdfast.sandbox import cgroups\n"
    return subprocess.run(
        [sys.executable, "-c", imports + become + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


REFUSAL = f"""
try:
    cgroups.find({OWNER!r})
except cgroups.CgroupUnavailable as refusal:
    print(json.dumps([refusal.reason, refusal.remedy, str(refusal)]))
"""


@root_only
def test_a_user_without_cgroups_is_refused_with_the_exact_command() -> None:
    answer = as_user(REFUSAL)

    reason, remedy, message = json.loads(answer.stdout)
    assert str(NOBODY) in reason
    assert remedy == delegation.command(hierarchies.mounted(), NOBODY)
    assert remedy in message
    words = shlex.split(remedy)
    assert words[:3] == ["sudo", "sh", "-c"]
    assert words[4] == "$$"
    assert f"holdfast-{NOBODY}" in words[3]


@pytest.mark.skipif(os.geteuid() == 0, reason="root is never refused here")
def test_an_ordinary_user_gets_a_tree_or_the_command_that_gives_him_one() -> None:
    try:
        found = cgroups.find(f"{OWNER}-probe")
    except CgroupUnavailable as refusal:
        remedy = refusal.remedy
    else:
        found.remove()
        return
    assert remedy.startswith("sudo sh -c ")


@root_only
def test_the_watchdog_is_used_only_when_it_is_named() -> None:
    answer = as_user(f"print(cgroups.find({OWNER!r}, memory_cap='watchdog').kind)")

    assert answer.stdout.strip() == "watchdog", answer.stderr


USE_DELEGATED = f"""
tree = cgroups.find({OWNER!r})
tree.adopt(os.getpid())
cgroup = tree.create("s", cgroups.Limits(memory_bytes=32 << 20, pids=8, cpus=0.5))
fds = cgroup.join_fds()
child = os.fork()
if child == 0:
    for fd in fds:
        os.write(fd, b"0")
    x = bytearray(100 << 20)
    os._exit(0)
_, status = os.waitpid(child, 0)
other = os.fork()
if other == 0:
    for fd in fds:
        os.write(fd, b"0")
    time.sleep(60)
while cgroup.pids() != [other]:
    time.sleep(.005)
cgroup.freeze()
frozen = cgroup.wait_frozen(2)
killed = [entry.pid for entry in cgroup.kill_except(set())]
os.waitpid(other, 0)
print(json.dumps([tree.kind, os.WTERMSIG(status), cgroup.oom_kills(), frozen, killed == [other]]))
cgroup.remove()
"""


@root_only
def test_a_delegated_user_makes_caps_and_kills_like_root(tree: Tree) -> None:
    # On v2 the user must already be inside his tree, so it is this process that goes in and comes out.
    came_from = hierarchies.mounted()
    delegation.delegate(NOBODY, pid=os.getpid())
    try:
        answer = as_user(USE_DELEGATED)
        assert answer.stdout, answer.stderr
        assert json.loads(answer.stdout) == [tree.kind, signal.SIGKILL, 1, True, True]
    finally:
        if tree.kind == "v2" and came_from.v2:
            Path(came_from.v2.own, "cgroup.procs").write_text(str(os.getpid()))
        delegation.undelegate(NOBODY)


def test_the_scope_is_asked_for_with_every_property_it_needs() -> None:
    words = delegation.scope_arguments("holdfast-home-77.scope", 77, bus="/run/user/7/bus")

    *call, description_and_rest = " ".join(words).split(" StartTransientUnit ", 1)
    assert call == [
        "busctl --address=unix:path=/run/user/7/bus --quiet "
        "call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager"
    ]
    assert description_and_rest == (
        "ssa(sv)a(sa(sv)) holdfast-home-77.scope fail 5 Description s Holdfast sessions "
        "Slice s app.slice Delegate b true CollectMode s inactive-or-failed PIDs au 1 77 0"
    )
    assert "Holdfast sessions" in words, "one argument, though it holds a space"


def test_a_bus_is_asked_for_a_scope_only_if_a_systemd_of_the_users_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busctl").write_text("#!/bin/sh\n")
    (tmp_path / "busctl").chmod(0o755)
    (tmp_path / "bus").touch()
    (tmp_path / "systemd").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", f"unix:path={tmp_path}/bus")
    nobody_logged_in = 54_322

    assert not delegation.user_manager_present(nobody_logged_in)

    (tmp_path / "systemd" / "private").touch()
    assert delegation.user_manager_present(nobody_logged_in)


def test_only_earlier_scopes_of_the_same_owner_are_left_overs(tmp_path: Path) -> None:
    scopes = Path(delegation.scopes_directory(str(tmp_path), 1000))
    for scope in ("holdfast-home-12.scope", "holdfast-home-2-34.scope", "other.scope"):
        (scopes / scope / "keeper").mkdir(parents=True)
        (scopes / scope / "s1").mkdir()

    left = ScopedTree("home", str(tmp_path), 1000).existing()

    assert left == ["holdfast-home-12.scope/keeper", "holdfast-home-12.scope/s1"]


def test_a_scope_must_exist_before_a_session_can(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="adopt the keeper first"):
        ScopedTree("home", str(tmp_path), 1000).create("s", ROOMY)


@pytest.fixture
def bare_v2(tree: Tree) -> Iterator[V2Cgroup]:
    """A v2 cgroup without limits: even a machine of v1 has the hierarchy, only no controllers in it."""
    top = hierarchies.mounted().v2
    if top is None or not os.access(top.top, os.W_OK):
        pytest.skip("no v2 hierarchy of ours")
    path = f"{top.top}/{OWNER}"
    os.mkdir(path)
    cgroup = V2Cgroup(OWNER, path, tree)
    yield cgroup
    cgroup.kill_all()
    cgroup.remove()


def test_the_v2_freezer_and_killer_work_without_any_controller(bare_v2: V2Cgroup, spawn: Spawner) -> None:
    kept, other = (spawn(bare_v2, "print('up', flush=True); time.sleep(60)") for _ in range(2))
    assert [line_of(kept), line_of(other)] == ["up", "up"]

    bare_v2.freeze()
    assert bare_v2.wait_frozen(2.0)
    assert [process.pid for process in bare_v2.kill_except({kept.pid})] == [other.pid]
    assert bare_v2.pids() == [kept.pid]

    bare_v2.freeze()
    bare_v2.kill_all()
    assert bare_v2.pids() == []


def test_a_v2_cgroup_without_freezing_asked_is_not_reported_frozen(bare_v2: V2Cgroup, spawn: Spawner) -> None:
    line_of(spawn(bare_v2, "print('up', flush=True); time.sleep(60)"))

    assert bare_v2.wait_frozen(0.05) is False


def test_the_v2_command_enables_gives_away_and_moves_the_shell() -> None:
    found = hierarchies.parse("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/user.slice/x")

    script = shlex.split(delegation.command(found, 1000))[3]

    assert script == (
        'set -e; cd /sys/fs/cgroup; echo "+cpu +memory +pids" > cgroup.subtree_control; '
        'mkdir -p holdfast-1000/login; cd holdfast-1000; echo "+cpu +memory +pids" > cgroup.subtree_control; '
        "chown 1000 . cgroup.procs cgroup.subtree_control cgroup.threads; echo $0 > login/cgroup.procs"
    )


HYBRID = r"""
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 /box /sys/fs/cgroup/my\040memory rw shared:9 - cgroup cgroup rw,memory
35 31 0:32 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
""".strip()


def test_hierarchies_mounted_together_in_part_or_under_odd_names_are_understood() -> None:
    found = hierarchies.parse(HYBRID, "4:memory:/box/us\n3:cpu,cpuacct:/\n1:name=systemd:/x\n0::/deep/er\n")

    assert found.v1["cpu"] is found.v1["cpuacct"]
    assert found.v1["cpu"].own == "/sys/fs/cgroup/cpu,cpuacct"
    assert found.v1["memory"].top == "/sys/fs/cgroup/my memory"
    assert found.v1["memory"].own == "/sys/fs/cgroup/my memory/us"
    assert found.v2 is not None
    assert found.v2.own == "/sys/fs/cgroup/unified/deep/er"


# Orphans fall to it and it reaps, like the pid 1 of a namespace.
REAPER = """
import ctypes, signal
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""


@pytest.fixture
def watched(spawn: Spawner) -> Iterator[WatchdogCgroup]:
    """A pid 1 of sorts with two descendants, one of them holding 60 MiB."""
    cgroup = WatchdogTree(OWNER).create("w", Limits(memory_bytes=100 * MIB, pids=9, cpus=None))
    family = """
if os.fork() == 0:
    x = bytearray(60 << 20)
    os.fork()
    print('up', flush=True)
    while True:
        time.sleep(.001)
time.sleep(60)
"""
    pid1 = spawn(cgroup, REAPER + family)
    cgroup.attach(pid1.pid)
    assert [line_of(pid1), line_of(pid1)] == ["up", "up"]
    yield cgroup
    cgroup.kill_all()
    cgroup.remove()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_watchdog_sees_stops_and_resumes_every_descendant(watched: WatchdogCgroup) -> None:
    pid1, *others = watched.pids()
    assert len(others) == 2

    watched.freeze()
    assert watched.wait_frozen(2.0)
    assert [state_of(pid) for pid in others] == ["T", "T"]
    assert state_of(pid1) == "S"

    watched.thaw()
    assert wait_until(lambda: all(state_of(pid) in "SR" for pid in others))


def test_the_watchdog_counts_shared_memory_once_and_kills_above_the_cap(watched: WatchdogCgroup) -> None:
    _, holder, _ = watched.pids()
    assert 60 * MIB < watched.memory_now_bytes() < 100 * MIB, "two processes, one copy"
    assert not watched.over_cap()

    watched.set_memory(50 * MIB)
    assert watched.over_cap()
    watched.oom_kill(holder)

    assert watched.oom_kills() == 1
    assert wait_until(lambda: len(watched.pids()) == 2)
    assert watched.memory_peak_bytes() > 60 * MIB


def test_the_watchdog_kills_all_but_the_kept(watched: WatchdogCgroup) -> None:
    pid1, *others = watched.pids()

    killed = watched.kill_except({pid1})

    assert sorted(process.pid for process in killed) == sorted(others)
    assert watched.pids() == [pid1]


def test_the_watchdog_adds_up_cpu_time(watched: WatchdogCgroup) -> None:
    assert wait_until(lambda: watched.cpu_seconds() > 0)


def test_the_watchdog_beats_a_fork_bomb_too(make: Make, spawn: Spawner) -> None:
    # Bounded by a real cgroup here, by RLIMIT_NPROC in a session.
    bounds = make(Limits(memory_bytes=512 * MIB, pids=40, cpus=1.0))
    watched = WatchdogTree(OWNER).create("bomb", ROOMY)
    pid1 = spawn(bounds, REAPER + "if os.fork() == 0:" + BOMB.replace("\n", "\n    ") + "\ntime.sleep(60)")
    watched.attach(pid1.pid)
    assert wait_until(lambda: len(watched.pids()) >= 30)

    watched.kill_except({pid1.pid})

    assert bounds.pids() == [pid1.pid]
    watched.remove()
