"""Faults of the disk under a live session, at random moments and by a seed, and what must hold after each.

    no acknowledged run lost      the files are those of the runs that were acknowledged, now and for the next owner
    none blamed on the user       what a fault kept from its end is an error of ours, and its key is free
    no session wedged             when the fault is gone, the same request with the same key is committed

`python -m tests.disk_faults 60 --seed 17` prints what happened, and ends with 1 if something of this does not hold.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.lean import lean_environment

from holdfast import HoldfastError, Session, engine
from holdfast.store import connection
from holdfast.store.sqlite import Store
from holdfast.verify import check_in_home

_CODES = {"disk_full", "disk_read_only", "disk_failed", "files_lost"}
_DISK_BYTES = 24 << 20
_INODES = 1500
_LONGEST_S = 0.03
"""Until a fault comes, or goes: a run takes about as long."""


class Broken(Exception):
    """Something that must hold does not."""


def fill(disk: Path, left_bytes: int) -> None:
    filler = disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 20))
            except OSError:
                break
        while file.write(bytes(4096)):
            pass
    with suppress(OSError):
        os.truncate(filler, max(0, filler.stat().st_size - left_bytes))


def use_up_inodes(disk: Path, left: int) -> None:
    filler = disk / "filler"
    filler.mkdir()
    with suppress(OSError):
        for number in range(os.statvfs(disk).f_favail - left):
            (filler / str(number)).mkdir()


def free(disk: Path) -> None:
    filler = disk / "filler"
    shutil.rmtree(filler) if filler.is_dir() else filler.unlink(missing_ok=True)


def remount(disk: Path, how: str) -> bool:
    """False: Linux refuses it, because a file on the disk is just being written."""
    return subprocess.run(["mount", "-o", f"remount,{how}", disk], capture_output=True, check=False).returncode == 0


def put_back(taken: Path, place: Path) -> None:
    if not place.exists():
        taken.rename(place)
        return
    for entry in taken.iterdir():  # the host has made the directory again meanwhile
        if not (place / entry.name).exists():
            entry.rename(place / entry.name)
    shutil.rmtree(taken)


class Faults:
    """Guards the faults: each is a pair of what brings it about and what ends it."""

    def __init__(self, home: Path, session: str, chance: random.Random) -> None:
        self._home, self._chance = home, chance
        self._own = home / "sessions" / session
        self.came: Counter[str] = Counter()

    def draw(self) -> tuple[str, Callable[[], object], Callable[[], object]]:
        kinds = [self._full_disk, self._full_disk, self._full_journal, self._no_inodes, self._no_inodes]
        return self._chance.choice([*kinds, self._read_only, self._removed, self._moved_away])()

    def _full_disk(self) -> tuple[str, Callable[[], object], Callable[[], object]]:
        disk, left = self._home / "sessions", self._chance.choice([0, 4096, 3 * 4096, 40 << 10])
        return "full disk", lambda: fill(disk, left), lambda: free(disk)

    def _full_journal(self) -> tuple[str, Callable[[], object], Callable[[], object]]:
        left = self._chance.choice([0, 0, 8192])
        return "full journal", lambda: fill(self._home, left), lambda: free(self._home)

    def _no_inodes(self) -> tuple[str, Callable[[], object], Callable[[], object]]:
        disk, left = self._home / "sessions", self._chance.randrange(10)
        return "no inodes", lambda: use_up_inodes(disk, left), lambda: free(disk)

    def _read_only(self) -> tuple[str, Callable[[], object], Callable[[], object]]:
        disk = self._home / "sessions"

        def begin() -> None:
            for _ in range(50):
                if remount(disk, "ro"):
                    return

        return "read-only", begin, lambda: remount(disk, "rw")

    def _removed(self) -> tuple[str, Callable[[], object], Callable[[], object]]:
        name = self._chance.choice(["stages", "stages", "log", "view"])
        return f"{name} removed", lambda: shutil.rmtree(self._own / name, ignore_errors=True), lambda: None

    def _moved_away(self) -> tuple[str, Callable[[], object], Callable[[], object]]:
        name = self._chance.choice(["files", "blobs", "manifests", ""])
        place = self._own / name if name else self._own
        taken = self._home / "sessions" / "taken"
        return f"{name or 'session'} moved away", lambda: place.rename(taken), lambda: put_back(taken, place)


class Trial:
    """One session under faults, beside a model of what was acknowledged."""

    def __init__(self, session: Session, faults: Faults, chance: random.Random, *, home: Path) -> None:
        self.session, self.faults, self.chance, self.home = session, faults, chance, home
        self.files: dict[str, bytes] = {}
        self.count = 0
        self.told: Counter[str] = Counter()
        self.latest = ""
        self.careless = False
        """Code closes no file. What such a file could not write while a disk was full for a moment is nowhere told."""

    def fault(self) -> None:
        """A fault, requests under it, its end; then all that was refused is asked for again."""
        name, begin, end = self.faults.draw()
        self.faults.came[name] += 1
        # A layer of a run that is verified and not yet published is the only place where its files are: no fault of
        # a disk takes it away alone.
        pause = 0.0 if "removed" in name else self.chance.choice([0.0, self.chance.random() * _LONGEST_S])
        asked = [self._draw() for _ in range(self.chance.randrange(1, 4))]
        end_at = self.chance.choice([0.0, self.chance.random() * _LONGEST_S])
        self.careless = not pause and not end_at
        with self._at_random(begin, pause):
            refused = [each for each in asked if not self._ask(*each, under=name)]
        with self._at_random(end, end_at):
            refused = [each for each in refused if not self._ask(*each, under=name)]
        for each in refused:
            if not self._ask(*each, under=f"nothing, after {name}"):
                raise Broken(f"the fault is gone ({name}), and {each[:2]} is refused still: {self.latest}")
        self._compare(name)

    @contextmanager
    def _at_random(self, act: Callable[[], object], pause_s: float) -> Iterator[None]:
        """At once, or in the midst of what is done in the block; in any case before it ends."""
        if not pause_s:
            act()
            yield
            return
        failed: list[BaseException] = []

        def later() -> None:
            time.sleep(pause_s)
            try:
                act()
            except BaseException as error:
                failed.append(error)

        acting = threading.Thread(target=later)
        acting.start()
        try:
            yield
        finally:
            acting.join()
        if failed:
            raise failed[0]

    def _draw(self) -> tuple[str, str, bytes]:
        """How, which file, and its content."""
        self.count += 1
        how = self.chance.choice(["run", "run", "run", "notebook", "shell", "write", "large", "another session"])
        size = 400_000 if how == "large" else self.chance.randrange(1, 9000)
        return how, f"f{self.count % 7}", f"{self.count}:".encode().ljust(size, b"x")

    def _ask(self, how: str, path: str, content: bytes, *, under: str) -> bool:
        try:
            self._do(how, path, content)
        except HoldfastError as error:
            if error.code not in _CODES or not error.hint:
                raise Broken(f"{how} under {under} raised {error!r}") from error
            self.told[error.code] += 1
            self.latest = str(error)
            return False
        except Exception as error:
            raise Broken(f"{how} under {under} raised a bare {error!r}") from error
        self.told["acknowledged"] += 1
        if how != "another session":
            self.files[path] = content
        return True

    def _do(self, how: str, path: str, content: bytes) -> None:
        head = content.partition(b":")[0].decode()
        if how == "write":
            self.session.write(path, content)
            return
        if how == "another session":
            with Session(memory="256M", home=self.home, env=lean_environment()) as other:
                done = other.run(f"open({path!r}, 'wb').write({content[:100]!r})")
                assert done.status == "committed", done
            return
        if how == "shell":
            done: Any = self.session.shell(f"head -c {len(content)} < /dev/zero | tr '\\0' x > {path} && "
                                           f"printf '{head}:' | dd of={path} conv=notrunc status=none")  # fmt: skip
        else:
            value = f"b'{head}:'.ljust({len(content)}, b'x')"
            code = f"with open({path!r}, 'wb') as file: file.write({value})"
            code = f"open({path!r}, 'wb').write({value})" if self.careless else code
            done = self.session.run(code, mode="notebook" if how == "notebook" else "strict", key=f"key-{head}")
        if done.status != "committed":
            raise Broken(f"{how} was {done.status}, and the user's code is blamed: {done.error or done.stderr}")

    def _compare(self, name: str) -> None:
        found = {entry.path: self.session.read(entry.path) for entry in self.session.files()}
        if found != self.files:
            wrong = sorted(path for path in {*found, *self.files} if found.get(path) != self.files.get(path))
            raise Broken(f"after {name}: {wrong} are not as they were acknowledged")


def carry_out(place: Path, *, faults: int, seed: int) -> dict[str, Any]:
    """All of it, on two small disks at a place: one for the home with its journal, one for the sessions."""
    home, chance = place / "home", random.Random(seed)
    connection._PLENTY = 0  # else no journal on a disk as small as these has any room
    connection._LOG_BYTES = 0  # the room that a journal has from its start would hide that it finds none
    with _mounted(home), _mounted(home / "sessions"):
        session = Session(memory="256M", timeout=60, versions=3, home=home, env=lean_environment())
        trial = Trial(session, Faults(home, session.id, chance), chance, home=home)
        try:
            for _ in range(faults):
                trial.fault()
            known = session.id
            session.close(keep=True)
            with Session(resume=known, home=home) as again:
                trial.session = again
                trial._compare("the session was opened again")
                store = Store(home / "journal.sqlite3", read_only=True)
                report = check_in_home(store, known, home)
                store.close()
        finally:
            engine.shut_down()
        if report.problem or report.unsettled:
            raise Broken(f"verify: {report.problem}, unsettled: {report.unsettled}")
    return {"faults": dict(trial.faults.came), "told": dict(trial.told)}


@contextmanager
def _mounted(path: Path) -> Iterator[None]:
    path.mkdir()
    options = f"size={_DISK_BYTES},nr_inodes={_INODES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int)
    parser.add_argument("--seed", type=int, default=17)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        try:
            told = carry_out(Path(place), faults=asked.faults, seed=asked.seed)
        except Broken as error:
            traceback.print_exception(error)
            return 1
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
