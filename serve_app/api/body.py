"""The bytes of a request's body, as many and for as long as they are waited for."""

import asyncio

from starlette.requests import Request


class BodyTooLarge(Exception):
    """The body is declared or was counted to be larger than is taken."""


class BodyTooSlow(Exception):
    """The body did not arrive in time."""


async def read_bytes(request: Request, *, limit: int, seconds: float) -> bytes:
    """Read the whole body. Raises `BodyTooLarge` (before a byte is read, where the length says so) and `BodyTooSlow`."""
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
