"""An interpreter: finding it, asking it about itself, refusing it if guests cannot run in it."""

import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping

import anyio
import msgspec

from holdfast.environments.uv import clean_environ
from holdfast.errors import EnvironmentUnusable

OLDEST = (3, 11)
NEEDED = {"IPython": "ipython", "msgspec": "msgspec"}
"""What a guest cannot start without: module, and the distribution that brings it."""

_PROBE_TIMEOUT_S = 60.0


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


async def inspect(env: str | os.PathLike[str]) -> Environment:
    """Describe what a user chose: a virtual environment, an interpreter, or a name on PATH."""
    probe = await ask(locate(os.fspath(env)), needed=NEEDED)
    refuse_unsuitable(probe)
    refuse_incomplete(probe)
    return described(probe)


# Finding it


def own_interpreter() -> str:
    """The real interpreter behind the one that runs us."""
    # The base, not our own venv's link: guests never run in the host application's environment.
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def locate(env: str) -> str:
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


# Asking it about itself

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


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter says about itself."""

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


async def ask(python: str, *, needed: Iterable[str] = ()) -> Probe:
    """Ask; `needed` are modules to try, which costs as long as they take to import."""
    try:
        with anyio.fail_after(_PROBE_TIMEOUT_S):
            # -I: neither the current directory nor the user's site-packages may answer for it.
            done = await anyio.run_process(
                [python, "-I", "-c", _PROBE, *needed],
                check=False,
                env=clean_environ(os.environ),
                cwd="/",
            )
        return msgspec.json.decode(done.stdout, type=Probe)
    except TimeoutError as error:  # an OSError too, but it says nothing against the interpreter
        raise EnvironmentUnusable(
            f"{python} did not answer within {_PROBE_TIMEOUT_S:g} s",
            hint=f"try again when the machine is less busy; meanwhile see: time {shlex.quote(python)} -I --version",
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise EnvironmentUnusable(
            f"{python} does not answer as a Python interpreter",
            hint=f"this must print a version: {shlex.quote(python)} -I --version",
        ) from error


def described(probe: Probe) -> Environment:
    """What is worth keeping of an answer."""
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


# Refusing it


def refuse_unsuitable(probe: Probe) -> None:
    """Raise if no guest can ever run there."""
    if probe.implementation != "CPython" or probe.version_info < OLDEST:
        raise EnvironmentUnusable(
            f"{probe.python} is {probe.implementation} {probe.version}; guests need CPython 3.11 or newer",
            hint="choose another, or get one: uv python install 3.12",
        )


def refuse_incomplete(probe: Probe) -> None:
    """Raise if a guest lacks modules there; the hint installs them."""
    if not probe.missing:
        return
    raise EnvironmentUnusable(
        f"{probe.python} cannot import {' and '.join(probe.missing)}, which guests need",
        hint=_remedy(shlex.quote(probe.python), " ".join(NEEDED[name] for name in probe.missing), probe),
    )


def _remedy(python: str, wanted: str, probe: Probe) -> str:
    if probe.externally_managed and probe.prefix == probe.base_prefix:
        # uv refuses to install there, as pip does.
        return f"uv venv --python {python} guests && uv pip install --python guests {wanted}; then choose guests"
    return f"uv pip install --python {python} {wanted}"
