"""The playground's form: which fields it has, what they take, and which request they make."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from serve_app.api.routing import validate
from serve_app.api.schemas import CatalogId, OptionalPrompt, Prompt
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import GenerationRequest

EXAMPLES = (
    "purple mountains under a black sky with a yellow moon",
    "a yellow flower with a red middle on a blue background",
    "a large red heart in the center on a pink background",
)
"""Prompts that the bundled model draws well."""
Size = Literal["512x512", "768x512", "512x768", "768x768"]
SIZES: Mapping[Size, str] = {
    "512x512": "Square, 512 × 512",
    "768x512": "Wide, 768 × 512",
    "512x768": "Tall, 512 × 768",
    "768x768": "Large square, 768 × 768",
}
DEFAULTS: Mapping[str, str] = {
    "prompt": "", "negative_prompt": "", "lora_id": "", "lora_weight": "0.75", "size": "512x512",
    "steps": "30", "guidance_scale": "7.5", "num_images": "1", "seed": "",
}  # fmt: skip
TUNED = ("steps", "guidance_scale", "negative_prompt", "seed")
"""These fields are shown only on demand, unless one of them differs from its default."""

COMPARISON: Mapping[str, str] = {"across": "", "weights": "0.25, 0.5, 0.75, 1", "seeds": "3"}
"""The form that compares has these fields beside the playground's."""


def draw_seed() -> int:
    """Draw a seed that is short enough to be copied by hand."""
    return secrets.randbelow(2**32)


def _absent(value: object) -> object:
    return None if value == "" else value


class PlaygroundForm(BaseModel):
    """The fields of interface A, a negative prompt, and as few steps as a LoRA may want.

    For an empty seed the service draws one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: Prompt
    negative_prompt: OptionalPrompt = ""
    lora_id: CatalogId
    lora_weight: Annotated[float, Field(ge=0.1, le=1.0)] = 0.75
    size: Size = "512x512"
    steps: Annotated[int, Field(ge=1, le=50)] = 30
    guidance_scale: Annotated[float, Field(ge=1, le=20)] = 7.5
    num_images: Annotated[int, Field(ge=1, le=4)] = 1
    seed: Annotated[int | None, BeforeValidator(_absent), WithJsonSchema({"type": "integer"})] = None

    def to_domain(self) -> GenerationRequest:
        width, height = map(int, self.size.split("x"))
        fields: dict[str, Any] = {"seed": draw_seed(), "width": width, "height": height}
        return GenerationRequest.asked(**fields | self.model_dump(exclude={"size"}, exclude_none=True))


def read_playground_form(fields: Mapping[str, str]) -> PlaygroundForm:
    """Raises `InvalidParameter` in words for a person."""
    try:
        return validate(PlaygroundForm, {name: fields[name] for name in DEFAULTS if name in fields})
    except InvalidParameter as error:
        raise InvalidParameter(error.message.replace("_", " ")) from None


def values_of(request: GenerationRequest) -> dict[str, str]:
    """The form's fields as they were for a request."""
    values = {name: getattr(request, name) for name in DEFAULTS if name != "size"}
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return {**texts, "size": f"{request.width}x{request.height}"}
