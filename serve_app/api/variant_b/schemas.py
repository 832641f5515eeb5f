"""Variant B's request and response models, and their translation to and from the domain."""

from collections.abc import Callable
from dataclasses import asdict
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, RootModel

from serve_app.api.openapi import EXAMPLE_ADAPTER_ID
from serve_app.api.responses import failure_of, time_left
from serve_app.api.schemas import (
    CatalogId,
    Failure,
    GenerationBody,
    GenerationId,
    OptionalPrompt,
    Prompt,
    ResponseBody,
    Seed,
    UnfinishedProgress,
    Url,
    UtcTime,
)
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import Variant

Side = Annotated[int, Field(ge=256, le=1024, multiple_of=8, description="Pixels: a multiple of 8.")]


class GenerationRequest(GenerationBody):
    """Body of `POST /v1/generate` with `X-API-Key`.

    `seed` is this service's one extension of the interface.
    """

    interface = Variant.B
    other_api_fields: ClassVar[dict[str, str]] = {
        "prompt": "belongs to the bearer interface; with X-API-Key send `positive_prompt`",
        "lora_id": "belongs to the bearer interface; with X-API-Key send `model_id`",
        "guidance_scale": "belongs to the bearer interface; with X-API-Key send `guidance`",
        "num_images": "belongs to the bearer interface; with X-API-Key each run makes one image",
        "steps": "belongs to the bearer interface; the X-API-Key interface has no such field",
    }

    prompt: Annotated[
        Prompt,
        Field(alias="positive_prompt", description="What the image shows. White space around it does not count."),
    ]
    negative_prompt: Annotated[OptionalPrompt, Field(description="What the image should not show.")] = ""
    lora_id: Annotated[CatalogId, Field(alias="model_id", description="A model from the models list.")]
    lora_weight: Annotated[float, Field(ge=0, le=2, description="How strongly the model's LoRA acts.")] = 0.75
    guidance_scale: Annotated[
        float, Field(alias="guidance", ge=1, le=20, description="How closely the image follows the prompt.")
    ] = 7.5
    width: Side = 512
    height: Side = 512
    seed: Annotated[Seed, Field(description="The same seed gives the same image. Left out: the service draws one.")] = (
        None
    )


GENERATION_EXAMPLES: dict[str, dict[str, Any]] = {
    "Shortest": {
        "positive_prompt": "purple mountains under a black sky with a yellow moon",
        "model_id": EXAMPLE_ADAPTER_ID,
    },
    "Everything": {
        "positive_prompt": "a yellow flower with a red middle on a blue background",
        "negative_prompt": "green",
        "model_id": EXAMPLE_ADAPTER_ID,
        "lora_weight": 0.8,
        "guidance": 6.5,
        "width": 640,
        "height": 512,
        "seed": 7,
    },
}


class Acknowledgement(ResponseBody):
    """The run is durable and will end in `completed` or `failed`."""

    run_id: GenerationId
    status: Literal["queued"]
    estimated_time: Annotated[int, Field(ge=1, description="Seconds until completion.")]


class QueuedRun(ResponseBody):
    """A run that waits."""

    run_id: GenerationId
    status: Literal["queued"]
    progress: UnfinishedProgress


class ProcessingRun(ResponseBody):
    """A run that is being worked on."""

    run_id: GenerationId
    status: Literal["processing"]
    progress: UnfinishedProgress


class CompletedRun(ResponseBody):
    """A run whose image is stored."""

    run_id: GenerationId
    status: Literal["completed"]
    progress: Literal[100]
    image_url: Annotated[Url, Field(description="The PNG; opens without the key.")]


class FailedRun(ResponseBody):
    """A run that ended without an image."""

    run_id: GenerationId
    status: Literal["failed"]
    progress: UnfinishedProgress
    error: Failure


class Run(RootModel[Annotated[QueuedRun | ProcessingRun | CompletedRun | FailedRun, Field(discriminator="status")]]):
    """A run's record; `status` says which fields it has."""


class Model(ResponseBody):
    """A LoRA model."""

    id: Annotated[CatalogId, Field(description="Send it as `model_id`.")]
    name: str
    description: str
    created_at: UtcTime


class Models(ResponseBody):
    """The models that the account may use."""

    models: list[Model]


def acknowledgement(job: Job) -> Acknowledgement:
    """Answer `queued`, whatever has happened since; the estimate is in whole seconds, at least one."""
    estimated_time = max(1, ceil(time_left(job).total_seconds()))
    return Acknowledgement(run_id=job.id, status="queued", estimated_time=estimated_time)


def run_record(job: Job, url_of: Callable[[str], str]) -> dict[str, Any]:
    """Return a `Run` as plain values; every end without an image is `failed`. `url_of` signs URIs."""
    if job.state is JobState.COMPLETED:
        image_url = url_of(job.images[0].image_uri)
        return {"run_id": job.id, "status": "completed", "progress": 100, "image_url": image_url}
    if job.state.is_terminal:
        error = asdict(failure_of(job))
        return {"run_id": job.id, "status": "failed", "progress": job.progress, "error": error}
    if job.state is JobState.QUEUED and job.started_at is None:  # once started, it stays processing
        return {"run_id": job.id, "status": "queued", "progress": job.progress}
    return {"run_id": job.id, "status": "processing", "progress": job.progress}
