"""The fields of a form, read within limits: size, time, media type."""

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, HTTPException
from starlette.requests import Request

from serve_app.api.body import check_length, read_bytes
from serve_app.domain.errors import PayloadTooLarge, RequestTimeout

FORM_BYTES = 64 * 1024
"""Two prompts of the most characters, percent-encoded; no other form of ours is larger than a few hundred bytes."""
MAX_FIELDS = 90
MEDIA_TYPE = "application/x-www-form-urlencoded"
_CLOSE = {"Connection": "close"}
"""What is left of a body that was not read must not be taken for the next request."""


async def read_form(request: Request) -> Mapping[str, str]:
    """Read a form's fields, the first of each name. Raises `HTTPException`: 413, 408, 415, 400."""
    try:
        check_length(request, FORM_BYTES)
        raw = await read_bytes(request, limit=FORM_BYTES)
    except PayloadTooLarge:
        raise HTTPException(413, "The form is too large.", _CLOSE) from None
    except RequestTimeout:
        raise HTTPException(408, "The form did not arrive in time. Try again.", _CLOSE) from None
    if not raw:  # without fields, and browsers then name no media type
        return {}
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if media_type != MEDIA_TYPE or encoding not in ("", "identity"):
        raise HTTPException(415, f"Forms are sent as {MEDIA_TYPE}, without a content encoding.")
    try:
        pairs = parse_qsl(raw.decode("ascii", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise HTTPException(400, "The form has too many fields.") from None
    return dict(reversed(pairs))


Form = Annotated[Mapping[str, str], Depends(read_form)]
