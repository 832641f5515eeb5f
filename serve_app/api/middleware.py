"""Wraps all requests: the outermost ASGI layer adds headers, answers unexpected errors and counts; the next bounds them.

The second layer bounds how many requests are in progress, and the time for which a body may be awaited.
"""

import asyncio
import logging
import re
import secrets
import string
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import quote_from_bytes

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.accounts.auth import Authenticator
from serve_app.api.credentials import SHARED_PATH, presumed_variant, read_api_key, read_bearer, read_either
from serve_app.api.errors import domain_error_response, internal_error
from serve_app.api.ops import FILES
from serve_app.api.request_context import RequestContext
from serve_app.domain import metrics
from serve_app.domain.accounts import Plan, Window
from serve_app.domain.errors import AmbiguousCredentials, Overloaded, RequestTimeout, StoreUnavailable, Unauthorized
from serve_app.domain.requests import Variant
from serve_app.log import log_ids
from serve_app.store.measures import Measures

_READERS = {Variant.A: read_bearer, Variant.B: read_api_key, None: read_either}


async def caller_window(
    authenticator: Authenticator, scope: Scope, context: RequestContext, status: int
) -> Window | None:
    """Return the window of a valid key at an address where no check asks for one: a missing path, or an image's.

    It counts nothing, and is None without a key. Only text in the form of a key costs a round trip.
    """
    is_missing = status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if not is_missing and not path.startswith(FILES):
        return None
    read = _READERS[None if path == SHARED_PATH else context.variant]
    try:
        key, variant = read(Headers(scope=scope))
        return (await authenticator.authenticate(key, variant, counted=False)).window
    except (Unauthorized, AmbiguousCredentials, StoreUnavailable):
        return None


METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD, NO_ROUTE, NO_INTERFACE = "other", "unmatched", "none"


def route_pattern(scope: Scope) -> str:
    """Return a request's pattern, as `/v1/jobs/{job_id}`, with the prefix of the application that has it.

    Files, and paths that no application has, are counted under the prefix alone.
    """
    root: str = scope.get("root_path", "")
    mounted = root.removeprefix(scope.get("app_root_path", root))
    route = scope.get("route")
    return mounted + route.path if isinstance(route, Route) else mounted or NO_ROUTE


log = logging.getLogger(__name__)

SERVE_CONTROLS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
"""Ray Serve obeys these headers; a caller must not be able to set them."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{8,128}")


class RequestContextMiddleware:
    """Adds the common headers to each response, and answers unexpected exceptions.

    The headers are the request id, the rate limits and the cache rules. Pure ASGI, because headers that a dependency or
    `@app.middleware` sets are missing on a 500. HEAD is answered as GET; the server sends no body.
    """

    def __init__(
        self,
        app: ASGIApp,
        plans: Mapping[tuple[Variant, str], Plan],
        measures: Measures,
        authenticator: Authenticator,
    ) -> None:
        self._app = app
        self._measures = measures
        self._authenticator = authenticator
        self._lowest_plans = {plan.variant: plan for plan in reversed(list(plans.values()))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(_request_id(scope))
        is_read = scope["method"] in ("GET", "HEAD")
        inner = {
            **scope,
            "method": "GET" if is_read else scope["method"],
            "query_string": _quoted(scope["query_string"]),
            "headers": [_unescaped(*pair) for pair in scope["headers"] if pair[0].lower() not in SERVE_CONTROLS],
        }
        context.attach(inner)
        started = finished = False
        status = 0
        began = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            nonlocal started, finished, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                if context.window is None:
                    context.window = await caller_window(self._authenticator, inner, context, status)
                message["headers"] = self._with_common_headers(message["headers"], inner, context, is_read=is_read)
            finished = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            with log_ids(request_id=context.request_id):
                await self._app(inner, receive, send_with_headers)
        except ClientDisconnect:
            log.info("request %s: the client disconnected before its body was read", context.request_id)
        except Exception as error:
            log.error("request %s failed", context.request_id, exc_info=error)
            if finished:  # an application sent its 500 and raised the exception again, to be logged
                return
            if started:  # the server ends such a response by closing the connection
                raise
            await internal_error(context.request_id)(inner, receive, send_with_headers)
        finally:
            if status:
                self._count(inner, context, status=status, seconds=time.perf_counter() - began)

    def _count(self, scope: Scope, context: RequestContext, *, status: int, seconds: float) -> None:
        """Count a request by the pattern of its route: by its address, each job would add a label of its own."""
        route = context.route or route_pattern(scope)
        interface = (context.caller.variant if context.caller else context.variant) or NO_INTERFACE
        method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        self._measures.count(metrics.HTTP_REQUESTS, interface, method, route, str(status))
        self._measures.observe(metrics.HTTP_SECONDS, seconds, route)
        if context.error_code:
            self._measures.count(metrics.HTTP_ERRORS, interface, context.error_code)

    def _with_common_headers(
        self, headers: Iterable[tuple[bytes, bytes]], scope: Scope, context: RequestContext, *, is_read: bool
    ) -> list[tuple[bytes, bytes]]:
        window = context.window or self._unopened_window(scope, context)
        result = [*headers, (b"x-request-id", context.request_id.encode()), *rate_headers(window)]
        given = {name for name, _ in result}
        if b"x-content-type-options" not in given:
            result.append((b"x-content-type-options", b"nosniff"))
        if b"cache-control" not in given:
            result.append((b"cache-control", b"private, no-cache" if is_read else b"no-store"))
        return result

    def _unopened_window(self, scope: Scope, context: RequestContext) -> Window:
        """Return the lowest plan of the interface that an unknown caller probably meant.

        It is reported and not enforced.
        """
        variant = context.variant or presumed_variant(Headers(scope=scope))
        return Window.unopened(self._lowest_plans[variant], datetime.now(UTC))


def _unescaped(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return a header, a cookie's without backslashes, of which ours have none.

    Python before 3.11.10 takes time that grows with the square of their number, 0.4 s for 15,000 (CVE-2024-7592).
    """
    return name, value.replace(b"\\", b"") if name.lower() == b"cookie" else value


def _quoted(query: bytes) -> bytes:
    """Percent-encode the query's bytes beyond ASCII: Starlette raises for a query that is not UTF-8."""
    return query if query.isascii() else quote_from_bytes(query, safe=string.printable).encode()


def rate_headers(window: Window) -> list[tuple[bytes, bytes]]:
    """Return `X-RateLimit-*` and the IETF draft's pair of headers.

    The first has the end of the window in Unix seconds, the second the seconds left.
    """
    plan, policy, remaining = window.plan, window.plan.policy_name.encode(), window.remaining
    window_s = max(1, round(plan.window.total_seconds()))
    return [
        (b"x-ratelimit-limit", b"%d" % plan.limit),
        (b"x-ratelimit-remaining", b"%d" % remaining),
        (b"x-ratelimit-reset", b"%d" % window.reset_unix),
        (b"ratelimit-policy", b'"%s";q=%d;w=%d' % (policy, plan.limit, window_s)),
        (b"ratelimit", b'"%s";r=%d;t=%d' % (policy, remaining, window.seconds_left)),
    ]


def _request_id(scope: Scope) -> str:
    """Return the caller's own id if it is safe in logs and headers, else a new one."""
    given = next((value for name, value in scope["headers"] if name.lower() == b"x-request-id"), b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else "req_" + secrets.token_hex(12)


GRACE_S, SLOWEST_BYTES_PER_S = 10.0, 32 << 10
"""A caller may keep its request waiting for `GRACE_S`, and for the time that the received bytes take at the slowest
rate."""


class OpenRequests:
    """Passes on `at_once` requests together; `waiting` more wait for a place, and the next is `overloaded`.

    A request holds no place while bytes of its body are awaited, so that half-sent bodies keep nobody out. There are at
    most as many of those as callers have connections, and their time is bounded here.
    """

    def __init__(self, app: ASGIApp, *, at_once: int, waiting: int) -> None:
        self._app = app
        self._places = asyncio.Semaphore(at_once)
        self._waiting, self._most_waiting = 0, waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._places.locked() and self._waiting >= self._most_waiting:
            error = Overloaded("too many requests are open")
            await domain_error_response(error, RequestContext.of(scope))(scope, receive, send)
            return
        request = _OpenRequest(receive, self._places)
        self._waiting += 1
        try:
            await request.take_place()
        finally:
            self._waiting -= 1
        try:
            await self._app(scope, request.receive, send)
        finally:
            request.leave_place()


class _OpenRequest:
    """One request: whether it holds a place, and for how long its body may still be awaited."""

    def __init__(self, receive: Receive, places: asyncio.Semaphore) -> None:
        self._receive, self._places = receive, places
        self._has_place = self._is_whole = False
        self._seconds_left = GRACE_S

    async def take_place(self) -> None:
        await self._places.acquire()
        self._has_place = True

    def leave_place(self) -> None:
        if self._has_place:
            self._has_place = False
            self._places.release()

    async def receive(self) -> Message:
        """Receive a message, without a place until the body is whole. Raises `RequestTimeout`."""
        if self._is_whole:  # all that can still come is the end of the connection
            return await self._receive()
        self.leave_place()
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds_left):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(
                f"The body must arrive within {GRACE_S:g} seconds, or at {SLOWEST_BYTES_PER_S >> 10} KiB a second."
            ) from None
        self._seconds_left += len(message.get("body", b"")) / SLOWEST_BYTES_PER_S - (time.monotonic() - began)
        self._is_whole = not message.get("more_body", False)
        await self.take_place()
        return message
