"""A guest cannot change what it, or anybody else, is shown of the machine."""

from holdfast import Session

SHOWN = ["/proc/meminfo", "/sys/devices/system/cpu/online", "/sys/devices/system/cpu/cpu0/topology/core_cpus_list"]
ATTACK = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
done = []

def attempt(what, call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return
    done.append(what)

def checked(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)

for path in {SHOWN!r}:
    raw = path.encode()
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        attempt((path, "open", flags), os.open, path, flags)
    attempt((path, "reopen"), lambda: os.open(f"/proc/self/fd/{{os.open(path, os.O_RDONLY)}}", os.O_RDWR))
    attempt((path, "chmod"), os.chmod, path, 0o666)
    attempt((path, "chown"), os.chown, path, os.getuid(), os.getgid())
    attempt((path, "utime"), os.utime, path)
    attempt((path, "truncate"), os.truncate, path, 0)
    attempt((path, "unlink"), os.unlink, path)
    attempt((path, "rename"), os.rename, path, "/tmp/away")
    attempt((path, "replace"), os.rename, "/tmp/mine", path)
    attempt((path, "setxattr"), os.setxattr, path, "user.x", b"x")
    attempt((path, "umount"), checked, "umount2", raw, 2)
    attempt((path, "remount"), checked, "mount", None, raw, None, 0x1020, None)
    attempt((path, "bind"), checked, "mount", b"/dev/null", raw, None, 0x1000, None)
attempt("umount the directory", checked, "umount2", b"/sys/devices/system/cpu", 2)
attempt("a file beside", lambda: open("/sys/devices/system/cpu/new", "w"))
attempt("a directory beside", os.mkdir, "/sys/devices/system/cpu/cpu9")
print(done, sorted(os.listdir("/sys")), sorted(os.listdir("/dev/shm")))
"""


def test_what_is_shown_is_read_only_for_the_guest() -> None:
    with Session(memory="256M", cpus=1) as session:
        before = session.run("import os; print(open('/sys/devices/system/cpu/online').read(), os.cpu_count())").stdout
        run = session.run("open('/tmp/mine', 'w').write('x')\n" + ATTACK)

        assert run.error is None, run.error
        assert run.stdout == "[] ['devices'] []\n"
        after = session.run(
            "import psutil; print(open('/sys/devices/system/cpu/online').read(), os.cpu_count()); "
            "psutil.virtual_memory().total"
        )
        assert (after.text, after.stdout) == (str(256 << 20), before)


def test_nothing_inside_has_the_file_open_that_the_host_writes() -> None:
    with Session(memory="256M") as session:
        seen = session.run(
            "import os\n"
            "for name in os.listdir('/proc/self/fd'):\n"
            "    try: print(os.readlink(f'/proc/self/fd/{name}'))\n"
            "    except OSError: pass"
        )
        assert "meminfo" not in seen.stdout
