"""Runs a command on Debian's kernel with cgroup v2, in QEMU, for hosts that only have cgroup v1.

    python tests/vm/boot.py --prepare                         # once, as root: packages and kernel
    python tests/vm/boot.py [--user UID] -- COMMAND ...       # its output is ours, its exit code is ours
    python tests/vm/boot.py --systemd UID -- COMMAND ...      # as root, in a service, and UID can log in

What the command finds inside:

- the host's root, read-only over 9p, below a tmpfs: the same paths and tools, and every write vanishes;
- the clone as working directory; PATH, HOME and HOLDFAST_HOME as outside (an ordinary user's HOME is new);
- cgroup v2 alone, and itself in a delegated cgroup, as in a systemd service with Delegate=yes; or, with `--systemd`,
  in a service of a real systemd that is process 1, with D-Bus and logind and nothing else of the host's;
- `/tmp` and `/run`: plain tmpfs, without what the host has there; `/disk`: an empty ext4. Overlays can be
  built on these and on nothing else, for the rest is itself an overlay;
- `/exchange`: a directory of the host (`--exchange`), the only way out for a file;
- no network but loopback.

The machine is emulated in software, so a command is many times slower than outside. It is
no security boundary for the host: whoever is root inside reads all that the caller can read.

Our own exit codes are 124, the machine cannot be had here, and 125, it failed (panic, time-out). The
command's code comes through a port that only our own script in the guest writes to: no output can be mistaken for it.
"""

import argparse
import contextlib
import os
import re
import resource
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).parent))
from debian import CACHE, CLONE, Kernel, Unavailable, prepare, prepared_kernel

HOST_OPTIONS = "trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000"
KERNEL_OPTIONS = " ".join(
    (
        "console=ttyS0 quiet panic=-1 cgroup_no_v1=all audit=0",
        # What protects a real machine costs an emulated one time. So does what makes a real one faster: an instruction
        # that copies or clears a page is emulated word by word, and a plain loop is quicker.
        "mitigations=off nokaslr init_on_alloc=0 clearcpuid=rep_good",
        # Where QEMU gets too little of the processor, timers come late: the kernel must neither panic over it, nor fall
        # back to a clock that costs a trip out of the machine each time it is read.
        "no_timer_check tsc=reliable nowatchdog",
    )
)
DISK_BYTES = 4 << 30
COMMAND_PATHS = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
UNAVAILABLE, FAILED = 124, 125


class MachineFailed(Exception):
    """The machine broke or ran out of time: says nothing about the command in it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    kernel: Kernel
    exchange: Path
    memory_mib: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    code: int
    boot_s: float
    """From starting QEMU until the command started."""
    run_s: float
    processor_s: float
    """What QEMU took of the host's processors: comparable on a busy host too."""


def run(
    command: Sequence[str],
    output: BinaryIO,
    *,
    environment: Mapping[str, str] | None = None,
    exchange: Path | None = None,
    memory_mib: int = 2048,
    timeout_s: float = 300.0,
    user: int = 0,
    systemd_user: int | None = None,
) -> Finished:
    """Boot, run `command`, stream what it prints to `output`, power off.

    >>> run(["sh", "-c", "exit 7"], sys.stdout.buffer).code  # doctest: +SKIP
    7
    """
    kernel = prepared_kernel()
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="run-") as scratch:
        work = Path(scratch)
        work.chmod(0o700)
        if exchange is None:
            exchange = work / "exchange"
            exchange.mkdir()
        make_disk(work / "disk")
        script = command_script(command, environment or {}, user=user, enter_cgroup=systemd_user is None)
        (work / "initrd").write_bytes(initrd(kernel, {"job": job_settings(user, systemd_user), "command": script}))
        machine = Machine(kernel=kernel, exchange=exchange, memory_mib=memory_mib)
        return watch(machine, work, output, timeout_s=timeout_s)


# --- describing the machine


def job_settings(user: int, systemd_user: int | None) -> bytes:
    needed = {CLONE, Path(sys.prefix), Path(sys.base_prefix)}
    hidden = sorted(str(path) for path in needed if path.parts[1] in ("tmp", "run"))
    closed = sorted(
        str(parent)
        for parent in {parent for path in needed for parent in (path, *path.parents)}
        if parent.is_dir() and not parent.stat().st_mode & 0o001
    )
    settings = {
        "HOST_OPTIONS": HOST_OPTIONS,
        "KEEP": " ".join(hidden),
        "OPEN": " ".join(closed),
        "USER_ID": str(systemd_user or user),
        "CGROUP": cgroup_of(user),
        "DELEGATED": cgroup_of(user).removesuffix("/login"),
        "SYSTEMD": "" if systemd_user is None else "yes",
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items()).encode()


def cgroup_of(user: int) -> str:
    if user == 0:
        return "system.slice/holdfast.service"
    return f"holdfast-{user}/login"  # as by the command that Holdfast prints: a login has other processes as well


def command_script(command: Sequence[str], environment: Mapping[str, str], *, user: int, enter_cgroup: bool) -> bytes:
    variables = {
        "PATH": COMMAND_PATHS,
        "HOME": os.environ.get("HOME", "/root") if user == 0 else "/tmp/home",
        "HOLDFAST_HOME": os.environ.get("HOLDFAST_HOME", "/tmp/holdfast-home"),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        **environment,
    }
    identity = [] if user == 0 else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    identity += ["--inh-caps=-all"] if identity else []
    words = [*identity, "env", "-i", *(f"{name}={value}" for name, value in variables.items()), *command]
    lines = (
        f"cd {shlex.quote(str(CLONE))} || exit 126",
        f"echo 0 > /sys/fs/cgroup/{cgroup_of(user)}/cgroup.procs || exit 126" if enter_cgroup else "",
        f"exec {shlex.join(words)}",
    )
    return ("\n".join(lines) + "\n").encode()


def initrd(kernel: Kernel, job: Mapping[str, bytes]) -> bytes:
    """Uncompressed: it costs the host nothing, and the emulated processor would unpack slowly."""
    guest = Path(__file__).with_name("guest.sh").read_bytes()
    files = {
        "init": guest,
        "bin/busybox": Path(shutil.which("busybox", path=COMMAND_PATHS) or "/bin/busybox").read_bytes(),
        "vm/guest.sh": guest,
        "vm/modules/order": "".join(f"{module.name}\n" for module in kernel.modules).encode(),
        **{f"vm/modules/{module.name}": module.read_bytes() for module in kernel.modules},
        **{f"vm/{name}": content for name, content in job.items()},
    }
    directories = ["bin", "dev", "vm", "vm/modules"]
    entries = [cpio_entry(name, 0o040755, b"") for name in directories]
    entries += [cpio_entry(name, 0o100755, content) for name, content in files.items()]
    return b"".join([*entries, cpio_entry("TRAILER!!!", 0, b"")])


def cpio_entry(name: str, mode: int, content: bytes) -> bytes:
    """One member of a `newc` archive: 13 numbers in hexadecimal, then name and content, padded to 4."""
    # inode, mode, uid, gid, links, mtime, size, device (2), special device (2), length of the name, checksum
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    header = b"070701" + b"".join(b"%08X" % number for number in numbers) + name.encode() + b"\0"
    return header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4)


def make_disk(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    mkfs = shutil.which("mkfs.ext4", path=COMMAND_PATHS) or "mkfs.ext4"
    subprocess.run([mkfs, "-q", "-F", "-E", "root_owner=0:0", image], check=True)


def qemu_arguments(machine: Machine, work: Path, *, output: int, status: int) -> list[str]:
    return [
        # QEMU dies with us even if we are killed by a signal that leaves no time to say so.
        *("setpriv", "--pdeathsig", "KILL"),
        *("qemu-system-x86_64", "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"),
        # Emulation on purpose: /dev/kvm exists on hosts where it hangs. Each of what is off costs time.
        *("-accel", "tcg", "-cpu", "max,la57=off,erms=off,fsrm=off,smap=off,smep=off"),
        *("-smp", "1", "-m", str(machine.memory_mib)),
        *("-kernel", str(machine.kernel.image), "-initrd", str(work / "initrd"), "-append", KERNEL_OPTIONS),
        *("-serial", f"file:{work / 'console'}"),
        *("-device", "virtio-serial-pci"),
        *(
            "-chardev",
            f"file,id=status,path=/dev/fd/{status}",
            "-device",
            "virtserialport,nr=1,chardev=status",
        ),
        *(
            "-chardev",
            f"file,id=output,path=/dev/fd/{output}",
            "-device",
            "virtserialport,nr=2,chardev=output",
        ),
        *("-drive", f"file={work / 'disk'},if=virtio,format=raw,cache=unsafe"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        # Owners and modes are kept beside the files: the guest cannot make a set-uid file out here.
        *("-virtfs", f"local,path={machine.exchange},mount_tag=exchange,security_model=mapped-file"),
    ]


# --- running it


class Listener:
    """Takes what the machine sends: output to pass on, and the two reports of its process 1."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._status = b""
        self.ready_at: float | None = None
        self.code: int | None = None

    def hear_output(self, chunk: bytes) -> None:
        self._output.write(chunk)
        self._output.flush()

    def hear_status(self, chunk: bytes) -> None:
        self._status += chunk
        if self.ready_at is None and b"ready\n" in self._status:
            self.ready_at = time.monotonic()
        if said := re.search(rb"^exit (\d+)\n", self._status, re.MULTILINE):
            self.code = int(said[1])


def watch(machine: Machine, work: Path, output: BinaryIO, *, timeout_s: float) -> Finished:
    started, processor_started = time.monotonic(), processor_s()
    listener = Listener(output)
    with qemu_running(machine, work) as (output_end, status_end):
        heard = {output_end: listener.hear_output, status_end: listener.hear_status}
        timely = listen(heard, deadline=started + timeout_s)
    if listener.code is not None and listener.ready_at is not None:
        boot_s = listener.ready_at - started
        return Finished(
            code=listener.code,
            boot_s=boot_s,
            run_s=time.monotonic() - listener.ready_at,
            processor_s=processor_s() - processor_started,
        )
    phase = "it was starting" if listener.ready_at is None else "the command was running"
    cause = "went down without an exit code" if timely else f"was stopped after {timeout_s:g} s,"
    raise MachineFailed(f"the machine {cause} while {phase}\n{last_words(work)}")


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def qemu_running(machine: Machine, work: Path) -> Iterator[tuple[int, int]]:
    """QEMU in its own process group, gone on the way out. Yields the reading ends of output and status."""
    output_end, output_in = os.pipe()
    status_end, status_in = os.pipe()
    qemu = None
    try:
        with (work / "qemu-errors").open("wb") as errors:
            qemu = subprocess.Popen(
                qemu_arguments(machine, work, output=output_in, status=status_in),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(output_in, status_in),
                start_new_session=True,
            )
        os.close(output_in)
        os.close(status_in)
        yield output_end, status_end
    finally:
        if qemu is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(qemu.pid, signal.SIGKILL)
            qemu.wait()
        os.close(output_end)
        os.close(status_end)


def listen(heard: Mapping[int, Callable[[bytes], None]], *, deadline: float) -> bool:
    """Until QEMU has closed every end. False when the deadline came first."""
    with selectors.DefaultSelector() as selector:
        for end, hear in heard.items():
            selector.register(end, selectors.EVENT_READ, hear)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            for key, _ in selector.select(left_s):
                if chunk := os.read(key.fd, 65536):
                    key.data(chunk)
                else:
                    selector.unregister(key.fd)
    return True


def last_words(work: Path) -> str:
    logs = ((work / name) for name in ("qemu-errors", "console"))
    texts = (log.read_text(errors="replace").strip() for log in logs if log.exists())
    lines = "\n".join(texts).splitlines()
    panic = next((number for number, line in enumerate(lines) if "Kernel panic" in line), len(lines))
    return "\n".join(lines[max(0, panic - 20) : panic + 20])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a command on a kernel with cgroup v2, in an emulated machine.")
    parser.add_argument("--prepare", action="store_true", help="install packages (as root), unpack a kernel, and stop")
    parser.add_argument("--memory-mib", type=int, default=2048)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--user", type=int, default=0, metavar="UID", help="run the command as this ordinary user")
    parser.add_argument("--systemd", type=int, metavar="UID", help="boot systemd, and this user may log in")
    parser.add_argument("--exchange", type=Path, help="host directory that is /exchange inside")
    parser.add_argument("--times", action="store_true", help="say on stderr how long it took")
    parser.add_argument("command", nargs="*", help="after --")
    options = parser.parse_args(words)
    if not options.prepare and not options.command:
        parser.error("a command is needed, after --")
    # SIGTERM takes the same way out as Ctrl-C: through `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.prepare:
            prepare()
            return 0
        done = run(
            options.command,
            sys.stdout.buffer,
            exchange=options.exchange,
            memory_mib=options.memory_mib,
            timeout_s=options.timeout_s,
            user=options.user,
            systemd_user=options.systemd,
        )
    except Unavailable as reason:
        print(f"tests/vm: not available: {reason}", file=sys.stderr)
        return UNAVAILABLE
    except MachineFailed as reason:
        print(f"tests/vm: {reason}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if options.times:
        took = f"booted in {done.boot_s:.1f} s, ran for {done.run_s:.1f} s, {done.processor_s:.1f} s of the processors"
        print(f"tests/vm: {took}", file=sys.stderr)
    return done.code


if __name__ == "__main__":
    sys.exit(main())
