"""The npm inspector, in CLI mode, as a second client that we did not write: another language, another SDK."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def inspector(npm: Callable[..., Path]) -> Path:
    """It, and its own installation, want a newer Node than distributions have."""
    return npm("npm", "node@22", "@modelcontextprotocol/inspector@2.12.0") / ".bin"


@pytest.fixture(scope="module", params=["stdio", "http"])
def target(
    request: pytest.FixtureRequest, homes: Callable[[], Path], serving: Callable[..., Any]
) -> Iterator[list[str]]:
    """How the inspector is told of a server."""
    home = homes()
    if request.param == "stdio":
        yield ["-e", f"HOLDFAST_HOME={home}", sys.executable, "-m", "holdfast.cli.main", "mcp"]
        return
    with serving(home) as served:
        yield [served.url, "--transport", "http", "--header", f"Authorization: Bearer {served.token}"]


@pytest.mark.timeout(700)
def test_it_lists_the_tools_finds_their_schemas_portable_and_runs_code(
    inspector: Path, target: list[str], tmp_path: Path
) -> None:
    def inspect(*arguments: str) -> Any:
        environment = os.environ | {"PATH": f"{inspector}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        done = subprocess.run(
            [inspector / "mcp-inspector", "--cli", *target, *arguments], env=environment, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    tools = inspect("--method", "tools/list", "--strict")["tools"]
    code = ["--tool-arg", "code=open('a.csv', 'w').write('a,b'); 6 * 7", "--tool-arg", 'outputs=["a.csv"]']
    answer = inspect("--method", "tools/call", "--tool-name", "run_code", *code, "--tool-arg", "timeout=30")

    assert len(tools) == 10
    assert answer["structuredContent"]["status"] == "committed"
    assert [change["path"] for change in answer["structuredContent"]["outputs"]] == ["a.csv"]
    assert answer["content"][0]["text"] == "42"
    assert answer["content"][-1]["text"].startswith("[committed")
