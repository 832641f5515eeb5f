"""Request and response models of `/v1/loras`."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.schemas import NOT_NULL, CatalogId, RequestBody, ResponseBody, Url, UtcTime, line
from serve_app.domain.catalog import Adapter, Offer, Recommended

CURSOR = r"-?[0-9]{1,14}-[A-Za-z0-9_\-]{1,128}"

Cursor = Annotated[str | None, WithJsonSchema({"type": "string", "pattern": f"^{CURSOR}$"})]


class Found(ResponseBody):
    """What the check of its file saw."""

    summary: Annotated[str, Field(description="One sentence.")]
    family: str
    rank: Annotated[int, Field(ge=1, description="The highest rank among its layers.")]
    layers: Annotated[int, Field(ge=1, description="Number of layers it changes.")]
    targets: list[str]
    components: list[str]
    writer: Annotated[str, Field(description="The tool that wrote the file; empty if unknown.")]
    algorithm: Annotated[str, Field(description="LoRA, DoRA, LoHa, LoKr or IA3; empty for files checked earlier.")] = ""
    suggested_trigger_words: Annotated[
        list[str],
        Field(description="From the file's own trigger phrase and commonest tags; yours are `trigger_words`."),
    ] = Field(default_factory=list[str])
    metadata: Annotated[
        dict[str, str] | SkipJsonSchema[None],
        Field(description="What the file says of its training. Only for a single LoRA of your own, not in lists."),
    ] = None


class SharedWith(ResponseBody):
    """An account that may use your LoRA."""

    account_id: str
    name: str


class Lora(ResponseBody):
    """A LoRA that your account may use."""

    id: Annotated[CatalogId, Field(description="Send it as `lora_id` (interface A) or `model_id` (interface B).")]
    name: str
    description: str
    trigger_words: list[str]
    base_model: str
    base_models: Annotated[
        list[str],
        Field(
            description="What `POST /v1/jobs` takes as `base_model` with it: its own, and others of its family and widths. "
            "Interfaces A and B draw on its own."
        ),
    ]
    created_at: UtcTime
    is_own: Annotated[bool, Field(description="Whether your account owns it, and may change, share and delete it.")]
    sha256: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"})]
    size_bytes: Annotated[
        Annotated[int, Field(ge=1)] | SkipJsonSchema[None],
        Field(description="Absent for LoRAs provided by the operator."),
    ] = None
    found: Annotated[Found | SkipJsonSchema[None], Field(description="Absent for LoRAs provided by the operator.")] = (
        None
    )
    recommended_steps: Annotated[
        Annotated[int, Field(ge=1)] | SkipJsonSchema[None],
        Field(description="What it or its base model was made for, such as 8. Absent where nothing is known."),
    ] = None
    recommended_guidance: Annotated[
        Annotated[float, Field(ge=1)] | SkipJsonSchema[None],
        Field(description="Likewise the guidance scale; 1 is none. Requests keep their defaults: send it with them."),
    ] = None
    sample_url: Annotated[
        Url | SkipJsonSchema[None],
        Field(
            description=(
                "A picture drawn with it, signed as images are. Absent while there is none, and for the operator's."
            )
        ),
    ] = None
    shared_with: Annotated[
        list[SharedWith] | SkipJsonSchema[None], Field(description="Only for a single LoRA of your own, not in lists.")
    ] = None
    warning: Annotated[
        str | SkipJsonSchema[None],
        Field(
            description="Only in the answer to an upload: why its jobs would wait now. Absent where nothing is known."
        ),
    ] = None


class Loras(ResponseBody):
    """A page of LoRAs, newest first."""

    loras: list[Lora]
    next_cursor: Annotated[
        Cursor, Field(description="Pass it as `cursor` for the next page, also of a short one; absent on the last.")
    ] = None


def lora_record(
    adapter: Adapter,
    account_id: str,
    shared_with: Mapping[str, str] | None = None,
    *,
    recommended: Recommended,
    drawn_on: Sequence[str],
    sample_url: str | None = None,
    warning: str = "",
) -> Lora:
    """Return the adapter as the account sees it; with `shared_with`, as its owner does.

    `drawn_on` are ids of base models.
    """
    is_own = adapter.owner == account_id
    shared = [SharedWith(account_id=each, name=name) for each, name in sorted((shared_with or {}).items())]
    shows_all = is_own and shared_with is not None
    return Lora(
        id=adapter.id,
        name=adapter.name,
        description=adapter.description,
        trigger_words=list(adapter.trigger_words),
        base_model=adapter.base_model,
        base_models=list(drawn_on),
        created_at=adapter.created_at,
        is_own=is_own,
        sha256=adapter.sha256,
        size_bytes=adapter.size_bytes or None,
        found=_found(adapter, shows_metadata=shows_all),
        recommended_steps=recommended.steps,
        recommended_guidance=recommended.guidance,
        sample_url=sample_url,
        shared_with=shared if shows_all else None,
        warning=warning or None,
    )


def _found(adapter: Adapter, *, shows_metadata: bool) -> Found | None:
    """Return the facts found in its file; None for a row of the catalog file."""
    if not adapter.found:
        return None
    hidden = set[str]() if shows_metadata else {"metadata"}
    return Found(**{name: adapter.found[name] for name in Found.model_fields.keys() - hidden if name in adapter.found})


MAX_WORDS, MAX_WORD = 20, 64

Name = Annotated[str, line(1, 100)]
Description = Annotated[str, line(0, 1000)]
Word = Annotated[str, line(1, MAX_WORD)]
Words = Annotated[list[Word], Field(max_length=MAX_WORDS)]


class NewLora(RequestBody):
    """What a form and a reference both say of a LoRA."""

    name: Annotated[Name, Field(description="Display name.")]
    base_model: Annotated[CatalogId, Field(description="The base model it was trained for.")]
    description: Annotated[Description, Field(description="A short description of its style.")] = ""

    def offer(self, words: list[str]) -> Offer:
        said = {"name": self.name, "base_model": self.base_model, "description": self.description}
        return Offer(**said, trigger_words=tuple(words))


class LoraForm(NewLora):
    """The text fields of the form of `POST /v1/loras`."""

    trigger_words: Annotated[
        str,
        line(0, MAX_WORDS * (MAX_WORD + 2)),
        Field(description="Comma-separated words that activate it in a prompt."),
    ] = ""

    def to_offer(self) -> Offer:
        return self.offer(split_words(self.trigger_words)[:MAX_WORDS])


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$", min_length=64, max_length=64)]


class LoraReference(NewLora):
    """Weights that are not sent: those of a LoRA that the account has, or at an allowed address."""

    # openapi-python-client would take `oneOf` for an `Any`, and its `add_lora` would fail whatever it is given.
    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["sha256"]},
            "then": {"not": {"required": ["source"]}},
            "else": {"required": ["source"]},
        }
    )

    trigger_words: Annotated[Words, Field(description="Words that activate it in a prompt.")] = Field(
        default_factory=list[str]
    )
    sha256: Annotated[
        Sha256 | SkipJsonSchema[None],
        NOT_NULL,
        Field(
            description=(
                "SHA-256 of weights that a LoRA of your account already has; for any others the answer is 404: "
                "upload the file."
            )
        ),
    ] = None
    source: Annotated[
        Annotated[str, line(1, 1000)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(
            description="Address of the file, or of a PEFT folder if it ends in `/`; must be allowed by the operator."
        ),
    ] = None

    def to_offer(self) -> Offer:
        return self.offer(self.trigger_words)


class LoraChange(RequestBody):
    """What changes; the weights never do."""

    name: Annotated[Name | SkipJsonSchema[None], NOT_NULL, Field(description="Display name.")] = None
    description: Annotated[
        Description | SkipJsonSchema[None], NOT_NULL, Field(description="A short description of its style.")
    ] = None
    trigger_words: Annotated[
        Words | SkipJsonSchema[None], NOT_NULL, Field(description="Words that activate it in a prompt.")
    ] = None


class GrantRequest(RequestBody):
    account: Annotated[str, line(1, 200), Field(description="Another account's id or name.")]


def split_words(text: str) -> list[str]:
    """Split a text of trigger words with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]
