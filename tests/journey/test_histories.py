"""Random histories of a session, beside a model: what each version was, and which of them the documentation promises.

A model notes what is on the disk after each version, and counts the versions that changed files. From then on every
version with at most `versions` of them behind it can be restored, and nothing that fails moves anything. Each history
is named by its seed; HOLDFAST_HISTORIES says how many are played.
"""

import os
import random
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import Session
from holdfast.config import default_home
from holdfast.errors import CkptUnknown
from holdfast.home import JOURNAL
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "2"))
STEPS = int(os.environ.get("HOLDFAST_HISTORY_STEPS", "25"))
PATHS = ("a", "b", "c", "d/a", "d/e/b", "a/b")
Tree = dict[str, tuple[str, int, bytes]]

CODE = """
import os, shutil
def clear(path):
    if os.path.isdir(path) and not os.path.islink(path): shutil.rmtree(path)
    elif os.path.lexists(path): os.remove(path)
def place(path):
    for each in range(1, path.count('/') + 1):
        above = '/'.join(path.split('/')[:each])
        if os.path.lexists(above) and (os.path.islink(above) or not os.path.isdir(above)): os.remove(above)
        os.makedirs(above, exist_ok=True)
    clear(path)
"""
CHANGES = (
    "place({path!r}); open({path!r}, 'w').write({text!r})",
    "place({path!r}); os.symlink({text!r}, {path!r})",
    "place({path!r}); os.mkdir({path!r}); os.chmod({path!r}, {mode})",
    "clear({path!r})",
    "os.path.isfile({path!r}) and not os.path.islink({path!r}) and os.chmod({path!r}, {mode})",
    "os.path.lexists({path!r}) and not os.path.lexists('moved') and os.rename({path!r}, 'moved')",
    "clear('moved')",
    "[clear(each) for each in os.listdir()]",
)
IDLE = (
    "pass",
    "open('/tmp/t', 'a').write('1')",
    "[open(each, 'a').close() for each in os.listdir() if os.path.isfile(each)]",
)


class Version:
    """What the model knows of one."""

    def __init__(self, ckpt: str, tree: Tree, changes: int, x: int | None) -> None:
        self.ckpt, self.tree, self.x = ckpt, tree, x
        self.changes = changes
        """How many versions up to this one changed files."""


class History:
    """A session and its model, side by side."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.undo, self.kept = self.random.randrange(4), self.random.randrange(1, 8)
        self.session = Session(memory="512M", timeout=30, undo=self.undo, versions=self.kept)
        self.x: int | None = None
        self.played: list[str] = []
        self.versions = [Version(self.session.ckpt, self.tree(), 0, None)]
        self.known = {self.session.version}

    def tree(self) -> Tree:
        """All of /mnt/data but pipes and sockets, which do not come back, and times, which are new."""
        data, found = default_home() / "sessions" / self.session.id / "files" / "data", Tree()
        for path in (data, *sorted(data.rglob("*"))):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                found[str(path.relative_to(data))] = ("link", 0, os.fsencode(path.readlink()))
            else:
                content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
                found[str(path.relative_to(data))] = (stat.filemode(status.st_mode), status.st_size * 0, content)
        return found

    @property
    def now(self) -> Version:
        return self.versions[-1]

    def note(self) -> None:
        """After a step that may have made a version."""
        tree = self.tree()
        if self.session.version in self.known:
            assert tree == self.now.tree, "files moved without a version"
            self.now.x = self.x
            return
        self.known.add(self.session.version)
        changes = self.now.changes + (tree != self.now.tree)
        self.versions.append(Version(self.session.ckpt, tree, changes, self.x))

    def promised(self) -> list[Version]:
        return [each for each in self.versions if self.now.changes - each.changes <= self.kept]

    # -- steps -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        name = self.random.choices([*WEIGHTS], weights=[*WEIGHTS.values()])[0]
        self.played.append(name)
        STEPS_BY_NAME[name](self)
        self.note()
        if self.random.random() < 0.1:
            self.verify()
            self.check_memory()
            self.note()

    def code(self) -> str:
        made = self.random.choice(CHANGES).format(
            path=self.random.choice(PATHS), text=str(self.random.randrange(4)),
            mode=self.random.choice([0o700, 0o755, 0o640, 0o777]),
        )  # fmt: skip
        self.played[-1] += f" {made}"
        return CODE + made

    def run(self) -> None:
        x = self.random.randrange(1_000)
        run = self.session.run(f"{self.code()}\nx = {x}")
        assert run.status == "committed", run.error
        self.x = x

    def idle(self) -> None:
        assert self.session.run(CODE + self.random.choice(IDLE)).status == "committed"

    def fail(self) -> None:
        run = self.session.run(f"{self.code()}\nx = -1\n1 / 0")
        assert run.status == "rolled_back"
        assert run.memory == "restored"

    def die(self) -> None:
        run = self.session.run(f"{self.code()}\nimport os; os._exit(3)")
        assert run.status == "rolled_back"
        self.x = self.x if run.memory == "restored" else None

    def save(self) -> None:
        path, text = self.random.choice(PATHS), str(self.random.randrange(100))
        kept = f"place({path!r}); open({path!r}, 'w').write({text!r}); from holdfast import kit; kit.save({path!r})"
        self.played[-1] += f" {path} {text}"
        run = self.session.run(f"{CODE}{kept}\nopen('lost', 'w').write('1'); x = -2\n1 / 0")
        assert run.status == "rolled_back"
        assert self.session.read(path) == text.encode()

    def write(self) -> None:
        taken = {path for path, (mode, _, _) in self.now.tree.items() if not mode.startswith("d")}
        directories = self.now.tree.keys() - taken
        path = self.random.choice([each for each in (*PATHS, "up") if each not in directories])
        if any(str(above) in taken for above in Path(path).parents):
            return
        text = str(self.random.randrange(3))
        self.session.write(path, text)
        assert self.session.read(path) == text.encode()

    def upload(self) -> None:
        if self.now.tree.get("up", ("-",))[0] != "link":
            (self.directory / "up").write_text(str(self.random.randrange(3)))
            self.session.upload(self.directory / "up")

    def rewrite(self) -> None:
        if files := self.session.files():
            path = self.random.choice(files).path
            self.session.write(path, self.session.read(path))

    def remove(self) -> None:
        if files := self.session.files():
            self.session.remove(self.random.choice(files).path)

    def restore(self) -> None:
        then = self.random.choice(self.versions)
        is_promised = then in self.promised()
        self.played[-1] += f" {then.ckpt} {is_promised}"
        try:
            back = self.session.restore(then.ckpt)
        except CkptUnknown:
            assert not is_promised, "a version that is promised does not come back"
            return
        assert back.files_not_restored == []
        assert self.tree() == then.tree
        if back.memory == "restored":
            self.x = then.x
        elif back.memory == "lost":
            self.x = None

    def stay(self) -> None:
        back = self.session.restore(self.session.ckpt)
        self.x = None if back.memory == "lost" else self.x

    def reset(self) -> None:
        self.session.reset()
        self.x = None

    def restart(self) -> None:
        name = self.session.id
        self.session.close(keep=True)
        self.verify(name)
        self.session, self.x = Session(resume=name), None

    # -- what holds --------------------------------------------------------------------------------------------

    def verify(self, session: str | None = None) -> None:
        with closing(Store(default_home() / JOURNAL, read_only=True)) as store:
            assert check_in_home(store, session or self.session.id, default_home()).problem == ""

    def check_memory(self) -> None:
        assert self.session.run("globals().get('x')").text == (None if self.x is None else str(self.x))

    def check_promises(self) -> None:
        """Each restore is a version too, and so the oldest ones go first."""
        for _ in range(self.kept + 1):
            self.restore()
            self.note()


WEIGHTS = {
    "run": 10, "idle": 4, "fail": 2, "die": 0.5, "save": 2, "write": 5, "upload": 2, "rewrite": 2, "remove": 1,
    "restore": 5, "stay": 2, "reset": 0.7, "restart": 1,
}  # fmt: skip
STEPS_BY_NAME: dict[str, Callable[[History], None]] = {name: getattr(History, name) for name in WEIGHTS}


@pytest.mark.timeout(60 + 20 * HISTORIES)
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_whatever_the_history_every_promised_version_comes_back_and_verify_is_content(
    seed: int, tmp_path: Path
) -> None:
    history = History(seed, tmp_path)
    try:
        for _ in range(STEPS):
            history.step()
        history.check_promises()
        history.verify()
    except BaseException:
        print(f"seed {seed}, undo={history.undo}, versions={history.kept}:", *history.played, sep="\n")
        raise
    finally:
        history.session.close()
