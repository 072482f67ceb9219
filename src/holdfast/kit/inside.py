"""What a sandbox provides to the kit. Whoever runs user code sets it up; where nobody did, the kit is outside."""

from collections.abc import Callable

Save = Callable[[list[bytes], str], str]
"""Takes absolute paths of files without a link in them, and a step; says why not, or nothing."""

_save: Save | None = None


def provide_save(save: Save | None) -> None:
    """From now on `kit.save` ends there."""
    global _save
    _save = save


def provided_save() -> Save | None:
    return _save
