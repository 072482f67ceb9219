"""Our own failures as a message and a hint, never as a traceback."""

import contextlib
import json
import sys
from collections.abc import Iterator

import typer

from holdfast.errors import HoldfastError


@contextlib.contextmanager
def told(*, as_json: bool = False) -> Iterator[None]:
    """Exit code 3 for what Holdfast could not do, 130 for Ctrl-C."""
    try:
        yield
    except HoldfastError as error:
        if as_json:
            said = {"code": error.code, "message": error.message, "hint": error.hint}
            print(json.dumps({"status": "refused", "error": said}))
        print(f"holdfast: {error}", file=sys.stderr)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
