"""The layer that a session's changes go to. It is laid afresh when what is in it was published, or is to go."""

from collections.abc import Collection

import anyio.to_thread

from holdfast import durable
from holdfast.errors import DiskRefused
from holdfast.resources import layers
from holdfast.resources.descent import Parts
from holdfast.resources.handles import still_held
from holdfast.resources.publish import discard
from holdfast.resources.workspace import Workspace


class Staging:
    """Guards which layer it is, what lies there by our own doing, and those that were before it."""

    def __init__(self, workspace: Workspace) -> None:
        self.name, self.path = "", workspace.stage_path("")
        self.same_inode: frozenset[Parts] = frozenset()
        """Files that the last commit left in the guest's hands, until it has opened them anew."""
        self.untouched: dict[int, int] = {}
        """Files in the layer that only lie there because they are open: see `layers.touched_last`."""
        self._workspace = workspace
        self._left: list[str] = []
        """Layers that nothing is mounted on any more."""

    def is_gone(self) -> bool:
        """Whether somebody removed the layer on the host: what a guest writes then lands nowhere."""
        return bool(self.name) and not (self.path.is_dir() and self.path.with_name(f"{self.name}.work").is_dir())

    def refuse_if_gone(self) -> None:
        if self.is_gone():
            raise DiskRefused(
                "the session's layer was removed on the host while the session used it",
                hint="leave what is in the home's sessions/ alone, and run it again: it gets another layer",
            )

    def has_changes(self) -> bool:
        """Whether anything was written to disk since the layer was laid."""
        self.refuse_if_gone()
        return layers.has_changes(self.path, shared=self._workspace.shared is not None)

    async def lay(self) -> None:
        """An empty one in place of this. Nothing is mounted yet."""
        self.leave(await anyio.to_thread.run_sync(self._workspace.new_stage))

    def leave(self, following: str = "") -> None:
        if self.name:
            self._left.append(self.name)
        self.name, self.path, self.untouched = following, self._workspace.stage_path(following), {}

    async def note_untouched(self) -> None:
        """What is open for writing was copied into the layer when it was opened anew; that alone is no change."""
        if self.has_changes():
            self.untouched = await anyio.to_thread.run_sync(layers.touched_last, self.path)

    async def holds_committed_files(self) -> bool:
        """Whether the guest has still one in hand that the last commit left it."""
        held, self.same_inode = self.same_inode, frozenset()
        return bool(held and await anyio.to_thread.run_sync(still_held, self._workspace.files, held))

    async def sweep(self, *, wanted: Collection[str]) -> None:
        """Remove the layers that are done with; not those that a run has still to be published from."""
        for name in [name for name in self._left if name not in wanted]:
            with durable.ours("removing an old layer"):
                await anyio.to_thread.run_sync(discard, self._workspace.stage_path(name))
            self._left.remove(name)
