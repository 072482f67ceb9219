"""What a guest sees of the file system.

The keeper builds one *template* root per environment (`build_root`) and starts the zygote inside it. A session
inherits a private copy of that mount table and puts its own pieces on top (`enter_session`). Guests see:

    /usr, /bin, /lib…     the host's, read-only
    /opt/python, /opt/env the environment, read-only, under names that tell nothing about the host
    /opt/holdfast         this package, read-only
    /etc                  a handful of files made here
    /dev                  null zero full random urandom, and shm (RAM, counted against the cap)
    /proc                 a fresh one that shows the session's own processes, and its cap as the machine's memory
    /sys                  the list of its processors (`shown`), and nothing else
    /mnt/data /tmp /home/user   the session's disk, staged on an overlay

There is no /root, /run of the host and no socket of it. All of it stays read-only for good: nobody inside
holds a capability over this mount namespace.
"""

import os
import re
import shutil
from pathlib import Path

from holdfast.sandbox import linux, shown

ENV = "/opt/env"
PYTHON = "/opt/python"
LIBPYTHON = "/opt/libpython"
PACKAGE_ROOT = "/opt/holdfast"
INSTALLERS = f"{PACKAGE_ROOT}/bin"
"""Commands that say why nothing can be installed. An environment's own `pip` comes first."""
HOW_TO_INSTALL: str = (
    "packages come with the environment, and nothing can be installed inside a session: "
    "install them on the host into a virtual environment, and open the session with env=DIRECTORY (or --env DIRECTORY)"
)
WORKSPACE = "/mnt/data"
HOME = "/home/user"
GUEST_ID = 1000
INIT_ID = 999
DIRECTORIES = {"data": WORKSPACE, "tmp": "/tmp", "home": HOME}  # noqa: S108 (the guest's own)
"""The areas of a session's files, and where the guest finds them."""

SESSIONS = "/.sessions"
"""Where a session's first process finds the sessions' directories; gone before user code runs."""
SHARED = "/.shared"
"""The same for a directory of the user's that sessions have as /mnt/data."""
_READ_ONLY = linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
# An ordinary user's guest has the uid that owns the ipc namespace's settings in `sys`. Any guest may write to
# `pressure`: each word sets a trigger that Linux charges to nobody, watches, and takes milliseconds to take down
# again, so that a process with thousands of them outlives its SIGKILL by minutes.
_PROC_READ_ONLY = ("/proc/sys", "/proc/pressure")
_INSTALLERS = ("pip", "pip3", "uv", "conda", "mamba")
_FINDS_ITS_PYTHON = b"#!/bin/sh\n'''exec' \"$(dirname"
"""How a script of a relocatable environment begins: it looks for `python` beside itself."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FILES = ("ld.so.cache", "ld.so.conf", "localtime", "mime.types", "protocols", "services", "debian_version")
_ETC_DIRECTORIES = ("alternatives", "fonts", "ssl/certs", "ld.so.conf.d")
_ETC = {
    "passwd": f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\ninit:x:{INIT_ID}:{INIT_ID}::/:/usr/sbin/nologin\n"
    f"user:x:{GUEST_ID}:{GUEST_ID}:user:{HOME}:/bin/bash\n",
    "group": f"root:x:0:\ninit:x:{INIT_ID}:\nuser:x:{GUEST_ID}:\n",
    "hosts": "127.0.0.1 localhost holdfast\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hostname": "holdfast\n",
}


def build_root(
    *, root: str, prefix: str, base_prefix: str, python: str, package: str, sessions: str, shared: str = ""
) -> str:
    """Build the template below `root`, make it `/`, and return the guest's interpreter as a guest path.

    The caller is alone in a mount namespace of its own.
    """
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID, "size=16m,mode=755")
    _bind_system(root)
    interpreter = _bind_environment(root, prefix=prefix, base_prefix=base_prefix, python=python)
    _bind(package, f"{root}{PACKAGE_ROOT}/holdfast")
    _make_installers(Path(root + INSTALLERS))
    _make_etc(root)
    _make_dev(root)
    for directory in ("/proc", shown.PROCESSORS, "/var", "/run", *DIRECTORIES.values(), SESSIONS, SHARED, "/.old"):
        os.makedirs(root + directory, exist_ok=True)
    os.symlink("/tmp", f"{root}/var/tmp")  # noqa: S108 (the guest's own)
    linux.mount(sessions, root + SESSIONS, flags=linux.MS_BIND)
    if shared:
        linux.mount(shared, root + SHARED, flags=linux.MS_BIND)
    linux.mount("proc", f"{root}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    _pivot(root)
    return interpreter


def seal_root() -> None:
    """Make the template read-only. The zygote calls it once it is warm: imports may write caches before."""
    linux.mount(None, "/", flags=_READ_ONLY & ~linux.MS_NODEV)


def enter_session(*, shm_bytes: int, shared: bool = False) -> None:
    """Put a session's pieces on this process's private copy of the template; its disk is there (`overlay.enter`)."""
    for place in (SESSIONS, SHARED) if shared else (SESSIONS,):
        linux.unmount(place, linux.MNT_DETACH)
    shared_memory = f"size={shm_bytes},mode=1777"
    linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, shared_memory)  # noqa: S108
    # Over the template's, not instead of it: in a user namespace the kernel grants a fresh /proc only to
    # those who can already see a whole one. hidepid: pid 1 belongs to another uid and stays out of sight.
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, "hidepid=2")
    for place in filter(os.path.isdir, _PROC_READ_ONLY):
        linux.mount(place, place, flags=linux.MS_BIND)
        linux.mount(None, place, flags=_READ_ONLY | linux.MS_NOEXEC)


def _bind(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    linux.mount(source, target, flags=linux.MS_BIND | linux.MS_REC)
    linux.lock_tree(target)  # with all that is mounted below: a remount would change the top alone


def _bind_system(root: str) -> None:
    _bind("/usr", f"{root}/usr")
    for name in _SYSTEM_LINKS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _bind(f"/{name}", f"{root}/{name}")


def _bind_environment(root: str, *, prefix: str, base_prefix: str, python: str) -> str:
    in_usr = Path(base_prefix).is_relative_to("/usr")
    if not in_usr:
        _bind(base_prefix, root + PYTHON)
        _expose_libpython(root, base_prefix)
    base = python if in_usr else PYTHON + "/" + os.path.relpath(python, base_prefix)
    if prefix == base_prefix:
        return base
    _make_virtual_environment(Path(root + ENV), prefix=Path(prefix), base_python=base)
    return f"{ENV}/bin/python"


def _expose_libpython(root: str, base_prefix: str) -> None:
    """A shared libpython is linked by a host path that guests do not have; only it goes on the search path."""
    libraries = [path.name for path in Path(base_prefix, "lib").glob("libpython*.so*")]
    if libraries:
        os.makedirs(root + LIBPYTHON)
    for name in libraries:
        os.symlink(f"{PYTHON}/lib/{name}", f"{root}{LIBPYTHON}/{name}")


def _make_virtual_environment(target: Path, *, prefix: Path, base_python: str) -> None:
    """The virtual environment at `prefix`, as it would look had it been made at `/opt/env`.

    Its scripts and `pyvenv.cfg` hold host paths, so these few small files are made anew; libraries are bound.
    """
    target.mkdir(parents=True)
    for entry in prefix.iterdir():
        if entry.is_dir() and not entry.is_symlink() and entry.name != "bin":
            _bind(str(entry), str(target / entry.name))
    (target / "pyvenv.cfg").write_text(f"home = {os.path.dirname(base_python)}\ninclude-system-site-packages = false\n")
    _bind(str(prefix / "bin"), str(target / ".bin"))
    (target / "bin").mkdir()
    for script in (prefix / "bin").iterdir():
        _make_script(script, target / "bin" / script.name, prefix=prefix, base_python=base_python)


def _make_script(script: Path, target: Path, *, prefix: Path, base_python: str) -> None:
    if re.fullmatch(r"python(\d(\.\d+)?)?", script.name):
        target.symlink_to(base_python)
        return
    head = script.read_bytes()[:256] if script.is_file() else b""
    shebang = b"#!" + os.fsencode(prefix)
    if head.startswith(shebang):
        target.write_bytes(script.read_bytes().replace(os.fsencode(prefix), ENV.encode(), 1))
        target.chmod(0o755)
    elif head.startswith(_FINDS_ITS_PYTHON):
        target.write_bytes(script.read_bytes())
        target.chmod(0o755)
    elif head:
        target.symlink_to(f"{ENV}/.bin/{script.name}")


def _make_installers(target: Path) -> None:
    """Those of the base interpreter begin with a host path, and fail as if a file of theirs were missing."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _INSTALLERS:
        (target / name).write_text(f"#!/bin/sh\necho '{name}: {HOW_TO_INSTALL}' >&2\nexit 1\n")
        (target / name).chmod(0o755)


def _make_etc(root: str) -> None:
    etc = Path(root, "etc")
    etc.mkdir()
    for name, text in _ETC.items():
        (etc / name).write_text(text)
    for name in _ETC_FILES:
        if os.path.isfile(f"/etc/{name}"):
            shutil.copyfile(f"/etc/{name}", etc / name)
    for name in _ETC_DIRECTORIES:
        if os.path.isdir(f"/etc/{name}"):
            _bind(f"/etc/{name}", str(etc / name))


def _make_dev(root: str) -> None:
    dev = Path(root, "dev")
    dev.mkdir()
    for name in _DEVICES:
        (dev / name).touch()
        linux.mount(f"/dev/{name}", str(dev / name), flags=linux.MS_BIND)
    (dev / "shm").mkdir()
    (dev / "fd").symlink_to("/proc/self/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (dev / name).symlink_to(f"/proc/self/fd/{number}")


def _pivot(root: str) -> None:
    os.chdir(root)
    linux.pivot_root(".", ".old")
    os.chdir("/")
    linux.unmount("/.old", linux.MNT_DETACH)
    os.rmdir("/.old")
