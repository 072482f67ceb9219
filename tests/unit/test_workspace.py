"""A session's directory: what it means that it is not there."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from holdfast.resources.workspace import Workspace


def test_a_session_is_gone_only_where_its_directory_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path / "s1")
    assert workspace.is_gone()
    workspace.create(owner=None)
    assert not workspace.is_gone()

    def fails(*_: object, **__: object) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "stat", fails)
    monkeypatch.setattr(Path, "lstat", fails)
    assert not workspace.is_gone(), "a disk that cannot be read deletes nothing"


def test_the_directory_of_all_sessions_may_be_a_link(tmp_path: Path) -> None:
    """To a larger disk, say: it is the home's owner who made it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sessions").symlink_to("elsewhere")
    workspace = Workspace(tmp_path / "sessions" / "s1")
    workspace.create(owner=None)
    workspace.sync()
    workspace.remove()

    assert workspace.is_gone()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_that_are_given_to_the_next_guest_keep_their_modes(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "s1")
    workspace.prepare(owner=61_001)
    for name, mode in (("suid", 0o6755), ("plain", 0o644), ("shut", 0o000)):
        path = workspace.files.area("data") / name
        path.touch()
        os.chown(path, 61_001, 61_001)
        path.chmod(mode)
    workspace.prepare(owner=61_002)

    found = {path.name: path.stat() for path in workspace.files.area("data").iterdir()}
    assert {name: stat.S_IMODE(status.st_mode) for name, status in found.items()} == {
        "suid": 0o6755, "plain": 0o644, "shut": 0o000,
    }  # fmt: skip
    assert {status.st_uid for status in found.values()} == {61_002}
