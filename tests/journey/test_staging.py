"""The workspace on its overlay: a live session is given another stage, and user code does not notice.

These sessions have no transactions around them: what a test "commits" it puts into the lower layer itself.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from holdfast.config import Limits, default_home
from holdfast.environments import Environment, ensure
from holdfast.errors import KernelStartFailed, SandboxUnavailable
from holdfast.home import Home, acquire
from holdfast.kernel import wire
from holdfast.kernel.happenings import Printed
from holdfast.nodes.local import Incarnation, LocalNode
from holdfast.resources.workspace import Workspace
from holdfast.sandbox import cgroups


class Machine:
    """A node of its own, in a home of its own."""

    def __init__(self, portal: BlockingPortal, home: Home, environment: Environment) -> None:
        self.portal = portal
        self.home = home
        self.environment = environment
        self.node = LocalNode(home, cgroups.find(home.id, memory_cap="cgroup"))
        portal.call(self.node.start)

    def close(self) -> None:
        self.portal.call(self.node.close)
        self.node.tree.remove()
        self.home.release()


class Staged:
    """One kernel on one workspace."""

    def __init__(self, machine: Machine, name: str, limits: Limits) -> None:
        self._machine = machine
        self.ids = machine.node.take_ids()
        self.workspace = Workspace(machine.home.sessions / name)
        self.workspace.create(owner=self.ids.file_owner)
        self.stage = self.workspace.new_stage()
        self._now: Incarnation = self._call(
            lambda: machine.node.fork(machine.environment, session=name, stage=self.stage, ids=self.ids, limits=limits)
        )
        self.kernel = self._now.kernel
        self.cgroup = self._now.cgroup

    def run(self, code: str) -> str:
        """What the cell printed."""
        return self.execute(wire.Execute(turn=1, code=code))[0]

    def execute(self, request: wire.Message) -> tuple[str, wire.Finished]:
        printed, finished = self._call(lambda: self._conduct(request))
        return printed, finished

    def restage(self, *, tell: bool = True) -> list[str]:
        """Another stage under the live session; what its kernel could not open again."""
        self.cgroup.freeze()
        self.mount()
        self.cgroup.thaw()
        return self.tell() if tell else []

    def mount(self) -> None:
        self.stage = self.workspace.new_stage()
        self._call(lambda: self._machine.node.stage(self.kernel, self.workspace.path, self.stage))

    def tell(self) -> list[str]:
        restaged = self._call(lambda: self.kernel.restage(10))
        assert restaged is not None
        return restaged.not_reopened

    def publish(self) -> None:
        """The least that can be called a commit: what the stage has more than the files, and another stage."""
        self.cgroup.freeze()
        done = self.workspace.stage_path(self.stage)
        subprocess.run(["cp", "-a", "--no-preserve=xattr", f"{done}/.", self.workspace.files.root], check=True)
        self.mount()
        self.cgroup.thaw()

    def snapshot(self) -> None:
        assert self._call(lambda: self.kernel.take_snapshot(10)) is None

    def wake(self, *, fresh: bool = True) -> wire.Woken:
        """The kernel dies, a fresh stage is mounted, and the snapshot takes its place."""
        self.kernel.kill()
        while self.kernel.is_alive():
            time.sleep(0.001)
        if fresh:
            self.mount()
        woken = self._call(lambda: self.kernel.wake_snapshot(10))
        assert woken is not None
        return woken

    def end(self) -> None:
        self._call(self._now.end)
        self.workspace.remove()
        self._machine.node.give_back_ids(self.ids)

    def _call(self, verb: Callable[[], Any]) -> Any:
        return self._machine.portal.call(verb)

    async def _conduct(self, request: wire.Message) -> tuple[str, wire.Finished]:
        printed, raised = "", ""
        await self.kernel.send(request)
        with anyio.fail_after(30):
            while True:
                for event in await self.kernel.wait(None):
                    match event:
                        case Printed():
                            printed += event.data.decode()
                        case wire.Raised():
                            raised = event.traceback
                        case wire.Finished():
                            assert not raised, raised
                            return printed.strip(), event


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    home = acquire(tmp_path_factory.mktemp("staging") / "home")
    with start_blocking_portal() as portal:
        machine = Machine(portal, home, portal.call(ensure, default_home()))
        yield machine
        machine.close()


@pytest.fixture
def open_staged(machine: Machine) -> Iterator[Callable[..., Staged]]:
    opened: list[Staged] = []

    def open_one(**limits: Any) -> Staged:
        opened.append(Staged(machine, f"s{os.urandom(4).hex()}", Limits(memory_bytes=512 << 20, **limits)))
        return opened[-1]

    yield open_one
    for one in opened:
        one.end()


@pytest.fixture
def staged(open_staged: Callable[..., Staged]) -> Staged:
    return open_staged()


# -- the overlay ---------------------------------------------------------------------------------------------------


def test_what_a_cell_writes_lands_in_its_stage_and_not_among_the_committed_files(staged: Staged) -> None:
    staged.run("for p in ('a', '/tmp/b', '/home/user/c'): open(p, 'w').write('x')")

    stage = staged.workspace.stage_path(staged.stage)
    assert sorted(str(p.relative_to(stage)) for p in stage.rglob("*") if p.is_file()) == ["data/a", "home/c", "tmp/b"]
    assert [p for p in staged.workspace.files.root.rglob("*") if p.is_file()] == []


def test_a_cell_that_writes_nothing_leaves_its_stage_empty(staged: Staged) -> None:
    staged.run("import os; os.listdir('/mnt/data'); 1 + 1")

    assert list(staged.workspace.stage_path(staged.stage).iterdir()) == []


def test_another_stage_takes_back_what_was_not_committed(staged: Staged) -> None:
    staged.run("import os; open('gone', 'w').write('x')")
    assert staged.restage() == []

    assert staged.run("print(os.listdir(), os.getcwd())") == "[] /mnt/data"


def test_what_was_committed_is_there_on_the_next_stage(staged: Staged) -> None:
    staged.run("import os; os.mkdir('d'); open('d/kept', 'w').write('x')")
    staged.publish()
    assert staged.tell() == []

    assert staged.run("print(open('d/kept').read(), os.listdir('d'))") == "x ['kept']"


# The host's own root may be an overlay as well, which is not volatile.
OVERLAYS = "print(sum(' - overlay ' in line and 'volatile' in line for line in open('/proc/self/mountinfo')))"


def test_a_hundred_stages_leave_three_mounts(staged: Staged) -> None:
    for _ in range(100):
        staged.restage()

    assert staged.run(OVERLAYS) == "3"


def test_nobody_waits_for_the_disk_before_the_commit_does(staged: Staged) -> None:
    assert staged.run(OVERLAYS) == "3"


def test_a_stage_that_cannot_be_mounted_is_refused_and_the_session_keeps_the_one_it_has(staged: Staged) -> None:
    staged.run("open('kept', 'w').write('x')")
    shutil.rmtree(staged.workspace.stage_path(name := staged.workspace.new_stage()))
    with pytest.raises((KernelStartFailed, SandboxUnavailable)):
        staged._call(lambda: staged._machine.node.stage(staged.kernel, staged.workspace.path, name))

    assert staged.run("print(open('kept').read())") == "x"


def test_what_is_mapped_and_deleted_counts_on_any_stage(staged: Staged) -> None:
    staged.run(
        "import mmap, os; open('f', 'wb').write(bytes(20 << 20)); fd = os.open('f', os.O_RDONLY)\n"
        "m = mmap.mmap(fd, 0, prot=mmap.PROT_READ); os.close(fd); os.remove('f')"
    )
    before = staged.workspace.usage([staged.kernel.pid]).size_bytes
    staged.restage()

    assert before >= 20 << 20
    assert staged.workspace.usage([staged.kernel.pid]).size_bytes >= 20 << 20


def test_measuring_leaves_the_modes_as_they_are(staged: Staged) -> None:
    staged.run("import os; os.makedirs('a/b/c'); os.chmod('a/b', 0o500); os.chmod('a', 0)")
    staged.workspace.usage()

    upper = staged.workspace.stage_path(staged.stage) / "data/a"
    assert upper.stat().st_mode & 0o777 == 0
    upper.chmod(0o700)
    assert (upper / "b").stat().st_mode & 0o777 == 0o500


# -- what is open ----------------------------------------------------------------------------------------------------


def test_the_working_directory_is_entered_again(staged: Staged) -> None:
    staged.run("import os; os.makedirs('a/b'); os.chdir('a/b')")
    staged.publish()
    staged.tell()

    assert staged.run("open('here', 'w').close(); print(os.getcwd(), os.listdir('/mnt/data/a/b'))") == (
        "/mnt/data/a/b ['here']"
    )


def test_a_working_directory_that_is_gone_is_named_and_left(staged: Staged) -> None:
    staged.run("import os; os.mkdir('a'); os.chdir('a')")

    assert staged.restage() == ["the working directory /mnt/data/a: No such file or directory; it is /mnt/data now"]
    assert staged.run("print(os.getcwd())") == "/mnt/data"


def test_an_open_file_goes_on_where_it_was(staged: Staged) -> None:
    staged.run("f = open('log', 'w+'); f.write('one\\n'); f.flush(); f.seek(2); g = open('log', 'a'); d = 'two'")
    staged.publish()
    assert staged.tell() == []

    assert staged.run("print(f.read()); g.write(d); g.close(); print(open('log').read())") == "e\n\none\ntwo"
    assert (staged.workspace.files.root / "data/log").read_text() == "one\n"
    assert (staged.workspace.stage_path(staged.stage) / "data/log").read_text() == "one\ntwo"


def test_every_area_is_followed(staged: Staged) -> None:
    staged.run("fs = [open(p, 'w+') for p in ('/mnt/data/f', '/tmp/f', '/home/user/f')]; [f.write('x') for f in fs]")
    staged.run("[f.flush() for f in fs]")
    staged.publish()
    assert staged.tell() == []
    staged.run("for f in fs: f.write('y'); f.close()")

    stage = staged.workspace.stage_path(staged.stage)
    assert [(stage / area / "f").read_text() for area in ("data", "tmp", "home")] == ["xy"] * 3


def test_flags_and_inheritance_stay_as_they_were(staged: Staged) -> None:
    staged.run("""
import fcntl, os
open('f', 'w').write('0123')
fds = [os.open('f', os.O_RDONLY), os.open('f', os.O_RDWR | os.O_APPEND), os.open('f', os.O_WRONLY | os.O_NONBLOCK),
       os.open('.', os.O_RDONLY | os.O_DIRECTORY), os.open('f', os.O_PATH)]
os.set_inheritable(fds[0], True)
def state(): return [(fcntl.fcntl(fd, fcntl.F_GETFL), os.get_inheritable(fd)) for fd in fds]
before = state()
""")
    staged.publish()
    assert staged.tell() == []

    assert staged.run("print(state() == before, os.listdir(fds[3]), os.stat(fds[4]).st_size)") == "True ['f'] 4"


def test_copies_of_a_descriptor_go_on_sharing_their_offset(staged: Staged) -> None:
    staged.run("import os; open('f', 'w').write('0123456'); a = os.open('f', os.O_RDONLY); b = os.dup(a)")
    staged.run("c = os.open('f', os.O_RDONLY)")
    staged.publish()
    staged.tell()

    assert staged.run("print(os.read(a, 2), os.read(b, 2), os.read(c, 2))") == "b'01' b'23' b'01'"


def test_a_deleted_file_stays_open_and_is_named(staged: Staged) -> None:
    staged.run("import os; f = open('f', 'w+'); f.write('kept'); f.flush(); os.remove('f'); fd = f.fileno()")
    (words,) = staged.restage()

    assert words.endswith("it was deleted while it was open")
    assert staged.run("f.seek(0); print(f.read())") == "kept"


def test_a_file_that_is_not_on_the_new_stage_is_named(staged: Staged) -> None:
    staged.run("f = open('f', 'w')")
    (words,) = staged.restage()

    assert words.startswith("/mnt/data/f (descriptor ")
    assert words.endswith("No such file or directory")


def test_a_fifo_in_place_of_a_file_holds_nobody_up(staged: Staged) -> None:
    staged.run("f = open('f', 'w')")
    os.mkfifo(staged.workspace.files.root / "data/f", 0o666)
    (staged.workspace.files.root / "data/f").chmod(0o666)
    (words,) = staged.restage()

    assert "another kind of file" in words or "No such device" in words


def test_files_elsewhere_are_left_alone(staged: Staged) -> None:
    staged.run("import os; f = open('/dev/shm/f', 'w+'); f.write('x'); n = open('/dev/null'); r, w = os.pipe()")
    assert staged.restage() == []

    assert staged.run("f.seek(0); print(f.read(), os.write(w, b'y'), n.read())") == "x 1"


def test_a_full_table_of_descriptors_can_be_followed(open_staged: Callable[..., Staged]) -> None:
    staged = open_staged(open_files=256)
    staged.run("""
import errno, os
fds = []
try:
    while True: fds.append(os.open('f', os.O_RDWR | os.O_CREAT))
except OSError as error:
    assert error.errno == errno.EMFILE
""")
    staged.publish()
    assert staged.tell() == []

    assert staged.run("os.write(fds[-1], b'x'); print(len(fds) > 200, os.path.getsize('f'))") == "True 1"


def test_ten_restages_in_a_row_keep_a_file_at_its_place(staged: Staged) -> None:
    staged.run("f = open('f', 'w')")
    for number in range(10):
        staged.run(f"f.write('{number}'); f.flush()")
        staged.publish()
        assert staged.tell() == []

    assert staged.run("print(open('f').read())") == "0123456789"


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_a_woken_snapshot_finds_its_files_on_the_new_stage(staged: Staged) -> None:
    staged.run("import os; f = open('f', 'w+'); f.write('committed'); f.flush(); os.mkdir('d'); os.chdir('d')")
    staged.publish()
    staged.tell()
    staged.run("f.seek(3)")
    staged.snapshot()
    staged.run("f.write('lost'); f.flush(); os.chdir('/tmp'); os.remove('/mnt/data/f')")

    assert staged.wake().not_restored == []
    assert staged.run("print(f.tell(), f.read(), os.getcwd()); f.write('!'); f.flush()") == "3 mitted /mnt/data/d"
    assert (staged.workspace.stage_path(staged.stage) / "data/f").read_text() == "committed!"


def test_a_woken_snapshot_on_the_same_stage_keeps_what_it_has_open(staged: Staged) -> None:
    staged.run("import os; f = open('f', 'w+'); f.write('x'); f.flush(); os.remove('f')")
    staged.snapshot()

    assert staged.wake(fresh=False).not_restored == []
    assert staged.run("f.seek(0); print(f.read())") == "x"


def test_a_snapshot_that_is_several_stages_old_can_be_woken(staged: Staged) -> None:
    staged.run("f = open('f', 'w+'); f.write('0')")
    staged.run("f.flush()")
    staged.publish()
    staged.tell()
    staged.snapshot()
    for _ in range(3):
        staged.restage()

    assert staged.wake().not_restored == []
    assert staged.run("f.write('1'); f.flush(); print(open('f').read())") == "01"


# -- renames ---------------------------------------------------------------------------------------------------------

TREE = """
import os, shutil, pathlib
os.makedirs('old/sub'); open('old/sub/f', 'w').write('x'); os.chmod('old/sub/f', 0o640); os.utime('old/sub/f', (1, 2))
os.symlink('sub/f', 'old/link'); os.link('old/sub/f', 'old/hard'); os.mkfifo('old/fifo'); os.utime('old/sub', (3, 4))
"""
LOOK = """
def look(top):
    entries = [os.path.join(d, n) for d, ds, fs in os.walk(top) for n in ds + fs]
    return sorted((os.path.relpath(e, top), oct(os.lstat(e).st_mode), os.lstat(e).st_mtime, os.lstat(e).st_nlink
                   if os.path.isfile(e) else 0) for e in entries if not e.endswith('link'))
"""


@pytest.mark.parametrize(
    "verb",
    ["os.rename('old', 'new')", "os.replace('old', '/mnt/data/new')", "pathlib.Path('old').rename('new')",
     "shutil.move('old', 'new')", "os.renames('old', 'new')", "os.rename(b'old/', b'new')",
     "os.rename('old', 'new', src_dir_fd=os.open('.', 0), dst_dir_fd=os.open('/mnt/data', 0))",
     "os.mkdir('new'); os.rename('old', 'new')"],
)  # fmt: skip
def test_a_committed_directory_can_be_renamed(staged: Staged, verb: str) -> None:
    staged.run(TREE + LOOK)
    staged.publish()
    staged.tell()
    staged.run(f"before = look('old'); {verb}")

    assert staged.run("print(look('new') == before, os.listdir('.'), open('new/link').read())") == "True ['new'] x"


def test_mv_renames_a_committed_directory_by_itself(staged: Staged) -> None:
    staged.run(TREE)
    staged.publish()
    staged.tell()

    assert staged.execute(wire.Shell(turn=2, command="mv old new && ls"))[0] == "new"


def test_a_rename_that_cannot_be_is_refused_as_ever(staged: Staged) -> None:
    staged.run(TREE + "os.mkdir('full'); open('full/f', 'w').close(); open('file', 'w').close()")
    staged.publish()
    staged.tell()

    assert staged.run("""
import errno
for source, target in (('old', 'full'), ('old', 'file'), ('old', 'old/sub/in'), ('old', '/tmp/x'), ('none', 'x')):
    try:
        print('moved', os.rename(source, target))
    except OSError as error:
        print(errno.errorcode[error.errno])
print(sorted(os.listdir('.')))
""").split("\n") == ["ENOTEMPTY", "ENOTDIR", "EINVAL", "EXDEV", "ENOENT", "['file', 'full', 'old']"]  # fmt: skip


# -- names -----------------------------------------------------------------------------------------------------------


def changed(staged: Staged, code: str) -> tuple[dict[str, str], list[str]]:
    finished = staged.execute(wire.Execute(turn=1, code=code))[1]
    return finished.names, finished.gone


def test_a_cell_says_which_names_it_bound_and_which_it_took_away(staged: Staged) -> None:
    assert changed(staged, "import pandas as pd\nx = 1.5\ndf = pd.DataFrame()\n_private = 2") == (
        {"pd": "module", "x": "float", "df": "pandas.DataFrame"}, [],
    )  # fmt: skip
    assert changed(staged, "x = 'other'; del pd; y = df") == ({"x": "str", "y": "pandas.DataFrame"}, ["pd"])
    assert changed(staged, "y is df") == ({}, [])


def test_a_command_begins_a_new_account_too(staged: Staged) -> None:
    changed(staged, "x = 1")
    finished = staged.execute(wire.Shell(turn=2, command="true"))[1]

    assert (finished.exit_code, finished.names, finished.gone) == (0, {}, [])


def test_a_woken_snapshot_counts_from_its_own_last_cell(staged: Staged) -> None:
    changed(staged, "kept = [1]; gone = {}")
    staged.snapshot()
    changed(staged, "kept = 2; del gone; new = 3")
    staged.wake()

    assert changed(staged, "del gone; more = 4") == ({"more": "int"}, ["gone"])


def test_telling_of_names_runs_no_code_of_theirs(staged: Staged) -> None:
    code = """
class Meta(type):
    def __getattribute__(cls, name): print('ran', name); return type.__getattribute__(cls, name)
class Text(str):
    def __format__(self, spec): print('formatted'); return 'x'
class Odd(metaclass=Meta):
    def __eq__(self, other): print('compared'); return True
    __hash__ = None
    __class__ = property(lambda self: print('asked'))
Odd.__module__ = Text('place'); Odd.__qualname__ = Text('Name')
odd = Odd()
"""
    printed, finished = staged.execute(wire.Execute(turn=1, code=code))

    assert finished.names["odd"] == "place.Name"
    assert not {"ran", "asked", "formatted", "compared"} & set(printed.split())


def test_ten_thousand_names_are_all_that_is_told(staged: Staged) -> None:
    names, _ = changed(staged, "globals().update({f'n{i}': [i] for i in range(30_000)}); globals()['\\ud800'] = []")

    assert 9_000 < len(names) <= 10_000
