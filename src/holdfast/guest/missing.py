"""What to do about a package that the environment does not have. The error itself says it, so every face shows it."""

import re
from contextlib import suppress

from holdfast.sandbox.mounts import HOW_TO_INSTALL

_SAYS_SO = re.compile(r"\bnot installed\b|\bpip install\b|\bconda install\b")
_MOST_READ = 2_000


def hint(error: BaseException) -> str:
    """Empty if it is about something else. Otherwise it is also a note on the error."""
    if not _is_about_a_package(error):
        return ""
    with suppress(Exception):  # the exception's own code
        if HOW_TO_INSTALL not in getattr(error, "__notes__", []):
            error.add_note(HOW_TO_INSTALL)
    return HOW_TO_INSTALL


def _is_about_a_package(error: BaseException) -> bool:
    if isinstance(error, ModuleNotFoundError):
        return True
    if not isinstance(error, (ImportError, ValueError, RuntimeError)):  # plotly says it by a ValueError
        return False
    try:
        return _SAYS_SO.search(str(error)[:_MOST_READ]) is not None
    except Exception:  # the exception's own code
        return False
