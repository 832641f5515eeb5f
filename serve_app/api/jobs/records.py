"""The record of a job that `/v1/jobs` shows: real states, the request with its defaults, the seed of each image."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.jobs.schemas import GenerationFields, UpscaleFields, request_record
from serve_app.api.openapi import EXAMPLE_ADAPTER_ID
from serve_app.api.responses import estimated_completion, failure_of
from serve_app.api.schemas import AnyJobId, Count, Failure, ImageId, Pixels, ResponseBody, Url, UtcTime, utc_text
from serve_app.domain import jobs
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant, is_composite
from serve_app.marking.xmp import SourceType

CURSOR = "[0-9]{1,14}-(?:gen|job|up)_[a-z2-7]{26}"
Cursor = Annotated[str | None, WithJsonSchema({"type": "string", "pattern": f"^{CURSOR}$"})]

OptionalTime = UtcTime | SkipJsonSchema[None]
ExpectedEnd = Annotated[OptionalTime, Field(description="Only for a single job, not in lists.")]


class Timings(ResponseBody):
    """Seconds of the parts of a completed job."""

    queue: Annotated[float, Field(description="Until the worker that completed it began.")]
    load: Annotated[float, Field(description="Loading its LoRAs.")]
    denoise: Annotated[float, Field(description="Denoising and decoding all images.")]
    store: float


class Marking(ResponseBody):
    """How a job's images say to machines that a model made them."""

    source_type: Annotated[
        SourceType,
        Field(
            description="The IPTC's digital source type; a composite where an uploaded picture was edited or enlarged."
        ),
    ]
    marks: Annotated[
        list[Literal["xmp", "c2pa", "watermark"]],
        Field(description="An XMP packet and a signed manifest of C2PA name the type; a watermark is in the pixels."),
    ]


class UnreadCharacters(ResponseBody):
    """How many characters at the end of each text the base model did not read: they are beyond its tokens."""

    prompt: Count
    negative_prompt: Count


class JobUsage(ResponseBody):
    """What a completed job used."""

    images: Count
    megapixel_steps: Annotated[float, Field(description="For an upscale, the megapixels of its result.")]
    worker_seconds: float


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
    seed_number: Annotated[int | SkipJsonSchema[None], Field(description="The same as a number.")] = None


class _AnyJob(ResponseBody):
    id: AnyJobId
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


class QueuedJob(_AnyJob):
    """A job that waits."""

    status: Literal["queued"]
    jobs_ahead: Annotated[
        Count | SkipJsonSchema[None], Field(description="How many jobs of your account are before it.")
    ] = None
    estimated_completion_time: ExpectedEnd = None


class RunningJob(_AnyJob):
    """A job that a worker has started."""

    status: Literal["running"]
    estimated_completion_time: ExpectedEnd = None


class CompletedJob(_AnyJob):
    """A job whose images are stored."""

    status: Literal["completed"]
    finished_at: Annotated[OptionalTime, Field(description="When it ended.")] = None
    images: list[Image]
    timings: Annotated[Timings | SkipJsonSchema[None], Field(description="Absent where they are not known.")] = None
    usage: Annotated[JobUsage | SkipJsonSchema[None], Field(description="Absent where it is not known.")] = None
    marking: Annotated[
        Marking | SkipJsonSchema[None], Field(description="Absent where this service marked no images.")
    ] = None
    unread_characters: Annotated[
        UnreadCharacters | SkipJsonSchema[None], Field(description="Absent where all of both texts was read.")
    ] = None


class EndedJob(_AnyJob):
    """A job that ended without images."""

    status: Literal["failed", "canceled", "expired"]
    finished_at: Annotated[OptionalTime, Field(description="When it ended.")] = None
    error: Failure


# TypeScript rules a shape out by `status` only where the shape has a single one.
AnyJob = QueuedJob | RunningJob | CompletedJob | EndedJob


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
        record |= _accounts_of(job)
    elif job.state.is_terminal:
        record["error"] = asdict(failure_of(job))
    else:
        if job.jobs_ahead is not None:
            record["jobs_ahead"] = job.jobs_ahead
        if job.finish_estimate is not None:
            record["estimated_completion_time"] = utc_text(estimated_completion(job))
    return record


def _accounts_of(job: jobs.Job) -> dict[str, Any]:
    """Return the `timings`, `usage`, `marking` and unread characters of a completed job, as far as they are known."""
    known: dict[str, Any] = {}
    if job.timings is not None and job.started_at is not None:
        queue = (job.started_at - job.created_at).total_seconds()
        known["timings"] = {"queue": queue, **asdict(job.timings)}
    if job.seconds is not None and job.request is not None:
        known["usage"] = {
            "images": job.request.num_images,
            "megapixel_steps": round(job.request.work, 6),
            "worker_seconds": job.seconds,
        }
    if job.marks and job.request is not None:
        source = SourceType.COMPOSITE if is_composite(job.request) else SourceType.GENERATED
        known["marking"] = {"source_type": source, "marks": list(job.marks)}
    if any(job.unread):
        known["unread_characters"] = job.unread._asdict()
    return known


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
            **({} if seeds is None else {"seed": str(seeds[image.index]), "seed_number": seeds[image.index]}),
        }
        for image in job.images
    ]


_REQUEST = GenerationRequest(
    prompt="purple mountains under a black sky with a yellow moon",
    loras=(LoraUse(EXAMPLE_ADAPTER_ID),),
    width=768,
    seeds=(7,),
)
_JOB: dict[str, Any] = {
    "id": "gen_c4zq2e7wvbbxm5l3r6yhtajd2i",
    "kind": "generation",
    "interface": "a",
    "attempt": 1,
    "created_at": "2026-11-21T12:00:00Z",
    "request": request_record(_REQUEST),
    "started_at": "2026-11-21T12:00:01Z",
}
_COMPLETED: dict[str, Any] = {
    **_JOB,
    "status": "completed",
    "progress": 100,
    "finished_at": "2026-11-21T12:00:08Z",
    "images": [
        {
            "image_id": "img_nq6w3s5kfrzp2xvd7bmtch4ylu",
            "url": "https://images.example/mountains.png",
            "width": 768,
            "height": 512,
            "size_bytes": 401221,
            "sha256": "9f" * 32,
            "seed": "7",
            "seed_number": 7,
        }
    ],
}
_CANCELED: dict[str, Any] = {
    **_JOB,
    "status": "canceled",
    "progress": 43,
    "finished_at": "2026-11-21T12:00:08Z",
    "error": {"code": "canceled", "message": "The request was canceled."},
}
_RUNNING: dict[str, Any] = {
    **_JOB,
    "status": "running",
    "progress": 43,
    "estimated_completion_time": "2026-11-21T12:00:09Z",
}

JOB_EXAMPLE = {"Running": _RUNNING, "Completed": _COMPLETED}
CANCELED_EXAMPLE = {"Canceled": _CANCELED}
JOBS_EXAMPLE = {"Jobs": {"jobs": [_COMPLETED, _CANCELED]}}
