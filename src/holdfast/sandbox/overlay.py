"""The overlay that a session's files are staged on.

    files/                  what is committed: the lower layer
    stages/<stage>/         what this run changed: the upper layer
    stages/<stage>.work/    the overlay's own

One overlay per stage; its three areas are bound to where the guest looks for them, and nothing else of it can be
reached from inside: not its root, not a layer. A layer is touched only while nobody can look at it: the session is
frozen when a stage is published, and is given the next one (`replace`), from outside, before it is thawed.

Where a directory of the user's is the session's /mnt/data (`wire.Shared`), that directory is the lower layer, because
an overlay does not follow a mount that is below it:

    view/mask               a whiteout: `.holdfast`, which we keep there, does not exist for the guest
    view/below              the directory; where root runs us, with its owner shown as the guest
    stages/<stage>/data     what this run changed in it
    stages/<stage>.work/    the overlay's own `data`; a new /tmp and $HOME, which end with the stage

`view` is built on a file system in memory that ends with the mounting. All names are relative to the session's
directory, because mount options have little room for paths. The layers are mounted without index, redirects and
metacopy, whatever this kernel's defaults: the upper layer then holds whole files at their own paths, whiteouts and
opaque directories, and no other marks that mean anything. They are mounted `volatile`: what a run writes lasts when
it is committed, and `publish.prepare` sees to that in the layer itself. A guest's own `fsync` would only make it wait,
and everybody else's commits with it.
"""

import errno
import os
import signal
import stat

from holdfast.kernel.wire import Shared
from holdfast.sandbox import linux, namespaces
from holdfast.sandbox.mounts import DIRECTORIES, WORKSPACE

# Mounted over for a moment, in a namespace that nobody else sees, to have a place from which to take the areas.
_SCAFFOLD = "stages"
_VIEW = "view"
_INITIAL_USER_NAMESPACE = "user:[4026531837]"
HIDDEN = ".holdfast"
"""What is ours in a shared directory."""


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class OverlayUnavailable(OSError):
    """Linux refuses the overlay: without it no session can be staged."""


class LayerNotWritable(OSError):
    """The disk of the home refuses the directories that an overlay needs; `errno` says why."""


def enter(directory: str, stage: str, shared: Shared | None = None) -> None:
    """Attach a session's areas, in this process's own mount namespace, which has nothing there yet."""
    for target, area in _areas(directory, stage, shared).items():
        linux.move_mount(area, target)
        os.close(area)
    os.chdir("/")


def replace(directory: str, stage: str, shared: Shared | None, *, init: int) -> None:
    """Give the live session whose pid 1 is the pidfd `init` another stage. Ends inside its mount namespace.

    It has the old stage or the new one. Should it be left with neither, it is killed.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    areas = _areas(directory, stage, shared)
    linux.setns(init, linux.CLONE_NEWNS)
    try:
        for target, area in areas.items():
            linux.unmount(target, linux.MNT_DETACH)  # lazily: the guest's working directory and files hold it
            linux.move_mount(area, target)
    except BaseException:
        signal.pidfd_send_signal(init, signal.SIGKILL)
        raise


def mark_options() -> str:
    """Where the overlay keeps its marks: what only the host's root can write, or in a user namespace, what guests
    get at only through the overlay, which hides and escapes it."""
    return "" if os.readlink("/proc/self/ns/user") == _INITIAL_USER_NAMESPACE else ",userxattr"


def _areas(directory: str, stage: str, shared: Shared | None) -> dict[str, int]:
    """Where each area belongs, and a mount of it that is not attached yet."""
    os.chdir(directory)
    return _take_from_files(stage) if shared is None else _take_from_shared(stage, shared)


def _take_from_files(stage: str) -> dict[str, int]:
    _mount(_SCAFFOLD, lower="files", upper=f"stages/{stage}", work=f"stages/{stage}.work")
    areas = {target: linux.open_tree(f"{_SCAFFOLD}/{name}") for name, target in DIRECTORIES.items()}
    linux.unmount(_SCAFFOLD, linux.MNT_DETACH)
    return areas


def _take_from_shared(stage: str, shared: Shared) -> dict[str, int]:
    linux.mount("tmpfs", _VIEW, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=700")
    for name in ("mask", "below", "top"):
        os.mkdir(f"{_VIEW}/{name}")
    os.mknod(f"{_VIEW}/mask/{HIDDEN}", stat.S_IFCHR)
    _attach_below(shared)
    lower = f"{_VIEW}/mask:{_VIEW}/below"
    _mount(f"{_VIEW}/top", lower=lower, upper=f"stages/{stage}/data", work=f"stages/{stage}.work/data")
    own = {target: linux.open_tree(f"stages/{stage}.work/{name}") for name, target in _scratch().items()}
    for tree in own.values():
        linux.tame_tree(tree)
    areas = {WORKSPACE: linux.open_tree(f"{_VIEW}/top"), **own}
    linux.unmount(_VIEW, linux.MNT_DETACH)
    return areas


def _scratch() -> dict[str, str]:
    return {name: target for name, target in DIRECTORIES.items() if target != WORKSPACE}


def _attach_below(shared: Shared) -> None:
    tree = linux.open_tree(shared.path)
    status = os.fstat(tree)
    if (status.st_dev, status.st_ino) != shared.identity:
        raise OSError(errno.ESTALE, "the workspace is another directory than it was")
    if shared.guest is not None:
        ids = namespaces.mapping(*shared.owner, shown_as=shared.guest)
        try:
            linux.map_tree(tree, ids)
        except OSError as error:
            raise OverlayUnavailable(
                error.errno, f"the owner of its files cannot be mapped: {error.strerror}"
            ) from error
        finally:
            os.close(ids)
    linux.move_mount(tree, f"{_VIEW}/below")
    os.close(tree)


def _mount(target: str, *, lower: str, upper: str, work: str) -> None:
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    options = f"{layers},index=off,metacopy=off,redirect_dir=nofollow,volatile{mark_options()}"
    try:
        linux.mount("overlay", target, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
    except OSError as error:
        # Linux says EINVAL where the file system of the upper layer is read-only.
        number = errno.EROFS if _is_read_only(upper) else error.errno
        kind = LayerNotWritable if number in _DISK else OverlayUnavailable
        raise kind(number, os.strerror(number or 0)) from error
    # An overlay that cannot make its work directory is mounted read-only, and the mount succeeds. Every write in the
    # session would then fail with EROFS, for as long as the layer stays.
    if _is_read_only(target):
        linux.unmount(target, linux.MNT_DETACH)
        number = errno.EROFS if _is_read_only(upper) else errno.ENOSPC
        raise LayerNotWritable(number, os.strerror(number))


def _is_read_only(directory: str) -> bool:
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
