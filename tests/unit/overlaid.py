"""A session's disk with a real overlay over it, mounted in a namespace of its own for each piece of code."""

import hashlib
import inspect
import json
import os
import shlex
import stat
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.blobs.local import LocalBlobs
from holdfast.records import Change, FileEntry
from holdfast.resources import layers, publish

Tree = dict[str, list[int | str]]


def read_tree(root: str) -> Tree:
    """Every path below a directory (as latin-1), with all that is to survive a commit; of directories not the time."""
    found: Tree = {}
    ahead = [os.fsencode(root)]
    while ahead:
        directory = ahead.pop()
        for name in os.listdir(directory):
            path = directory + b"/" + name
            status = os.lstat(path)
            content = ""
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path).decode("latin-1")
            time = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
            found[path[len(root) + 1 :].decode("latin-1")] = [status.st_mode, time, content]
            if stat.S_ISDIR(status.st_mode):
                ahead.append(path)
    return found


_INSIDE = """
import hashlib, json, os, shutil, socket, stat, sys
Tree = dict
{read_tree}
merged = sys.argv[1]
os.chdir(merged + "/data")
exec(sys.argv[2])
json.dump(read_tree(merged), sys.stdout)
"""
# An ordinary user reads what is closed to him as the root of a namespace.
_NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
_MARKS = "" if os.geteuid() == 0 else ",userxattr"


class Disk:
    """`files`, one stage, blobs; and what is known of the committed files."""

    def __init__(self, path: Path) -> None:
        self.files, self.stage, self.merged = path / "files", path / "stages/s1", path / "merged"
        self.known: dict[str, FileEntry] = {}
        for area in layers.AREAS:
            (self.files / area).mkdir(parents=True, exist_ok=True)
        for directory in (self.stage, path / "stages/s1.work", path / "blobs", self.merged):
            directory.mkdir(parents=True, exist_ok=True)
        self.blobs = LocalBlobs(path / "blobs")

    def run(self, code: str) -> Tree:
        """Run code in the merged /mnt/data (`..` has the other areas); returns what it saw at the end."""
        for directory in (self.stage, self.stage.with_name("s1.work")):
            directory.mkdir(exist_ok=True)
        options = f"lowerdir={self.files},upperdir={self.stage},workdir={self.stage}.work"
        options += f",index=off,metacopy=off,redirect_dir=nofollow{_MARKS}"
        return _run_inside(self.merged, code, set_up=["mount", "-t", "overlay", "overlay", "-o", options])

    def changes(self) -> list[Change]:
        return layers.read_changes(self.stage, self.files, self.known)

    def commit(self, code: str) -> Tree:
        """Run and publish; returns what the code saw."""
        seen = self.run(code)
        self.publish(self.changes())
        return seen

    def publish(self, changes: Sequence[Change], *, redo: bool = False) -> None:
        publish.prepare(self.stage, changes)
        publish.publish(self.stage, self.files, changes, self.blobs, redo=redo)
        self.note(changes)

    def note(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.area == "data":
                self.known.pop(change.path, None)
                if change.action != "removed" and change.kind == "file":
                    self.known[change.path] = FileEntry(path=change.path, sha256=change.sha256, bytes=change.bytes)

    def tree(self) -> Tree:
        return _run_inside(self.files, "", set_up=["true"])


def _run_inside(root: Path, code: str, *, set_up: list[str]) -> Tree:
    """What code saw at its end of the tree at `root`, which is made by a command that gets it as last argument."""
    inside = _INSIDE.format(read_tree=inspect.getsource(read_tree))
    script = f'{shlex.join([*set_up, str(root)])} && exec "$@"'
    command = [sys.executable, "-c", inside, str(root), textwrap.dedent(code)]
    done = subprocess.run([*_NAMESPACE, "sh", "-c", script, "sh", *command], capture_output=True, text=True)
    if "unshare failed" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stderr
    tree: Tree = json.loads(done.stdout)
    return tree
