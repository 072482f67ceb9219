"""The file system boundary, from both sides: what the guest can see, and what the host does with what it left."""

import os
import socket
import stat
from pathlib import Path

import pytest

from holdfast import Session
from holdfast.resources.workspace import remove_tree

CANARY = "the-host's-secret-4f1d"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the host's that anybody on the host may read."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    path = tmp_path / "secret"
    path.write_text(CANARY)
    path.chmod(0o666)
    return path


def canary_is_intact(path: Path) -> bool:
    return path.read_text() == CANARY and stat.S_IMODE(path.stat().st_mode) == 0o666


# -- reading the host -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/machine-id", "/root", "/root/.ssh", "/boot",
     "/var/lib", "/var/log", "/var/spool", "/run/docker.sock", "/var/run/docker.sock", "/run/systemd", "/run/user",
     "/run/dbus/system_bus_socket", "/srv", "/media", "/lost+found", "/.old", "/.dockerenv"],
)  # fmt: skip
def test_a_place_of_the_host_is_not_there(probe, path):
    printed = probe(f'print(tries(os.stat, "{path}"), tries(os.open, "{path}", os.O_RDONLY))')

    assert set(printed.split()) <= {"ENOENT", "EACCES", "ENOTDIR"}


@pytest.mark.parametrize(
    "prefix", ["", "/proc/self/root", "/proc/1/root", "/proc/1/cwd", "/proc/self/cwd/../../..", "/.old",
               "/.sessions/../..",
               "/proc/self/task/../../1/root", "/dev/fd/../../1/root", "/../../../.."],
)  # fmt: skip
def test_a_readable_file_of_the_host_is_not_reached(probe, secret, prefix):
    printed = probe(f'print(tries(reads, "{prefix}{secret}"))')

    assert printed in ("ENOENT", "EACCES", "EPERM")


def test_a_symlink_to_a_file_of_the_host_leads_nowhere(session, attack, secret):
    printed = attack(f"""
        os.symlink("{secret}", "/mnt/data/link")
        print(tries(reads, "/mnt/data/link"), tries(writes, "/mnt/data/link", b"owned"))
    """)

    assert printed == "ENOENT ENOENT"
    assert canary_is_intact(secret)


def test_the_home_with_the_other_sessions_is_not_there(session, attack, open_session, tools):
    other = open_session()
    other.run(f"open('/mnt/data/canary-of-another', 'w').write({CANARY!r})")
    home = tools.home()

    printed = attack(f"""
        print(os.path.exists("{home}"), os.path.exists("{tools.directory_of(other)}"), tries(os.listdir, "/.sessions"))
        found = []
        for directory, directories, files in os.walk("/"):
            directories[:] = [d for d in directories if directory != "/" or d not in ("proc", "usr", "opt")]
            found += [f for f in files + directories if f in ("canary-of-another", "{other.id}", "{session.id}")]
        print(found)
    """)

    there, found = printed.splitlines()
    assert there in ("False False SUCCESS []", "False False ENOENT", "False False EACCES")
    assert found == "[]"


def test_home_holds_no_user_but_the_guest(probe):
    assert probe('print(os.listdir("/home"), os.listdir("/mnt"), os.listdir("/run"))') == "['user'] ['data'] []"


def test_a_socket_of_the_host_cannot_be_connected_to(probe, tmp_path):
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        printed = probe(f'print(tries(socket.socket(socket.AF_UNIX).connect, "{path}"))')

    assert printed == "ENOENT"


def test_no_host_path_or_secret_is_in_the_environment(probe):
    printed = probe("import json; print(json.dumps(dict(os.environ))); print(reads('/proc/self/environ'))")

    for name in ("HOLDFAST_HOME", "SUDO_", "SSH_", "API_KEY", "VIRTUAL_ENV", "PYTHONPATH", str(Path.cwd())):
        assert name not in printed


def test_no_path_of_the_home_is_in_the_guests_memory(probe, tools):
    """The zygote's memory is every guest's memory: it must not know where on the host it was started."""
    encoded = str(tools.home()).encode().hex()

    printed = probe(f"""
        needle, hits = bytes.fromhex("{encoded}"), 0
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps.read().splitlines():
                span, mode = line.split()[:2]
                low, high = (int(x, 16) for x in span.split("-"))
                if mode.startswith("rw") and "[v" not in line and high - low < 64 << 20:
                    for at in range(low, high, 1 << 20):
                        memory.seek(at)
                        hits += memory.read(min(1 << 20, high - at)).count(needle)
        print(hits)
    """)

    # Not the needle itself: it is in the attack's own frame, at most a handful of times.
    assert int(printed) < 10


def test_the_cgroup_table_does_not_tell_of_the_hosts_groups(probe, target):
    assert target.id not in probe('print(reads("/proc/self/cgroup").decode())')


# -- writing to the host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "directory", ["/", "/usr/bin", "/usr/lib", "/bin", "/etc", "/etc/ssl/certs", "/dev", "/opt", "/opt/env",
                  "/opt/env/lib", "/opt/env/bin", "/opt/holdfast/holdfast", "/opt/python/lib", "/run", "/var", "/home",
                  "/mnt", "/proc", "/.sessions"],
)  # fmt: skip
def test_what_sessions_share_cannot_be_written(probe, directory):
    printed = probe(f"""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        print(tries(os.open, "{directory}/planted", flags), tries(os.mkdir, "{directory}/planted.d"),
              tries(os.rename, "/mnt/data/.works", "{directory}/planted"), tries(os.chmod, "{directory}", 0o777))
    """)

    assert set(printed.split()) <= {"EROFS", "EACCES", "EPERM", "ENOENT", "EXDEV"}


def test_every_mount_but_the_sessions_own_is_read_only_and_none_honours_set_uid(probe):
    printed = probe("""
        own = {"/mnt/data", "/tmp", "/home/user", "/dev/shm", "/proc"}
        for line in reads("/proc/self/mountinfo").decode().splitlines():
            point = line.split()[4]
            flags = os.statvfs(point).f_flag
            device = point.startswith("/dev/") and point != "/dev/shm"
            if not device and not (flags & os.ST_RDONLY or point in own):
                print("writable", point)
            if not device and not flags & os.ST_NOSUID:
                print("set-uid", point)
    """)

    assert printed == ""


def test_a_shared_file_cannot_be_hard_linked_into_the_workspace(probe):
    printed = probe("""
        print(*[tries(os.link, source, "/mnt/data/hard") for source in
                ("/usr/bin/env", "/etc/passwd", "/opt/env/pyvenv.cfg", "/proc/self/status", "/dev/null")])
    """)

    assert set(printed.split()) <= {"EXDEV", "EPERM", "EROFS"}


def test_a_shared_mapping_of_a_shared_file_cannot_be_written(probe):
    printed = probe("""
        import mmap
        fd = os.open("/opt/holdfast/holdfast/__init__.py", os.O_RDONLY)
        print(tries(mmap.mmap, fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), tries(os.ftruncate, fd, 0),
              tries(os.fchmod, fd, 0o777), tries(os.utime, fd), tries(os.open, f"/proc/self/fd/{fd}", os.O_RDWR),
              tries(os.setxattr, fd, "user.x", b"y"))
        os.close(fd)
    """)

    assert set(printed.split()) <= {"EACCES", "EPERM", "EROFS", "EINVAL"}


def test_the_guest_takes_no_lease_on_a_file_that_others_open(attack, open_session, tools):
    """While a lease stands, everybody else's open() of that file waits for its holder, who is frozen: 45 s each."""
    path = "/opt/env/pyvenv.cfg"
    attack(f"""
        import fcntl
        held = os.open("{path}", os.O_RDONLY)
        print(tries(fcntl.fcntl, held, 1024, fcntl.F_WRLCK))
    """)
    other = open_session()

    assert tools.try_in(other, f'print(tries(os.open, "{path}", os.O_RDONLY | os.O_NONBLOCK))').startswith("SUCCESS")


def test_the_guest_does_not_see_which_programs_the_host_starts(attack):
    """inotify watches inodes, not mounts: a watch on a directory shared with the host tells what the host opens."""
    assert attack('print(call("inotify_init1", os.O_NONBLOCK))') == "EPERM"


# -- what the host does with what the guest left ----------------------------------------------------------------


def closed_without_a_trace(session: Session, tools) -> bool:
    path = tools.directory_of(session)
    assert path.exists()
    session.close()
    return not path.exists()


def test_closing_removes_links_and_not_what_they_point_to(tools, secret):
    outside = secret.parent / "outside"
    outside.mkdir(mode=0o777)
    (outside / "kept").write_text(CANARY)
    with Session() as session:
        tools.try_in(
            session,
            f"""
            os.symlink("{secret}", "/mnt/data/file")
            os.symlink("{outside}", "/mnt/data/directory")
            os.symlink("/", "/tmp/root")
            os.symlink("..", "/home/user/up")
            os.symlink("/mnt/data/loop", "/mnt/data/loop")
            os.mkdir("/mnt/data/deep")
            os.symlink("{outside}", "/mnt/data/deep/directory")
            os.symlink("{outside}", "/mnt/data/.remove-0")
            os.symlink("{secret}", "/mnt/data/deep/.remove-1")
            """,
        )
        assert closed_without_a_trace(session, tools)

    assert canary_is_intact(secret)
    assert (outside / "kept").read_text() == CANARY


def test_measuring_does_not_follow_links(session, attack, secret, tools):
    with open(secret.parent / "large", "wb") as large:
        os.posix_fallocate(large.fileno(), 0, 64 << 20)
    attack(f"""
        os.symlink("{secret.parent}", "/mnt/data/directory")
        os.symlink("{secret.parent}/large", "/mnt/data/large")
        os.symlink("/", "/mnt/data/root")
    """)

    assert tools.used_bytes(session) < 1 << 20


def test_links_that_change_while_the_host_measures_never_lead_it_outside(session, attack, secret, tools):
    with open(secret.parent / "large", "wb") as large:
        os.posix_fallocate(large.fileno(), 0, 256 << 20)
    # Swaps a directory and a link to the host while a guard is made to measure by steady growth.
    attack(f"""
        import time
        os.makedirs("/mnt/data/real/a")
        os.symlink("{secret.parent}", "/mnt/data/link")
        end = time.time() + 1
        with open("/mnt/data/grows", "wb") as grows:
            while time.time() < end:
                call("renameat2", -100, b"/mnt/data/real", -100, b"/mnt/data/link", 2)
                grows.write(bytes(1 << 16))
                if grows.tell() > 100 << 20:
                    grows.seek(0)
    """)

    assert tools.used_bytes(session) < 120 << 20
    assert canary_is_intact(secret)


def test_a_tree_five_thousand_deep_is_not_kept_and_is_removed(tools):
    with Session(timeout=30) as session:
        run = session.run('import os\nfor _ in range(5000):\n    os.mkdir("d"); os.chdir("d")\nos.chdir("/mnt/data")')
        assert (run.status, run.error.code) == ("rolled_back", "verification")
        assert "at most 4,096" in run.error.message
        tools.assert_works(session)
        assert closed_without_a_trace(session, tools)


@pytest.mark.parametrize(
    "name", ["b'new\\nline'", "b'\\xff\\xfe invalid'", "b'\\x1b[2J'", "b'-rf'", "b'*'", "b'x' * 255", "b'.remove-0'"]
)
def test_an_evil_name_is_measured_and_removed(tools, name):
    with Session() as session:
        tools.try_in(
            session,
            f"""
            name = {name}
            for place in (b"/mnt/data/", b"/tmp/", b"/home/user/"):
                os.makedirs(place + name + b"/" + name)
                open(place + name + b"/" + name + b"/" + name, "w").write("x" * 100_000)
            """,
        )
        assert tools.used_bytes(session) > 300_000
        assert closed_without_a_trace(session, tools)


def test_directories_that_nobody_may_enter_are_removed(tools):
    with Session() as session:
        tools.try_in(
            session,
            """
            for path in ("/mnt/data/shut", "/tmp/shut", "/mnt/data/a/b/shut"):
                os.makedirs(path + "/inner")
                open(path + "/inner/file", "w").close()
                os.chmod(path + "/inner/file", 0)
                os.chmod(path + "/inner", 0)
                os.chmod(path, 0)
            os.chmod("/mnt/data/a", 0o400)
            """,
        )
        tools.assert_works(session)
        assert closed_without_a_trace(session, tools)


def test_fifos_and_sockets_in_place_of_files_stop_nobody(tools):
    with Session() as session:
        tools.try_in(
            session,
            """
            for place in ("/mnt/data", "/tmp", "/home/user"):
                for name in ("fifo", "log", "stdout", ".bashrc", "usercustomize.py"):
                    os.mkfifo(f"{place}/{name}")
                socket.socket(socket.AF_UNIX).bind(f"{place}/socket")
            """,
        )
        session.reset()
        assert session.run("6 * 7").text == "42"
        assert tools.used_bytes(session) >= 0
        assert closed_without_a_trace(session, tools)


@pytest.mark.parametrize("place", ["/mnt/data", "/tmp", "/home/user"])
def test_a_workspace_that_its_owner_shut_does_not_stop_the_next_kernel(session, attack, place, monkeypatch, tools):
    monkeypatch.setattr("holdfast.nodes.local._FORK_TIMEOUT_S", 5.0, raising=False)
    attack(f'os.chmod("{place}", 0)')
    try:
        session.reset()
        assert session.run("6 * 7").text == "42"
    finally:
        # However it went, what follows can be judged by itself.
        directory = tools.directory_of(session)
        for name in ("data", "tmp", "home"):
            for area in (directory / "files" / name, *directory.glob(f"stages/*/{name}")):
                area.chmod(0o700)
        session.reset()


def test_a_module_planted_in_the_workspace_does_not_run_in_the_next_kernel_by_itself(session, attack):
    attack("""
        for place in ("/mnt/data", "/home/user", "/tmp", "/home/user/.local/lib/python3.11/site-packages",
                      "/home/user/.ipython/profile_default/startup", "/home/user/.config/matplotlib"):
            os.makedirs(place, exist_ok=True)
            for name in ("sitecustomize.py", "usercustomize.py", "00.py", "wire.py", "msgspec.py"):
                open(f"{place}/{name}", "w").write("open('/mnt/data/ran', 'a').write(__file__)")
    """)
    session.reset()

    assert session.run("import os; os.path.exists('/mnt/data/ran')").text == "False"


def test_the_log_of_a_run_is_found_by_its_id_and_by_nothing_else(session, tools):
    from holdfast.errors import HoldfastError

    for run_id in ("../data/x", "/etc/passwd", "..", "a/b", "run_x\0"):
        with pytest.raises((HoldfastError, ValueError)):
            session.output(run_id)


def test_the_guest_does_not_reach_the_logs_of_its_own_runs(session, attack, tools):
    run = session.run("print('logged')")
    assert session.output(run) == "logged\n"

    assert attack(f"""
        found = []
        for directory, directories, files in os.walk("/"):
            directories[:] = [d for d in directories if directory != "/" or d not in ("proc", "usr", "opt")]
            found += [f for f in files if f.startswith("{run.id}")]
        print(found)
    """) == "[]"  # fmt: skip


def test_a_removal_that_was_cut_short_can_be_completed(tmp_path):
    """The host may be killed while it removes a large tree; the next owner of the home starts with what is left."""
    left = tmp_path / "session"
    for directory in (".remove-0", ".remove-3", "data"):
        (left / directory / "inner").mkdir(parents=True)
        (left / directory / "file").write_text("x")

    remove_tree(left)

    assert not left.exists()
