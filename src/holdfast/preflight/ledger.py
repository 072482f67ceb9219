"""The files of the workspace that a cell was seen to read and write.

Paths come in as the code has them and leave relative to /mnt/data; what lies elsewhere is left out.
"""

import posixpath
from collections.abc import Iterable

import msgspec

from holdfast.preflight.folding import Value
from holdfast.preflight.languages import Effect
from holdfast.records import Flow, Noun

WORKSPACE = "/mnt/data"
_MOST_FILES = 200


class Forecast(Noun, frozen=True, kw_only=True):
    """Paths are relative to /mnt/data; `*` stands for a part that is only known at run time."""

    inputs: list[str] = msgspec.field(default_factory=list)
    outputs: list[str] = msgspec.field(default_factory=list)
    flows: list[Flow] = msgspec.field(default_factory=list)


class Ledger:
    """The files that were met so far."""

    def __init__(self) -> None:
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
                sources.extend(self._flows[path])
            elif len(self._inputs) < _MOST_FILES:
                self._inputs[path] = None
                sources.append(path)
        return sources

    def write(self, paths: Iterable[str]) -> list[str]:
        written = [path for path in self._within(paths) if len(self._outputs) < _MOST_FILES]
        self._outputs.update(dict.fromkeys(written))
        for path in written:
            self._flows.setdefault(path, {})
        return written

    def remove(self, paths: Iterable[str]) -> None:
        self._outputs.update(dict.fromkeys(list(self._within(paths))[:_MOST_FILES]))

    def flow(self, sources: Iterable[str], outputs: Iterable[str]) -> None:
        sources = list(sources)
        for output in outputs:
            self._flows[output].update(dict.fromkeys(source for source in sources if source != output))

    def record(self, effect: Effect) -> tuple[list[str], list[str]]:
        """The inputs and outputs of an effect, by their paths in the workspace."""
        sources = self.read(effect.reads)
        outputs = self.write(effect.writes)
        self.remove(effect.removes)
        return sources, outputs

    def change_directory(self, value: Value) -> None:
        known = len(value.texts) == 1 and "*" not in value.texts[0] and self.directory
        self.directory = posixpath.join(self.directory or "", value.texts[0]) if known else None

    def forecast(self) -> Forecast:
        fed = {output: [path for path in self._inputs if path in inputs] for output, inputs in self._flows.items()}
        flows = [Flow(output=output, inputs=inputs) for output, inputs in fed.items() if inputs]
        return Forecast(inputs=list(self._inputs), outputs=list(self._outputs), flows=flows)

    def _within(self, paths: Iterable[str]) -> Iterable[str]:
        """Those in the workspace, relative to it. One that is all unknown says nothing."""
        for path in paths:
            if self.directory is None and not path.startswith("/"):
                continue
            absolute = posixpath.normpath(posixpath.join(self.directory or "/", path))
            inside = absolute.removeprefix(WORKSPACE + "/")
            if inside != absolute and inside.strip("*/.") and "://" not in path and not path.startswith("~"):
                yield inside
