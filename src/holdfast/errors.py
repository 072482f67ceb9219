"""Everything Holdfast itself can fail with. Code that fails is not here: that is a result (`run.error`).

    HoldfastError
    ├── InvalidSetting           a value that cannot be used
    ├── InputMissing             a declared input that is not there
    ├── BadEgress                a host that cannot be listed as one that a session may speak to
    ├── EgressRefused            a session may not reach what was asked for
    ├── HomeBusy                 another process owns the home directory
    ├── NotOurs                  a directory's `.holdfast` that this home did not make there
    ├── SandboxUnavailable       this machine lacks a primitive that a strict sandbox needs
    ├── EnvironmentUnusable      the chosen Python cannot host guests
    ├── EnvironmentBuildFailed   the guests' own environment could not be built
    ├── KernelStartFailed        a kernel did not come up
    ├── KeeperLost               the process below which all sessions run has ended, and no other came up
    ├── ProcessStuck             Linux does not end a process that was killed
    ├── DiskLimit                the session wrote far more than it may
    ├── JournalLimit             what is written down of a session's runs is more than it may be
    ├── SessionClosed            the session is not open, or not any more
    ├── SessionUnknown           no session of that id is in this home
    ├── SessionHalted            what is on disk is not what was written there: the session is stopped
    ├── DiskFailed               a write could not be made durable
    │   ├── DiskRefused          the disk refused a step as a whole: nothing is in doubt, it may be tried again
    │   │   ├── DiskFull         the disk has no room
    │   │   ├── DiskReadOnly     the disk is read-only
    │   │   └── FilesLost        the files of a session are not there, and nobody deleted the session
    │   └── JournalLost          the journal was deleted, replaced or set back
    ├── KeysLost                 the key that signs receipts is gone, damaged or another
    ├── InternalFault            a mistake of this package
    ├── StateMoved               the session is not where the caller thinks it is
    ├── KeyReused                an idempotency key came with another request
    ├── KeyMismatch              the journal answers an idempotency key with another run than its receipt says
    ├── RehearsalUnavailable     there is no snapshot that a rehearsal could return to
    ├── CkptUnknown              a CKPT that names no retained state
    ├── FileUnknown              no such file in the workspace
    ├── ProtectedPath            a run may not write to what tools of the user's run by themselves
    ├── UndeclaredWrite          a run wrote what none of its declared outputs covers
    ├── PatternsTooCostly        declared patterns take too long to compare with the files there are
    ├── VerifyFailed             a chain, signature, manifest or file is not what it was
    ├── ExtraMissing             a face needs packages that are not installed
    ├── ApiKeyUnknown            no API key of that id is in this home
    ├── TooManySessions          the caller has as many sessions as he may
    ├── ServerUnreachable        a server does not answer, or not any more
    ├── RunUnknown               no run of that id is in the session
    ├── RunAbandoned             nobody listened to it any more: it was given up
    ├── EventsGone               the events of a run that were asked for are not kept any more
    ├── ServerStopping           the server takes no new work
    └── Refused                  a server did not take the request; nothing was looked at
        ├── Unauthorized         no token, or one that is not known
        ├── Forbidden            the token is known, and may not do this; or a page of another site asks
        ├── WrongHost            the request was meant for another name than ours
        ├── Malformed            it is not HTTP as we read it
        ├── WrongMediaType       the body is not what this server takes
        ├── TooLarge             the body is larger than it may be
        ├── HeadersTooLarge      there are too many headers, or they are too long
        ├── RateLimited          too many requests in a short time
        └── SlowClient           the body did not arrive in time

Each says what happened, and in `hint` what to do next.
"""

import errno

from holdfast.visible import visible_lines

_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK = (*_FULL, errno.EIO, errno.EROFS)
"""Numbers by which Linux says that a disk is full, broken or read-only."""
_NO_DISK = (ConnectionError, TimeoutError, ChildProcessError, ProcessLookupError, BlockingIOError, InterruptedError)


class HoldfastError(Exception):
    """The root of the tree: catch this to catch every failure that is ours."""

    code = "holdfast_error"

    def __init__(self, message: str, *, hint: str) -> None:
        self.message = visible_lines(message)  # it names files, variables and packages as a guest has named them
        self.hint = visible_lines(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]\nhint: {self.hint}"


class InvalidSetting(HoldfastError):
    """A setting or argument that cannot be used as it is."""

    code = "invalid_setting"


class InputMissing(HoldfastError):
    """A declared input is not there, or a pattern matches no file. Nothing ran, and the key is not used."""

    code = "input_missing"


class BadEgress(HoldfastError):
    """An entry of `egress=` that names no host, or could mean several."""

    code = "bad_egress"


class EgressRefused(HoldfastError):
    """A session may not reach these hosts: its server does not let clients, or it was opened without."""

    code = "egress_refused"


class HomeBusy(HoldfastError):
    """Another live process owns the home directory."""

    code = "home_busy"


class NotOurs(HoldfastError):
    """What is kept in a directory of the user's came from elsewhere: nothing that it says is done."""

    code = "not_ours"


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


class KeeperLost(HoldfastError):
    """The keeper has ended, and with it the processes of every session; another could not be started."""

    code = "keeper_lost"


class ProcessStuck(HoldfastError):
    """A process outlived its SIGKILL: it hangs inside Linux. Nothing of the run that left it is kept."""

    code = "process_stuck"


class DiskLimit(HoldfastError):
    """The session's disk is so far beyond its limit that nothing more runs in it."""

    code = "disk_limit"


class JournalLimit(HoldfastError):
    """The journal holds as much of the session's runs as it may: code, answers, receipts.

    Nothing ran, and the key is not used. Files and history can still be read.
    """

    code = "journal_limit"


class SessionClosed(HoldfastError):
    """The session is not open: not yet, or not any more. Its files are gone, unless it was kept: then `resume=`."""

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


class DiskRefused(DiskFailed):
    """The disk refused a step as a whole, so that it may be tried again: by the caller; or, if the run was verified by
    then, by us alone, which the message says. The code that ran is not to blame, and its key is not used."""


class DiskFull(DiskRefused):
    """The disk of the home has no room. The session may still be far below its own limit."""

    code = "disk_full"


class DiskReadOnly(DiskRefused):
    """The disk of the home is mounted read-only; Linux does that by itself to a file system that is damaged."""

    code = "disk_read_only"


class JournalLost(DiskFailed):
    """The journal is not the file that it was, or lacks commits that were acknowledged. No run is acknowledged."""

    code = "journal_lost"


class FilesLost(DiskRefused):
    """Files of a session are gone from the home, and nobody deleted the session. Nothing runs before they are back."""

    code = "files_lost"


class KeysLost(HoldfastError):
    """The key that signed the receipts of this home is not there. No other is made unless the user asks for it."""

    code = "keys_lost"


class InternalFault(HoldfastError):
    """A mistake of this package. What was verified by then is not lost: the session's next request commits it, which
    the message says."""

    code = "internal"


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


class KeyMismatch(HoldfastError):
    """What the journal has under an idempotency key is not what the receipt of that run says. Nothing ran."""

    code = "key_mismatch"


class RehearsalUnavailable(HoldfastError):
    """Nothing could bring memory back afterwards. Nothing ran."""

    code = "rehearsal_unavailable"


class CkptUnknown(HoldfastError):
    """The CKPT is mistyped, of another session, or no longer retained."""

    code = "ckpt_unknown"


class FileUnknown(HoldfastError):
    """The workspace has no such file."""

    code = "file_unknown"


class ProtectedPath(HoldfastError):
    """A file of a user's directory that tools run or obey by themselves, and that the user did not name exactly."""

    code = "protected_path"


class UndeclaredWrite(HoldfastError):
    """A write into a user's directory that no declared output covers."""

    code = "undeclared_write"


class PatternsTooCostly(HoldfastError):
    """Declared patterns and the session's files together are more than the host compares."""

    code = "patterns_too_costly"


class VerifyFailed(HoldfastError):
    """Something is not what its receipt says; the message names the first such thing."""

    code = "verify_failed"


class ExtraMissing(HoldfastError):
    """What was asked for needs packages that Holdfast does not bring along by itself."""

    code = "extra_missing"


class ApiKeyUnknown(HoldfastError):
    """This home has no API key of that id."""

    code = "api_key_unknown"


class TooManySessions(HoldfastError):
    """The caller has as many sessions as he may."""

    code = "too_many_sessions"


class RunUnknown(HoldfastError):
    """This session has no run of that id."""

    code = "run_unknown"


class RunAbandoned(HoldfastError):
    """Nothing runs on unattended: its client was gone for too long, or the server stopped.

    It says what became of it: mostly it was rolled back, but code may end before it is asked to, and a notebook keeps
    what an interrupted cell has done.
    """

    code = "run_abandoned"


class EventsGone(HoldfastError):
    """They were kept for a while and within bounds. What the run printed, and how it ended, is still known."""

    code = "events_gone"


class ServerStopping(HoldfastError):
    """The server ends what runs and takes nothing new."""

    code = "server_stopping"


class ServerUnreachable(HoldfastError):
    """No server answers there; or the connection broke and did not come back. The message says what is in doubt."""

    code = "server_unreachable"


class Refused(HoldfastError):
    """A server did not take the request. Nothing ran, and nothing changed."""

    code = "refused"


class Unauthorized(Refused):
    """Who asks is not known."""

    code = "unauthorized"


class Forbidden(Refused):
    """Who asks is known and may not do this; or a page of another site asks through somebody's browser."""

    code = "forbidden"


class WrongHost(Refused):
    """The Host header names somebody else: a page whose name was made to point here, or a server with more names."""

    code = "wrong_host"


class Malformed(Refused):
    """A request that two readers could take for two different ones."""

    code = "malformed"


class WrongMediaType(Refused):
    """A body of another type than this server takes."""

    code = "wrong_media_type"


class TooLarge(Refused):
    """A body past its limit."""

    code = "too_large"


class HeadersTooLarge(Refused):
    """Too many headers, or too long ones."""

    code = "headers_too_large"


class RateLimited(Refused):
    """Too many requests in a short time."""

    code = "rate_limited"

    def __init__(self, message: str, *, hint: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class SlowClient(Refused):
    """A body that did not arrive in time."""

    code = "slow_client"


def disk_failed(step: str, error: OSError, *, in_doubt: bool = False) -> DiskFailed:
    """The error that callers get for a step that failed. After a failed sync nobody knows what is on the disk."""
    why = error.strerror or str(error)
    if error.errno in _FULL:
        kind = DiskFailed if in_doubt else DiskFull
        return kind(f"the disk is full ({step})", hint="free space where the home is, then run it again")
    if in_doubt or error.errno == errno.EIO:
        return DiskFailed(
            f"{step} failed: {why}", hint="look at the disk (dmesg), then open the session again: it recovers"
        )
    if error.errno == errno.EROFS:
        return DiskReadOnly(
            f"the disk is read-only ({step})",
            hint="look why (dmesg; Linux does that to a damaged disk), mount it writable again, then run it again",
        )
    return DiskRefused(
        f"{step} failed: {why}", hint="look at the home's disk: put back what was removed or closed, then run it again"
    )


def of_disk(error: BaseException, *, step: str = "work on the home's files") -> DiskFailed | None:
    """The error that callers get instead of a bare `OSError` of the host's file system; None for any other failure:
    what fails on sockets and processes is no disk's."""
    return disk_failed(step, error) if isinstance(error, OSError) and not isinstance(error, _NO_DISK) else None


def as_told(error: BaseException, *, verified: str = "") -> HoldfastError:
    """A failure as callers are told of it; `verified` is the run that it kept from being committed."""
    if isinstance(error, HoldfastError):
        return error
    if not verified and (failure := of_disk(error)):
        return failure
    what = f"{type(error).__name__}: {error}"
    if not verified:
        return InternalFault(what, hint="please report this")
    return InternalFault(
        f"{verified} is verified, and will be committed: {what}",
        hint="do not run it again: the session's next request commits it, or whoever opens the session next. Please "
        "report this",
    )


def by_code() -> dict[str, type[HoldfastError]]:
    """The tree by its codes, for what a server tells. Where two share a code it is the one nearer to the root."""
    found: dict[str, type[HoldfastError]] = {}
    kinds: list[type[HoldfastError]] = [HoldfastError]
    for kind in kinds:
        found.setdefault(kind.code, kind)
        kinds.extend(kind.__subclasses__())
    return found
