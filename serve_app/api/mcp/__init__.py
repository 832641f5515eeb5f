"""The Model Context Protocol over streamable HTTP at `/mcp`, for assistants: a bearer key, and nothing kept between.

Any ingress answers any message, as a stream of server-sent events where it takes longer: progress reaches the caller,
proxies see that the connection is alive, and a caller that hangs up cancels its job.
"""

import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import mcp_types as types
from fastapi import APIRouter, FastAPI, Request, Response
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.types import Message, Receive, Send
from starlette.types import Scope as AsgiScope

from serve_app.api import errors
from serve_app.api.body import read_json
from serve_app.api.credentials import BEARER
from serve_app.api.dependencies import authenticate, load_job, settings_of
from serve_app.api.mcp.tools import Asked, call_tool, list_resources, list_tools, read_resource, refusal
from serve_app.api.openapi import json_app
from serve_app.api.request_context import RequestContext
from serve_app.domain.accounts import Scope
from serve_app.domain.errors import AtelierError, Forbidden, InvalidParameter, NotFound
from serve_app.tracing import set_caller

log = logging.getLogger(__name__)
logging.getLogger("mcp").setLevel(logging.WARNING)  # it would say of each message that a session begins and ends
router = APIRouter(strict_content_type=False)


def create_app() -> FastAPI:
    """Build the application, whose errors have the contract's statuses in the envelope that its clients read."""
    app = json_app(routes=router.routes)
    errors.install(app, lambda plain: errors.other_body(plain, _error_body))
    app.state.credentials = BEARER
    app.state.changing_scope = Scope.READ  # every message is a POST; tools that draw ask for more
    app.state.mcp = Server(
        "atelier",
        version=version("atelier"),
        on_list_tools=list_tools,
        on_call_tool=_counted(call_tool),
        on_list_resources=_counted(list_resources),
        on_read_resource=_counted(read_resource),
    )
    return app


def _error_body(status: int, code: str, message: str) -> dict[str, Any]:
    number = types.INTERNAL_ERROR if status >= 500 else types.INVALID_REQUEST
    return {"jsonrpc": "2.0", "id": None, "error": {"code": number, "message": message, "data": {"code": code}}}


def _counted(answer: Callable[[Asked, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Count a message against its caller's plan, and tell errors: the library would show the words of an unexpected one."""

    async def counted(context: ServerRequestContext[Any, Request], params: Any) -> Any:
        request = context.request
        assert request is not None, "every message comes by HTTP"
        try:
            return await answer(Asked(request, await authenticate(request), context.session.report_progress), params)
        except AtelierError as error:
            _, message = errors.told_of(error)
            if answer is call_tool:  # its result is what an assistant reads
                return refusal(message)
            is_asked_wrongly = isinstance(error, NotFound | InvalidParameter)
            code = types.INVALID_PARAMS if is_asked_wrongly else types.INTERNAL_ERROR
            raise MCPError(code, message) from None
        except Exception as error:
            request_id = RequestContext.of(request).request_id
            log.error("request %s failed", request_id, exc_info=error)
            raise MCPError(types.INTERNAL_ERROR, errors.INTERNAL_WORDS.format(request_id)) from None

    return counted


@router.post("/mcp")
@router.post("/mcp/")
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
    try:
        own, origin = urlsplit(f"//{host}").hostname or "", urlsplit(request.headers.get("origin", "").lower())
    except ValueError:
        raise Forbidden("Host or Origin: is no address.") from None
    is_address = ":" in own or own.rpartition(".")[2].isdecimal()
    if own not in names and "." in own and not is_address:
        raise Forbidden(f"Host: {own} is neither in ATELIER_MCP_HOSTS nor the host of ATELIER_PUBLIC_URL.")
    if any(origin) and origin.netloc != host and origin.hostname not in names:
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
