"""Field types and base models that the request and response models of several interfaces share."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, get_args

from fastapi import Depends, Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, StringConstraints, WithJsonSchema

from serve_app.domain.durations import Position
from serve_app.domain.errors import FailureCode, InvalidParameter
from serve_app.domain.jobs import JOB_PREFIXES
from serve_app.domain.requests import USUAL_WEIGHT, GenerationDraft, GenerationRequest, LoraUse, Variant

MAX_PROMPT = 4000
"""A prompt has at most this many code points after trimming."""


class RequestBody(BaseModel):
    """A request body: closed, strict, immutable.

    `other_api_fields` explains fields of the other interface that are sent here.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    other_api_fields: ClassVar[dict[str, str]] = {}

    @classmethod
    def kind_of_body(cls) -> str:
        """Return the `kind` of one model of a body that has several."""
        return get_args(cls.model_fields["kind"].annotation)[0]


class GenerationBody(RequestBody):
    """A request for images: its fields are called as the domain's, and an interface's own name of one is its alias."""

    interface: ClassVar[Variant]

    def to_domain(self) -> GenerationDraft:
        fields = self.model_dump()
        lora = LoraUse(fields.pop("lora_id"), fields.pop("lora_weight"))
        return GenerationDraft(**fields, loras=(lora,), interface=self.interface)

    @classmethod
    def fields_of(cls, request: GenerationRequest) -> dict[str, Any]:
        """Return the body that asks for the same images, with every field written out."""
        return {field.alias or name: getattr(request, name) for name, field in cls.model_fields.items()}


class ResponseBody(BaseModel):
    """A response body: exactly these fields, from keywords or from the attributes of a domain object."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("null")
    return value


NOT_NULL = BeforeValidator(_not_null)
"""Marks a field that may be left out, but not be null."""


def utc_text(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def job_id_schema(*prefixes: str) -> dict[str, str]:
    return {"type": "string", "pattern": f"^(?:{'|'.join(prefixes)})_[a-z2-7]{{26}}$"}


def job_id_path(description: str, *prefixes: str) -> Any:
    """Document a job's id in a path, without validating it: the key is checked first, and then nothing is found."""
    return Path(description=description, json_schema_extra=job_id_schema(*prefixes))


NO_NUL = Field(json_schema_extra={"pattern": r"^[^\u0000]*$"})
"""A text that has no other pattern has this one: the reader of JSON refuses NUL, and the documents say so."""
Prompt = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_PROMPT),
    Field(json_schema_extra={"pattern": r"^[^\u0000]*[^\u0000\u0085\s][^\u0000]*$"}),
]
"""U+0085 is white space to the service, but not to every reader of patterns."""
OptionalPrompt = Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_PROMPT), NO_NUL]
LINE_PATTERN = r"^[^\u0000-\u001f\u007f-\u009f]*$"
"""A text that is shown in one line, in a terminal too, has no control characters."""


def line(shortest: int, longest: int) -> StringConstraints:
    """Constrain a text to one line: trimmed, without control characters, of `shortest` to `longest` code points."""
    return StringConstraints(strip_whitespace=True, min_length=shortest, max_length=longest, pattern=LINE_PATTERN)


CatalogId = Annotated[str, Field(min_length=1, max_length=128), NO_NUL]
MAX_LORAS = 4


class LoraWish(RequestBody):
    """A LoRA, and how strongly it acts."""

    id: Annotated[CatalogId, Field(description="A LoRA that your account may use.")]
    weight: Annotated[float, Field(ge=-2, le=2, description="How strongly it acts; below 0 it acts the other way.")] = (
        USUAL_WEIGHT
    )


Steps = Annotated[int, Field(ge=1, le=150)]
Seed = Annotated[int | None, NOT_NULL, WithJsonSchema({"type": "integer"})]

DEFAULT_PAGE_SIZE = 50
PageSize = Annotated[int, Query(ge=1, le=200, description="Page size.")]


def page_after(pattern: str) -> Any:
    """Return a dependency: the place in a listing after which a page begins. It raises `InvalidParameter`."""
    schema = WithJsonSchema({"type": "string", "pattern": f"^{pattern}$"})
    query = Query(description="`next_cursor` of the previous page.")

    async def read(cursor: Annotated[str | None, schema, query] = None) -> Position | None:
        place = None if cursor is None else Position.read(cursor, pattern)
        if place is None and cursor is not None:
            raise InvalidParameter("cursor: must be the next_cursor of a previous page")
        return place

    return Depends(read)


def image_id_path(description: str) -> Any:
    return Path(description=description, json_schema_extra={"type": "string", "pattern": "^img_[a-z2-7]{26}$"})


JobId = Annotated[str, WithJsonSchema(job_id_schema("gen", "up"))]
AnyJobId = Annotated[str, WithJsonSchema(job_id_schema(*JOB_PREFIXES))]
"""Ids in the interfaces A and B, and in the jobs API."""
GenerationId = Annotated[str, WithJsonSchema(job_id_schema("gen"))]
ImageId = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^img_[a-z2-7]{26}$"})]
Url = Annotated[str, WithJsonSchema({"type": "string", "format": "uri"})]
UtcTime = Annotated[
    datetime,
    PlainSerializer(utc_text, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"}),
]
Count = Annotated[int, Field(ge=0)]
Pixels = Annotated[int, Field(ge=1, description="Pixels.")]
UnfinishedProgress = Annotated[int, Field(ge=0, le=99, description="Percent; never decreases.")]


class Failure(ResponseBody):
    """Why a job ended without images."""

    code: FailureCode
    message: str
