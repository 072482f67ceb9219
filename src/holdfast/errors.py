"""Everything Holdfast itself can fail with. Code that fails is not here: that is a result (`run.error`).

    HoldfastError
    ├── InvalidSetting           a value that cannot be used
    ├── HomeBusy                 another process owns the home directory
    ├── SandboxUnavailable       this machine lacks a primitive that a strict sandbox needs
    ├── EnvironmentUnusable      the chosen Python cannot host guests
    ├── EnvironmentBuildFailed   the guests' own environment could not be built
    ├── KernelStartFailed        a kernel did not come up
    ├── DiskLimit                the session wrote far more than it may
    ├── SessionClosed            the session has ended
    ├── SessionUnknown           no session of that id is in this home
    ├── SessionHalted            what is on disk is not what was written there: the session is stopped
    ├── DiskFailed               a write could not be made durable
    │   └── DiskFull             there was no room for it: nothing was written, and nothing is in doubt
    ├── StateMoved               the session is not where the caller thinks it is
    ├── KeyReused                an idempotency key came with another request
    ├── RehearsalUnavailable     there is no snapshot that a rehearsal could return to
    ├── CkptUnknown              a CKPT that names no retained state
    ├── FileUnknown              no such file in the workspace
    └── VerifyFailed             a chain, signature, manifest or file is not what it was

Each says what happened, and in `hint` what to do next.
"""


class HoldfastError(Exception):
    """The root of the tree: catch this to catch every failure that is ours."""

    code = "holdfast_error"

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]\nhint: {self.hint}"


class InvalidSetting(HoldfastError):
    """A setting or argument that cannot be used as it is."""

    code = "invalid_setting"


class HomeBusy(HoldfastError):
    """Another live process owns the home directory."""

    code = "home_busy"


class SandboxUnavailable(HoldfastError):
    """A primitive that the strict sandbox needs is missing. We never run weaker than asked."""

    code = "sandbox_unavailable"


class EnvironmentUnusable(HoldfastError):
    """The Python environment chosen for guests cannot host them."""

    code = "environment_unusable"


class EnvironmentBuildFailed(HoldfastError):
    """uv could not build the guests' environment."""

    code = "environment_build_failed"


class KernelStartFailed(HoldfastError):
    """A kernel did not come up. Nothing of the caller's ran."""

    code = "kernel_start_failed"


class DiskLimit(HoldfastError):
    """The session's disk is so far beyond its limit that nothing more runs in it."""

    code = "disk_limit"


class SessionClosed(HoldfastError):
    """The session has ended; its files are gone."""

    code = "session_closed"


class SessionUnknown(HoldfastError):
    """This home has no session of that id."""

    code = "session_unknown"


class SessionHalted(HoldfastError):
    """Files or journal are not what was written. Nothing more runs until somebody has looked."""

    code = "session_halted"


class DiskFailed(HoldfastError):
    """A write could not be made durable. It is not tried again: a second fsync can report success over lost data."""

    code = "disk_failed"


class DiskFull(DiskFailed):
    """No room for a write. Nothing of it is there, so that it may be tried again when there is room."""


class StateMoved(HoldfastError):
    """The session is not where the caller thinks it is. Nothing ran."""

    code = "state_moved"

    def __init__(self, message: str, *, hint: str, differs: object = None) -> None:
        super().__init__(message, hint=hint)
        self.differs = differs
        """The same as data: `recovery.Differences`."""


class KeyReused(HoldfastError):
    """The idempotency key belongs to another request. Nothing ran."""

    code = "key_reused"


class RehearsalUnavailable(HoldfastError):
    """Nothing could bring memory back afterwards. Nothing ran."""

    code = "rehearsal_unavailable"


class CkptUnknown(HoldfastError):
    """The CKPT is mistyped, of another session, or no longer retained."""

    code = "ckpt_unknown"


class FileUnknown(HoldfastError):
    """The workspace has no such file."""

    code = "file_unknown"


class VerifyFailed(HoldfastError):
    """Something is not what its receipt says; the message names the first such thing."""

    code = "verify_failed"
