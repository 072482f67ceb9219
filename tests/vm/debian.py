"""What the test machine is built from: Debian's packages and Debian's kernel, kept below the clone."""

import fcntl
import hashlib
import lzma
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
CACHE = CLONE / ".home" / "vm"
# The last two bring systemd, logind and D-Bus with them: the machine boots the host's.
PACKAGES = ("qemu-system-x86", "busybox-static", "e2fsprogs", "libpam-systemd", "dbus-user-session")
# linux-image-cloud-amd64 is a third of the size but has no 9p.
KERNEL_PACKAGE = "linux-image-amd64"
MODULES = (
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32c_generic",
    "ext4",
)


class Unavailable(Exception):
    """This host cannot run the machine; the message says what would change that."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    image: Path
    modules: tuple[Path, ...]
    """In the order in which they can be loaded."""


def prepare() -> Kernel:
    """Install what is missing (root only), unpack a kernel below the clone. Quick the second time."""
    refuse_other_machines()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing := missing_packages():
            if os.geteuid() != 0:
                raise Unavailable(f"needs root once: apt-get install --no-install-recommends {' '.join(missing)}")
            apt(
                "apt-get",
                "install",
                "-y",
                "--no-install-recommends",
                "--no-remove",  # a host with another init keeps it
                "-o",
                "DPkg::Lock::Timeout=120",
                *missing,
            )
        sweep()
        return cached_kernel() or unpack_kernel()


def sweep() -> None:
    """Remove what runs that were killed outright left behind; a day-old one is surely over."""
    for directory in (*CACHE.glob("run-*"), *CACHE.glob("unpack-*")):
        if time.time() - directory.stat().st_mtime > 86400:
            shutil.rmtree(directory, ignore_errors=True)


def prepared_kernel() -> Kernel:
    refuse_other_machines()
    missing = missing_packages()
    kernel = cached_kernel()
    if missing or kernel is None:
        lacking = ", ".join([*missing, *(["a kernel below .home/vm"] if kernel is None else [])])
        raise Unavailable(f"lacks {lacking}: run `python tests/vm/boot.py --prepare` as root")
    return kernel


def refuse_other_machines() -> None:
    if platform.machine() != "x86_64":
        raise Unavailable(f"the test machine is x86_64 only, this host is {platform.machine()}")
    if shutil.which("dpkg-query") is None:
        raise Unavailable("the test machine is built from Debian packages, and this host has no dpkg")


def missing_packages() -> list[str]:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *PACKAGES]
    listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return [package for package in PACKAGES if f"installed {package}" not in listed]


def apt(*command: str, directory: Path | None = None) -> str:
    """Once more after `apt-get update` if it fails: a fresh image has no package lists, an old one stale."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    for retry in (False, True):
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        if not retry:
            subprocess.run(["apt-get", "update"], env=environment, capture_output=True, check=False)
    raise Unavailable(f"`{shlex.join(command)}` failed: {done.stderr.strip()[-600:]}")


def kernel_directory_suffix() -> str:
    return hashlib.sha256(repr(MODULES).encode()).hexdigest()[:8]


def cached_kernel() -> Kernel | None:
    for directory in sorted(CACHE.glob(f"linux-image-*-{kernel_directory_suffix()}"), reverse=True):
        order = (directory / "order").read_text().split()
        return Kernel(image=directory / "vmlinux", modules=tuple(directory / name for name in order))
    return None


def unpack_kernel() -> Kernel:
    """Download the package without installing it; keep the kernel and the modules we load."""
    depends = apt("apt-cache", "depends", KERNEL_PACKAGE)
    named = re.search(r"Depends: (linux-image-\d\S+)", depends)
    if named is None:
        raise Unavailable(f"{KERNEL_PACKAGE} names no kernel here: is this Debian?")
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unpack-") as scratch:
        work = Path(scratch)
        apt("apt-get", "download", named[1], directory=work)
        [package] = work.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, work / "tree"], check=True)
        kept = work / "kept"
        kept.mkdir()
        [image] = (work / "tree" / "boot").glob("vmlinuz-*")
        (kept / "vmlinux").write_bytes(unpacked_image(image.read_bytes()))
        order = []
        for name, content in load_order(work / "tree", MODULES):
            (kept / f"{name}.ko").write_bytes(content)
            order.append(f"{name}.ko")
        (kept / "order").write_text("\n".join(order) + "\n")
        # The rename is last, so a directory with the final name is a complete one.
        kept.rename(CACHE / f"{named[1]}-{kernel_directory_suffix()}")
    kernel = cached_kernel()
    assert kernel is not None
    return kernel


def unpacked_image(image: bytes) -> bytes:
    """The kernel inside a compressed one: QEMU starts either, but the emulated processor unpacks for seconds.

    The header of the x86 boot protocol says where it lies. A kernel not compressed with xz stays as it is.
    """
    setup_sectors = image[0x1F1]
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[(setup_sectors + 1) * 512 + offset :][:length]
    if not payload.startswith(b"\xfd7zXZ\0"):
        return image
    # Not lzma.decompress: four bytes, the unpacked size, follow the stream.
    return lzma.LZMADecompressor().decompress(payload)


def load_order(tree: Path, wanted: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted modules and all they depend on, dependencies first.

    The package has no modules.dep (installing it would run depmod), but each module records what it needs.
    """
    files = {file.name.partition(".ko")[0].replace("-", "_"): file for file in tree.rglob("*.ko*") if file.is_file()}
    builtin = {
        Path(line).stem.replace("-", "_")
        for listing in tree.rglob("modules.builtin")
        for line in listing.read_text().splitlines()
    }
    seen: set[str] = set()

    def visit(name: str) -> Iterator[tuple[str, bytes]]:
        name = name.replace("-", "_")
        if name in seen or name in builtin:
            return
        seen.add(name)
        if name not in files:
            raise Unavailable(f"Debian's kernel has no module {name}")
        content = module_content(files[name])
        recorded = re.search(rb"\0depends=([^\0]*)\0", content)
        for dependency in recorded[1].decode().split(",") if recorded else ():
            if dependency:
                yield from visit(dependency)
        yield name, content

    for name in wanted:
        yield from visit(name)


def module_content(file: Path) -> bytes:
    content = file.read_bytes()
    return lzma.decompress(content) if file.suffix == ".xz" else content
