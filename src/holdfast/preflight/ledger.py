"""The files of the workspace that a cell was seen to read and write.

Paths come in as the code has them and leave relative to /mnt/data; what lies elsewhere is left out.
"""

import posixpath
from collections.abc import Iterable

import msgspec

from holdfast.preflight.folding import Value
from holdfast.preflight.languages import Effect
from holdfast.preflight.steps import Steps
from holdfast.records import Flow, Noun

WORKSPACE = "/mnt/data"
_MOST_FILES = 200
_MOST_FLOWS = 1_000
"""Inputs of all flows together."""
_MOST_PATH, _MOST_CHARACTERS = 4_096, 200_000
"""Longer is no path that a file can have; and of all of a cell's together."""
_JOINED = 200
"""Characters of a path that are put in order in the time of one step."""


class Forecast(Noun, frozen=True, kw_only=True):
    """Paths are relative to /mnt/data; `*` stands for a part that is only known at run time."""

    inputs: list[str] = msgspec.field(default_factory=list)
    outputs: list[str] = msgspec.field(default_factory=list)
    flows: list[Flow] = msgspec.field(default_factory=list)


class Ledger:
    """The files that were met so far."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._room = _MOST_CHARACTERS
        self.directory: str | None = WORKSPACE
        """What relative paths are relative to; None: not known any more."""
        self._inputs: dict[str, None] = {}
        self._outputs: dict[str, None] = {}
        self._flows: dict[str, dict[str, None]] = {}

    @property
    def has_inputs(self) -> bool:
        return bool(self._inputs)

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def read(self, paths: Iterable[str]) -> list[str]:
        """The inputs that these come from: themselves, or what this very cell has made them of."""
        sources: list[str] = []
        for path in self._within(paths):
            if path in self._flows:
                self._steps.take(len(self._flows[path]))
                sources.extend(self._flows[path])
            elif path in self._inputs or (len(self._inputs) < _MOST_FILES and self._has_room(path)):
                self._inputs[path] = None
                sources.append(path)
        return sources

    def write(self, paths: Iterable[str]) -> list[str]:
        written = [path for path in self._within(paths) if self._is_listed(path)]
        for path in written:
            self._flows.setdefault(path, {})
        return written

    def remove(self, paths: Iterable[str]) -> None:
        for path in self._within(paths):
            self._is_listed(path)

    def _is_listed(self, path: str) -> bool:
        """Whether it is among the outputs, if need be from now on."""
        if path not in self._outputs and len(self._outputs) < _MOST_FILES and self._has_room(path):
            self._outputs[path] = None
        return path in self._outputs

    def _has_room(self, path: str) -> bool:
        self._room -= len(path)
        return self._room >= 0

    def flow(self, sources: Iterable[str], outputs: Iterable[str]) -> None:
        sources = list(sources)
        for output in outputs:
            self._steps.take(1 + len(sources))
            self._flows[output].update(dict.fromkeys(source for source in sources if source != output))

    def record(self, effect: Effect) -> tuple[list[str], list[str]]:
        """The inputs and outputs of an effect, by their paths in the workspace."""
        sources = self.read(effect.reads)
        outputs = self.write(effect.writes)
        self.remove(effect.removes)
        return sources, outputs

    def change_directory(self, value: Value) -> None:
        known = len(value.texts) == 1 and "*" not in value.texts[0] and self.directory
        directory = posixpath.join(self.directory or "", value.texts[0]) if known else None
        self.directory = directory if directory is not None and len(directory) <= _MOST_PATH else None

    def forecast(self) -> Forecast:
        flows, room = list[Flow](), _MOST_FLOWS
        for output, inputs in self._flows.items():
            self._steps.take(1 + len(self._inputs if inputs else ()))
            fed = [path for path in self._inputs if path in inputs][:room] if inputs else []
            room -= len(fed)
            flows += [Flow(output=output, inputs=fed)] if fed else []
        return Forecast(inputs=list(self._inputs), outputs=list(self._outputs), flows=flows)

    def _within(self, paths: Iterable[str]) -> Iterable[str]:
        """Those in the workspace, relative to it. One that is all unknown says nothing."""
        for path in paths:
            if self.directory is None and not path.startswith("/"):
                continue
            length = len(path) + len(self.directory or "")
            self._steps.take(1 + length // _JOINED)
            if length > _MOST_PATH:
                continue
            absolute = posixpath.normpath(posixpath.join(self.directory or "/", path))
            inside = absolute.removeprefix(WORKSPACE + "/")
            if inside != absolute and inside.strip("*/.") and "://" not in path and not path.startswith("~"):
                yield inside
