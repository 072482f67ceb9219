"""An open home, when some of it fails or two ask for opposites at once."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import durable
from holdfast.books import Books
from holdfast.config import Limits, Settings
from holdfast.errors import HoldfastError, InvalidSetting, SessionUnknown
from holdfast.home import acquire
from holdfast.opening import open_service
from holdfast.resources.descent import identity_of
from holdfast.resources.workspace import Workspace
from holdfast.service import Service
from holdfast.sessions import LiveSession

LIMITS = Limits(memory_bytes=256 << 20)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = await open_service(Settings(home=tmp_path / "home"))
    yield service
    await service.close()


async def test_one_session_that_fails_to_close_keeps_nobody_else_from_it(
    tmp_path: Path, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await open_service(Settings(home=tmp_path / "home"))
    sessions = [await service.create_session(limits=LIMITS, env=lean) for _ in range(3)]
    inits = [each.computer.now.kernel.init_pid for each in sessions if each.computer.now is not None]

    close = sessions[1].close

    async def fail(*, keep: bool = False) -> None:
        await close(keep=True)
        raise OSError("its disk is gone")

    monkeypatch.setattr(sessions[1], "close", fail)
    with pytest.raises(OSError, match="its disk is gone"):
        await service.close()

    assert [path.name for path in (tmp_path / "home/sessions").iterdir()] == [sessions[1].id]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in inits), "the keeper's end is that of all"
    acquire(tmp_path / "home").release()  # the home is free
    service = await open_service(Settings(home=tmp_path / "home"))
    try:
        assert not any(service.is_live(each.id) for each in sessions)
    finally:
        await service.close()


@pytest.mark.parametrize("error", [OSError("no room for a spare"), LookupError("a fault of ours")])
async def test_a_spare_that_did_not_come_up_keeps_nobody_from_closing_the_home(
    error: Exception, tmp_path: Path, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await open_service(Settings(home=tmp_path / "home"))
    session = await service.create_session(limits=LIMITS, env=lean)

    async def fail(*_: object) -> LiveSession:
        raise error

    monkeypatch.setattr(service, "_start_session", fail)  # the one that is begun behind the first
    assert service._refilling is not None
    await asyncio.wait([service._refilling])
    await service.close()

    assert session.ended.is_set()
    assert list((tmp_path / "home/sessions").iterdir()) == []
    acquire(tmp_path / "home").release()  # the home is free


@pytest.mark.parametrize(("kind", "step"), [(Books, "load"), (Workspace, "sweep")])
async def test_one_session_that_cannot_be_reached_keeps_nobody_from_the_home(
    kind: type, step: str, tmp_path: Path, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await open_service(Settings(home=tmp_path / "home"))
    sessions = [await service.create_session(limits=LIMITS, env=lean, keep=True) for _ in range(2)]
    await service.close()
    (tmp_path / "home/sessions/not-ours").write_text("nor can it be removed as a directory is")
    reached = getattr(kind, step)

    def fail(books: Any) -> Any:
        if sessions[0].id in str(getattr(books, "workspace", books).path):
            raise PermissionError("nobody may look there")
        return reached(books)

    with monkeypatch.context() as patched:
        patched.setattr(kind, step, fail)
        service = await open_service(Settings(home=tmp_path / "home"))
    try:
        for session in sessions:
            await service.end_session(await service.resume_session(session.id))
    finally:
        await service.close()


async def test_a_session_is_not_resumed_while_it_is_deleted(service: Service, lean: Path) -> None:
    session = await service.create_session(limits=LIMITS, env=lean, keep=True)
    await service.end_session(session, keep=True)
    kept = service.home.sessions / session.id
    assert kept.is_dir()

    dropping = asyncio.create_task(service.drop_session(session.id))
    await asyncio.sleep(0)
    with pytest.raises(HoldfastError) as refused:
        await service.resume_session(session.id)
    with pytest.raises(InvalidSetting):
        await service.drop_session(session.id)
    await dropping

    assert "is being deleted" in refused.value.message
    assert not kept.exists()
    with pytest.raises(SessionUnknown):
        await service.resume_session(session.id)


async def test_a_sessions_directory_lasts_before_the_journal_knows_of_it(
    tmp_path: Path, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave books without a directory, and those are taken for a session that was deleted."""
    steps: list[object] = []
    sync, register = durable.sync_directory, Books.register

    def note_sync(directory: int | Path) -> None:
        status = os.fstat(directory) if isinstance(directory, int) else directory.stat()
        steps.append(identity_of(status))
        sync(directory)

    def note_register(books: Books) -> None:
        steps.append("registered")
        register(books)

    monkeypatch.setattr(durable, "sync_directory", note_sync)
    monkeypatch.setattr(Books, "register", note_register)
    service = await open_service(Settings(home=tmp_path / "home"))
    try:
        session = await service.create_session(limits=LIMITS, env=lean)
        before = steps[: steps.index("registered")]
        lasting = (session.workspace.files.root, session.workspace.path, service.home.sessions)
        assert {identity_of(path.stat()) for path in lasting} <= set(before)
    finally:
        await service.close()
