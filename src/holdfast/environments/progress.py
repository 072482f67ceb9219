"""How far a build is: what is reported, and how it is read from what uv prints."""

from collections.abc import Callable

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a build is. A total of 0 means that nobody knows it yet."""

    phase: str
    """waiting, resolving, downloading, installing, compiling, storing or ready."""
    done: int = 0
    total: int = 0
    text: str = ""


Report = Callable[[Progress], None]


def advance(now: Progress, line: str) -> Progress:
    """What a line that uv printed says about the progress. uv announces large downloads only."""
    match line.split():
        case ["Resolved", count, *_] if count.isdigit():
            return Progress(phase="downloading", total=int(count))
        case ["Downloading", name, *size]:
            return msgspec.structs.replace(now, text=" ".join([name, *size]))
        case ["Downloaded", name]:
            return msgspec.structs.replace(now, done=now.done + 1, text=name)
        case ["Prepared", *_]:
            return Progress(phase="installing", total=now.total)
        case ["Installed", *_]:
            return Progress(phase="compiling", text="bytecode")
        case ["Bytecode", "compiled", count, *_] if count.isdigit():
            return Progress(phase="compiling", done=int(count), total=int(count), text="bytecode")
    return now
