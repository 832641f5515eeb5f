"""Reads the bytes of a request's body within limits of size and time."""

import asyncio

from starlette.requests import Request


class BodyTooLarge(Exception):
    """The body's declared or counted size is over the limit."""


class BodyTooSlow(Exception):
    """The body did not arrive in time."""


async def read_bytes(request: Request, *, limit: int, seconds: float) -> bytes:
    """Read the whole body. Raises `BodyTooLarge` and `BodyTooSlow`.

    Where the body's declared length is too large, no byte is read.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise BodyTooLarge
    raw = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > limit:
                    raise BodyTooLarge
    except TimeoutError:
        raise BodyTooSlow from None
    return bytes(raw)
