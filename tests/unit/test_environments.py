"""The guests' environment: built from tiny wheels that the tests make themselves, so no network is needed."""

import base64
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from rich.console import Console

from holdfast import environments
from holdfast.cli.progress import rich_report
from holdfast.environments import Environment, Progress, advance, ensure_from, inspect, interpreter, uv
from holdfast.errors import EnvironmentBuildFailed, EnvironmentUnusable

SOURCE = Path(environments.__file__).parents[2]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def wheel(shelf: Path, name: str, module: str) -> str:
    """Write a wheel with one empty module. Returns its line in a lock."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_record_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    target = shelf / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # its fixed date makes equal wheels equal
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(target.read_bytes()).hexdigest()}\n"


def _record_digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uv-cache")


def point_uv_at(shelf: Path, cache: Path, patch: pytest.MonkeyPatch) -> Path:
    """Let uv find the tests' wheels, and nothing else."""
    shelf.mkdir()
    patch.setenv("UV_FIND_LINKS", str(shelf))
    patch.setenv("UV_OFFLINE", "1")
    patch.setenv("UV_CACHE_DIR", str(cache))
    return shelf


def write_lock(shelf: Path) -> Path:
    path = shelf.with_name("lock.txt")
    path.write_text(wheel(shelf, "ipython", "IPython") + wheel(shelf, "msgspec", "msgspec"))
    return path


@pytest.fixture
def shelf(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return point_uv_at(tmp_path / "shelf", cache, monkeypatch)


@pytest.fixture
def lock(shelf: Path) -> Path:
    return write_lock(shelf)


class Built(msgspec.Struct, frozen=True):
    lock: Path
    home: Path
    environment: Environment


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Built:
    """One environment for all tests that only look at it: a build takes a second."""
    place = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        lock = write_lock(point_uv_at(place / "shelf", cache, patch))
        return Built(lock, place / "home", anyio.run(build, lock, place / "home"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


async def build(lock: Path, home: Path, heard: list[Progress] | None = None) -> Environment:
    report = heard.append if heard is not None else lambda progress: None
    return await ensure_from(lock, home=home, python=None, report=report)


def drafts(home: Path) -> list[str]:
    return [path.name for path in (home / "envs").glob(".building-*")]


def finished(home: Path) -> list[Path]:
    return [path.parent for path in (home / "envs").glob("*/environment.json")]


# Building


async def test_an_environment_is_built_from_its_lock(lock: Path, home: Path) -> None:
    heard: list[Progress] = []
    environment = await build(lock, home, heard)

    assert [environment.prefix] == [str(path) for path in finished(home)]
    assert re.fullmatch(rf"[0-9a-f]{{12}}-{environment.tag}-\w+", Path(environment.prefix).name)
    assert environment.base_python == os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    assert environment.version == sys.version.split()[0]
    assert environment.packages == 2
    assert drafts(home) == []
    phases = [progress.phase for progress in heard]
    assert phases[0] == "resolving"
    assert phases[-1] == "ready"
    assert "compiling" in phases


async def test_the_renamed_environment_works_and_knows_its_place(built: Built) -> None:
    environment = built.environment
    code = "import IPython, msgspec, sys; print(sys.prefix, msgspec.__file__, msgspec.__cached__, sep='\\n')"
    said = await anyio.run_process([environment.python, "-I", "-c", code])
    prefix, module, bytecode = said.stdout.decode().split()

    assert prefix == environment.prefix
    assert os.path.dirname(module) in environment.site_packages
    assert os.path.exists(bytecode)
    assert os.stat(prefix).st_mode & 0o777 == 0o755
    assert f"home = {os.path.dirname(environment.base_python)}" in Path(prefix, "pyvenv.cfg").read_text()


async def test_a_warm_start_takes_no_process_and_no_time(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a warm start must not start a process")

    monkeypatch.setattr(anyio, "open_process", refuse)
    monkeypatch.setattr(anyio, "run_process", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    took = []
    for _ in range(10):
        before = time.perf_counter()
        assert await build(built.lock, built.home) == built.environment
        took.append(time.perf_counter() - before)
    assert min(took) < 0.005


async def test_whether_it_is_built_can_be_asked_without_building_it(built: Built, tmp_path: Path) -> None:
    assert environments.find_from(built.lock, home=built.home, python=None) == built.environment
    assert environments.find(tmp_path / "nowhere") is None
    assert not (tmp_path / "nowhere").exists()


async def test_a_moved_home_keeps_its_environment(lock: Path, home: Path, tmp_path: Path) -> None:
    old = await build(lock, home)
    moved = home.rename(tmp_path / "elsewhere")
    new = await build(lock, moved)

    assert new.prefix == old.prefix.replace(str(home), str(moved))
    assert os.path.exists(new.python)
    assert all(os.path.isdir(path) for path in new.site_packages)
    assert new.fingerprint == old.fingerprint


async def test_another_lock_gets_another_environment(lock: Path, shelf: Path, built: Built) -> None:
    lock.write_text(lock.read_text() + wheel(shelf, "pebble", "pebble"))
    other = await build(lock, built.home)

    assert other.prefix != built.environment.prefix
    assert other.fingerprint != built.environment.fingerprint
    assert len(finished(built.home)) == 2


async def test_a_damaged_description_means_a_new_build(lock: Path, home: Path) -> None:
    built = await build(lock, home)
    Path(built.prefix, "environment.json").write_text('{"python": "/bi')

    assert await build(lock, home) == built
    assert await build(lock, home) == built


# Interruptions


async def test_a_cancelled_build_leaves_nothing(lock: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[anyio.abc.Process] = []
    real = anyio.open_process

    async def remember(*arguments: Any, **options: Any) -> anyio.abc.Process:
        started.append(await real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(anyio, "open_process", remember)
    with anyio.CancelScope() as scope:

        def hang_up(progress: Progress) -> None:
            if progress.phase == "downloading":
                scope.cancel()

        await ensure_from(lock, home=home, python=None, report=hang_up)

    assert scope.cancelled_caught
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    assert (drafts(home), finished(home)) == ([], [])
    assert await build(lock, home)


async def test_a_killed_build_never_looks_finished(lock: Path, home: Path) -> None:
    code = f"""
import anyio, os, pathlib
from holdfast.environments import ensure_from
def die(progress):
    if progress.phase == "downloading":
        os.kill(os.getpid(), 9)
lock, home = pathlib.Path({str(lock)!r}), pathlib.Path({str(home)!r})
anyio.run(lambda: ensure_from(lock, home=home, python=None, report=die))
"""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    killed = await anyio.run_process([sys.executable, "-c", code], check=False, env=environ)

    assert killed.returncode == -signal.SIGKILL
    assert finished(home) == []
    assert len(drafts(home)) == 1
    assert await build(lock, home)
    assert drafts(home) == []


async def test_two_builds_at_once_make_one_environment(lock: Path, home: Path) -> None:
    heard: list[Progress] = []
    built: list[Environment] = []

    async def one() -> None:
        built.append(await build(lock, home, heard))

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        group.start_soon(one)

    phases = [progress.phase for progress in heard]
    assert built[0] == built[1]
    assert (phases.count("ready"), phases.count("waiting")) == (1, 1)
    assert len(finished(home)) == 1


# Failures


async def test_other_bytes_than_locked_are_refused(lock: Path, home: Path) -> None:
    lock.write_text(re.sub(r"sha256:\w{8}", "sha256:00000000", lock.read_text()))
    with pytest.raises(EnvironmentBuildFailed) as caught:
        await build(lock, home)

    assert "msgspec" in caught.value.message or "ipython" in caught.value.message
    assert caught.value.hint
    assert (drafts(home), finished(home)) == ([], [])


async def test_a_lock_without_hashes_is_refused(lock: Path, home: Path) -> None:
    lock.write_text("msgspec==1.0\n")
    with pytest.raises(EnvironmentBuildFailed, match="hash"):
        await build(lock, home)


async def test_a_package_that_cannot_be_had_is_explained(lock: Path, home: Path) -> None:
    lock.write_text(f"no-such-package==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(EnvironmentBuildFailed, match="no-such-package") as caught:
        await build(lock, home)
    assert "network" in caught.value.hint


async def test_a_home_that_cannot_be_written_is_explained(lock: Path, home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(EnvironmentBuildFailed, match="cannot write"):
        await build(lock, home)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("failed to write: No space left on device (os error 28)", "free about"),
        ("error sending request for url\ncause: dns error", "network"),
        ("Hash mismatch for `idna==3.20`", "other files than the lock"),
        ("a riddle", "run again"),
    ],
)
def test_each_failure_has_its_own_advice(said: str, hint: str) -> None:
    assert hint in uv.hint_for(said)


async def test_uv_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentBuildFailed, match="uv is neither"):
        uv.find_binary()


# An environment that the user chose


async def test_a_chosen_environment_is_described_like_a_managed_one(built: Built) -> None:
    managed = built.environment

    assert await inspect(managed.prefix) == managed
    assert await inspect(Path(managed.python)) == managed


async def test_the_tests_own_interpreter_can_be_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "NEEDED", {"msgspec": "msgspec"})
    found = await inspect(sys.executable)

    assert (found.python, found.prefix, found.base_prefix) == (sys.executable, sys.prefix, sys.base_prefix)
    assert os.path.dirname(os.path.dirname(msgspec.__file__)) in found.site_packages
    assert re.fullmatch("[0-9a-f]{64}", found.fingerprint)


async def test_what_is_missing_comes_with_the_command_that_installs_it(lock: Path, shelf: Path, home: Path) -> None:
    lock.write_text(wheel(shelf, "pebble", "pebble"))
    bare = await build(lock, home)
    with pytest.raises(EnvironmentUnusable, match="cannot import IPython and msgspec") as caught:
        await inspect(bare.python)
    assert caught.value.hint == f"uv pip install --python {bare.python} ipython msgspec"


@pytest.mark.parametrize("nowhere", ["no-such-python", "/no/such/python", "/etc"])
async def test_no_interpreter_there(nowhere: str) -> None:
    with pytest.raises(EnvironmentUnusable, match="no Python interpreter at"):
        await inspect(nowhere)


async def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(EnvironmentUnusable, match="does not answer as a Python"):
        await inspect("/bin/true")


async def test_a_machine_too_busy_to_answer_is_not_blamed_on_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("holdfast.environments.interpreter._PROBE_TIMEOUT_S", 0.2)

    with pytest.raises(EnvironmentUnusable, match=r"did not answer within 0\.2 s"):
        await inspect(tmp_path / "python")


@pytest.mark.parametrize(("implementation", "version"), [("CPython", "3.10.4"), ("PyPy", "3.11.9")])
async def test_other_pythons_are_refused_by_name(tmp_path: Path, implementation: str, version: str) -> None:
    answer = {
        **{"python": "/opt/odd", "prefix": "/opt", "base_prefix": "/opt", "base_python": "/opt/odd"},
        **{"implementation": implementation, "version": version},
        **{"version_info": [int(part) for part in version.split(".")[:2]], "threading": ""},
        **{"site_packages": [], "externally_managed": False, "distributions": {}, "missing": []},
    }
    odd = tmp_path / "odd-python"
    odd.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    odd.chmod(0o755)
    with pytest.raises(EnvironmentUnusable, match=f"/opt/odd is {implementation} {version}"):
        await inspect(odd)


def test_a_system_python_is_not_to_be_installed_into() -> None:
    probe = interpreter.Probe(
        python="/usr/bin/python3",
        prefix="/usr",
        base_prefix="/usr",
        base_python="/usr/bin/python3.11",
        implementation="CPython",
        version="3.11.2",
        version_info=(3, 11),
        threading="",
        site_packages=[],
        externally_managed=True,
        distributions={},
        missing=["IPython"],
    )
    with pytest.raises(EnvironmentUnusable) as caught:
        interpreter.refuse_incomplete(probe)
    assert caught.value.hint.startswith("uv venv --python /usr/bin/python3 guests && uv pip install")


# What uv hears and says


def test_uv_gets_the_users_settings_and_nothing_else() -> None:
    given = {
        **{"HOME": "/h", "PATH": "/bin", "HTTPS_PROXY": "p", "no_proxy": "n", "SSL_CERT_FILE": "c"},
        **{"UV_DEFAULT_INDEX": "i", "UV_NO_VERIFY_HASHES": "1", "PYTHONPATH": "/x", "SECRET": "s"},
    }
    assert set(uv.clean_environ(given)) == {
        *("HOME", "PATH", "HTTPS_PROXY", "no_proxy", "SSL_CERT_FILE", "UV_DEFAULT_INDEX"),
    }


def test_progress_follows_what_uv_prints() -> None:
    now = Progress(phase="resolving")
    seen = []
    for line in [
        "Using Python 3.11.7 environment at: v",
        "Resolved 58 packages in 245ms",
        "Downloading pyarrow (52.5MiB)",
        " Downloaded pyarrow",
        "Prepared 58 packages in 4.36s",
        "Installed 58 packages in 374ms",
        "Bytecode compiled 8633 files in 24.64s",
        " + anyio==4.16.0",
    ]:
        now = advance(now, line)
        seen.append((now.phase, now.done, now.total, now.text))

    assert seen == [
        ("resolving", 0, 0, ""),
        ("downloading", 0, 58, ""),
        ("downloading", 0, 58, "pyarrow (52.5MiB)"),
        ("downloading", 1, 58, "pyarrow"),
        ("installing", 0, 58, ""),
        ("compiling", 0, 0, "bytecode"),
        ("compiling", 8633, 8633, "bytecode"),
        ("compiling", 8633, 8633, "bytecode"),
    ]


def test_a_log_gets_one_line_a_phase() -> None:
    out = io.StringIO()
    with rich_report(Console(file=out)) as report:
        for done in range(3):
            report(Progress(phase="downloading", done=done, total=3))
        report(Progress(phase="ready", text="/a/[b]"))
    assert out.getvalue() == "environment: downloading\nenvironment: ready /a/[b]\n"


def test_a_terminal_gets_no_share_of_an_unknown_whole() -> None:
    assert "2/3" in drawn(Progress(phase="downloading", done=2, total=3))
    assert "0/?" in drawn(Progress(phase="downloading", done=2, total=3), Progress(phase="storing"))


def drawn(*reports: Progress) -> str:
    out = io.StringIO()
    with rich_report(Console(file=out, force_terminal=True, width=100)) as report:
        for progress in reports:
            report(progress)
    return out.getvalue()


# What is shipped


def test_the_shipped_lock_names_no_place() -> None:
    for line in environments.LOCK.read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; [^/:]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


def test_the_shipped_lock_covers_what_is_asked_for() -> None:
    asked = environments.LOCK.with_suffix(".in").read_text().splitlines()
    wanted = {line for line in asked if line and not line.startswith("#")}
    locked = set(re.findall(r"^([a-z0-9-]+)==", environments.LOCK.read_text(), re.MULTILINE))
    assert wanted <= locked
    assert {"ipython", "msgspec", "cloudpickle", "numpy", "pandas", "pyarrow"} <= wanted
