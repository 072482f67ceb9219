"""What this machine lets us build a sandbox from, by trying it.

Each probe forks a child that really does what a session will do (with the session's own functions where it can),
in namespaces that end with it, and reports the errno. Nothing is left behind: no process, mount, cgroup or file.

A missing *required* primitive means that sessions are refused. `ok` is None where a primitive is of no use to this
user on this machine.

    python -m holdfast.sandbox.probe        prints the findings as JSON

Call `find` in a process with one thread: it forks.
"""

import dataclasses
import errno
import json
import os
import platform
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.sandbox import cgroups, linux, mounts, namespaces, pid1, privileges, seccomp
from holdfast.sandbox.cgroups import delegation, hierarchies

_PATIENCE_S = 20
_CAP_BYTES = 32 << 20
_HOST_ID = 1_900_000_000
_PACKAGE = Path(__file__).parents[1]
_APPARMOR = "kernel/apparmor_restrict_unprivileged_userns"
_CLONE = "kernel/unprivileged_userns_clone"
_MAX = "user/max_user_namespaces"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One primitive."""

    name: str
    required: bool
    ok: bool | None
    detail: str
    """What was seen."""
    why: str
    """What it is for, or what is lost without it."""
    remedy: str = ""
    """The command that brings it, where it is missing."""


def find(directory: Path | None = None) -> list[Finding]:
    """Try everything. `directory`: on the disk where sessions will live."""
    return [
        *_linux(),
        *_namespaces(),
        *_file_systems(directory),
        *_identity(),
        *_user_namespace_switches(),
        _seccomp(),
        *_cgroups(),
        *_compiled(),
    ]


def strict(findings: list[Finding]) -> bool:
    """Whether a strict sandbox can be had here, by this user."""
    return all(finding.ok is not False for finding in findings if finding.required)


# -- trying ------------------------------------------------------------------------------------------------------


def _tried(body: Callable[[], str], meanwhile: Callable[[int], None] = lambda pid: None) -> str:
    """Run `body` in a child and return what it says; its OSError is raised here. `meanwhile` gets the child's pid."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _answer(body, there)
    there.close()
    try:
        meanwhile(pid)
        said = b"".join(iter(lambda: here.recv(65536), b""))
    finally:
        here.close()
        status = os.waitpid(pid, 0)[1]
    if not said:
        raise OSError(errno.EINTR, f"the probe ended with status {os.waitstatus_to_exitcode(status)}")
    number, text = json.loads(said)
    if number is not None:
        raise OSError(number, text)
    return str(text)


def _answer(body: Callable[[], str], there: socket.socket) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_PATIENCE_S)
        answer: tuple[int | None, str] = None, body()
    except OSError as error:
        answer = error.errno or 0, error.strerror or str(error)
    except BaseException as error:  # a process edge: whatever it was, it must end here and be told
        answer = 0, "".join(traceback.format_exception_only(error)).strip()
    there.sendall(json.dumps(answer).encode())
    os._exit(0)


def _outcome(body: Callable[[], str]) -> tuple[bool, str, OSError | None]:
    try:
        return True, _tried(body), None
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "")
        return False, f"{error.strerror} ({code})" if code else str(error.strerror), error


def _is_root() -> bool:
    return os.geteuid() == 0


def _enter_outer() -> None:
    namespaces.enter_outer(as_root=_is_root())


def _inside(body: Callable[[], str]) -> Callable[[], str]:
    """`body` as pid 1 of the keeper's layer."""

    def entered() -> str:
        _enter_outer()
        return _tried(body)

    return entered


# -- the kernel --------------------------------------------------------------------------------------------------


def _linux() -> list[Finding]:
    def handles() -> str:
        os.close(os.pidfd_open(os.getpid()))
        return "a process can be held by a handle"

    def close_range() -> str:
        linux.close_all_fds_except({int(name) for name in os.listdir("/proc/self/fd")})
        return "descriptors can be closed in one call"

    newer = "boot Linux 5.9 or newer (this is {}); 5.14 and newer also end a cgroup v2 session in one step"
    remedy = newer.format(platform.release())
    whys = {
        "pidfd": (handles, "kills and watches a process without mistaking another for it (Linux 5.3)"),
        "close_range": (close_range, "no descriptor of the host leaks into a kernel (Linux 5.9)"),
    }
    found = []
    for name, (body, why) in whys.items():
        ok, detail, _ = _outcome(body)
        found.append(Finding(name=name, required=True, ok=ok, detail=detail, why=why, remedy=remedy))
    return found


# -- namespaces --------------------------------------------------------------------------------------------------


def _user_namespace() -> str:
    """Make one and use it: AppArmor on Ubuntu 24.04 lets the first succeed and forbids the second."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            try:
                Path(f"/proc/self/{name}").write_text(text)
            except OSError as error:
                raise OSError(error.errno, f"made, but writing {name}: {error.strerror}") from error
    try:
        linux.unshare(linux.CLONE_NEWUTS)
        linux.sethostname("holdfast")
    except OSError as error:
        raise OSError(error.errno, f"made, but without its capabilities: {error.strerror}") from error
    return "made and used"


def _mount_namespace() -> str:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "/mnt", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m")
    Path("/mnt/probe").touch()
    return "mounted in private"


def _pid_namespace() -> str:
    pid = os.getpid()
    if pid != 1:
        raise OSError(errno.EINVAL, f"the first process is number {pid}")
    return "the first process is number 1"


def _net_namespace() -> str:
    linux.unshare(linux.CLONE_NEWNET)
    linux.bring_up_loopback()
    return f"devices: {', '.join(name for _, name in socket.if_nameindex())}"


def _ipc_namespace() -> str:
    before = os.readlink("/proc/self/ns/ipc")
    linux.unshare(linux.CLONE_NEWIPC)
    if os.readlink("/proc/self/ns/ipc") == before:
        raise OSError(errno.EINVAL, "unshare had no effect")
    return "made"


def _uts_namespace() -> str:
    linux.unshare(linux.CLONE_NEWUTS)
    linux.sethostname("holdfast")
    return "made and named"


def _namespaces() -> list[Finding]:
    rows = (
        ("user", _user_namespace, "the guest is nobody on the host, with no capability over it"),
        ("mount", _inside(_mount_namespace), "a file system of the guest's own"),
        ("pid", _inside(_pid_namespace), "host processes are out of sight; all of a session dies with its pid 1"),
        ("net", _inside(_net_namespace), "no network but loopback"),
        ("ipc", _inside(_ipc_namespace), "no shared memory, queue or semaphore of the host"),
        ("uts", _inside(_uts_namespace), "a host name of the guest's own"),
    )
    found = []
    for name, body, why in rows:
        ok, detail, error = _outcome(body)
        remedy = _namespace_remedy(error, f"CONFIG_{name.upper()}_NS")
        row = Finding(name=f"{name} namespace", required=True, ok=ok, detail=detail, why=why, remedy=remedy)
        found.append(row)
    return found


def _namespace_remedy(error: OSError | None, option: str) -> str:
    if error is None:
        return ""
    if error.errno in (errno.ENOSPC, errno.EUSERS) or _switch(_MAX) == 0:
        return _raise_limit()
    if not _is_root() and _switch(_CLONE) == 0:
        return _set_switch(_CLONE, 1)
    if not _is_root() and _switch(_APPARMOR) == 1:
        return apparmor_profile()
    if error.errno in (errno.EINVAL, errno.ENOSYS):
        return f"boot a kernel with {option}=y"
    if not _is_root() and isinstance(error, PermissionError) and "newuidmap" in str(error.strerror):
        return _subordinate_remedy()
    return _container_remedy()


def _container_remedy() -> str:
    if _status("Seccomp") not in ("0", "") or _is_root():
        return delegation.IN_A_CONTAINER
    return "ask who runs this machine to allow user namespaces, or run holdfast as root"


# -- what may stand in the way of user namespaces ------------------------------------------------------------------


def _user_namespace_switches() -> list[Finding]:
    limit, clone = _switch(_MAX), _switch(_CLONE)
    return [
        Finding(
            name="user.max_user_namespaces", required=True, ok=limit != 0,
            detail="no limit of its own" if limit is None else f"{limit:,}",
            why="each session takes one user namespace", remedy=_raise_limit() if limit == 0 else "",
        ),
        Finding(
            name="kernel.unprivileged_userns_clone", required=not _is_root(),
            ok=None if _is_root() or clone is None else clone != 0,
            detail=_not_here(clone), why="Debian's switch for ordinary users; root needs none",
            remedy=_set_switch(_CLONE, 1) if clone == 0 else "",
        ),
        _apparmor(),
    ]  # fmt: skip


def _apparmor() -> Finding:
    restricted = _switch(_APPARMOR) == 1
    ok: bool | None = None
    detail = _not_here(_switch(_APPARMOR))
    if restricted and not _is_root():
        ok, seen, _ = _outcome(_user_namespace)
        detail = "restricts, and a profile lets this interpreter through" if ok else f"restricts: {seen}"
    return Finding(
        name="AppArmor", required=not _is_root(), ok=ok, detail=detail,
        why="on Ubuntu 24.04 it takes the capabilities out of an ordinary user's namespaces",
        remedy=apparmor_profile() if ok is False else "",
    )  # fmt: skip


def _not_here(value: int | None) -> str:
    if value is None:
        return "not on this machine"
    return f"{value}; root is not bound by it" if _is_root() else str(value)


def apparmor_profile(interpreter: str = "") -> str:
    """The commands that exempt one interpreter, and every program that runs in it, from the restriction."""
    path = interpreter or os.path.realpath(sys.executable)
    return (
        "sudo tee /etc/apparmor.d/holdfast >/dev/null <<'EOF'\n"
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n"
        f'profile holdfast "{path}" flags=(unconfined) {{\n'
        "  userns,\n"
        "}\n"
        "EOF\n"
        "sudo apparmor_parser -r /etc/apparmor.d/holdfast"
    )


def _switch(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return None


def _set_switch(name: str, value: int) -> str:
    setting = f"{name.replace('/', '.')}={value}"
    return f"echo {setting} | sudo tee /etc/sysctl.d/90-holdfast.conf && sudo sysctl -w {setting}"


def _raise_limit() -> str:
    return _set_switch(_MAX, 65536)


def _status(field: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{field}:")), "")


# -- file systems --------------------------------------------------------------------------------------------------


def _file_systems(directory: Path | None) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="holdfast-probe-", dir=directory, ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o755)
        proc = _outcome(_inside(_fresh_proc))
        root = _outcome(_inside(lambda: _guest_root(scratch)))
        overlay = _outcome(_inside(lambda: _overlay(scratch)))
    in_docker = "start the container with: docker run --security-opt systempaths=unconfined (or --privileged)"
    return [
        Finding(
            name="fresh /proc", required=True, ok=proc[0], detail=proc[1],
            why="shows the session's own processes and hides pid 1", remedy="" if proc[0] else in_docker,
        ),
        Finding(
            name="root of its own", required=True, ok=root[0], detail=root[1],
            why="the guest sees /usr and its environment, read-only, and its own disk; no /etc, /home or /run of the host",
            remedy="" if root[0] else _container_remedy(),
        ),
        Finding(
            name="overlayfs", required=False, ok=overlay[0], detail=overlay[1],
            why="stages the files of a run; this version does not need it yet",
            remedy="" if overlay[0] else "boot Linux 5.11 or newer with CONFIG_OVERLAY_FS, or try: sudo modprobe overlay",
        ),
    ]  # fmt: skip


def _fresh_proc() -> str:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, "hidepid=2")
    seen = [name for name in os.listdir("/proc") if name.isdigit()]
    if seen != ["1"]:
        raise OSError(errno.EEXIST, f"{len(seen)} processes are in sight")
    return "only the session's processes are in sight"


def _guest_root(scratch: str) -> str:
    """The zygote's and the session's own steps, on this interpreter."""
    for name in ("root", *(f"sessions/probe/{name}" for name in mounts.DIRECTORIES)):
        os.makedirs(f"{scratch}/{name}")
    linux.unshare(linux.CLONE_NEWNS)
    mounts.build_root(
        root=f"{scratch}/root", prefix=sys.base_prefix, base_prefix=sys.base_prefix, package=str(_PACKAGE),
        python=os.path.realpath(getattr(sys, "_base_executable", sys.executable)), sessions=f"{scratch}/sessions",
    )  # fmt: skip
    mounts.seal_root()
    namespaces.enter_session()
    mounts.enter_session("probe", shm_bytes=1 << 20)
    namespaces.name_host_and_loopback()
    if os.path.exists("/etc/shadow"):
        raise OSError(errno.EEXIST, "the host's /etc is still there")
    return f"built and entered: {' '.join(sorted(name for name in os.listdir('/') if name[0] != '.'))}"


def _overlay(scratch: str) -> str:
    for name in ("lower", "upper", "work", "merged"):
        os.makedirs(f"{scratch}/overlay/{name}")
    Path(f"{scratch}/overlay/lower/file").write_text("committed")
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    layers = ",".join(f"{name}dir={scratch}/overlay/{name}" for name in ("lower", "upper", "work"))
    own = "" if _is_host_root() else ",userxattr"
    try:
        linux.mount("overlay", f"{scratch}/overlay/merged", "overlay", 0, layers + own)
        Path(f"{scratch}/overlay/merged/file").write_text("staged")
        kept = Path(f"{scratch}/overlay/lower/file").read_text()
        linux.unmount(f"{scratch}/overlay/merged")
    finally:
        shutil.rmtree(f"{scratch}/overlay")  # here: an ordinary user may not enter the kernel's work/work
    if kept != "committed":
        raise OSError(errno.EINVAL, "a write went through to the lower layer")
    return "mounted and written to" + ("" if _is_host_root() else " in a user namespace")


def _is_host_root() -> bool:
    """Asked inside a namespace, where everybody is 0."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


# -- who the guest is ----------------------------------------------------------------------------------------------


def _identity() -> list[Finding]:
    second = None if _is_root() else namespaces.second_id(os.geteuid(), os.getegid())
    kernel_id, init_id = (_HOST_ID, _HOST_ID + 1) if _is_root() else (0, 0 if second is None else 1)
    ok, detail, _ = _outcome(_inside(lambda: _become_guest(kernel_id, init_id)))
    refused = "run holdfast as an ordinary user, or start the container with: docker run --userns=host --privileged"
    two = _is_root() or second is not None
    return [
        Finding(
            name="guest's identity", required=True, ok=ok, detail=detail,
            why="a uid of its own where root starts it, yours where you do; never a capability",
            remedy="" if ok else refused if _is_root() else _subordinate_remedy() if two else _container_remedy(),
        ),
        Finding(
            name="second uid", required=False, ok=two and ok,
            detail="pid 1 has another uid than the kernel" if two and ok else "pid 1 and the kernel share your uid",
            why="without it pid 1 is guarded by other means: not dumpable, signals blocked, ptrace filtered",
            remedy="" if two and ok else _subordinate_remedy(),
        ),
    ]  # fmt: skip


def _become_guest(kernel_id: int, init_id: int) -> str:
    """As the zygote: a child makes its user namespace, we map it, it gives everything up."""
    _fresh_proc()  # else /proc/<pid> would be the host's process of that number
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()

    def guest() -> str:
        linux.unshare(linux.CLONE_NEWUSER)
        os.write(ready_write, b"!")
        os.close(mapped_write)
        if not os.read(mapped_read, 1):
            raise OSError(errno.EPERM, "its ids could not be mapped")
        groups = Path("/proc/self/setgroups").read_text().strip() == "allow"
        privileges.become(mounts.GUEST_ID, may_set_groups=groups)
        if int(_status("CapEff"), 16) or int(_status("CapBnd"), 16):
            raise OSError(errno.EPERM, "capabilities remain")
        return f"uid {os.getuid()}, no capabilities"

    def map_it(pid: int) -> None:
        os.close(ready_write)
        try:
            if os.read(ready_read, 1):
                namespaces.map_guest_ids(pid, kernel_id=kernel_id, init_id=init_id)
                os.write(mapped_write, b"!")
        finally:
            os.close(mapped_write)

    said = _tried(guest, map_it)
    return f"{said}; on the host uid {kernel_id}" if kernel_id else f"{said}; on the host your own uid"


def _subordinate_remedy() -> str:
    ids = "--add-subuids 100000-165535 --add-subgids 100000-165535"
    return f'sudo apt-get install -y uidmap && sudo usermod {ids} "$(id -un)"'


# -- system calls --------------------------------------------------------------------------------------------------


def _seccomp() -> Finding:
    def confined() -> str:
        program = seccomp.compile_filter()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(program)
        try:
            linux.unshare(linux.CLONE_NEWUSER)
        except PermissionError:
            return f"a filter of {len(program) // 8} instructions is in force"
        raise OSError(errno.EINVAL, "the filter was taken, yet it filters nothing")

    ok, detail, error = _outcome(confined)
    config = "boot a kernel with CONFIG_SECCOMP_FILTER=y, on x86_64 or aarch64"
    return Finding(
        name="seccomp", required=True, ok=ok, detail=detail,
        why="the guest may make only the system calls on our list", remedy=config if error else "",
    )  # fmt: skip


# -- cgroups -------------------------------------------------------------------------------------------------------


def _cgroups() -> list[Finding]:
    found = hierarchies.mounted()
    version = "v1" if "memory" in found.v1 else "v2" if found.v2 else ""
    rows = [_controller(name, found, version) for name in ("memory", "pids", "cpu", "freezer")]
    return [*rows, _swap(found, version), *_live_cgroup(version)]


def _controller(name: str, found: hierarchies.Hierarchies, version: str) -> Finding:
    whys = {
        "memory": "the hard RAM cap",
        "pids": "a fork bomb stays small",
        "cpu": "no session starves the others",
        "freezer": "nothing runs between two runs, and nothing forks away from a kill",
    }
    if version == "v2" and found.v2 is not None:
        # The freezer of v2 is no controller: every cgroup but the topmost has it.
        offered = Path(found.v2.top, "cgroup.controllers").read_text().split()
        ok = name == "freezer" or name in offered
        remedy = delegation.controllers_remedy(found.v2.top, {name})
    else:
        ok, remedy = name in found.v1, delegation.mount_command([name])
    return Finding(
        name=f"cgroup {name}", required=True, ok=ok, detail=version if ok else "not offered", why=whys[name],
        remedy="" if ok else remedy,
    )  # fmt: skip


def _swap(found: hierarchies.Hierarchies, version: str) -> Finding:
    swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    top = Path(found.v1["memory"].top) if version == "v1" else Path("/sys/fs/cgroup")
    counted = any(top.glob("memory.memsw.limit_in_bytes")) or any(top.glob("*/memory.swap.max"))
    seen = "swap is counted" if counted else "swap is not counted"
    return Finding(
        name="swap accounting", required=swap, ok=counted if swap else None,
        detail=seen if swap else "the machine has no swap", why="else a session could go past its cap into swap",
        remedy="" if counted or not swap else "sudo swapoff -a (or boot with the kernel parameter swapaccount=1)",
    )  # fmt: skip


def _live_cgroup(version: str) -> list[Finding]:
    """Make one, as a session would, and see that it holds."""
    why_own, why_cap = "limits bind a whole session, whatever it starts", "a runaway cell is killed, not the machine"
    own = Finding(name="cgroup of our own", required=True, ok=True, detail=version, why=why_own)
    cap = Finding(name="memory cap", required=True, ok=None, detail="not tried: no cgroup", why=why_cap)
    try:
        frozen, killed = _in_a_cgroup(cgroups.find(f"probe-{os.getpid()}"))
    except cgroups.CgroupUnavailable as error:
        weaker = 'or accept a cap that is only sampled: memory_cap="watchdog", --memory-cap watchdog'
        remedy = f"{error.remedy}\n# {weaker}"
        return [dataclasses.replace(own, ok=False, detail=error.reason, remedy=remedy), cap]
    except OSError as error:
        remedy = delegation.remedy(hierarchies.mounted(), os.geteuid())
        return [dataclasses.replace(own, ok=False, detail=str(error), remedy=remedy), cap]
    return [
        dataclasses.replace(
            own, ok=frozen, detail=f"{version}: made, entered, {'frozen, thawed' if frozen else 'NOT frozen'}, removed",
            remedy="" if frozen else "boot Linux 5.2 or newer",
        ),
        dataclasses.replace(
            cap, ok=killed,
            detail=f"a process that took {2 * _CAP_BYTES >> 20} of {_CAP_BYTES >> 20} MiB was {'' if killed else 'NOT '}killed",
            remedy="" if killed else "sudo swapoff -a, and boot without the kernel parameter cgroup_disable=memory",
        ),
    ]  # fmt: skip


def _in_a_cgroup(tree: cgroups.Tree) -> tuple[bool, bool]:
    """Whether a process in a capped cgroup can be frozen, and is killed at the cap."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _exceed(there)
    there.close()
    cgroup = None
    try:
        tree.adopt(pid)
        cgroup = tree.create("probe", cgroups.Limits(memory_bytes=_CAP_BYTES, pids=16, cpus=1.0))
        fds = cgroup.join_fds()
        socket.send_fds(here, [b"!"], fds)
        for fd in fds:
            os.close(fd)
        if here.recv(1) != b"!":
            raise OSError(errno.EPERM, "a process could not enter the cgroup that was made for it")
        cgroup.attach(pid)
        cgroup.freeze()
        frozen = cgroup.wait_frozen(2.0)
        cgroup.thaw()
        here.send(b"!")
        survived = here.recv(1)
        return frozen, not survived and cgroup.oom_kills() > 0
    finally:
        here.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if cgroup is not None:
            cgroup.remove()
        tree.remove()


def _exceed(there: socket.socket) -> None:
    """Enter the cgroup we are handed, then take twice what it allows."""
    try:
        signal.alarm(_PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, fds, _, _ = socket.recv_fds(there, 1, 8)
        for fd in fds:
            os.write(fd, b"0")
        there.send(b"!")
        if there.recv(1):
            taken = bytearray(b"x") * (2 * _CAP_BYTES)
            there.send(taken[:1])
    finally:
        os._exit(0)


# -- what was compiled ---------------------------------------------------------------------------------------------


def _compiled() -> list[Finding]:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    built = pid1.EXECUTABLE.exists()
    runs = built and _pid1_runs()
    detail = "pid 1 is compiled" if runs else "pid 1 does not run on this machine" if built else "pid 1 runs in Python"
    reinstall = "pip install --force-reinstall --no-deps --no-cache-dir holdfast"
    compile_it = f"sudo apt-get install -y gcc libc6-dev && {shlex.quote(sys.executable)} -m {reinstall}"
    return [
        Finding(
            name="compiled parts", required=built, ok=runs, detail=detail,
            why="without them each session costs 2 MiB more", remedy="" if runs else compile_it,
        ),
        Finding(
            name="C compiler", required=False, ok=compiler is not None if not runs else None if compiler is None else True,
            detail=compiler or ("none, and none is needed any more" if runs else "none"),
            why="builds the compiled parts when holdfast is installed",
            remedy="" if compiler or runs else "sudo apt-get install -y gcc libc6-dev",
        ),
    ]  # fmt: skip


def _pid1_runs() -> bool:
    """Without an argument it only complains, with status 2: enough to know that it is for this machine."""
    try:
        return subprocess.run([pid1.EXECUTABLE], capture_output=True, timeout=5, check=False).returncode == 2
    except (OSError, subprocess.TimeoutExpired):
        return False


def main() -> int:
    findings = find()
    json.dump([dataclasses.asdict(finding) for finding in findings], sys.stdout, indent=2)
    return 0 if strict(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
