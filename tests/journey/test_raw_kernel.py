"""The kernel without a Jupyter server, from another language: `@jupyterlab/services` over ZeroMQ in Node.

VS Code's extension drives local kernels with these two packages; the extension itself is not tested.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from jupyter_client.connect import write_connection_file
from tests.journey.kernels import WAIT_S, end_server, jupyter_places, left_behind, make_home, wait_until


@pytest.fixture(scope="module")
def packages(npm: Callable[..., Path]) -> Path:
    return npm("npm-jupyter", "@jupyterlab/services@7.6.5", "zeromq@6.8.0")


@pytest.mark.timeout(700)
def test_a_front_end_that_starts_the_kernel_itself_gets_outputs_receipts_and_interrupts(
    packages: Path, tmp_path: Path
) -> None:
    home = make_home(tmp_path)
    environment = {**os.environ, **jupyter_places(tmp_path), "HOLDFAST_HOME": str(home), "NODE_PATH": str(packages)}
    install = [sys.executable, "-m", "holdfast.cli.main", "jupyter", "install", "--prefix", tmp_path]
    subprocess.run([*install, "--memory", "512M"], check=True, env=environment)
    spec = tmp_path / "share" / "jupyter" / "kernels" / "holdfast" / "kernel.json"
    connection, _ = write_connection_file(str(tmp_path / "connection.json"), key=secrets.token_hex(16).encode())
    cells = [
        "x = list(range(20))\ndisplay('shown')\nprint('text')\nsum(x)",
        "hog = bytearray(2 << 30)",
        "done = 1\nprint('interrupt me', flush=True)\nwhile True: pass",
        "len(x), done, 'hog' in globals()",
    ]
    with subprocess.Popen(
        ["node", Path(__file__).with_name("raw_kernel.cjs"), spec, connection, *cells],
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as node:  # fmt: skip
        try:
            said, _ = node.communicate(timeout=WAIT_S * 4)
        finally:
            with suppress(ProcessLookupError):  # also the kernel alone, if Node failed: nobody else would end it
                os.killpg(node.pid, signal.SIGKILL)
            end_server(home)
    told = json.loads(said.splitlines()[-1])
    first, killed, interrupted, last = told["cells"]

    assert (told["language"], told["ended"]) == ("python", 0)
    assert [output["output_type"] for output in first["outputs"]] == ["display_data", "stream", "execute_result"]
    for cell, output in ((first, 0), (first, 2), (killed, 0), (last, 0)):
        receipt = cell["metadata"]["holdfast"]["receipt"]
        assert cell["outputs"][output]["metadata"]["holdfast"]["receipt"] == receipt
    assert "Memory: as it was before the run" in killed["outputs"][0]["data"]["text/plain"]
    assert interrupted["reply"]["ename"] == "KeyboardInterrupt"
    assert last["outputs"][0]["data"]["text/plain"] == "(20, 1, False)"
    assert wait_until(lambda: left_behind(home) == []), left_behind(home)
