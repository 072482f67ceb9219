"""The Python environment that guests run in: built once by uv, or chosen by the user.

A managed environment is `<home>/envs/<key>-<tag>-<machine>`; the key digests the shipped lock and the base
interpreter, so that another lock or an upgraded Python gets a new directory and running guests keep theirs.

1. It is built in a sibling directory and renamed: what has its final name is whole.
2. `environment.json` is written last inside; with it a later start needs no process at all.
3. Only the holder of `envs/.lock` builds, so a building directory that he did not make is a dead one.
"""

from holdfast.environments.build import LOCK, ensure, ensure_from, find, find_from
from holdfast.environments.interpreter import Environment, inspect
from holdfast.environments.progress import Progress, Report, advance

__all__ = [
    "LOCK",
    "Environment",
    "Progress",
    "Report",
    "advance",
    "ensure",
    "ensure_from",
    "find",
    "find_from",
    "inspect",
]
