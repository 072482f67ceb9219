"""What calls do to files: which of their arguments are paths that are read, written or removed.

A call is known by its dotted name (`numpy.save`), or as a method of whatever value by its last part (`.to_csv`).
"""

import ast
import posixpath
import shlex
from collections.abc import Callable, Mapping

from holdfast.preflight import languages
from holdfast.preflight.folding import Names, Value, fold
from holdfast.preflight.languages import Effect

USUAL_IMPORTS = {
    "pd": "pandas", "np": "numpy", "pl": "polars", "plt": "matplotlib.pyplot", "pq": "pyarrow.parquet",
    "sns": "seaborn", "Image": "PIL.Image",
    **{
        name: name
        for name in ("os", "shutil", "sqlite3", "duckdb", "joblib", "torch", "subprocess", "io", "gzip", "bz2", "lzma",
                     "tarfile", "zipfile", "h5py", "wave", "json", "csv", "pickle", "glob", "codecs")
    },
}  # fmt: skip
"""What a name means that an earlier cell will have imported."""

_NO_FILE = frozenset(
    {"read_sql", "read_sql_query", "read_sql_table", "read_clipboard", "read_gbq", "read_database", "read_row",
     "read_database_uri", "write_database", "read_until", "read_only", "write_row", "read_delta", "read_table_schema"}
)  # fmt: skip
_TO = frozenset(
    f".to_{kind}"
    for kind in ("csv", "parquet", "feather", "pickle", "json", "excel", "html", "latex", "markdown", "hdf", "stata",
                 "xml", "orc", "string", "netcdf", "zarr", "file")
)  # fmt: skip
_FIRST_READ = frozenset(
    {"numpy.load", "numpy.loadtxt", "numpy.genfromtxt", "numpy.fromfile", "joblib.load", "torch.load",
     "pandas.ExcelFile", "openpyxl.load_workbook", "load_workbook", "matplotlib.pyplot.imread", "cv2.imread",
     "scipy.io.loadmat", "matplotlib.image.imread", "pyarrow.parquet.ParquetFile", "ParquetFile",
     "shutil.unpack_archive"}
)  # fmt: skip
_FIRST_WRITTEN = frozenset(
    {"numpy.savetxt", "numpy.savez", "numpy.savez_compressed", "numpy.save", "pandas.ExcelWriter", "ExcelWriter",
     "matplotlib.pyplot.imsave", "cv2.imwrite", "scipy.io.savemat", ".savefig", "matplotlib.pyplot.savefig", ".tofile"}
)  # fmt: skip
_SECOND_WRITTEN = frozenset(
    {"torch.save", "joblib.dump", "urllib.request.urlretrieve", "urlretrieve", "pyarrow.parquet.write_table",
     ".write_table", "pyarrow.feather.write_feather", "pyarrow.dataset.write_dataset", "pyarrow.csv.write_csv"}
)  # fmt: skip
_COPYING = frozenset({"shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "os.link", "os.symlink"})
_MOVING = frozenset({"shutil.move", "os.rename", "os.replace", "os.renames"})
_REMOVING = frozenset({"os.remove", "os.unlink", "shutil.rmtree"})
_OPENING = frozenset(
    {"open", "io.open", "gzip.open", "bz2.open", "lzma.open", "codecs.open", "tarfile.open", "zipfile.ZipFile",
     "ZipFile", "h5py.File", "wave.open", "PIL.Image.open"}
)  # fmt: skip
_DATABASES = frozenset({"sqlite3.connect", "duckdb.connect"})
_QUERIES = frozenset({"sql", "execute", "executescript", "query"})
_SHELLS = frozenset(
    {"os.system", "os.popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
     "subprocess.Popen", "subprocess.getoutput"}
)  # fmt: skip
_KEYWORDS = frozenset(
    {"filepath_or_buffer", "path_or_buf", "path", "io", "excel_writer", "fname", "file", "filename", "source", "where",
     "dest", "base_dir", "filepath", "database", "sink", "target"}
)  # fmt: skip
_SUFFIXES = {"numpy.save": ".npy", "numpy.savez": ".npz", "numpy.savez_compressed": ".npz"}


def dotted_name(function: ast.expr, imports: Mapping[str, str]) -> str:
    """`numpy.save` of `np.save`; `.to_csv` of a method of a value."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    root = function.id if isinstance(function, ast.Name) else ""
    module = imports.get(root) or USUAL_IMPORTS.get(root)
    if parts and not module:
        return "." + parts[0]
    return ".".join([module or root, *reversed(parts)])


def effect_of(call: ast.Call, names: Names, imports: Mapping[str, str]) -> Effect:
    """What a call does to files; nothing where its paths are unknown."""
    dotted = dotted_name(call.func, imports)
    receiver = fold(call.func.value, names) if isinstance(call.func, ast.Attribute) else Value()
    if receiver.is_path and dotted.startswith("."):
        return _path_method(call, dotted[1:], receiver, names)
    for kinds, effect in _RULES:
        if dotted in kinds:
            return effect(call, dotted, names)
    return _by_last_name(call, dotted, names)


def _by_last_name(call: ast.Call, dotted: str, names: Names) -> Effect:
    """Libraries agree on these words: pandas, polars, pyarrow, geopandas, plotly, duckdb."""
    last = dotted.rpartition(".")[2]
    if last in _QUERIES:
        effects = [languages.sql(text, names.steps) for text in _argument(call, 0, names)]
        return Effect(reads=[p for e in effects for p in e.reads], writes=[p for e in effects for p in e.writes])
    if last in _NO_FILE:
        return Effect()
    if last.startswith(("read_", "scan_")):
        return Effect(reads=_argument(call, 0, names))
    if last.startswith(("write_", "sink_")):
        return Effect(writes=_argument(call, 0, names))
    if last == "save":  # of an image or a workbook; of much else, where the text is no file's name
        return Effect(writes=[path for path in _argument(call, 0, names) if posixpath.splitext(path)[1]])
    return Effect()


def _path_method(call: ast.Call, method: str, receiver: Value, names: Names) -> Effect:
    own = list(receiver.texts)
    if method == "open":
        return _opened(own, _mode(call, 0))
    if method in ("read_text", "read_bytes"):
        return Effect(reads=own)
    if method in ("write_text", "write_bytes", "touch"):
        return Effect(writes=own)
    if method in ("rename", "replace"):
        return Effect(reads=own, writes=_argument(call, 0, names), removes=own)
    return Effect(removes=own) if method == "unlink" else Effect()


def _first_read(call: ast.Call, dotted: str, names: Names) -> Effect:
    return Effect(reads=_argument(call, 0, names))


def _first_written(call: ast.Call, dotted: str, names: Names) -> Effect:
    suffix, paths = _SUFFIXES.get(dotted, ""), _argument(call, 0, names)
    return Effect(writes=[path if path.endswith(suffix) else path + suffix for path in paths])


def _second_written(call: ast.Call, dotted: str, names: Names) -> Effect:
    return Effect(writes=_argument(call, 1, names))


def _copied(call: ast.Call, dotted: str, names: Names) -> Effect:
    return Effect(reads=_argument(call, 0, names), writes=_argument(call, 1, names))


def _moved(call: ast.Call, dotted: str, names: Names) -> Effect:
    source = _argument(call, 0, names)
    return Effect(reads=source, writes=_argument(call, 1, names), removes=source)


def _removed(call: ast.Call, dotted: str, names: Names) -> Effect:
    return Effect(removes=_argument(call, 0, names))


def _opening(call: ast.Call, dotted: str, names: Names) -> Effect:
    return _opened(_argument(call, 0, names), _mode(call, 1))


def _opened(paths: list[str], mode: str) -> Effect:
    reads = "r" in mode
    writes = any(letter in mode for letter in "wax+")
    return Effect(reads=paths if reads else [], writes=paths if writes else [])


def _mode(call: ast.Call, position: int) -> str:
    """Empty: it is not known before the code runs."""
    given = call.args[position : position + 1] + [k.value for k in call.keywords if k.arg == "mode"]
    if not given:
        return "r"
    return given[0].value if isinstance(given[0], ast.Constant) and isinstance(given[0].value, str) else ""


def _database(call: ast.Call, dotted: str, names: Names) -> Effect:
    paths = [path for path in _argument(call, 0, names) if path and not path.startswith(":")]
    return Effect(reads=paths, writes=paths)


def _shell(call: ast.Call, dotted: str, names: Names) -> Effect:
    if call.args and isinstance(call.args[0], ast.List | ast.Tuple):
        words = [fold(word, names).texts[:1] or ("*",) for word in call.args[0].elts]
        return languages.shell(" ".join(shlex.quote(word[0]) for word in words), names.steps)
    effects = [languages.shell(text, names.steps) for text in _argument(call, 0, names)]
    return effects[0] if effects else Effect()


def _argument(call: ast.Call, position: int, names: Names) -> list[str]:
    if any(isinstance(arg, ast.Starred) for arg in call.args[: position + 1]):
        return []
    if position < len(call.args):
        return list(fold(call.args[position], names).texts)
    named = [keyword.value for keyword in call.keywords if keyword.arg in _KEYWORDS]
    return list(fold(named[0], names).texts) if named else []


_RULES: list[tuple[frozenset[str], Callable[[ast.Call, str, Names], Effect]]] = [
    (_FIRST_READ, _first_read),
    (_TO | _FIRST_WRITTEN, _first_written),
    (_SECOND_WRITTEN, _second_written),
    (_COPYING, _copied),
    (_MOVING, _moved),
    (_REMOVING, _removed),
    (_OPENING, _opening),
    (_DATABASES, _database),
    (_SHELLS, _shell),
]
