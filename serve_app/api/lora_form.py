"""Request models of LoRAs: an upload, a reference to weights elsewhere, a change, a sharing."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.schemas import NOT_NULL, CatalogId, RequestBody, line
from serve_app.service.register import Offer

MAX_WORDS, MAX_WORD = 20, 64

Name = Annotated[str, line(1, 100)]
Description = Annotated[str, line(0, 1000)]
Word = Annotated[str, line(1, MAX_WORD)]
Words = Annotated[list[Word], Field(max_length=MAX_WORDS)]


class LoraForm(RequestBody):
    """The text fields of the form of `POST /v1/loras`."""

    name: Annotated[Name, Field(description="Display name.")]
    base_model: Annotated[CatalogId, Field(description="The base model it was trained for.")]
    description: Annotated[Description, Field(description="A short description of its style.")] = ""
    trigger_words: Annotated[
        str,
        line(0, MAX_WORDS * (MAX_WORD + 2)),
        Field(description="Comma-separated words that activate it in a prompt."),
    ] = ""

    def to_offer(self) -> Offer:
        words = tuple(split_words(self.trigger_words)[:MAX_WORDS])
        return Offer(name=self.name, base_model=self.base_model, description=self.description, trigger_words=words)


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$", min_length=64, max_length=64)]


class LoraReference(RequestBody):
    """Weights that are not sent: those of a LoRA that the account has, or at an allowed address."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["sha256"]}, {"required": ["source"]}]})

    name: Annotated[Name, Field(description="Display name.")]
    base_model: Annotated[CatalogId, Field(description="The base model it was trained for.")]
    description: Annotated[Description, Field(description="A short description of its style.")] = ""
    trigger_words: Annotated[Words, Field(description="Words that activate it in a prompt.")] = Field(
        default_factory=list[str]
    )
    sha256: Annotated[
        Sha256 | SkipJsonSchema[None],
        NOT_NULL,
        Field(
            description="SHA-256 of weights that a LoRA of your account already has; for any others the answer is 404: upload the file."
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
        words = tuple(self.trigger_words)
        return Offer(name=self.name, base_model=self.base_model, description=self.description, trigger_words=words)


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
