"""Bounds the requests in progress, and the time for which a body may be awaited."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.errors import domain_error_response
from serve_app.api.request_context import RequestContext
from serve_app.domain.errors import Overloaded, RequestTimeout

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
