"""A session's directory: what it means that it is not there."""

import errno
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
