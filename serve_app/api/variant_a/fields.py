"""Variant A's request bodies: its field names, bounds and defaults, and what they mean indoors."""

import secrets
from typing import Annotated, Literal

from pydantic import Field

from serve_app.api.fields import Body, CatalogId, Prompt, Rule, Seed
from serve_app.domain.requests import GenerationRequest, image_seeds

DRAWN_SEEDS = 2**53
"""Seeds the service draws are exact in every JSON reader."""

FOREIGN = {
    "positive_prompt": "belongs to the X-API-Key interface; with a bearer key send `prompt`",
    "negative_prompt": "belongs to the X-API-Key interface; the bearer interface has no such field",
    "model_id": "belongs to the X-API-Key interface; with a bearer key send `lora_id`",
    "guidance": "belongs to the X-API-Key interface; with a bearer key send `guidance_scale`",
}

LoraWeight = Annotated[
    float,
    Field(ge=0.1, le=1.0, description="How strongly the LoRA acts."),
    Rule("must be between 0.1 and 1.0", "must be a number between 0.1 and 1.0"),
]
Side = Annotated[Literal[512, 768], Rule("must be 512 or 768", "must be 512 or 768")]
NumImages = Annotated[
    int,
    Field(ge=1, le=4, description="How many images to make; image i uses seed + i."),
    Rule("must be between 1 and 4", "must be an integer between 1 and 4"),
]
GuidanceScale = Annotated[
    float,
    Field(ge=1, le=20, description="Classifier-free guidance scale: how closely the image follows the prompt."),
    Rule("must be between 1 and 20", "must be a number between 1 and 20"),
]
Steps = Annotated[
    int,
    Field(ge=20, le=50, description="Denoising steps: more take longer and show finer detail."),
    Rule("must be between 20 and 50", "must be an integer between 20 and 50"),
]
ScaleFactor = Annotated[
    Literal[2, 4],
    Field(description="How many times wider and higher the result is; it may hold at most 16 megapixels."),
    Rule("must be 2 or 4", "must be 2 or 4"),
]


class GenerationBody(Body):
    """Body of `POST /v1/generate` with a bearer key."""

    prompt: Annotated[Prompt, Field(description="What the image shows. White space around it does not count.")]
    lora_id: Annotated[CatalogId, Field(description="The LoRA model to use.")]
    lora_weight: LoraWeight = 0.75
    width: Annotated[Side, Field(description="Pixels.")] = 512
    height: Annotated[Side, Field(description="Pixels.")] = 512
    num_images: NumImages = 1
    guidance_scale: GuidanceScale = 7.5
    steps: Steps = 30
    seed: Annotated[Seed, Field(description="The same seed gives the same images. Left out: drawn for you.")] = None

    def to_request(self) -> GenerationRequest:
        seed = secrets.randbelow(DRAWN_SEEDS) if self.seed is None else self.seed
        return GenerationRequest(
            prompt=self.prompt,
            lora_id=self.lora_id,
            lora_weight=self.lora_weight,
            width=self.width,
            height=self.height,
            guidance_scale=self.guidance_scale,
            steps=self.steps,
            seeds=image_seeds(seed, self.num_images),
        )


class UpscaleBody(Body):
    """Body of `POST /v1/upscale`."""

    image_id: Annotated[CatalogId, Field(description="An image of your account, from a completed request.")]
    scale_factor: ScaleFactor = 2
