"""The outermost layer: what is true of every answer whatever happened inside, and the last word on every exception."""

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.answers import refusal
from serve_app.api.exchange import Exchange, with_exchange
from serve_app.domain.accounts import Plan, Window
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.requests import Variant

log = logging.getLogger(__name__)

SERVE_CONTROLS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
"""Ray Serve obeys these; a caller must not."""
STORE_RETRY_S = 5

_REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{8,128}")
_B_PATH = re.compile(r"/v1/(?:generations|models)(?:/|$)")


class Edge:
    """Gives each answer its request id, rate headers, cache rule and `nosniff`; turns every exception into the error envelope.

    A raw ASGI layer on purpose: headers set by a dependency or by framework middleware are missing on a 500.
    """

    def __init__(self, app: ASGIApp, plans: Mapping[tuple[Variant, str], Plan]) -> None:
        self._app = app
        self._lowest = {plan.variant: plan for plan in reversed(list(plans.values()))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(_request_id(Headers(scope=scope)))
        reply = _Reply(send, lambda start: self._dress(start, scope, exchange))
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in SERVE_CONTROLS]
        inner = with_exchange({**scope, "app": self, "headers": headers}, exchange)
        try:
            await self._app(inner, receive, reply)
        except ClientDisconnect:
            log.info("request %s: the client left before its body was read", exchange.request_id)
        except Exception as error:  # the outermost layer: nothing above it could answer the caller
            response = _failure(error, exchange)
            if reply.finished:  # a mounted application answered, then let its exception rise to be logged
                return
            if reply.started:  # cut short: only the server can still tell the caller, by closing the connection
                raise
            await response(inner, receive, reply)

    def _dress(self, start: Message, scope: Scope, exchange: Exchange) -> None:
        headers = MutableHeaders(scope=start)
        headers["X-Request-Id"] = exchange.request_id
        for name, value in rate_headers(exchange.window or self._unknown_callers_window(scope)):
            headers[name] = value
        headers.setdefault("X-Content-Type-Options", "nosniff")
        headers.setdefault("Cache-Control", "private, no-cache" if scope["method"] in ("GET", "HEAD") else "no-store")

    def _unknown_callers_window(self, scope: Scope) -> Window:
        """The lowest plan of the interface that was probably meant, reported and not enforced."""
        return Window.unopened(self._lowest[_presumed_variant(scope)], datetime.now(UTC))


def rate_headers(window: Window) -> Iterable[tuple[str, str]]:
    """`X-RateLimit-*` with the end of the window in Unix seconds, and the IETF draft's pair with the seconds left."""
    plan, policy = window.plan, window.plan.policy_name
    yield "X-RateLimit-Limit", str(plan.limit)
    yield "X-RateLimit-Remaining", str(window.remaining)
    yield "X-RateLimit-Reset", str(window.reset_unix)
    yield "RateLimit-Policy", f'"{policy}";q={plan.limit};w={max(1, round(plan.window.total_seconds()))}'
    yield "RateLimit", f'"{policy}";r={window.remaining};t={window.seconds_left}'


class _Reply:
    """The way out: dresses the answer's start, and knows how far the answer has got."""

    __slots__ = ("_dress", "_send", "finished", "started")

    def __init__(self, send: Send, dress: Callable[[Message], None]) -> None:
        self._send, self._dress = send, dress
        self.started = self.finished = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._dress(message)
        elif message["type"] == "http.response.body":
            self.finished = not message.get("more_body", False)
        await self._send(message)


def _request_id(headers: Headers) -> str:
    """The caller's own id when it is fit for logs and headers, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else "req_" + secrets.token_hex(12)


def _presumed_variant(scope: Scope) -> Variant:
    if _B_PATH.match(scope["path"].removeprefix(scope.get("root_path", ""))):
        return Variant.B
    headers = Headers(scope=scope)
    has_bearer = headers.get("authorization", "").lower().startswith("bearer ")
    return Variant.B if "x-api-key" in headers and not has_bearer else Variant.A


def _failure(error: Exception, exchange: Exchange) -> Response:
    if isinstance(error, StoreUnavailable):
        log.warning("request %s: the store is unavailable: %s", exchange.request_id, error)
        message = "The service cannot reach its store; nothing was accepted. Try again in a few seconds."
        return refusal(503, error.code, message, {"Retry-After": str(STORE_RETRY_S)})
    log.error("request %s failed", exchange.request_id, exc_info=error)
    message = f"Something went wrong on our side; quote request id {exchange.request_id} when you report it."
    return refusal(500, "internal_error", message)
