"""The managed environment: found under its key, or built alone, aside, and published whole."""

import contextlib
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from holdfast import durable
from holdfast.environments import uv
from holdfast.environments.interpreter import (
    Environment,
    Probe,
    ask,
    described,
    locate,
    own_interpreter,
    refuse_unsuitable,
)
from holdfast.environments.progress import Progress, Report, advance
from holdfast.errors import EnvironmentBuildFailed

LOCK = Path(__file__).parents[1] / "guest-environment" / "requirements.txt"

_DRAFT = ".building-"


async def ensure(home: Path, *, python: str | None = None, report: Report | None = None) -> Environment:
    """Return the managed environment under `home`; build it first if it is not there."""
    return await ensure_from(LOCK, home=home, python=python, report=report or (lambda progress: None))


async def ensure_from(lock: Path, *, home: Path, python: str | None, report: Report) -> Environment:
    """`ensure` for any lock."""
    found = find_from(lock, home=home, python=python)
    return found or await _ensure_built(lock, _shelf(home), _interpreter(python), report)


# Finding it


def find(home: Path, *, python: str | None = None) -> Environment | None:
    """The managed environment under `home`, or None if it is not built yet. Takes no process and changes nothing."""
    return find_from(LOCK, home=home, python=python)


def find_from(lock: Path, *, home: Path, python: str | None) -> Environment | None:
    """`find` for any lock."""
    return _finished(_shelf(home), _key(lock, _interpreter(python)))


def _interpreter(python: str | None) -> str:
    return locate(python) if python else own_interpreter()


def _shelf(home: Path) -> Path:
    return home.absolute() / "envs"


def _key(lock: Path, interpreter: str) -> str:
    # Size and time stand in for the version: asking for that takes a process, and warm starts have no time.
    real = os.path.realpath(interpreter)
    seen = os.stat(real)
    identity = f"{real}\0{seen.st_size}\0{seen.st_mtime_ns}\0".encode()
    return hashlib.sha256(identity + lock.read_bytes()).hexdigest()[:12]


def _finished(envs: Path, key: str) -> Environment | None:
    for directory in envs.glob(f"{key}-*"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            text = (directory / "environment.json").read_bytes()
            return _relocated(msgspec.json.decode(text, type=Environment), directory)
    return None


def _relocated(environment: Environment, directory: Path) -> Environment:
    """The same environment elsewhere: after the rename that ends a build, or when the home was moved."""
    old, new = environment.prefix, str(directory)
    return msgspec.structs.replace(
        environment,
        prefix=new,
        python=environment.python.replace(old, new, 1),
        site_packages=tuple(path.replace(old, new, 1) for path in environment.site_packages),
    )


# Building it


async def _ensure_built(lock: Path, envs: Path, interpreter: str, report: Report) -> Environment:
    base = await ask(interpreter)
    refuse_unsuitable(base)
    key = _key(lock, base.base_python)
    final = envs / f"{key}-{base.tag}-{platform.machine()}"
    try:
        async with _alone(envs, report) as held:
            return _finished(envs, key) or await _build(lock, final, base=base, held=held, report=report)
    except OSError as error:
        raise EnvironmentBuildFailed(f"cannot write {final}: {error.strerror}", hint=uv.hint_for(str(error))) from error


@contextlib.asynccontextmanager
async def _alone(envs: Path, report: Report) -> AsyncIterator[int]:
    """Hold the build lock. Yields its descriptor."""
    descriptor = _open_lock(envs)
    try:
        if not _try_lock(descriptor):
            report(Progress(phase="waiting", text="another process builds the environment"))
        # Polled: a thread that blocks in flock could not be cancelled.
        while not _try_lock(descriptor):  # noqa: ASYNC110
            await anyio.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_lock(envs: Path) -> int:
    envs.mkdir(parents=True, exist_ok=True)
    return os.open(envs / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _build(lock: Path, final: Path, *, base: Probe, held: int, report: Report) -> Environment:
    draft = final.with_name(_DRAFT + secrets.token_hex(6))
    try:
        await anyio.to_thread.run_sync(_sweep, final.parent)
        await uv.run(["venv", "--relocatable", "--no-project", "--python", base.base_python, str(draft)], held=held)
        await _install(lock, draft, held=held, report=report)
        report(Progress(phase="storing", text="writing to disk"))
        environment = _relocated(described(await ask(str(draft / "bin" / "python"))), final)
        await anyio.to_thread.run_sync(_publish, draft, final, environment)
    finally:
        # Shielded: whoever interrupts a build must not find a gigabyte left behind.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_remove, draft)
    report(Progress(phase="ready", done=environment.packages, total=environment.packages, text=str(final)))
    return environment


async def _install(lock: Path, draft: Path, *, held: int, report: Report) -> None:
    now = Progress(phase="resolving", text="reading the lock")
    report(now)

    def hear(line: str) -> None:
        nonlocal now
        before, now = now, advance(now, line)
        if now != before:
            report(now)

    async def tick() -> None:
        if now.phase == "compiling":
            done, total = await anyio.to_thread.run_sync(_count_bytecode, draft)
            report(Progress(phase="compiling", done=done, total=total, text="bytecode"))

    await uv.run(
        [
            *("pip", "install", "--python", str(draft / "bin" / "python"), "--requirements", str(lock)),
            *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--compile-bytecode"),
            # Copies: a file shared with uv's cache changes when somebody edits another project's packages.
            *("--link-mode", "copy"),
        ],
        held=held,
        hear=hear,
        tick=tick,
    )


def _count_bytecode(draft: Path) -> tuple[int, int]:
    names = [name for _, _, files in os.walk(draft / "lib") for name in files]
    return sum(name.endswith(".pyc") for name in names), sum(name.endswith(".py") for name in names)


def _publish(draft: Path, final: Path, environment: Environment) -> None:
    description = msgspec.json.format(msgspec.json.encode(environment), indent=2)
    (draft / "environment.json").write_bytes(description)
    # Before the rename: after a power cut a whole-looking environment must not hold empty files.
    durable.sync_filesystem(draft)
    with durable.closing_fd(os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as envs:
        if final.exists():
            durable.rename(final.name, _DRAFT + secrets.token_hex(6), src_dir=envs, dst_dir=envs)
        durable.rename(draft.name, final.name, src_dir=envs, dst_dir=envs)
        durable.sync_directory(envs)


def _sweep(envs: Path) -> None:
    for dead in envs.glob(_DRAFT + "*"):
        _remove(dead)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
