"""What both contracts' fields have in common: strict types, whole numbers, trimmed text, and messages that name the rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)

from serve_app.domain.errors import InvalidParameter

MAX_PROMPT = 4000
"""Code points after trimming."""

WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space property, spelled out: `str.strip()`, JSON Schema's `\\s` and other languages each mean another set."""

_SPACE_CLASS = "".join(f"\\u{ord(c):04x}" for c in WHITE_SPACE)
_TEXT = rf"[^{_SPACE_CLASS}\u0000](?:[^\u0000]{{0,{MAX_PROMPT - 2}}}[^{_SPACE_CLASS}\u0000])?"
PROMPT_PATTERN = rf"^[{_SPACE_CLASS}]*{_TEXT}[{_SPACE_CLASS}]*$"
OPTIONAL_PROMPT_PATTERN = rf"^[{_SPACE_CLASS}]*(?:{_TEXT}[{_SPACE_CLASS}]*)?$"
SHOWN_NAME_LENGTH, SHOWN_UNKNOWN_FIELDS = 64, 5


@dataclass(frozen=True, slots=True)
class Rule:
    """A field's rule in the words of its error message: for a value out of bounds, and for a value of another type."""

    bounds: str
    type: str


class Body(BaseModel):
    """A request body at the door: closed, strict, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _trimmed(text: str) -> str:
    return text.strip(WHITE_SPACE)


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("null")
    return value


Prompt = Annotated[
    StrictStr,
    AfterValidator(_trimmed),
    Field(min_length=1, max_length=MAX_PROMPT),
    WithJsonSchema({"type": "string", "pattern": PROMPT_PATTERN, "x-allowed": f"1 to {MAX_PROMPT} characters"}),
    Rule(f"must be 1 to {MAX_PROMPT} characters long", f"must be a string of 1 to {MAX_PROMPT} characters"),
]
OptionalPrompt = Annotated[
    StrictStr,
    AfterValidator(_trimmed),
    Field(max_length=MAX_PROMPT),
    WithJsonSchema(
        {"type": "string", "pattern": OPTIONAL_PROMPT_PATTERN, "x-allowed": f"at most {MAX_PROMPT} characters"}
    ),
    Rule(f"must be at most {MAX_PROMPT} characters long", f"must be a string of at most {MAX_PROMPT} characters"),
]
CatalogId = Annotated[
    StrictStr,
    Field(min_length=1, max_length=128, json_schema_extra={"pattern": r"^[^\u0000]*$"}),
    Rule("must be 1 to 128 characters long", "must be a string of 1 to 128 characters"),
]
Seed = Annotated[
    int | None,
    BeforeValidator(_not_null),
    WithJsonSchema({"type": "integer", "x-allowed": "any integer"}),
    Rule("must be an integer of at most 4300 digits", "must be an integer of at most 4300 digits"),
]

BodyT = TypeVar("BodyT", bound=Body)


def read_fields(model: type[BodyT], document: dict[str, Any], foreign: Mapping[str, str]) -> BodyT:
    """The body that `document` spells, or `InvalidParameter` naming every field that breaks its rule.

    `foreign` explains the other contract's field names to a caller who sent them here.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidParameter("; ".join(_explain(model, [dict(f) for f in faults], foreign))) from None


def _explain(model: type[Body], faults: Sequence[dict[str, Any]], foreign: Mapping[str, str]) -> list[str]:
    unknown = [str(fault["loc"][0]) for fault in faults if fault["type"] == "extra_forbidden"]
    broken = {str(fault["loc"][0]): str(fault["type"]) for fault in faults if fault["type"] != "extra_forbidden"}
    return [_unknown(model, name, foreign) for name in unknown[:SHOWN_UNKNOWN_FIELDS]] + [
        f"{name}: {_broken(model, name, kind)}" for name, kind in broken.items()
    ]


def _broken(model: type[Body], name: str, kind: str) -> str:
    rule = next(item for item in model.model_fields[name].metadata if isinstance(item, Rule))
    if kind == "missing":
        return f"is required, {rule.type}"
    return rule.type if kind.endswith("_type") or kind == "value_error" else rule.bounds


def _unknown(model: type[Body], name: str, foreign: Mapping[str, str]) -> str:
    if name in foreign:
        return f"{name}: {foreign[name]}"
    shown = name if name.isidentifier() and name.isascii() and len(name) <= SHOWN_NAME_LENGTH else "body"
    near = get_close_matches(name[:SHOWN_NAME_LENGTH].lower(), model.model_fields, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; the fields are {', '.join(model.model_fields)}"
    return f"{shown}: unknown field{hint}"
