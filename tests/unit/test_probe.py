"""The probe tells the truth: here, and in places where a piece is really missing."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.nodes import ids
from holdfast.sandbox import pid1
from holdfast.sandbox.probe import Finding, compiled, identity, strict

CLONE = Path(__file__).parents[2]
NAMESPACES = {f"{name} namespace" for name in ("user", "mount", "pid", "net", "ipc", "uts")}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root makes the ordinary user")


def probed(setting: str = "", directory: Path | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """Findings of a process of its own, after it has run `setting`: its exit code, and the findings by name."""
    program = (
        "import os, sys, tempfile\nfrom pathlib import Path\nfrom holdfast.sandbox import linux, seccomp\n"
        "from holdfast.sandbox.probe import __main__, attempts, switches, user_namespaces\n"
        f"{textwrap.dedent(setting)}\nsys.exit(__main__.main())"
    )
    environment = os.environ | ({"TMPDIR": str(directory)} if directory else {})
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}


def missing(findings: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, finding in findings.items() if finding["ok"] is False and finding["required"]}


def test_a_strict_sandbox_is_possible_here_and_every_primitive_was_tried() -> None:
    code, found = probed()

    assert code == 0
    assert missing(found) == set()
    assert found.keys() >= NAMESPACES | {"seccomp", "fresh /proc", "overlayfs", "memory cap", "cgroup of our own"}
    assert found["memory cap"]["detail"].startswith("killed at 32 MiB")
    assert all(found[f"cgroup {name}"]["ok"] for name in ("memory", "pids", "cpu", "freezer"))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()

    probed(directory=tmp_path)

    assert list(tmp_path.iterdir()) == []
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert [place for place, _, _ in os.walk("/sys/fs/cgroup") if "/probe-" in place] == []


@pytest.mark.parametrize("inner_uid", [0, 1000])
def test_exhausted_user_namespaces_are_named_with_the_command_that_allows_more(inner_uid: int) -> None:
    code, found = probed(
        f"""
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{inner_uid} {{uid}} 1")
        Path("/proc/self/gid_map").write_text(f"{inner_uid} {{gid}} 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        """
    )

    assert code == 1
    assert missing(found) >= {"user namespace", "user namespace limit", "guest's identity"}
    assert "ENOSPC" in found["user namespace"]["detail"]
    assert "sysctl -w user.max_user_namespaces=" in found["user namespace"]["remedy"]


def test_a_filter_around_us_that_forbids_namespaces_is_seen() -> None:
    code, found = probed("linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1); seccomp.install(seccomp.compile_filter())")

    assert code == 1
    assert missing(found) >= NAMESPACES | {"seccomp", "root of its own"}
    assert "docker run --privileged" in found["user namespace"]["remedy"]
    assert found["pidfd"]["ok"]


@as_root
def test_a_user_without_a_cgroup_gets_the_command_that_delegates_one() -> None:
    code, found = probed(
        """
        os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # as after an exec; else his own /proc/self is not his
        """
    )

    assert code == 1
    assert missing(found) >= {"cgroup of our own"}
    assert "holdfast-54321" in found["cgroup of our own"]["remedy"]
    assert "--memory-cap watchdog" in found["cgroup of our own"]["remedy"]
    assert found["memory cap"]["ok"] is None
    assert found["user namespace"]["ok"]


ON_UBUNTU = """
    def emptied():
        raise OSError(1, "made, but writing uid_map: Operation not permitted")
    restricting = {"kernel/apparmor_restrict_unprivileged_userns": 1}
    switches.read, attempts.is_root = restricting.get, lambda: False
"""


def test_apparmors_restriction_comes_with_the_profile_that_lifts_it_for_this_interpreter() -> None:
    code, found = probed(f"{ON_UBUNTU}    user_namespaces.make_and_use = emptied")

    assert code == 1
    assert missing(found) >= {"user namespace", "AppArmor"}
    assert "uid_map" in found["AppArmor"]["detail"]
    for name in ("user namespace", "AppArmor"):
        profile = found[name]["remedy"]
        assert f'profile holdfast "{os.path.realpath(sys.executable)}" flags=(unconfined)' in profile
        assert "userns," in profile
        assert profile.endswith("sudo apparmor_parser -r /etc/apparmor.d/holdfast")


def test_apparmors_switch_is_read_where_ubuntus_kernel_has_it(tmp_path: Path) -> None:
    """A real file in the place of the switch, in a mount namespace; user namespaces really cannot be made."""
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/apparmor_restrict_unprivileged_userns").write_text("1\n")

    code, found = probed(
        f"""
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {{uid}} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {{gid}} 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        linux.mount({str(tmp_path)!r}, "/proc/sys", flags=linux.MS_BIND)
        """
    )

    assert code == 1
    assert missing(found) >= {"user namespace", "AppArmor"}
    assert found["AppArmor"]["detail"].startswith("restricts: ")
    assert found["AppArmor"]["remedy"].startswith("sudo tee /etc/apparmor.d/holdfast ")


def test_a_restriction_that_a_profile_lifted_is_no_fault() -> None:
    _, found = probed(f"{ON_UBUNTU}    user_namespaces.make_and_use = lambda: 'made and used'")

    assert found["AppArmor"]["ok"] is True
    assert "profile" in found["AppArmor"]["detail"]


def test_without_a_compiler_it_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pid1, "EXECUTABLE", tmp_path / "pid1")
    monkeypatch.setenv("PATH", str(tmp_path))

    parts, compiler = compiled.findings()

    assert (parts.ok, parts.required, compiler.ok) == (False, False, False)
    assert "2 MiB" in parts.why
    assert "gcc" in compiler.remedy


@pytest.mark.skipif("HOLDFAST_EMULATED" in os.environ, reason="a build fetches its tools: no network")
def test_it_installs_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    built = shutil.ignore_patterns("_snapshot*.so", "pid1", "__pycache__", "*.egg-info")
    shutil.copytree(CLONE / "src", clone / "src", ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CLONE / name, clone)

    uv = [Path(sys.executable).with_name("uv"), "build", "--quiet", "--wheel", "--out-dir", tmp_path, clone]
    subprocess.run(uv, check=True, env={**os.environ, "CC": "/bin/false"})

    names = {Path(name).name for wheel in tmp_path.glob("*.whl") for name in zipfile.ZipFile(wheel).namelist()}
    assert {"_snapshot.c", "pid1.c", "pid1.py", "py.typed"} <= names
    assert not any(name == "pid1" or name.endswith(".so") for name in names)


def test_a_pid_1_for_another_machine_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pid1").write_bytes(b"\x7fELF, but not for us")
    (tmp_path / "pid1").chmod(0o755)
    monkeypatch.setattr(pid1, "EXECUTABLE", tmp_path / "pid1")

    parts, _ = compiled.findings()

    assert (parts.ok, parts.required) == (False, True)


@as_root
def test_an_installation_that_this_user_may_not_enter_is_a_fault() -> None:
    code, found = probed(
        """
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", str(Path(linux.__file__).parent), "tmpfs", options="mode=0700")
        os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
        """
    )

    assert code == 1
    assert "compiled parts" in missing(found)
    assert "may not enter" in found["compiled parts"]["detail"]
    assert found["compiled parts"]["remedy"] == "install Holdfast where this user can read it"


def test_without_the_thread_keeping_fork_it_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "holdfast._snapshot", None)

    parts, _ = compiled.findings()

    assert (parts.ok, parts.required) == (False, False)
    assert "thread-keeping fork is missing" in parts.detail
    assert "unprotected" in parts.why
    assert "gcc" in parts.remedy


def test_a_thread_keeping_fork_for_another_machine_is_no_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_snapshot.abi3.so").write_bytes(b"\x7fELF, but not for us")
    monkeypatch.setattr(holdfast, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "holdfast._snapshot", raising=False)

    parts, _ = compiled.findings()

    assert (parts.ok, parts.required) == (False, False)
    assert "does not load" in parts.detail


def test_only_what_is_required_and_missing_rules_a_strict_sandbox_out() -> None:
    def finding(required: bool, ok: bool | None) -> Finding:
        return Finding(name="n", required=required, ok=ok, detail="", why="")

    assert strict([finding(True, True), finding(True, None), finding(False, False)])
    assert not strict([finding(True, True), finding(True, False)])


def test_the_probe_maps_the_ids_that_sessions_get() -> None:
    assert identity.HOST_ID == ids.FIRST
