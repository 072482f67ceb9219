"""A rollback that cannot lay a fresh layer, not at the second try either: memory is lost then, and said to be; files
are never half there."""

import shutil
from collections.abc import Callable

import pytest

from holdfast import Session
from holdfast.resources.workspace import Workspace


@pytest.fixture
def unmountable(session: Session, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The session's next layers lack their work directory: Linux really refuses to mount them."""
    own = session._session._transport._session.workspace.path

    def spoil(times: int) -> None:
        make, left = Workspace.new_stage, [times]

        def new_stage(workspace: Workspace) -> str:
            name = make(workspace)
            if left[0] and workspace.path == own:
                left[0] -= 1
                shutil.rmtree(workspace.stage_path(name).with_name(f"{name}.work"))
            return name

        monkeypatch.setattr(Workspace, "new_stage", new_stage)

    return spoil


@pytest.mark.parametrize(("times", "memory"), [(1, "restored"), (2, "lost")])
def test_what_is_written_after_it_is_committed(
    session: Session, unmountable: Callable[[int], None], times: int, memory: str
) -> None:
    session.run("x = 1\nopen('before.txt', 'w').write('1')")
    session.names()  # the layer after that run is laid
    unmountable(times)
    failed = session.run("open('half.txt', 'w').write('1')\nimport os; os._exit(9)")
    after = session.run("import os\nopen('after.txt', 'w').write('1')\nsorted(os.listdir())")

    assert (failed.status, failed.memory) == ("rolled_back", memory)
    assert failed.recovery is not None
    assert failed.recovery.names == ({"x": "recomputable"} if memory == "lost" else {})
    assert after.text == "['after.txt', 'before.txt']"
    assert [change.path for change in after.outputs] == ["after.txt"]
    assert [file.path for file in session.files()] == ["after.txt", "before.txt"]
