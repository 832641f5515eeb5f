"""A request's body, in the order of the contract: size, media type, JSON. The caller is known before any of it is read."""

import asyncio
import hashlib
import json
import re
from typing import Any

from starlette.requests import Request

from serve_app.api import strict_json
from serve_app.domain.errors import InvalidJson, InvalidParameter, PayloadTooLarge, UnsupportedMediaType

MAX_BODY_BYTES = 64 * 1024
ARRIVAL_LIMIT_S = 30
"""A body that takes longer holds a connection for nothing: 64 KiB pass in a second on a slow line."""

_JSON_TYPE = re.compile(r"application/json|[!#$&^_.+\-\w]+/[!#$&^_.+\-\w]+\+json", re.ASCII)
_KEY_TEXT = re.compile(r"[\x21-\x7e]{1,255}")


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object that the body holds. Raises `PayloadTooLarge`, `UnsupportedMediaType`, `InvalidJson` in that order."""
    raw = await _read_bytes(request)
    _check_media_type(request)
    document = strict_json.parse(raw)
    if not isinstance(document, dict):
        raise InvalidParameter("body: must be a JSON object")
    return document


def idempotency_key(request: Request) -> str | None:
    """The `Idempotency-Key` header, where the caller sent one."""
    lines = request.headers.getlist("idempotency-key")
    if not lines:
        return None
    if len(lines) > 1 or not _KEY_TEXT.fullmatch(lines[0]):
        raise InvalidParameter("Idempotency-Key: must be 1 to 255 visible ASCII characters")
    return lines[0]


def digest(document: dict[str, Any]) -> str:
    """SHA-256 (hex) of what was asked for: key order, spacing and the spelling of whole numbers make no difference."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


async def _read_bytes(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    raw = bytearray()
    try:
        async with asyncio.timeout(ARRIVAL_LIMIT_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise InvalidJson(f"The body did not arrive within {ARRIVAL_LIMIT_S} seconds.") from None
    return bytes(raw)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"The body must be at most {MAX_BODY_BYTES} bytes.")


def _check_media_type(request: Request) -> None:
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("Send the body without a content encoding.")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and not _JSON_TYPE.fullmatch(media_type):
        raise UnsupportedMediaType("Send the body as 'Content-Type: application/json'.")
