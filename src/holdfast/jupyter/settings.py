"""What a notebook's session is like: arguments of the kernelspec, or environment variables, or the defaults.

An argument counts more than a variable: who installed the kernelspec meant it so.
"""

import argparse
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

NO_DEADLINE = "366d"
"""A cell may take as long as it likes, as in any notebook, unless a deadline is asked for."""
_VARIABLES = "HOLDFAST_JUPYTER_"
_OPTIONS = ("memory", "timeout", "cpus", "disk", "env", "home")
_SWITCHES = ("keep", "inert")
_LISTS = ("upload", "egress")


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A session for one notebook."""

    options: dict[str, Any]
    """Those of `AsyncSession`."""
    upload: list[str]
    """Patterns: files beside the notebook that are put into /mnt/data when the kernel starts."""
    keep: bool
    """Files, receipts and keys stay when the kernel ends or restarts."""
    inert: bool
    """What a browser would execute is left out of displays."""


def chosen(argv: list[str], variables: Mapping[str, str] = os.environ) -> tuple[Chosen, list[str]]:
    """Ours, and the rest of the arguments, which are Jupyter's."""
    given = {name: variables.get(f"{_VARIABLES}{name.upper()}") for name in (*_OPTIONS, *_SWITCHES, *_LISTS)}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _OPTIONS:
        parser.add_argument(f"--{name}", default=given[name])
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", default=given[name] == "1")
    for name in _LISTS:
        parser.add_argument(f"--{name}", action="append")
    ours, theirs = parser.parse_known_args(argv)
    options = {name: value for name in _OPTIONS if (value := getattr(ours, name)) is not None}
    lists = {name: getattr(ours, name) or (given[name] or "").split() for name in _LISTS}
    if lists["egress"]:
        options["egress"] = lists["egress"]
    if "cpus" in options:
        with suppress(ValueError):  # what is no number the session refuses, where somebody reads it
            options["cpus"] = float(options["cpus"])
    return Chosen(
        options={"timeout": NO_DEADLINE, "mode": "notebook", **options},
        upload=lists["upload"],
        keep=ours.keep,
        inert=ours.inert,
    ), theirs


def arguments(given: Mapping[str, object]) -> list[str]:
    """The other way round: what a kernelspec says so that `chosen` reads it."""
    words: list[str] = []
    for name, value in given.items():
        match value:
            case True:
                words.append(f"--{name}")
            case list():
                words.extend(word for item in value for word in (f"--{name}", str(item)))
            case None | False:
                pass
            case _:
                words.extend((f"--{name}", str(value)))
    return words
