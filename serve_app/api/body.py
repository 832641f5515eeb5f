"""Reads the bytes of a request's body within limits of size and time, and its headers."""

import asyncio

from starlette.requests import Request


class BodyTooLarge(Exception):
    """The body's declared or counted size is over the limit."""


class BodyTooSlow(Exception):
    """The body did not arrive in time."""


def declares_more(request: Request, limit: int) -> bool:
    """Return whether the body's declared length is over the limit."""
    declared = request.headers.get("content-length", "")
    return declared.isdecimal() and len(declared) < 20 and int(declared) > limit


def media_type(request: Request) -> str:
    """Return the body's media type in lower case, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def is_encoded(request: Request) -> bool:
    """Return whether the body has a content encoding, such as gzip."""
    return request.headers.get("content-encoding", "").strip().lower() not in ("", "identity")


async def read_bytes(request: Request, *, limit: int, seconds: float) -> bytes:
    """Read the whole body. Raises `BodyTooLarge` and `BodyTooSlow`.

    Where the body's declared length is too large, no byte is read.
    """
    if declares_more(request, limit):
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
