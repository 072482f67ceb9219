"""cgroup v2 in a scope that the user's own systemd makes, at the moment there is a keeper to put in.

A scope ends with its last process, so each keeper gets a new one, named after owner and pid; those
of earlier keepers are what a crash has left.
"""

import os
import re

from holdfast.sandbox.cgroups import delegation, kernfs
from holdfast.sandbox.cgroups.contract import Limits
from holdfast.sandbox.cgroups.v2 import V2Cgroup, V2Tree, enable_sessions, sweep_one


class ScopedTree(V2Tree):
    asked_of = " in a scope of your systemd"

    def __init__(self, owner: str, top: str, uid: int) -> None:
        super().__init__(owner, "", keeper_leaf=True)
        self._top = top
        self._uid = uid
        self._scopes = delegation.scopes_directory(top, uid)
        self._unit = ""

    def adopt(self, pid: int) -> None:
        unit = f"holdfast-{self.owner}-{pid}.scope"
        place = delegation.start_scope(unit, pid, uid=self._uid)
        self._unit, self._directory = unit, f"{self._top}{place}"
        super().adopt(pid)
        enable_sessions(self._directory)

    def create(self, name: str, limits: Limits) -> V2Cgroup:
        if not self._directory:
            raise RuntimeError("adopt the keeper first: its scope holds the sessions")
        return super().create(name, limits)

    def existing(self) -> list[str]:
        return [
            f"{scope}/{name}"
            for scope in self._earlier_scopes()
            for name in kernfs.children_of(f"{self._scopes}/{scope}")
        ]

    def _earlier_scopes(self) -> list[str]:
        ours = re.compile(rf"holdfast-{re.escape(self.owner)}-\d+\.scope")
        found = kernfs.children_of(self._scopes)
        return [name for name in found if ours.fullmatch(name) and name != self._unit]

    def sweep(self) -> None:
        for name in self.existing():
            sweep_one(f"{self._scopes}/{name}", self)

    def remove(self) -> None:
        # systemd removes the scope itself, when the keeper has gone.
        if self._directory and os.path.isdir(self._directory):
            kernfs.remove_if_unused(f"{self._directory}/keeper")
