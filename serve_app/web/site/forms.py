"""Forms of pages, which are read within limits and sent by the session that was given them; and addresses of pages."""

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import parse_qsl

from fastapi import Depends, HTTPException, Request
from starlette.responses import RedirectResponse

from serve_app.api.body import check_length, is_encoded, media_type, read_bytes
from serve_app.api.dependencies import base_url, settings_of
from serve_app.domain.accounts import Operator, SignIn
from serve_app.domain.errors import PayloadTooLarge, RequestTimeout

W = TypeVar("W", SignIn, Operator)

FORM_BYTES = 64 * 1024
"""Two prompts of the most characters, percent-encoded; no other form of ours is larger than a few hundred bytes."""
MAX_FIELDS = 150
"""The playground's form has two fields for each LoRA that it shows, and some twenty others."""
MEDIA_TYPE = "application/x-www-form-urlencoded"
_CLOSE = {"Connection": "close"}
"""What is left of a body that was not read must not be taken for the next request."""


async def read_form(request: Request) -> Mapping[str, str]:
    """Read a form's fields in their order, the first of each name. Raises `HTTPException`: 413, 408, 415, 400."""
    try:
        check_length(request, FORM_BYTES)
        raw = await read_bytes(request, limit=FORM_BYTES)
    except PayloadTooLarge:
        raise HTTPException(413, "The form is too large.", _CLOSE) from None
    except RequestTimeout:
        raise HTTPException(408, "The form did not arrive in time. Try again.", _CLOSE) from None
    if not raw:  # browsers name no media type for a form without fields
        return {}
    if media_type(request) != MEDIA_TYPE or is_encoded(request):
        raise HTTPException(415, f"Forms are sent as {MEDIA_TYPE}, without a content encoding.")
    try:
        pairs = parse_qsl(raw.decode("ascii", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise HTTPException(400, "The form has too many fields.") from None
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields.setdefault(name, value)
    return fields


Form = Annotated[Mapping[str, str], Depends(read_form)]


MOST_PAGES = 2_000


def redirect(request: Request, path: str) -> RedirectResponse:
    """Redirect to another page of the same application."""
    return RedirectResponse(f"{root_of(request)}/{path}", 303)


def page_number(request: Request) -> int:
    """The `page` of the address, from 1."""
    text = request.query_params.get("page", "")
    return min(max(1, int(text)), MOST_PAGES) if text.isascii() and text.isdecimal() and len(text) < 6 else 1


def root_of(request: Request) -> str:
    """The path at which the pages' application is mounted."""
    return request.scope.get("root_path", "").rstrip("/")


def site_of(request: Request) -> str:
    """The path of the service, in which that application is mounted."""
    return request.scope.get("app_root_path", "").rstrip("/")


def service_url(request: Request) -> str:
    """Return the service's address, as callers outside use it."""
    pages = root_of(request).removeprefix(site_of(request))
    return base_url(request).removesuffix(pages)


def curl_line(base_url: str, header: str, fields: Mapping[str, str]) -> str:
    """Return a first request that works when it is pasted into a shell."""
    content = "Content-Type: application/json"
    return f"curl {base_url}/v1/generate -H '{header}' -H '{content}' -d '{json.dumps(fields)}'"


def is_secure(request: Request) -> bool:
    """Whether the browser speaks https, also when a front proxy ends it and `public_url` says so."""
    return request.url.scheme == "https" or settings_of(request).public_url.startswith("https://")


EXPIRED_FORM = "The page has expired. Go back, reload it, and try again."


@dataclass(frozen=True, slots=True)
class SignedIn(Generic[W]):
    """A live session, and whose it is."""

    token: str
    who: W


def check_form(session: SignedIn[Any], form: Mapping[str, str], purpose: str) -> None:
    """Raises 403 when the form was not given to this session."""
    if not is_form_token(session.token, purpose, form.get("form_token", "")):
        raise HTTPException(403, EXPIRED_FORM)


def form_token(session: str, purpose: str) -> str:
    """Return a token of a form, by which only this session can send a form of this purpose.

    Each is masked by random bytes of its own, so that the length of a compressed page that repeats what an attacker
    made the browser ask for tells nothing about it (breachattack.com).
    """
    pad = secrets.token_bytes(_DIGEST_BYTES)
    return (pad + _xor(pad, _form_digest(session, purpose))).hex()


def is_form_token(session: str, purpose: str, given: str) -> bool:
    try:
        raw = bytes.fromhex(given)
    except ValueError:
        return False
    found = _xor(raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:])
    return hmac.compare_digest(_form_digest(session, purpose), found)


_DIGEST_BYTES = 32


def _form_digest(session: str, purpose: str) -> bytes:
    return hmac.digest(session.encode(errors="replace"), f"form: {purpose}".encode(), "sha256")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=False))


def single_use_token(session: str, purpose: str) -> str:
    """A form token that differs on every page, to be accepted only once."""
    nonce = secrets.token_urlsafe(12)
    return f"{nonce}.{form_token(session, f'{purpose} {nonce}')}"


def nonce_of(session: str, purpose: str, given: str) -> str | None:
    """Return a single-use token's nonce; None for a token of another session or purpose."""
    nonce, _, proof = given.partition(".")
    return nonce if is_form_token(session, f"{purpose} {nonce}", proof) else None
