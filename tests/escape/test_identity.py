"""Who the guest is: nobody in particular, without a single capability, for good."""

import os

import pytest


def status(probe) -> dict[str, str]:
    lines = probe('print(reads("/proc/self/status").decode())').splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("kind", ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"])
def test_every_set_of_capabilities_is_empty(probe, kind):
    assert int(status(probe)[kind], 16) == 0


def test_no_new_privileges_and_a_filter_are_in_force(probe):
    found = status(probe)

    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"


def test_children_are_confined_as_their_parent_is(target, tools):
    result = target.shell("grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status | awk '{print $2}'")

    assert result.stdout.split() == ["0000000000000000", "0000000000000000", "1", "2"]
    tools.assert_works(target)


def test_the_guest_is_uid_1000_in_all_four_forms_and_its_groups_are_gone(probe):
    found = status(probe)

    assert found["Uid"].split() == ["1000"] * 4
    assert found["Gid"].split() == ["1000"] * 4
    # An ordinary user with one gid to map may not drop groups; then they show as the overflow gid.
    allowed = set() if os.geteuid() == 0 or not os.getgroups() else {"65534"}
    assert set(found["Groups"].split()) <= allowed


def test_the_user_namespace_maps_no_uid_0_and_at_most_two_ids(probe):
    maps = probe('print(reads("/proc/self/uid_map").decode()); print(reads("/proc/self/gid_map").decode())')
    rows = [line.split() for line in maps.splitlines() if line.strip()]

    assert {inside for inside, _, _ in rows} <= {"1000", "999"}
    assert all(count == "1" for _, _, count in rows)


def test_on_the_host_the_guest_has_the_ids_it_was_given(session, attack, tools):
    assert attack("print(os.getpid() > 1)") == "True"
    owners = {host_uid(pid) for pid in tools.host_pids(session)}

    if os.geteuid() == 0:
        assert all(owner >= 1_900_000_000 for owner in owners)
        assert len(owners) == 2, "pid 1 and the kernel are two different users"
    else:
        assert os.geteuid() in owners
        assert 0 not in owners


def host_uid(pid: int) -> int:
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))


@pytest.mark.parametrize(
    "call",
    ["os.setuid(0)", "os.setgid(0)", "os.setresuid(0, 0, 0)", "os.setresgid(0, 0, 0)", "os.setuid(999)",
     "os.setgroups([0])", "os.setgroups([])", "os.seteuid(65534)", "os.chown('/mnt/data', 0, 0)",
     "os.chown('/mnt/data', 999, 999)"],
)  # fmt: skip
def test_the_guest_becomes_nobody_else(probe, call):
    assert probe(f"print(tries(lambda: {call}))") in ("EPERM", "EINVAL")


def test_capset_gives_nothing_back(probe):
    printed = probe("""
        import struct
        print(call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6)))
    """)

    assert printed == "EPERM"


def test_a_set_uid_file_of_its_own_gives_the_guest_no_other_identity(attack):
    printed = attack("""
        import shutil, subprocess
        for where in ("/mnt/data", "/tmp", "/home/user", "/dev/shm"):
            shutil.copy("/usr/bin/id", where + "/id")
            os.chmod(where + "/id", 0o6755)
            out = subprocess.run([where + "/id"], capture_output=True, text=True).stdout
            print(bool(os.statvfs(where).f_flag & os.ST_NOSUID), "euid" not in out and "uid=1000" in out)
    """)

    assert printed.splitlines() == ["True True"] * 4


def test_a_set_uid_file_that_the_guest_makes_is_out_of_reach_for_users_of_the_host(session, attack, tools):
    """On the host it belongs to the guest's host uid (for an ordinary user: to himself)."""
    attack('open("/mnt/data/x", "w").close(); os.chmod("/mnt/data/x", 0o6777)')

    assert tools.directory_of(session).stat().st_mode & 0o777 == 0o700


def test_file_capabilities_cannot_be_written(probe):
    printed = probe("""
        open("/mnt/data/x", "w").close()
        cap = bytes.fromhex("0100000200200000000000000000000000000000")
        print(tries(os.setxattr, "/mnt/data/x", "security.capability", cap),
              tries(os.setxattr, "/mnt/data/x", "trusted.x", b"y"))
    """)

    assert set(printed.split()) <= {"EPERM", "EINVAL", "EOPNOTSUPP"}
