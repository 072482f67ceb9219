"""Everything Holdfast itself can fail with. Code that fails is not here: that is a result (`run.error`).

    HoldfastError
    ├── InvalidSetting           a value that cannot be used
    ├── HomeBusy                 another process owns the home directory
    ├── SandboxUnavailable       this machine lacks a primitive that a strict sandbox needs
    ├── EnvironmentUnusable      the chosen Python cannot host guests
    ├── EnvironmentBuildFailed   the guests' own environment could not be built
    ├── KernelStartFailed        a kernel did not come up
    ├── DiskLimit                the session wrote far more than it may
    └── SessionClosed            the session has ended

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
