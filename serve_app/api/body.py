"""Reads the bytes of a request's body up to a limit, and its headers."""

from starlette.requests import Request

from serve_app.domain.errors import PayloadTooLarge


def check_length(request: Request, limit: int) -> None:
    """Raise `PayloadTooLarge` where the body's declared length is over the limit."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise too_large(limit)


def media_type(request: Request) -> str:
    """Return the body's media type in lower case, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def is_encoded(request: Request) -> bool:
    """Return whether the body has a content encoding, such as gzip."""
    return request.headers.get("content-encoding", "").strip().lower() not in ("", "identity")


async def read_bytes(request: Request, *, limit: int) -> bytes:
    """Read the whole body. Raises `PayloadTooLarge` and `RequestTimeout`."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > limit:
            raise too_large(limit)
    return bytes(raw)


def too_large(limit: int, name: str = "body") -> PayloadTooLarge:
    return PayloadTooLarge(f"The {name} must be at most {limit} bytes.")
