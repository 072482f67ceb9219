"""What the host learns of a kernel: the events that `Kernel.wait` hands out."""

from typing import Literal

import msgspec

from holdfast.kernel import wire


class Printed(msgspec.Struct, frozen=True):
    """Bytes from one of the pipes."""

    stream: Literal["stdout", "stderr"]
    data: bytes


class Died(msgspec.Struct, frozen=True):
    """pid 1 reaped the kernel."""

    status: int


SOCKET_CLOSED, INIT_GONE = "it closed its control socket", "its pid 1 is gone"


class Gone(msgspec.Struct, frozen=True):
    """The kernel can no longer be talked to, and nobody reported its death."""

    reason: str


class Pressed(msgspec.Struct, frozen=True):
    """The session's cgroup reports that memory is short."""


class Snapshot(msgspec.Struct, frozen=True):
    """A frozen copy of the kernel, asleep."""

    pid: int
    pid_inside: int


Happening = Printed | Died | Gone | Pressed | wire.KernelMessage
