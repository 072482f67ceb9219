"""`get_ipython().kernel`, as far as libraries look at it to see that they run in a notebook."""

from typing import Any


class NotebookKernel:
    """Says which request is under way. There are no comms and no sockets."""

    implementation = "holdfast"

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._parent: dict[str, Any] = {}

    def begin(self, code: str, *, turn: int, silent: bool) -> None:
        """Remember the request, in the form of Jupyter's protocol."""
        self._parent = {
            "header": {"msg_id": str(turn), "msg_type": "execute_request", "session": "", "username": "user"},
            "parent_header": {},
            "metadata": {},
            "content": {"code": code, "silent": silent, "store_history": not silent},
        }

    def get_parent(self, channel: str | None = None) -> dict[str, Any]:
        """The request that is under way, or the last one."""
        return self._parent
