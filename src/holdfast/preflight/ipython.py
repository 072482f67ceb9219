"""A cell as Python: what IPython accepts beyond the language is taken out, and each line keeps its number.

IPython rewrites magics, `!commands` and `name?` before Python sees them. We do not need what it makes of them, only
that they stand in nobody's way: each becomes `...`, or the Python that it wraps (`%time df.sum()`). A text that is
Python as it stands is never touched, so nothing here can spoil an ordinary cell.
"""

import ast
import functools
import re
import warnings

import msgspec

from holdfast.records import Noun

MOST_CHARACTERS = 50_000
"""Parsing holds up every other session, and the worst of texts take it a few milliseconds per 1,000 characters."""

WRAPPING = frozenset({"time", "timeit", "prun", "memit", "mprun", "lprun", "capture"})
"""Magics, of a line or a cell, around Python."""
HARMLESS = frozenset(
    re.findall(
        r"\w+",
        "alias alias_magic autoawait autocall automagic autoreload autosave bookmark cat cd clear colors conda "
        "config cp dhist dirs doctest_mode echo env gui hist history install_ext ldir less lf lk ll load_ext "
        "logoff logon logstart logstate logstop ls lsmagic lx magic man matplotlib micromamba mamba mkdir more mv "
        "notebook page pdb pdef pdoc pfile pinfo pinfo2 pip popd pprint precision profile psearch psource pushd "
        "pwd pycat quickref reload_ext rehashx rm rmdir sc set_env subplots sx system tb unalias unload_ext uv "
        "who who_ls whos writefile xmode",
    )
)
"""Line magics that bind no name. Of any other, and of extensions', we do not know."""

_FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
CELL_NAME = "<holdfast cell>"
_CELL_MAGIC = re.compile(r"\s*%%(!|[\w.]+)(.*)")
_LINE_MAGIC = re.compile(r"(\s*)%{1,2}\s*([\w.]*)(.*)", re.DOTALL)
_TARGET = r"""\s*[^\W\d](?:[\w.,* \t]|\[(?:'[^'\n]*'|"[^"\n]*"|[\w.]+)\])*=\s*"""
_ASSIGNED = re.compile(rf"({_TARGET})([%!].*)", re.DOTALL)
_AUTOMAGIC = re.compile(r"(\w+)(?:[ \t]+(?![=\s])|$)")
_COMMAND = re.compile(r"\s*!{1,2}(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\s*[?,;/]")
_HELP = re.compile(r"""[^\n#'"]*\?\s*$""")
_OPTIONS = re.compile(r"(?:\s*-[a-zA-Z]+\s*\d*(?=\s|$))*\s*")
_PROMPT = re.compile(r"\s*(?:>>> ?|In \[\d+\]: ?)")
_ANY_PROMPT = re.compile(r"(?:>>>|\.\.\.|In \[\d+\]:|\s*\.{3,}:)(?: |$)")
_TOKEN = re.compile(r"#[^\n]*|'''|\"\"\"|['\"]|[\[({]|[\])}]|\\\n|\n|\\.|[^#'\"\[({\])}\\\n]+", re.DOTALL)
_STRING_ENDS = {
    "'": re.compile(r"(?:[^'\\\n]|\\.)*(?:'|(?=\n)|$)", re.DOTALL),
    '"': re.compile(r'(?:[^"\\\n]|\\.)*(?:"|(?=\n)|$)', re.DOTALL),
    "'''": re.compile(r"(?:[^'\\]|\\.|'(?!''))*(?:'''|$)", re.DOTALL),
    '"""': re.compile(r'(?:[^"\\]|\\.|"(?!""))*(?:"""|$)', re.DOTALL),
}


class Cell(Noun, frozen=True, kw_only=True):
    """What a cell consists of."""

    tree: ast.Module | None = None
    """None: it is not Python, is broken, or is more than we look at."""
    error: SyntaxError | None = None
    magic: str = ""
    """`bash` of a cell that starts with `%%bash`."""
    arguments: str = ""
    body: str = ""
    """What the cell magic is given."""
    line_magics: list[tuple[str, str]] = msgspec.field(default_factory=list)
    commands: list[str] = msgspec.field(default_factory=list)
    """Of `!command`."""

    @property
    def binds_unseen(self) -> bool:
        """Whether a magic may have bound any name."""
        return any(name not in HARMLESS and name not in WRAPPING for name, _ in self.line_magics)


@functools.lru_cache(maxsize=2)  # each check of a cell reads the same one
def read(code: str) -> Cell:
    """
    >>> ast.unparse(read("%time x = 1").tree)
    'x = 1'
    """
    if len(code) > MOST_CHARACTERS:
        return Cell()
    found = _CELL_MAGIC.match(code)
    return _read_magic(code, found) if found else _read_python(code)


def _read_magic(code: str, found: "re.Match[str]") -> Cell:
    magic, arguments = found[1], found[2].strip()
    body = code[found.end() :].removeprefix("\n")
    if magic not in WRAPPING:
        return Cell(magic=magic, arguments=arguments, body=body)
    kept = f"{arguments} = ..." if magic == "capture" and arguments.isidentifier() else ""
    inner = _read_python("\n" * code[: found.end()].count("\n") + kept + code[found.end() :])
    # The rest of a `%%timeit` line is code that runs before the body, and may bind what the body uses.
    unseen = [("timeit_setup", arguments)] if magic != "capture" and arguments else []
    return Cell(
        tree=inner.tree, error=inner.error, magic=magic, arguments=arguments, body=body, commands=inner.commands,
        line_magics=unseen + inner.line_magics,
    )  # fmt: skip


def _read_python(code: str) -> Cell:
    text = _automagic(code.replace("\r\n", "\n"))
    tree, error = parse(text)
    if error is None:
        return Cell(tree=tree)
    translation = _Translation()
    tree, error = parse(translation.translate(_unindented(text)))
    return Cell(tree=tree, error=error, line_magics=translation.line_magics, commands=translation.commands)


def as_python(code: str) -> str:
    """The text with what is IPython's in it replaced, also where it is broken or not finished.

    >>> as_python("for name in names:\\n    !cat {name}")
    'for name in names:\\n    ...'
    """
    tree, _ = parse(code)
    return code if tree is not None else _Translation().translate(_unindented(code))


def parse(text: str) -> tuple[ast.Module | None, SyntaxError | None]:
    """A tree, a syntax error, or neither where the parser gave up."""
    ignore_warnings()
    try:
        return compile(text, CELL_NAME, "exec", _FLAGS, dont_inherit=True), None
    except SyntaxError as error:
        return None, error
    except (RecursionError, MemoryError, ValueError):  # nested too deeply; a lone surrogate, a NUL
        return None, None


def ignore_warnings() -> None:
    """Keep what Python would warn of in a cell's text ("\\d") off the host's own standard error.

    Not `warnings.catch_warnings`: it swaps the filters of the whole process, and cells are read in threads.
    """
    pattern = re.compile(re.escape(CELL_NAME))
    if not any(module == pattern for _, _, _, module, _ in warnings.filters):
        warnings.filterwarnings("ignore", module=pattern.pattern)


def _automagic(code: str) -> str:
    """IPython lets the `%` of a magic be left out, if the cell is a single line: `ls -l` is Python, but not for it."""
    line = code.strip()
    word = _AUTOMAGIC.match(line) if "\n" not in line else None
    return "%" + line if word and word[1] in HARMLESS | WRAPPING else code


def _unindented(code: str) -> str:
    """Without the indentation or the prompts that it was pasted with."""
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if any(_PROMPT.match(line) for line in [first, *lines[:2]]):
        return "\n".join(_ANY_PROMPT.sub("", line, count=1) for line in lines)
    indent = first[: len(first) - len(first.lstrip())]
    return "\n".join(line.removeprefix(indent) for line in lines) if indent else code


class _Translation:
    """Goes through a text statement by statement, and replaces those that are IPython's."""

    def __init__(self) -> None:
        self.line_magics: list[tuple[str, str]] = []
        self.commands: list[str] = []

    def translate(self, text: str) -> str:
        parts, start = [], 0
        while start < len(text):
            end = _line_end(text, start)
            replaced = self._replace(text[start:end])
            if replaced is None:
                end = _statement_end(text, start)
                replaced = text[start:end]
            else:
                replaced += "\n" * text.count("\n", start, end)
            parts.append(replaced)
            start = end
        return "".join(parts)

    def _replace(self, line: str) -> str | None:
        """What stands for a line in Python; None: the line itself."""
        assigned = _ASSIGNED.match(line)
        if assigned:
            return assigned[1] + (self._replace(assigned[2].lstrip()) or "...")
        magic, command = _LINE_MAGIC.match(line), _COMMAND.match(line)
        indent = line[: len(line) - len(line.lstrip(" \t"))]
        if _HELP.match(line) or _ESCAPED.match(line):
            return indent + "..."
        if command:
            self.commands.append(command[1].replace("\\\n", " ").strip())
            return indent + "..."
        return indent + self._wrapped(magic[2], magic[3].strip()) if magic else None

    def _wrapped(self, magic: str, arguments: str) -> str:
        self.line_magics.append((magic, arguments))
        if magic not in WRAPPING:
            return "..."
        statement = _OPTIONS.sub("", arguments, count=1)
        tree, _ = parse(statement)
        return statement if tree and "\n" not in statement else "..."


def _line_end(text: str, start: int) -> int:
    """Where an IPython line ends: a backslash at its end joins it to the next."""
    end = text.find("\n", start) + 1
    while end and text.startswith("\\\n", end - 2):
        end = text.find("\n", end) + 1
    return end or len(text)


def _statement_end(text: str, start: int) -> int:
    """Where a Python line ends that strings, brackets or backslashes may carry over several of the text."""
    depth, at = 0, start
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return len(text)
        at = token.end()
        if token[0] in _STRING_ENDS:
            string = _STRING_ENDS[token[0]].match(text, at)
            at = string.end() if string else len(text)
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "\n" and depth <= 0:
            return at
    return at
