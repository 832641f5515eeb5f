"""Response models of `/v1/jobs`: real states, the request with its defaults, the seed of each image."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.responses import estimated_completion, failure_of
from serve_app.api.schemas import Failure, ImageId, JobId, Pixels, ResponseBody, Url, UtcTime, utc_text
from serve_app.domain import jobs
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import GenerationRequest, Request, Variant

CURSOR = "[0-9]{1,14}-(?:gen|up)_[a-z2-7]{26}"
Cursor = Annotated[str | None, WithJsonSchema({"type": "string", "pattern": f"^{CURSOR}$"})]

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
        Field(description="A decimal string, since JavaScript numbers are exact only up to 2^53. Absent for upscales."),
    ] = None


class _AnyJob(ResponseBody):
    id: JobId
    kind: JobKind
    interface: Variant
    progress: Annotated[int, Field(ge=0, le=100, description="Percent; never decreases.")]
    attempt: Annotated[Count, Field(description="Number of times a worker has started it.")]
    created_at: UtcTime
    request: Annotated[
        GenerationFields | UpscaleFields | SkipJsonSchema[None],
        Field(description="Absent when this version of the service cannot read it."),
    ] = None
    started_at: Annotated[OptionalTime, Field(description="Present once a worker has started it.")] = None


class UnfinishedJob(_AnyJob):
    """A job that waits or runs."""

    status: Literal["queued", "running"]
    estimated_completion_time: Annotated[OptionalTime, Field(description="Only for a single job, not in lists.")] = None


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
    next_cursor: Annotated[
        Cursor,
        Field(
            description=(
                "Pass it as `cursor` for the next page, also of one with fewer jobs than `limit`; absent on the last."
            )
        ),
    ] = None


def job_record(job: jobs.Job, url_of: Callable[[str], str]) -> dict[str, Any]:
    """Return a `Job` as plain values; a model of them costs a poll a tenth of its time.

    `url_of` signs an image URI. Fields without a value are absent.
    """
    record: dict[str, Any] = {
        "id": job.id,
        "kind": job.kind,
        "interface": job.variant,
        "progress": job.progress,
        "attempt": job.attempt,
        "created_at": utc_text(job.created_at),
    }
    if job.request is not None:
        record["request"] = request_record(job.request)
    if job.started_at is not None:
        record["started_at"] = utc_text(job.started_at)
    record["status"] = job.state
    if job.finished_at is not None and job.state.is_terminal:
        record["finished_at"] = utc_text(job.finished_at)
    if job.state is JobState.COMPLETED:
        record["images"] = _images(job, url_of)
    elif job.state.is_terminal:
        record["error"] = asdict(failure_of(job))
    elif job.finish_estimate is not None:
        record["estimated_completion_time"] = utc_text(estimated_completion(job))
    return record


def request_record(request: Request) -> dict[str, Any]:
    fields = GenerationFields if isinstance(request, GenerationRequest) else UpscaleFields
    return {name: getattr(request, name) for name in fields.model_fields}


def _images(job: jobs.Job, url_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the images that were not deleted, each with its own seed."""
    seeds = job.request.seeds if isinstance(job.request, GenerationRequest) else None
    return [
        {
            "image_id": image.image_id,
            "url": url_of(image.image_uri),
            "width": image.width,
            "height": image.height,
            "size_bytes": image.size_bytes,
            "sha256": image.sha256,
            **({} if seeds is None else {"seed": str(seeds[image.index])}),
        }
        for image in job.images
    ]
