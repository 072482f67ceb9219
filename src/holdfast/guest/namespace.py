"""What is alive in the namespace, and about how large it is."""

import sys
from typing import Any

from holdfast.guest.display import text
from holdfast.kernel import wire

_MAX_NAMES = wire.MAX_NAMES
_MAX_NAME = 200
_MODULE, _QUALNAME = type.__dict__["__module__"], type.__dict__["__qualname__"]
_MAX_SIZE = 1 << 62
"""Values say what they like of their own size; the wire takes 64 bits."""


def describe(namespace: dict[str, Any], hidden: dict[str, Any], *, bare: bool) -> dict[str, wire.Name]:
    """The user's own names: not IPython's, not the private ones."""
    own = [
        (_shown(name), value)
        for name, value in list(namespace.items())
        if isinstance(name, str) and not name.startswith("_") and not (name in hidden and hidden[name] is value)
    ][:_MAX_NAMES]
    if bare:
        return {name: wire.Name(address=id(value)) for name, value in own}
    return {
        name: wire.Name(type=type_name(value), approx_bytes=min(approx_bytes(value), _MAX_SIZE), address=id(value))
        for name, value in own
    }


class NamesSeen:
    """Which names were bound to which objects when the last request ended.

    By identity alone, so that it costs little and runs nobody's code: a value that was changed in place, or replaced
    by another at the same address, looks the same.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def changes(self, namespace: dict[str, Any], hidden: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
        """Names bound anew since the last call, each with its type, and those that are gone."""
        # IPython keeps two names for every cell that ever ran: of those, none is looked at twice.
        names = [name for name in namespace.copy() if type(name) is str and name[:1] != "_"][: 2 * _MAX_NAMES]
        own = {
            name: namespace[name]
            for name in names
            if name in namespace and not (name in hidden and hidden[name] is namespace[name])
        }
        before, self._before = self._before, {name: id(value) for name, value in own.items()}
        bound = [name for name, address in self._before.items() if before.get(name) != address][:_MAX_NAMES]
        gone = [name for name in before if name not in own][:_MAX_NAMES]
        return {_shown(name): type_name(own[name]) for name in bound}, [_shown(name) for name in gone]


def _shown(name: str) -> str:
    return text(name[:_MAX_NAME])


def approx_bytes(value: Any) -> int:
    """Arrays and frames say it themselves; for the rest, the object and one level of what it holds."""
    try:
        for attribute in ("nbytes", "memory_usage", "estimated_size"):
            if (size := _own_account(value, attribute)) is not None:
                return size
        size = sys.getsizeof(value)
        if isinstance(value, dict):
            size += sum(sys.getsizeof(k) + sys.getsizeof(v) for k, v in list(value.items())[:100_000])
        elif isinstance(value, (list, tuple, set, frozenset)):
            size += sum(sys.getsizeof(item) for item in list(value)[:100_000])
    except Exception:  # a value's own code runs here and may do anything; its size is a courtesy
        return 0
    return int(size)


def _own_account(value: Any, attribute: str) -> int | None:
    if isinstance(value, type) or not hasattr(type(value), attribute):
        return None
    account = getattr(value, attribute)
    account = account() if callable(account) else account
    return int(account.sum() if hasattr(account, "sum") else account)


def type_name(value: Any) -> str:
    """Read where Python itself keeps it: what a metaclass says instead would be code of the user's."""
    kind = type(value)
    module, name = _MODULE.__get__(kind), _QUALNAME.__get__(kind)
    plain = str.__str__(module) if isinstance(module, str) else ""
    prefix = "" if plain in ("", "builtins", "__main__") else f"{plain}."
    return text(f"{prefix}{str.__str__(name)}"[:_MAX_NAME])
