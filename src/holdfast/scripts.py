"""Files that hold code: a script, or a notebook whose code cells are run in their order."""

import io
import tokenize
from pathlib import Path

import msgspec

from holdfast.errors import InvalidSetting
from holdfast.kernel.wire import Script
from holdfast.sandbox.mounts import WORKSPACE

_ELSEWHERE = "/opt/job"
"""Where a file that is not in the workspace seems to be: it is run, and is not there."""


class _Cell(msgspec.Struct):
    cell_type: str
    source: str | list[str] = ""


class _Notebook(msgspec.Struct):
    cells: list[_Cell]
    metadata: dict[str, msgspec.Raw] = {}


class _Language(msgspec.Struct):
    language: str = "python"


def read(file: Path, *, workspace: Path, arguments: list[str]) -> tuple[str, Script]:
    """The code of a file, and how to run it; `workspace` is the directory that the guest has as /mnt/data."""
    place = file.resolve()
    inside = place.is_relative_to(workspace)
    shown = f"{WORKSPACE}/{place.relative_to(workspace)}" if inside else f"{_ELSEWHERE}/{file.name}"
    if file.suffix == ".ipynb":
        cells = code_cells(file.read_bytes(), name=file.name)
        return "\n\n".join(map(_as_python, cells)), Script(file=shown, arguments=arguments, cells=cells)
    return _decoded(file), Script(file=shown, arguments=arguments)


def code_cells(document: bytes, *, name: str) -> list[str]:
    """
    >>> code_cells(b'{"cells": [{"cell_type": "markdown"}, {"cell_type": "code", "source": ["a = 1", "a"]}]}', name="n")
    ['a = 1a']
    """
    try:
        notebook = msgspec.json.decode(document, type=_Notebook)
        kernel = msgspec.json.decode(notebook.metadata.get("kernelspec", msgspec.Raw(b"{}")), type=_Language)
    except msgspec.MsgspecError as error:
        raise InvalidSetting(
            f"{name} is no notebook of format 4: {error}", hint="open it in Jupyter and save it again"
        ) from error
    if kernel.language != "python":
        raise InvalidSetting(f"{name} is a notebook in {kernel.language}", hint="only Python is run")
    sources = ("".join(cell.source) for cell in notebook.cells if cell.cell_type == "code")
    return [source for source in sources if source.strip()]


def _as_python(cell: str) -> str:
    """For whoever reads all cells as one text: a cell in another language is a comment."""
    return "\n".join(f"# {line}" for line in cell.splitlines()) if cell.lstrip().startswith("%%") else cell


def _decoded(file: Path) -> str:
    """As Python reads it: UTF-8, or what its coding line says."""
    raw = file.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{file} is no Python source: {error}", hint="save it as UTF-8") from error
