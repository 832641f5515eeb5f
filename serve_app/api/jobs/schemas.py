"""Response models of `/v1/jobs`: real states, the request with its defaults, the seed of each image."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.responses import estimated_completion, failure_of
from serve_app.api.schemas import Failure, ImageId, JobId, Pixels, ResponseBody, Url, UtcTime
from serve_app.domain import jobs
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import GenerationRequest, Variant

Cursor = Annotated[str | None, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,14}-(?:gen|up)_[a-z2-7]{26}$"})]

Count = Annotated[int, Field(ge=0)]
OptionalTime = UtcTime | SkipJsonSchema[None]


class GenerationFields(ResponseBody):
    """What a generation was asked for, defaults filled in."""

    prompt: str
    negative_prompt: str
    lora_id: str
    lora_weight: float
    width: Pixels
    height: Pixels
    guidance_scale: float
    steps: Count
    num_images: Count


class UpscaleFields(ResponseBody):
    """What an upscale was asked for."""

    image_id: ImageId
    scale_factor: Count


class Image(ResponseBody):
    """A stored image, with what its file can be checked against."""

    image_id: ImageId
    url: Url
    width: Pixels
    height: Pixels
    size_bytes: Count
    sha256: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"})]
    seed: Annotated[
        str | None,
        WithJsonSchema({"type": "string", "pattern": "^[0-9]+$"}),
        Field(description="Decimal text: JavaScript's numbers end at 2^53. Absent for an upscale."),
    ] = None


class _AnyJob(ResponseBody):
    id: JobId
    kind: JobKind
    interface: Variant
    progress: Annotated[int, Field(ge=0, le=100, description="Percent; it never falls.")]
    attempt: Annotated[Count, Field(description="How often a worker has begun it.")]
    created_at: UtcTime
    request: Annotated[
        GenerationFields | UpscaleFields | SkipJsonSchema[None],
        Field(description="Absent when this version of the service cannot read it."),
    ] = None
    started_at: Annotated[OptionalTime, Field(description="Once a worker has begun.")] = None


class UnfinishedJob(_AnyJob):
    """A job that waits or runs."""

    status: Literal["queued", "running"]
    estimated_completion_time: Annotated[OptionalTime, Field(description="Of a single job, not in lists.")] = None


class CompletedJob(_AnyJob):
    """A job whose images are stored."""

    status: Literal["completed"]
    finished_at: Annotated[OptionalTime, Field(description="When it ended.")] = None
    images: list[Image]


class EndedJob(_AnyJob):
    """A job that ended without images."""

    status: Literal["failed", "canceled", "expired"]
    finished_at: Annotated[OptionalTime, Field(description="When it ended.")] = None
    error: Failure


AnyJob = UnfinishedJob | CompletedJob | EndedJob


class Job(RootModel[Annotated[AnyJob, Field(discriminator="status")]]):
    """A job; `status` says which fields it has."""


class Jobs(ResponseBody):
    """A page of jobs, newest first."""

    jobs: list[Job]
    next_cursor: Annotated[Cursor, Field(description="Where the next page begins; absent on the last.")] = None


def job_record(job: jobs.Job, url_of: Callable[[str], str]) -> AnyJob:
    """The job as it is. `url_of` signs an image URI."""
    common: dict[str, Any] = {
        "id": job.id,
        "kind": job.kind,
        "interface": job.variant,
        "status": job.state,
        "progress": job.progress,
        "attempt": job.attempt,
        "created_at": job.created_at,
        "request": job.request,
        "started_at": job.started_at,
    }
    if job.state is JobState.COMPLETED:
        return CompletedJob(**common, finished_at=job.finished_at, images=_images(job, url_of))
    if job.state.is_terminal:
        return EndedJob(**common, finished_at=job.finished_at, error=Failure.model_validate(failure_of(job)))
    estimate = estimated_completion(job) if job.finish_estimate is not None else None
    return UnfinishedJob(**common, estimated_completion_time=estimate)


def _images(job: jobs.Job, url_of: Callable[[str], str]) -> list[Image]:
    """The images that were not deleted, each with its own seed."""
    seeds = job.request.seeds if isinstance(job.request, GenerationRequest) else None
    return [
        Image(
            image_id=image.image_id,
            url=url_of(image.image_uri),
            width=image.width,
            height=image.height,
            size_bytes=image.size_bytes,
            sha256=image.sha256,
            seed=None if seeds is None else str(seeds[image.index]),
        )
        for image in job.images
    ]
