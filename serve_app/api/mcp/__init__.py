"""The Model Context Protocol over streamable HTTP at `/mcp`, for assistants: with a bearer key, and nothing kept between.

Any ingress answers any message, as a stream of server-sent events where it takes longer: progress reaches the caller,
proxies see that the connection is alive, and a caller that hangs up cancels its job.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS
from starlette.types import Message, Receive, Send
from starlette.types import Scope as AsgiScope

from serve_app.api.body import read_json
from serve_app.api.credentials import BEARER
from serve_app.api.dependencies import load_job, settings_of
from serve_app.api.errors import message_of
from serve_app.api.mcp.resources import list_resources, read_resource
from serve_app.api.mcp.tools import Context, call_tool, list_tools, request_of
from serve_app.api.openapi import json_app
from serve_app.api.request_context import RequestContext
from serve_app.domain.accounts import Scope
from serve_app.domain.errors import AtelierError, Forbidden, InvalidParameter, NotFound
from serve_app.tracing import set_caller

log = logging.getLogger(__name__)
logging.getLogger("mcp").setLevel(logging.WARNING)  # it would say of each message that a session begins and ends

P = TypeVar("P")
R = TypeVar("R")
router = APIRouter(strict_content_type=False)


def create_app(version: str) -> FastAPI:
    app = json_app(routes=router.routes)
    app.state.credentials = BEARER
    app.state.changing_scope = Scope.READ  # every message is a POST; tools that draw ask for more
    app.state.mcp = Server(
        "atelier",
        version=version,
        on_list_tools=list_tools,
        on_call_tool=_guarded(call_tool),
        on_list_resources=_guarded(list_resources),
        on_read_resource=_guarded(read_resource),
    )
    return app


def _guarded(answer: Callable[[Context, P], Awaitable[R]]) -> Callable[[Context, P], Awaitable[R]]:
    """Raise errors as the protocol has them: its library would show an unexpected one's own words to the caller."""

    async def answer_or_refuse(context: Context, params: P) -> R:
        try:
            return await answer(context, params)
        except AtelierError as error:
            code = INVALID_PARAMS if isinstance(error, NotFound | InvalidParameter) else INTERNAL_ERROR
            raise MCPError(code, message_of(error)) from None
        except Exception as error:
            request_id = RequestContext.of(request_of(context)).request_id
            log.error("request %s failed", request_id, exc_info=error)
            raise MCPError(
                INTERNAL_ERROR, f"Internal error; include request id {request_id} when you report it."
            ) from None

    return answer_or_refuse


@router.post("/mcp")
async def exchange(request: Request) -> Response:
    """Answer one message. Its key is checked at once, but what it asks for is counted by whoever answers it."""
    _check_names(request)
    set_caller(request.headers.get("traceparent", ""))
    await load_job(request, "")
    return _Exchange(request, await (await read_json(request)).body())


def _check_names(request: Request) -> None:
    """Raise `Forbidden` where a page that a browser shows might have led the caller here (DNS rebinding).

    Such a page has an `Origin`, and a name with a dot that leads to this service for as long as it likes.
    """
    settings, host = settings_of(request), request.headers.get("host", "").lower()
    names = {name.lower() for name in (*settings.mcp_hosts, urlsplit(settings.public_url).hostname) if name}
    own, origin = urlsplit(f"//{host}").hostname or "", request.headers.get("origin", "").lower()
    is_address = ":" in own or own.rpartition(".")[2].isdecimal()
    if own not in names and "." in own and not is_address:
        raise Forbidden(f"Host: {own} is neither in ATELIER_MCP_HOSTS nor the host of ATELIER_PUBLIC_URL.")
    if origin and urlsplit(origin).netloc != host and urlsplit(origin).hostname not in names:
        raise Forbidden("Origin: is neither this service's own nor in ATELIER_MCP_HOSTS.")


class _Exchange(Response):
    """Lets the protocol's library answer a message whose body has been read, with no session of before or after."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__()
        self._server: Server = request.app.state.mcp
        self._body: bytes | None = body

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async def read() -> Message:
            body, self._body = self._body, None
            return await receive() if body is None else {"type": "http.request", "body": body}

        headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
        inner = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
        manager = StreamableHTTPSessionManager(self._server, stateless=True)
        async with manager.run():
            await manager.handle_request(inner, read, send)
