"""What docs/mcp.md and docs/agents.md say is so."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.server.mcp import tools

DOCS = Path(__file__).parents[3] / "docs"
MCP, AGENTS = (DOCS / "mcp.md").read_text(), (DOCS / "agents.md").read_text()
README = (DOCS.parent / "README.md").read_text()


def commands(page: str = MCP) -> list[list[str]]:
    """What clients are told to start, without the program's own name."""
    configured = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.S)]
    servers = [(each.get("mcpServers") or each["servers"])["holdfast"] for each in configured]
    typed = re.findall(r"-- holdfast (mcp [^`\n]*)", page)
    return [server["args"] for server in servers if "command" in server] + [line.split() for line in typed]


def test_all_four_clients_are_there() -> None:
    assert len(commands()) == 4
    assert all(name in MCP for name in ("Claude Code", "Claude Desktop", "Cursor", "VS Code"))


def test_the_readme_shows_them_too() -> None:
    for name in ("Claude Code", "Claude Desktop", "Cursor", "VS Code"):
        assert f"**{name}**" in README
    assert len(commands(README)) == 3  # Claude Desktop and Cursor take the same
    assert '{"mcpServers": {"holdfast": ' in README
    assert '{"servers": {"holdfast": {"type": "stdio", ' in README


@pytest.mark.parametrize("arguments", [*commands(), *commands(README)], ids=" ".join)
def test_what_clients_are_told_to_start_can_be_started(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0


def test_every_tool_is_in_the_table_with_its_arguments() -> None:
    for name, call in tools.TOOLS.items():
        row = re.search(rf"^\| `{name}` \|(.*?)\|", MCP, re.M)
        assert row is not None, name
        assert re.findall(r"`(\w+)`", row[1]) == list(call.__struct_fields__), name


def test_agents_are_told_what_the_server_tells() -> None:
    assert f"```text\n{tools.INSTRUCTIONS}\n```" in AGENTS
