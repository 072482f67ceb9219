"""MCP, whatever it goes over: tools are listed, calls decoded, attended to by a `Desk`, and their answers encoded."""

import base64
from collections.abc import Awaitable, Callable
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)

from holdfast import __version__
from holdfast.errors import HoldfastError
from holdfast.server.mcp import answers, tools
from holdfast.server.mcp.answers import Answer
from holdfast.server.mcp.progress import Progress
from holdfast.visible import visible_lines

Context = ServerRequestContext[dict[str, Any]]
Attend = Callable[[Context, tools.Call, Progress | None], Awaitable[Answer]]
"""What a call comes to: whose session it is for is the transport's business."""


def mcp_server(attend: Attend) -> Server[dict[str, Any]]:
    async def list_tools(context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=tools.listed())

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        try:
            call = tools.parse(params.name, params.arguments)
            answer = await attend(context, call, _progress(context))
        except HoldfastError as error:
            answer = answers.of_error(error)
        return _encoded(answer)

    return Server(
        "holdfast",
        version=__version__,
        instructions=tools.INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _progress(context: Context) -> Progress | None:
    """How to tell the client of a call under way, if it wants to know."""
    if context.meta is None or "progress_token" not in context.meta:
        return None

    async def tell(progress: float, message: str) -> None:
        await context.session.report_progress(progress, message=message)

    return tell


def _encoded(answer: Answer) -> CallToolResult:
    """First what the code said, then its figures, then what came of it: the footer is never code's own words."""
    content: list[ContentBlock] = [TextContent(text=answer.said)] if answer.said else []
    content += [
        ImageContent(data=base64.b64encode(figure.data).decode(), mime_type=figure.kind) for figure in answer.figures
    ]
    content.append(TextContent(text=visible_lines(answer.text)))
    return CallToolResult(content=content, structured_content=answer.facts, is_error=answer.refused)
