"""`atelier mcp`: passes what an assistant says on standard input to a running service's `/mcp`, and the answers back.

What tools there are, and what they take, is the service's to say. Of the service's packages this needs none: the SDK
finds the address and the key.
"""

import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import anyio

from serve_app.client.access import find_access

NOT_INSTALLED = 2


def main() -> None:
    """Serve until standard input ends."""
    try:
        access = find_access(None, None, "a")
        anyio.run(_serve, f"{access.base_url.rstrip('/')}/mcp", access.key)
    except ValueError as error:
        sys.stderr.write(f"atelier mcp: {error}\n")
    except ModuleNotFoundError as error:
        sys.stderr.write(f"atelier mcp: there is no {error.name}: `pip install '.[mcp]'` in a checkout\n")
    else:
        return
    sys.exit(NOT_INSTALLED)


async def _serve(url: str, key: str) -> None:
    import httpx2
    from mcp import Client, MCPError
    from mcp.client.streamable_http import streamable_http_client
    from mcp.server import Server
    from mcp.server.stdio import stdio_server
    from mcp_types import INTERNAL_ERROR
    from mcp_types.version import LATEST_MODERN_VERSION

    async def ask(call: Callable[[Client], Awaitable[Any]]) -> Any:
        """Connect for one message, which needs no session, so that the service may be restarted in between."""
        answer, timeout = None, httpx2.Timeout(30, read=300)  # while it draws, it sends something every 15 seconds
        try:
            async with (
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=timeout) as http,
                Client(streamable_http_client(url, http_client=http), mode=LATEST_MODERN_VERSION) as service,
            ):
                try:
                    answer = await call(service)
                except MCPError as error:  # which the contexts would wrap in groups
                    answer = error
        except* httpx2.TransportError:
            answer = MCPError(INTERNAL_ERROR, f"There is no answer at {url}.")
        if isinstance(answer, MCPError):
            raise answer
        return answer

    server: Server[Any] = Server(
        "atelier",
        version=version("atelier"),
        on_list_tools=lambda _, params: ask(lambda service: service.list_tools(cursor=params and params.cursor)),
        on_call_tool=lambda context, params: ask(
            lambda service: service.call_tool(
                params.name, params.arguments, progress_callback=context.session.report_progress
            )
        ),
        on_list_resources=lambda _, params: ask(
            lambda service: service.list_resources(cursor=params and params.cursor)
        ),
        on_read_resource=lambda _, params: ask(lambda service: service.read_resource(str(params.uri))),
    )
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
