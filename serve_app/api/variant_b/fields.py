"""Variant B's request body: its field names, bounds and defaults, and what they mean indoors."""

import secrets
from typing import Annotated

from pydantic import Field

from serve_app.api.fields import Body, CatalogId, OptionalPrompt, Prompt, Rule, Seed
from serve_app.domain.requests import GenerationRequest, image_seeds

DRAWN_SEEDS = 2**53
"""Seeds the service draws are exact in every JSON reader."""

FOREIGN = {
    "prompt": "belongs to the bearer interface; with X-API-Key send `positive_prompt`",
    "lora_id": "belongs to the bearer interface; with X-API-Key send `model_id`",
    "guidance_scale": "belongs to the bearer interface; with X-API-Key send `guidance`",
    "num_images": "belongs to the bearer interface; with X-API-Key each run makes one image",
    "steps": "belongs to the bearer interface; the X-API-Key interface has no such field",
}

LoraWeight = Annotated[
    float,
    Field(ge=0, le=2, description="How strongly the model's LoRA acts."),
    Rule("must be between 0 and 2", "must be a number between 0 and 2"),
]
Guidance = Annotated[
    float,
    Field(ge=1, le=20, description="How closely the image follows the prompt."),
    Rule("must be between 1 and 20", "must be a number between 1 and 20"),
]
Side = Annotated[
    int,
    Field(ge=256, le=1024, multiple_of=8, description="Pixels: a multiple of 8."),
    Rule("must be a multiple of 8 between 256 and 1024", "must be an integer, a multiple of 8 between 256 and 1024"),
]


class GenerationBody(Body):
    """Body of `POST /v1/generate` with `X-API-Key`. `seed` is this service's one extension of the document."""

    positive_prompt: Annotated[Prompt, Field(description="What the image shows. White space around it does not count.")]
    negative_prompt: Annotated[OptionalPrompt, Field(description="What the image should not show.")] = ""
    model_id: Annotated[CatalogId, Field(description="A model from the models list.")]
    lora_weight: LoraWeight = 0.75
    guidance: Guidance = 7.5
    width: Side = 512
    height: Side = 512
    seed: Annotated[Seed, Field(description="The same seed gives the same image. Left out: drawn for you.")] = None

    def to_request(self) -> GenerationRequest:
        seed = secrets.randbelow(DRAWN_SEEDS) if self.seed is None else self.seed
        return GenerationRequest(
            prompt=self.positive_prompt,
            negative_prompt=self.negative_prompt,
            lora_id=self.model_id,
            lora_weight=self.lora_weight,
            width=self.width,
            height=self.height,
            guidance_scale=self.guidance,
            seeds=image_seeds(seed, 1),
        )
