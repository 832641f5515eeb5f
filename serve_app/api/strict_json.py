"""Parses JSON strictly by RFC 8259: what a lenient parser accepts beyond it is an error or an attack."""

import json
import re
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Any

from serve_app.domain.errors import InvalidJson

MAX_DIGITS = 4300
"""A longer integer is refused. It is CPython's own bound on converting text, made independent of its settings."""

MAX_DEPTH = 100
"""Deeper nesting is refused: no field is deeper than two, and the parser's own bound depends on who calls it."""

TOO_DEEP = "The body is nested too deeply."

_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")


def parse(body: bytes) -> Any:
    """Return the value of `body` in UTF-8. Raises `InvalidJson`.

    Other encodings, duplicate keys, trailing data, comments, numbers beyond a float's range, integers over
    `MAX_DIGITS` digits, nesting beyond `MAX_DEPTH`, lone surrogates and NUL are refused. `NaN` and `Infinity` are
    left to the model, which takes neither: its error names the field and its range. A number that is whole is an
    `int` however it was spelled: `512`, `512.0` and `5.12e2` are one value.
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
