"""Digests of what callers gave, by which a repeated idempotency key knows its request again."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, Self


class Digests(NamedTuple):
    """The SHA-256 (hex) of what a caller gave, which the same idempotency key must come with again.

    Versions up to aec29b3e (27 November 2026) wrote and compared `before` alone, the text by which their dataclasses
    printed; it is empty where it is not known. It can go when no such version runs any more and its records (24
    hours) are gone.
    """

    given: str = ""
    before: str = ""

    @classmethod
    def of(cls, given: Any, before: str) -> Self:
        """Return the digests of canonical JSON, in which `given_fields` stand for dataclasses, and of the older text."""
        return cls(_sha256(json.dumps(given, default=given_fields, sort_keys=True)), before and _sha256(before))

    def beside(self, text: str) -> Self:
        """Return the digests of this with another text."""
        return type(self)(*(digest and _sha256(f"{digest} {text}") for digest in self))


NO_DIGESTS = Digests()


def given_fields(asked: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults: a new one with a default changes no digest."""
    given: dict[str, Any] = {}
    for each in fields(asked):
        value = getattr(asked, each.name)
        if value != (each.default if each.default_factory is MISSING else each.default_factory()):
            given[each.name] = value
    return given


_OF_ANY = "output_format metadata priority start_within"
_PRINTED: Mapping[str, str] = {
    "GenerationRequest": f"{_OF_ANY} prompt loras base_model negative_prompt width height guidance_scale steps sampler "
    "seeds prompt_weights image strength mask",
    "Wish": "prompt seed num_images loras base_model negative_prompt width height steps guidance_scale sampler "
    f"prompt_weights image_id strength mask_image_id {_OF_ANY}",
    "UpscaleRequest": f"{_OF_ANY} image_id scale_factor source_uri source_width source_height",
}


def printed_before(name: str, asked: Any) -> str:
    """Return how a dataclass of this name, with these fields, printed in the versions that digested that."""
    return f"{name}({', '.join(f'{each}={getattr(asked, each)!r}' for each in _PRINTED[name].split())})"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
