"""The Python environment that guests run in: built once by uv, or chosen by the user.

A managed environment is `<home>/envs/<key>-<tag>-<machine>`; the key digests the shipped lock and the base
interpreter, so that another lock or an upgraded Python gets a new directory and running guests keep theirs.

1. It is built in a sibling directory and renamed: what has its final name is whole.
2. `environment.json` is written last inside; with it a later start needs no process at all.
3. Only the holder of `envs/.lock` builds, so a building directory that he did not make is a dead one.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from holdfast.errors import EnvironmentBuildFailed, EnvironmentUnusable, HoldfastError

LOCK = Path(__file__).with_name("guest-environment") / "requirements.txt"
OLDEST = (3, 11)
NEEDED = {"IPython": "ipython", "msgspec": "msgspec"}
"""What a guest cannot start without: module, and the distribution that brings it."""

_DRAFT = ".building-"
_PROBE_TIMEOUT_S = 60.0
_TICK_S = 0.5
_MAX_LINE_BYTES = 64 * 1024


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """One interpreter and what is installed for it."""

    python: str
    """The interpreter as its user calls it: in a virtual environment, the link there."""
    prefix: str
    base_prefix: str
    base_python: str
    """The real file behind `python`."""
    version: str
    tag: str
    site_packages: tuple[str, ...]
    packages: int
    fingerprint: str
    """SHA-256 over the Python version and each (distribution, version)."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a build is. A total of 0 means that nobody knows it yet."""

    phase: str
    """waiting, resolving, downloading, installing, compiling, storing or ready."""
    done: int = 0
    total: int = 0
    text: str = ""


Report = Callable[[Progress], None]


async def ensure(home: Path, *, python: str | None = None, report: Report | None = None) -> Environment:
    """Return the managed environment under `home`; build it first if it is not there."""
    return await ensure_from(LOCK, home=home, python=python, report=report or (lambda progress: None))


async def ensure_from(lock: Path, *, home: Path, python: str | None, report: Report) -> Environment:
    """`ensure` for any lock."""
    envs = _shelf(home)
    interpreter = _locate(python) if python else _own_interpreter()
    return _finished(envs, _key(lock, interpreter)) or await _ensure_built(lock, envs, interpreter, report)


async def inspect(env: str | os.PathLike[str]) -> Environment:
    """Describe what a user chose: a virtual environment, an interpreter, or a name on PATH."""
    probe = await _probe(_locate(os.fspath(env)), needed=NEEDED)
    _refuse_unsuitable(probe)
    _refuse_incomplete(probe)
    return _described(probe)


# Finding it


def _shelf(home: Path) -> Path:
    return home.absolute() / "envs"


def _own_interpreter() -> str:
    # The base, not our own venv's link: guests never run in the host application's environment.
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _locate(env: str) -> str:
    """The absolute path of an interpreter. Links stay: a link's place is what makes a virtual environment."""
    path = os.path.expanduser(env)
    if os.path.isdir(path):
        path = os.path.join(path, "bin", "python")
    found = shutil.which(path)
    if found is None:
        raise EnvironmentUnusable(
            f"no Python interpreter at {env!r}",
            hint="give the directory of a virtual environment, the path of a python, or a name on PATH",
        )
    return os.path.abspath(found)


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
    base = await _probe(interpreter)
    _refuse_unsuitable(base)
    key = _key(lock, base.base_python)
    final = envs / f"{key}-{base.tag}-{platform.machine()}"
    try:
        async with _alone(envs, report) as held:
            return _finished(envs, key) or await _build(lock, final, base=base, held=held, report=report)
    except OSError as error:
        raise EnvironmentBuildFailed(f"cannot write {final}: {error.strerror}", hint=_hint(str(error))) from error


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


async def _build(lock: Path, final: Path, *, base: "_Probe", held: int, report: Report) -> Environment:
    draft = final.with_name(_DRAFT + secrets.token_hex(6))
    try:
        await anyio.to_thread.run_sync(_sweep, final.parent)
        await _uv(["venv", "--relocatable", "--no-project", "--python", base.base_python, str(draft)], held=held)
        await _install(lock, draft, held=held, report=report)
        report(Progress(phase="storing", text="writing to disk"))
        environment = _relocated(_described(await _probe(str(draft / "bin" / "python"))), final)
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

    await _uv(
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


def advance(now: Progress, line: str) -> Progress:
    """What a line that uv printed says about the progress. uv announces large downloads only."""
    match line.split():
        case ["Resolved", count, *_] if count.isdigit():
            return Progress(phase="downloading", total=int(count))
        case ["Downloading", name, *size]:
            return msgspec.structs.replace(now, text=" ".join([name, *size]))
        case ["Downloaded", name]:
            return msgspec.structs.replace(now, done=now.done + 1, text=name)
        case ["Prepared", *_]:
            return Progress(phase="installing", total=now.total)
        case ["Installed", *_]:
            return Progress(phase="compiling", text="bytecode")
        case ["Bytecode", "compiled", count, *_] if count.isdigit():
            return Progress(phase="compiling", done=int(count), total=int(count), text="bytecode")
    return now


def _count_bytecode(draft: Path) -> tuple[int, int]:
    names = [name for _, _, files in os.walk(draft / "lib") for name in files]
    return sum(name.endswith(".pyc") for name in names), sum(name.endswith(".py") for name in names)


def _publish(draft: Path, final: Path, environment: Environment) -> None:
    description = msgspec.json.format(msgspec.json.encode(environment), indent=2)
    (draft / "environment.json").write_bytes(description)
    # Before the rename: after a power cut a whole-looking environment must not hold empty files.
    os.sync()
    if final.exists():
        final.rename(final.with_name(_DRAFT + secrets.token_hex(6)))
    draft.rename(final)


def _sweep(envs: Path) -> None:
    for dead in envs.glob(_DRAFT + "*"):
        _remove(dead)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


# Running uv


async def _no_tick() -> None:
    """Nothing to look at while this command runs."""


async def _uv(
    arguments: Sequence[str],
    *,
    held: int,
    hear: Callable[[str], None] = lambda line: None,
    tick: Callable[[], Awaitable[None]] = _no_tick,
) -> None:
    """Run uv to its end: `hear` gets each line that it prints, `tick` runs when it is silent."""
    tail: deque[str] = deque(maxlen=12)
    async with _started([_uv_binary(), "--color", "never", *arguments], held=held) as process:
        async for line in _lines(process, tick):
            tail.append(line)
            hear(line)
        status = await process.wait()
    if status != 0:
        said = "\n".join(tail)
        raise EnvironmentBuildFailed(f"uv {arguments[0]} ended with status {status}:\n{said}", hint=_hint(said))


@contextlib.asynccontextmanager
async def _started(command: Sequence[str], *, held: int) -> AsyncIterator[anyio.abc.Process]:
    process = await anyio.open_process(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=_clean_environ(os.environ),
        cwd="/",  # no project's configuration is to be found there, the user's own still counts
        umask=0o022,  # guests have another uid and must be able to read it all
        start_new_session=True,  # so that uv's own workers can be ended with it
        # uv keeps the build lock even if we are killed: nobody sweeps a directory that it still writes to.
        pass_fds=[held],
    )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: anyio.abc.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with anyio.move_on_after(3):
                await process.wait()
    await process.aclose()


async def _lines(process: anyio.abc.Process, tick: Callable[[], Awaitable[None]]) -> AsyncIterator[str]:
    assert process.stderr is not None
    stream = BufferedByteReceiveStream(process.stderr)
    while True:
        line: bytes | None = None
        try:
            with anyio.move_on_after(_TICK_S):
                line = await stream.receive_until(b"\n", _MAX_LINE_BYTES)
        except (anyio.IncompleteRead, anyio.DelimiterNotFound):
            return
        if line is None:
            await tick()
        else:
            yield line.decode(errors="replace").rstrip()


def _uv_binary() -> str:
    try:
        from uv import find_uv_bin  # here: warm starts never need it

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise EnvironmentBuildFailed(
            "uv is neither installed beside holdfast nor on PATH",
            hint="pip install uv, or choose an environment that exists already",
        )
    return found


_KEPT = {"HOME", "PATH", "TMPDIR", "USER", "LOGNAME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "NETRC"}
# What would change the content or the place of what we build; indexes and caches stay the user's.
_OVERRULED = {
    *("UV_NO_VERIFY_HASHES", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_NO_BINARY", "UV_VENV_SEED"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT", "UV_WORKING_DIR", "UV_NO_PROGRESS"),
}


def _clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's uv settings, proxies and certificates, and nothing else that he did not mean for uv."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _KEPT or name.startswith(("UV_", "SSL_", "XDG_")) or name.lower().endswith("_proxy"))
        and name not in _OVERRULED
    }


_HINTS = (
    (r"No space left|os error 28|Disk quota", "free about 2 GB there, or set HOLDFAST_HOME to another disk"),
    (
        r"Hash mismatch",
        "the index serves other files than the lock names; if it is a mirror, ask who runs it",
    ),
    (
        r"Failed to fetch|error sending request|dns error|network (was|is) disabled",
        "check the network; uv follows HTTPS_PROXY, SSL_CERT_FILE and UV_DEFAULT_INDEX",
    ),
    (r"Permission denied|Read-only file system", "set HOLDFAST_HOME to a directory that you may write to"),
    (
        r"no wheels|No solution found|unsatisfiable",
        "the index lacks a locked wheel: use CPython 3.11 to 3.14, or set UV_DEFAULT_INDEX to another",
    ),
)


def _hint(said: str) -> str:
    found = (hint for pattern, hint in _HINTS if re.search(pattern, said, re.IGNORECASE))
    return next(found, "run again; if it fails again, choose an environment that exists already")


# Asking an interpreter about itself

# Old syntax on purpose: even Python 2 is to answer, so that its refusal can name its version.
_PROBE = """
import json, os, platform, site, sys, sysconfig
def imports(name):
    try:
        __import__(name)
    except Exception:
        return False
    return True
distributions = {}
if sys.version_info >= (3, 8):
    import importlib.metadata
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"]
        if name:
            distributions.setdefault(name, found.version)
paths = sysconfig.get_paths()
print(json.dumps({
    "python": sys.executable,
    "prefix": sys.prefix,
    "base_prefix": getattr(sys, "base_prefix", sys.prefix),
    "base_python": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "implementation": platform.python_implementation(),
    "version": platform.python_version(),
    "version_info": list(sys.version_info[:2]),
    "threading": "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "",
    "site_packages": [paths["purelib"], paths["platlib"]] + getattr(site, "getsitepackages", list)(),
    "externally_managed": os.path.exists(os.path.join(paths["stdlib"], "EXTERNALLY-MANAGED")),
    "distributions": distributions,
    "missing": [name for name in sys.argv[1:] if not imports(name)],
}))
"""


class _Probe(msgspec.Struct, frozen=True, kw_only=True):
    python: str
    prefix: str
    base_prefix: str
    base_python: str
    implementation: str
    version: str
    version_info: tuple[int, int]
    threading: str
    site_packages: list[str]
    externally_managed: bool
    distributions: dict[str, str]
    missing: list[str]

    @property
    def tag(self) -> str:
        return f"cp{self.version_info[0]}{self.version_info[1]}{self.threading}"


async def _probe(python: str, *, needed: Iterable[str] = ()) -> _Probe:
    """Ask; `needed` are modules to try, which costs as long as they take to import."""
    try:
        with anyio.fail_after(_PROBE_TIMEOUT_S):
            # -I: neither the current directory nor the user's site-packages may answer for it.
            done = await anyio.run_process(
                [python, "-I", "-c", _PROBE, *needed],
                check=False,
                env=_clean_environ(os.environ),
                cwd="/",
            )
        return msgspec.json.decode(done.stdout, type=_Probe)
    except (OSError, msgspec.DecodeError) as error:
        raise EnvironmentUnusable(
            f"{python} does not answer as a Python interpreter",
            hint=f"this must print a version: {shlex.quote(python)} -I --version",
        ) from error


def _described(probe: _Probe) -> Environment:
    return Environment(
        python=probe.python,
        prefix=probe.prefix,
        base_prefix=probe.base_prefix,
        base_python=probe.base_python,
        version=probe.version,
        tag=probe.tag,
        site_packages=tuple(path for path in dict.fromkeys(probe.site_packages) if os.path.isdir(path)),
        packages=len(probe.distributions),
        fingerprint=_fingerprint(probe.version, probe.distributions),
    )


def _fingerprint(version: str, distributions: Mapping[str, str]) -> str:
    # Names as the packaging standard compares them: the same wheel may be spelt in two ways.
    named = sorted((re.sub(r"[-_.]+", "-", name).lower(), found) for name, found in distributions.items())
    return hashlib.sha256(msgspec.json.encode([version, named])).hexdigest()


def _refuse_unsuitable(probe: _Probe) -> None:
    if probe.implementation != "CPython" or probe.version_info < OLDEST:
        raise EnvironmentUnusable(
            f"{probe.python} is {probe.implementation} {probe.version}; guests need CPython 3.11 or newer",
            hint="choose another, or get one: uv python install 3.12",
        )


def _refuse_incomplete(probe: _Probe) -> None:
    if not probe.missing:
        return
    raise EnvironmentUnusable(
        f"{probe.python} cannot import {' and '.join(probe.missing)}, which guests need",
        hint=_remedy(shlex.quote(probe.python), " ".join(NEEDED[name] for name in probe.missing), probe),
    )


def _remedy(python: str, wanted: str, probe: _Probe) -> str:
    if probe.externally_managed and probe.prefix == probe.base_prefix:
        # uv refuses to install there, as pip does.
        return f"uv venv --python {python} guests && uv pip install --python guests {wanted}; then choose guests"
    return f"uv pip install --python {python} {wanted}"


# python -m holdfast.environments: prepare it ahead of the first session


def main(report: Report) -> int:
    """Build the managed environment and print its path."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--python", help="base interpreter (default: the one that runs holdfast)")
    chosen = parser.parse_args()
    try:
        print(anyio.run(lambda: ensure(chosen.home, python=chosen.python, report=report)).prefix)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print_phases() -> Report:
    shown: list[str] = []

    def report(progress: Progress) -> None:
        if progress.phase not in shown:
            shown.append(progress.phase)
            print(f"environment: {progress.phase} {progress.text}".rstrip(), file=sys.stderr)

    return report


if __name__ == "__main__":
    sys.exit(main(_print_phases()))
