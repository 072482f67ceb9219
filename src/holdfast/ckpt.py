"""A CKPT names one state of a session, in a token that people and models can copy.

    CKPT-<session>-g<generation>-v<version>-<root12>

`root12` is the beginning of `root`: a digest of the manifest and of the names in memory. Two states with the same
files and names share it, also when they are of different versions.
"""

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence

from holdfast.errors import CkptUnknown
from holdfast.records import Noun

# ASCII only, and no leading zero: one state has one spelling.
_FORM = re.compile(r"CKPT-([0-9A-Za-z_.-]+)-g(0|[1-9][0-9]{0,17})-v(0|[1-9][0-9]{0,17})-([0-9a-f]{12})")
_SHOWN = 100
_ALIKE = 0.6


class Ckpt(Noun, frozen=True, kw_only=True):
    """
    >>> str(Ckpt(session="ab12", generation=1, version=7, root12="0123456789ab"))
    'CKPT-ab12-g1-v7-0123456789ab'
    """

    session: str
    generation: int
    version: int
    root12: str

    def __str__(self) -> str:
        return f"CKPT-{self.session}-g{self.generation}-v{self.version}-{self.root12}"


def make(
    session: str, *, generation: int, version: int, manifest_sha256: str, names: Mapping[str, tuple[str, str]]
) -> Ckpt:
    """The CKPT of a state."""
    digest = root(manifest_sha256, names)
    return Ckpt(session=session, generation=generation, version=version, root12=digest[:12])


def root(manifest_sha256: str, names: Mapping[str, tuple[str, str]]) -> str:
    """SHA-256 over the files' manifest and the sorted names, each with its type and the run that bound it last."""
    digest = hashlib.sha256(_field(manifest_sha256))
    for name in sorted(names):
        kind, run = names[name]
        digest.update(_field(name) + _field(kind) + _field(run))
    return digest.hexdigest()


def _field(text: str) -> bytes:
    """Its length before it: whatever is in a name, it cannot look like the end of one."""
    raw = text.encode(errors="surrogatepass")
    return b"%d:%b" % (len(raw), raw)


def parse(text: str) -> Ckpt:
    """Read a CKPT as a caller wrote it."""
    matched = _FORM.fullmatch(text.strip())
    if not matched:
        raise CkptUnknown(
            f"{text[:_SHOWN]!r} is no CKPT",
            hint="one looks like CKPT-<session>-g<generation>-v<version>-<12 hex digits>; `run.ckpt` has the last",
        )
    session, generation, version, root12 = matched.groups()
    return Ckpt(session=session, generation=int(generation), version=int(version), root12=root12)


def resolve(text: str, known: Sequence[str]) -> str:
    """The one of the known CKPTs that a caller means. A near miss is suggested, never taken."""
    wanted = text.strip()
    if wanted in known:
        return wanted
    alike = difflib.get_close_matches(wanted[:_SHOWN], known, n=1, cutoff=_ALIKE)
    raise CkptUnknown(
        f"{text[:_SHOWN]!r} names no retained state",
        hint=f"did you mean {alike[0]}?" if alike else "`session.history()` lists those that are retained",
    )
