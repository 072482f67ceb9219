"""The overlay from inside: its marks, its layers, and what is left open on one that has been replaced.

Each run that changes a file is committed, and the next one finds the workspace mounted anew.
"""

import pytest

from holdfast.sandbox.mounts import DIRECTORIES

MARKS = ("opaque", "whiteout", "redirect", "metacopy", "origin", "impure", "upper", "nlink", "protattr", "xwhiteouts")
KEEP = "os.makedirs('/mnt/data/d', exist_ok=True); open('/mnt/data/d/kept', 'w').write('committed')"


@pytest.fixture
def committed(session, attack):
    """`d/kept` is committed; the attack begins on the next stage."""
    attack(KEEP)
    return attack


def is_kept(attack) -> bool:
    return attack("print(os.listdir('/mnt/data/d'), open('/mnt/data/d/kept').read())") == "['kept'] committed"


# -- marks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_of_the_hosts_root_cannot_be_set_or_read(committed, mark):
    printed = committed(f"""
        for path in ("/mnt/data", "/mnt/data/d", "/mnt/data/d/kept"):
            print(tries(os.setxattr, path, "trusted.overlay.{mark}", b"y"),
                  tries(os.getxattr, path, "trusted.overlay.{mark}"),
                  [name for name in os.listxattr(path) if "overlay" in name])
    """)

    assert set(printed.replace("[]", "").split()) <= {"EPERM", "ENODATA", "ENOTSUP", "EOPNOTSUPP"}


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("value", ["y", "x", "/tmp/elsewhere"])
def test_a_mark_of_the_users_hides_nothing(committed, mark, value):
    """In a user namespace these are the overlay's own. Through the overlay they are just attributes, or refused."""
    committed(f"""
        for path in ("/mnt/data", "/mnt/data/d", "/mnt/data/d/kept"):
            for name in ("user.overlay.{mark}", "user.overlay.overlay.{mark}"):
                tries(os.setxattr, path, name, b"{value}")
    """)
    assert is_kept(committed)  # on the next stage
    committed("open('/mnt/data/other', 'w').close()")

    assert is_kept(committed)


def test_a_directory_that_claims_to_be_opaque_takes_no_committed_file_with_it(session, committed):
    committed("""
        os.mkdir("/mnt/data/d/new")
        for name in ("user.overlay.opaque", "user.overlay.overlay.opaque"):
            tries(os.setxattr, "/mnt/data/d", name, b"y")
        os.rmdir("/mnt/data/d/new")
    """)

    assert is_kept(committed)
    assert [entry.path for entry in session.files()] == ["d/kept"]


# -- whiteouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb",
    ['call("mknodat", -100, b"/mnt/data/w", 0o020666, 0)', 'call("mknodat", -100, b"/mnt/data/d/kept2", 0o020000, 0)',
     'call("renameat2", -100, b"/mnt/data/d/kept", -100, b"/mnt/data/x", 4)',
     'tries(os.mknod, "/mnt/data/w", 0o020666, 0)', 'tries(os.mknod, "/tmp/w", 0o060666, 0)'],
)  # fmt: skip
def test_a_whiteout_cannot_be_made_by_hand(committed, verb):
    assert committed(f"print({verb})") in ("EPERM", "EINVAL")
    assert is_kept(committed)


# -- layers --------------------------------------------------------------------------------------------------------


def test_no_layer_and_no_root_of_the_overlay_is_in_sight(session, committed):
    printed = committed(f"""
        print(*[tries(os.listdir, place) for place in
                ("/.stage", "/stages", "/files", "/mnt/data/../files", "/mnt/data/../../files", "/mnt/data/../stages",
                 "/mnt/stages", "/.sessions/{session.id}", "/proc/1/cwd", "/proc/1/root")])
        found = []
        for directory, directories, files in os.walk("/"):
            directories[:] = [d for d in directories if directory != "/" or d not in ("proc", "usr", "opt")]
            found += [d for d in directories if d in ("stages", "files", "work", "blobs", "manifests")]
        print(found)
    """)

    places, found = printed.splitlines()
    assert set(places.split()) <= {"ENOENT", "EACCES"}
    assert found == "[]"


def test_the_mount_table_names_no_place_of_the_host(committed, tools):
    table = committed("print(reads('/proc/self/mountinfo').decode())")
    # Not by kind: where the host's own root is an overlay, as in a container, what of it is shown read-only is one too.
    overlays = [line for line in table.splitlines() if line.split()[4] in DIRECTORIES.values()]

    assert len(overlays) == 3
    assert all(" - overlay " in line for line in overlays)
    assert all("lowerdir=files," in line and "nosuid,nodev" in line for line in overlays)
    assert not any(str(tools.home()) in line for line in overlays)


@pytest.mark.parametrize(
    "call", ["name_to_handle_at", "open_by_handle_at", "fsopen", "open_tree", "move_mount", "umount2", "mount",
             "fspick", "mount_setattr", "setns", "unshare", "pivot_root"],
)  # fmt: skip
def test_nobody_inside_mounts_or_looks_behind_a_mount(probe, call):
    assert probe(f'print(call("{call}", -100, b"/mnt/data", 0, 0, 0))') in ("EPERM", "ENOSYS")


def test_the_areas_cannot_be_linked_or_moved_into_one_another(committed):
    printed = committed("""
        print(tries(os.link, "/mnt/data/d/kept", "/tmp/kept"), tries(os.rename, "/mnt/data/d", "/tmp/d"),
              tries(os.rename, "/mnt/data/d/kept", "/home/user/kept"), tries(os.rename, "/mnt/data", "/mnt/data2"),
              tries(os.rmdir, "/mnt/data"))
    """)

    assert set(printed.split()) <= {"EXDEV", "EROFS", "EBUSY", "EACCES"}
    assert is_kept(committed)


# -- what is left open on a stage that is gone ---------------------------------------------------------------------


def test_a_link_in_place_of_a_directory_leads_no_open_file_elsewhere(session, committed):
    committed("""
        os.makedirs("/tmp/evil"); open("/tmp/evil/kept", "w").write("evil")
        held = open("/mnt/data/d/kept", "r+")
    """)
    committed("""
        os.rename("/mnt/data/d/kept", "/mnt/data/moved"); os.rename("/mnt/data/moved", "/mnt/data/d/kept")
        os.unlink("/mnt/data/d/kept"); os.rmdir("/mnt/data/d"); os.symlink("/tmp/evil", "/mnt/data/d")
    """)
    assert committed("held.seek(0); print(held.read()); held.write('!'); held.flush()") == "committed"

    assert committed("print(open('/tmp/evil/kept').read())") == "evil"


def test_a_rollback_takes_back_what_was_written_through_a_file_that_was_open_before(session, committed):
    committed("held = open('/mnt/data/d/kept', 'r+')")
    session.run("held.write('OVERWRITTEN'); held.flush(); 1 / 0")

    assert is_kept(committed)
    assert committed("print(held.tell(), held.read())") == "0 committed"


def test_thousands_of_open_files_are_followed(session, committed):
    printed = committed("""
        held = []
        try:
            while True: held.append(os.open("/mnt/data/d/kept", os.O_RDONLY))
        except OSError as error:
            print(_errno.errorcode[error.errno], len(held) > 3000)
    """)
    assert printed == "EMFILE True"
    committed("os.close(held.pop()); os.close(held.pop()); open('/mnt/data/other', 'w').write('x')")

    assert committed("print({os.pread(fd, 9, 0) for fd in held})") == "{b'committed'}"


@pytest.mark.parametrize(
    "leave", ["os.rmdir('/mnt/data/here')", "os.chmod('/mnt/data/here', 0)",
              "os.rename('/mnt/data/here', '/mnt/data/x')",
              "os.rmdir('/mnt/data/here'); os.symlink('/', '/mnt/data/here')",
              "os.rmdir('/mnt/data/here'); open('/mnt/data/here', 'w').close()", "os.chmod('/mnt/data', 0)"],
)  # fmt: skip
def test_a_working_directory_that_was_pulled_away_stops_nobody(session, attack, leave):
    attack("os.mkdir('/mnt/data/here'); os.chdir('/mnt/data/here')")
    attack(leave)
    attack("os.chmod('/mnt/data', 0o700); os.chdir('/mnt/data'); open('/mnt/data/on', 'w').write('x')")

    assert attack("print(open('on').read())") == "x"


def test_a_descriptor_in_flight_writes_to_no_committed_file_unseen(session, committed):
    """A descriptor that travels through a socket is nobody's: it cannot be opened again on the next stage."""
    committed("""
        import array
        here, there = socket.socketpair()
        fd = os.open("/mnt/data/d/kept", os.O_RDWR)
        socket.send_fds(here, [b"x"], [fd])
        os.write(fd, b"COMMITTED")
        os.close(fd)
    """)
    assert committed("print(open('/mnt/data/d/kept').read())") == "COMMITTED"
    run = session.run("_, (fd,), _, _ = socket.recv_fds(there, 1, 1); os.pwrite(fd, b'forged', 0); 1 / 0")

    assert run.status == "rolled_back"
    seen = session.run("print(open('/mnt/data/d/kept').read())")
    assert seen.stdout == "COMMITTED\n" or "d/kept" in seen.outside


def test_who_hides_a_handle_on_a_database_loses_the_kernel_and_not_the_file(doomed):
    """A database keeps its inode when it is committed, so nobody may hold it once the guest has opened it anew."""
    session = doomed()
    run = session.run("""
        import os, socket
        here, there = socket.socketpair()
        fd = os.open("/mnt/data/db", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"SQLite format 3\\0COMMITTED")
        socket.send_fds(here, [b"x"], [fd])
        os.close(fd)
    """)
    assert run.status == "committed"
    session.run("_, (fd,), _, _ = socket.recv_fds(there, 1, 1); os.pwrite(fd, b'forged', 0)")

    assert session.generation == 2
    assert session.read("db") == b"SQLite format 3\0COMMITTED"


def test_a_kernel_that_does_not_follow_is_replaced(doomed, tools):
    session = doomed(memory="512M")
    tools.try_in(session, "kept = 1")
    tools.try_in(
        session,
        """
        import holdfast.guest.files, time
        holdfast.guest.files.OpenFiles.follow = lambda *_: time.sleep(1000)
        open("/mnt/data/f", "w").write("committed")
        """,
    )

    assert tools.try_in(session, "print(open('/mnt/data/f').read(), 'kept' in globals())") == "committed False"
    tools.assert_works(session)
