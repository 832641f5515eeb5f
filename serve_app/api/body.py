"""Reads a request's body up to a limit, and a JSON body in the contract's order: size, media type, strict JSON."""

import json
import re
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Any

from fastapi import Request

from serve_app.domain.errors import InvalidJson, InvalidParameter, PayloadTooLarge, UnsupportedMediaType


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
    if is_encoded(request):
        raise UnsupportedMediaType("Send the body without a content encoding.")
    sent = media_type(request)
    if sent and not _JSON_TYPE.fullmatch(sent):
        raise UnsupportedMediaType("Send the body as 'Content-Type: application/json'.")
    raw = await read_bytes(request, limit=MAX_BODY_BYTES)
    document = parse_json(raw)
    if not isinstance(document, dict):
        raise InvalidParameter("body: must be a JSON object")
    return JsonRequest(request, raw, document)


MAX_DIGITS = 4300
"""A longer integer is refused. It is CPython's own bound on converting text, made independent of its settings."""

MAX_DEPTH = 100
"""Deeper nesting is refused: no field is deeper than two, and the parser's own bound depends on who calls it."""

TOO_DEEP = "The body is nested too deeply."

_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")


def parse_json(body: bytes) -> Any:
    """Return the value of `body` in UTF-8, strictly by RFC 8259. Raises `InvalidJson`.

    What a lenient parser accepts beyond it is an error or an attack. Other encodings, duplicate keys, trailing data,
    comments, numbers beyond a float's range, integers over `MAX_DIGITS` digits, nesting beyond `MAX_DEPTH`, lone
    surrogates and NUL are refused. `NaN` and `Infinity` are left to the model, which takes neither: its error names the
    field and its range. A number that is whole is an `int` however it was spelled: `512`, `512.0` and `5.12e2` are one
    value.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidJson("The body must be UTF-8.") from None
    if not text.strip():
        raise InvalidJson("The body is empty; send a JSON object.")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=float,
            parse_int=_integer,
            parse_float=_number,
        )
    except json.JSONDecodeError as error:
        raise InvalidJson(f"The body is not valid JSON: line {error.lineno}, column {error.colno}.") from None
    except RecursionError:
        raise InvalidJson(TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if "\\u" in text:  # only an escape can write a lone surrogate or a NUL: UTF-8 and JSON refuse them as they are
        _check_text(value)
    return value


def _check_depth(value: Any) -> None:
    """Check the nesting level by level, without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidJson(TOO_DEEP)
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise InvalidJson("An object has the same key twice.")
    return members


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise InvalidJson(f"A number has more than {MAX_DIGITS} digits.")
    return int(text)


def _number(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise InvalidJson(f"A number has more than {MAX_DIGITS} digits.")
    value = float(text)
    if not isfinite(value):
        raise InvalidJson("A number is too large.")
    return _whole(text) if value.is_integer() else value


def _whole(text: str) -> int | float:
    """Return the integer that `text` spells exactly; its float where that only rounds to one."""
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent beyond the decimal module's range: the float is zero
        return float(text)
    return int(exact) if exact == exact.to_integral_value() else float(text)


def _check_text(value: Any) -> None:
    """Check every text of the value, walking without recursion."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str) and _UNWRITABLE.search(item):
            raise InvalidJson("Text must not contain NUL or a lone surrogate.")
