"""Reads a request's body up to a limit, and a JSON body in the contract's order: size, media type, strict JSON."""

import re
from typing import Any

from fastapi import Request

from serve_app.api import strict_json
from serve_app.domain.errors import InvalidParameter, PayloadTooLarge, UnsupportedMediaType


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


MAX_BODY_BYTES = 64 * 1024

_JSON_TYPE = re.compile(r"application/json|[!#$&^_.+\-\w]+/[!#$&^_.+\-\w]+\+json", re.ASCII)


class JsonRequest(Request):
    """A request whose body has been read and parsed.

    Its media type has been checked and is left out, so that FastAPI takes `json()` whatever the type was called.
    """

    def __init__(self, request: Request, raw: bytes, document: dict[str, Any]) -> None:
        headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._raw, self._document = raw, document

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> dict[str, Any]:
        return self._document


async def read_json(request: Request) -> JsonRequest:
    """Read and parse the body.

    Raises `PayloadTooLarge` and `UnsupportedMediaType`, before a byte is read where the headers tell, `RequestTimeout`,
    `InvalidJson` and `InvalidParameter`, in that order.
    """
    check_length(request, MAX_BODY_BYTES)
    _check_media_type(request)
    raw = await read_bytes(request, limit=MAX_BODY_BYTES)
    document = strict_json.parse(raw)
    if not isinstance(document, dict):
        raise InvalidParameter("body: must be a JSON object")
    return JsonRequest(request, raw, document)


def _check_media_type(request: Request) -> None:
    if is_encoded(request):
        raise UnsupportedMediaType("Send the body without a content encoding.")
    sent = media_type(request)
    if sent and not _JSON_TYPE.fullmatch(sent):
        raise UnsupportedMediaType("Send the body as 'Content-Type: application/json'.")
