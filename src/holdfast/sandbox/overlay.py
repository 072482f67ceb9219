"""The overlay that a session's files are staged on.

    files/                  what is committed: the lower layer
    stages/<stage>/         what this run changed: the upper layer
    stages/<stage>.work/    the overlay's own

One overlay per stage; its three areas are bound to where the guest looks for them, and nothing else of it can be
reached from inside: not its root, not a layer. A layer is touched only while nobody can look at it: the session is
frozen when a stage is published, and is given the next one (`replace`), from outside, before it is thawed.

All names are relative to the session's directory, because mount options have little room for paths. The layers are
mounted without index, redirects and metacopy, whatever this kernel's defaults: the upper layer then holds whole files
at their own paths, whiteouts and opaque directories, and no other marks that mean anything.
"""

import os
import signal

from holdfast.sandbox import linux
from holdfast.sandbox.mounts import DIRECTORIES

# Mounted over for a moment, in a namespace that nobody else sees, to have a place from which to take the areas.
_SCAFFOLD = "stages"
_INITIAL_USER_NAMESPACE = "user:[4026531837]"


class OverlayUnavailable(OSError):
    """Linux refuses the overlay: without it no session can be staged."""


def enter(directory: str, stage: str) -> None:
    """Bind a session's areas, in this process's own mount namespace, which has nothing there yet."""
    _mount(directory, stage)
    for name, target in DIRECTORIES.items():
        linux.mount(f"{_SCAFFOLD}/{name}", target, flags=linux.MS_BIND)
    linux.unmount(_SCAFFOLD, linux.MNT_DETACH)
    os.chdir("/")


def replace(directory: str, stage: str, *, init: int) -> None:
    """Give the live session whose pid 1 is the pidfd `init` another stage. Ends inside its mount namespace.

    It has the old stage or the new one. Should it be left with neither, it is killed.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    _mount(directory, stage)
    areas = {target: linux.open_tree(f"{_SCAFFOLD}/{name}") for name, target in DIRECTORIES.items()}
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


def _mount(directory: str, stage: str) -> None:
    os.chdir(directory)
    layers = f"lowerdir=files,upperdir=stages/{stage},workdir=stages/{stage}.work"
    options = f"{layers},index=off,metacopy=off,redirect_dir=nofollow{mark_options()}"
    try:
        linux.mount("overlay", _SCAFFOLD, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
    except OSError as error:
        raise OverlayUnavailable(error.errno, error.strerror) from error
