"""Field types and base models that the request and response models of several interfaces share."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from serve_app.domain.errors import FailureCode

MAX_PROMPT = 4000
"""Code points after trimming."""
MAX_RANDOM_SEED = 2**53
"""Seeds that the service draws are exact in every JSON reader."""
WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space property, spelled out: `str.strip()` and JSON Schema's `\\s` each mean another set."""


class RequestBody(BaseModel):
    """A request body: closed, strict, immutable.

    `other_api_fields` explains fields of the other interface that are sent here.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    other_api_fields: ClassVar[dict[str, str]] = {}


class ResponseBody(BaseModel):
    """A response body: exactly these fields, from keywords or from the attributes of a domain object."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)


def _trimmed(text: str) -> str:
    return text.strip(WHITE_SPACE)


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("null")
    return value


NOT_NULL = BeforeValidator(_not_null)
"""Of a field that may be left out, but not be null."""


def utc_text(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def job_id_schema(*prefixes: str) -> dict[str, str]:
    return {"type": "string", "pattern": f"^(?:{'|'.join(prefixes)})_[a-z2-7]{{26}}$"}


Prompt = Annotated[
    str,
    AfterValidator(_trimmed),
    Field(min_length=1, max_length=MAX_PROMPT),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_PROMPT, "pattern": r"\S"}),
]
OptionalPrompt = Annotated[
    str,
    AfterValidator(_trimmed),
    Field(max_length=MAX_PROMPT),
    WithJsonSchema({"type": "string", "maxLength": MAX_PROMPT}),
]
LINE_PATTERN = r"^[^\u0000-\u001f\u007f-\u009f]*$"
"""What is shown in one line, in a terminal too."""
_LINE = re.compile(LINE_PATTERN)


@dataclass(frozen=True, slots=True)
class Line:
    """Annotates a text of one line: trimmed, without control characters, of so many code points."""

    shortest: int
    longest: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        bounds = {"minLength": self.shortest, "maxLength": self.longest}
        return {"type": "string", **bounds, "pattern": LINE_PATTERN}

    def _check(self, text: str) -> str:
        text = _trimmed(text)
        if not self.shortest <= len(text) <= self.longest or not _LINE.fullmatch(text):
            raise PydanticCustomError("line", "must be one line")
        return text


CatalogId = Annotated[str, Field(min_length=1, max_length=128)]
Seed = Annotated[int | None, NOT_NULL, WithJsonSchema({"type": "integer"})]

JobId = Annotated[str, WithJsonSchema(job_id_schema("gen", "up"))]
GenerationId = Annotated[str, WithJsonSchema(job_id_schema("gen"))]
ImageId = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^img_[a-z2-7]{26}$"})]
Url = Annotated[str, WithJsonSchema({"type": "string", "format": "uri"})]
UtcTime = Annotated[
    datetime,
    PlainSerializer(utc_text, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"}),
]
Pixels = Annotated[int, Field(ge=1, description="Pixels.")]
UnfinishedProgress = Annotated[int, Field(ge=0, le=99, description="Percent; never decreases.")]


class Failure(ResponseBody):
    """Why a job ended without images."""

    code: FailureCode
    message: str
