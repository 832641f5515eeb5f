"""Variant A's request and response models, and their translation to and from the domain."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, RootModel

from serve_app.api.openapi import EXAMPLE_ADAPTER_ID
from serve_app.api.responses import estimated_completion, failure_of
from serve_app.api.schemas import (
    CatalogId,
    Failure,
    GenerationBody,
    ImageId,
    JobId,
    Pixels,
    Prompt,
    RequestBody,
    ResponseBody,
    Seed,
    UnfinishedProgress,
    Url,
    UtcTime,
    utc_text,
)
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import UpscaleDraft, Variant

Side = Literal[512, 768]


class GenerationRequest(GenerationBody):
    """Body of `POST /v1/generate` with a bearer key."""

    interface = Variant.A
    other_api_fields: ClassVar[dict[str, str]] = {
        "positive_prompt": "belongs to the X-API-Key interface; with a bearer key send `prompt`",
        "negative_prompt": "belongs to the X-API-Key interface; the bearer interface has no such field",
        "model_id": "belongs to the X-API-Key interface; with a bearer key send `lora_id`",
        "guidance": "belongs to the X-API-Key interface; with a bearer key send `guidance_scale`",
    }

    prompt: Annotated[Prompt, Field(description="What the image shows. White space around it does not count.")]
    lora_id: Annotated[CatalogId, Field(description="The LoRA model to use.")]
    lora_weight: Annotated[float, Field(ge=0.1, le=1.0, description="How strongly the LoRA acts.")] = 0.75
    width: Annotated[Side, Field(description="Pixels.")] = 512
    height: Annotated[Side, Field(description="Pixels.")] = 512
    num_images: Annotated[int, Field(ge=1, le=4, description="How many images; image i uses seed + i.")] = 1
    guidance_scale: Annotated[
        float,
        Field(ge=1, le=20, description="Classifier-free guidance scale: how closely the image follows the prompt."),
    ] = 7.5
    steps: Annotated[
        int, Field(ge=20, le=50, description="Denoising steps: more take longer and show finer detail.")
    ] = 30
    seed: Annotated[
        Seed, Field(description="The same seed gives the same images. Left out: the service draws one.")
    ] = None


_SHORTEST = {"prompt": "purple mountains under a black sky with a yellow moon", "lora_id": EXAMPLE_ADAPTER_ID}
GENERATION_EXAMPLES: dict[str, dict[str, Any]] = {
    "Shortest": _SHORTEST,
    "Everything": {
        **_SHORTEST,
        "lora_weight": 0.8,
        "width": 768,
        "height": 512,
        "num_images": 2,
        "guidance_scale": 6.5,
        "steps": 25,
        "seed": 7,
    },
}


class UpscaleRequest(RequestBody):
    """Body of `POST /v1/upscale`."""

    image_id: Annotated[CatalogId, Field(description="An image of your account, from a completed request.")]
    scale_factor: Annotated[
        Literal[2, 4],
        Field(description="How many times wider and higher the result is; it may hold at most 16 megapixels."),
    ] = 2

    def to_domain(self) -> UpscaleDraft:
        return UpscaleDraft(**self.model_dump(), interface=Variant.A)


class Acknowledgement(ResponseBody):
    """The request is durable and will end in `completed` or `failed`."""

    request_id: JobId
    status: Literal["processing"]
    estimated_completion_time: UtcTime


class Image(ResponseBody):
    """A generated image."""

    image_id: ImageId
    url: Annotated[Url, Field(description="The PNG; opens without the key.")]
    width: Pixels
    height: Pixels


class ProcessingRecord(ResponseBody):
    """A request that waits or runs."""

    request_id: JobId
    status: Literal["processing"]
    progress: UnfinishedProgress
    estimated_completion_time: UtcTime


class CompletedRecord(ResponseBody):
    """A request whose images are stored."""

    request_id: JobId
    status: Literal["completed"]
    images: Annotated[list[Image], Field(min_length=1, max_length=4)]
    completed_at: UtcTime


class FailedRecord(ResponseBody):
    """A request that ended without images."""

    request_id: JobId
    status: Literal["failed"]
    error: Failure


class StatusRecord(
    RootModel[Annotated[ProcessingRecord | CompletedRecord | FailedRecord, Field(discriminator="status")]]
):
    """A request's record; `status` says which fields it has."""


def acknowledgement(job: Job) -> Acknowledgement:
    return Acknowledgement(request_id=job.id, status="processing", estimated_completion_time=estimated_completion(job))


def status_record(job: Job, url_of: Callable[[str], str]) -> dict[str, Any]:
    """Return a `StatusRecord` as plain values.

    All of them are ours, and a model of them costs a poll a tenth of its time. Waiting is `processing`, and every end
    without images is `failed`. `url_of` signs an image URI.
    """
    if job.state is JobState.COMPLETED:
        assert job.finished_at is not None, job.id
        images = [
            {
                "image_id": image.image_id,
                "url": url_of(image.image_uri),
                "width": image.width,
                "height": image.height,
            }
            for image in job.images
        ]
        completed_at = utc_text(job.finished_at)
        return {"request_id": job.id, "status": "completed", "images": images, "completed_at": completed_at}
    if job.state.is_terminal:
        return {"request_id": job.id, "status": "failed", "error": asdict(failure_of(job))}
    estimate = utc_text(estimated_completion(job))
    return {
        "request_id": job.id,
        "status": "processing",
        "progress": job.progress,
        "estimated_completion_time": estimate,
    }
