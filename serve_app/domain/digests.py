"""Digests of what callers gave, by which a repeated idempotency key knows its request again."""

import hashlib
import json
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, Self


class Digests(NamedTuple):
    """The SHA-256 (hex) of what a caller gave, which the same idempotency key must come with again.

    Versions until November 2026 wrote and compared `before` alone, by `repr`: a field added since is declared with
    `repr=False`. It can go in the release after the first with `given`, when no such version runs beside it and the
    records of these (24 hours) are gone.
    """

    given: str = ""
    before: str = ""

    @classmethod
    def of(cls, given: Any, before: str) -> Self:
        """Return the digests of canonical JSON, in which `given_fields` stand for dataclasses, and of the older text."""
        return cls(_sha256(json.dumps(given, default=given_fields, sort_keys=True)), _sha256(before))

    def beside(self, text: str) -> Self:
        """Return the digests of this with another text."""
        return type(self)(*(_sha256(f"{digest} {text}") for digest in self))


NO_DIGESTS = Digests()


def given_fields(asked: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults: a new one with a default changes no digest."""
    given: dict[str, Any] = {}
    for each in fields(asked):
        value = getattr(asked, each.name)
        if value != (each.default if each.default_factory is MISSING else each.default_factory()):
            given[each.name] = value
    return given


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
