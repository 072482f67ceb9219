"""The other side of the comparison: an ipykernel, driven through jupyter_client as its users drive it."""

import importlib.util
import os
from pathlib import Path

import pandas
from jupyter_client import KernelManager
from jupyter_client.blocking.client import BlockingKernelClient

_TIMEOUT_S = 120


class JupyterKernel:
    """One kernel of this interpreter's own packages. `close` ends it."""

    def __init__(self, manager: KernelManager | None = None) -> None:
        self._manager = manager or KernelManager(kernel_name="python3")
        self._client: BlockingKernelClient | None = None

    def start(self) -> "JupyterKernel":
        """The documented way: start, connect, `wait_for_ready`."""
        self.launch()
        self._connected.wait_for_ready(timeout=_TIMEOUT_S)
        return self

    def launch(self) -> "JupyterKernel":
        """Without `wait_for_ready`, which polls, and ends with 0.2 s of listening that nothing more comes."""
        # It warns at every start that TCP is not encrypted.
        self._manager.start_kernel(env=_environment(), extra_arguments=["--log-level=ERROR"])
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        return self

    def run(self, code: str) -> str | None:
        """Execute, and wait for all of it: the result, the idle status and the reply."""
        client = self._connected
        request = client.execute(code)
        text = None
        while True:
            message = client.get_iopub_msg(timeout=_TIMEOUT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "error":
                raise RuntimeError(f"{message['content']['ename']}: {message['content']['evalue']}")
            if message["msg_type"] == "execute_result":
                text = message["content"]["data"]["text/plain"]
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        self._reply(request)
        return text

    def run_unheard(self, code: str) -> None:
        """Execute, and wait for the reply alone: right after `launch` nobody listens to the outputs yet."""
        content = self._reply(self._connected.execute(code))
        if content["status"] != "ok":
            raise RuntimeError(f"{content['ename']}: {content['evalue']}")

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)

    def close(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)

    def _reply(self, request: str) -> dict[str, str]:
        while True:
            message = self._connected.get_shell_msg(timeout=_TIMEOUT_S)
            if message["parent_header"].get("msg_id") == request:
                content: dict[str, str] = message["content"]
                return content

    @property
    def _connected(self) -> BlockingKernelClient:
        assert self._client is not None, "start it first"
        return self._client


def bytecode_is_compiled() -> bool:
    """Whether ipykernel's packages have their .pyc files, as Holdfast's guests have.

    Without them each import compiles its sources, and the comparison would flatter us by seconds.
    """
    return Path(importlib.util.cache_from_source(pandas.__file__)).exists()


def _environment() -> dict[str, str]:
    # PYTHONDONTWRITEBYTECODE, set in many containers, would keep the warm-up from writing the .pyc files.
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
