"""Path operations of `/v1/jobs`: create a job of all that the base models on offer can do, list, read, cancel, delete.

An account's jobs of both interfaces are among them. `/v1/base-models` says what may be asked for.
"""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from pydantic import AwareDatetime, Field

from serve_app.api.dependencies import (
    CallDep,
    CallerDep,
    acting_key,
    authenticate_beyond_plan,
    base_url,
    found,
    image_signer,
    jobs_of,
    load_job,
    loras_of,
    valid_job_id,
)
from serve_app.api.errors import COUNTED_ERRORS, EITHER_KEY_ERRORS, POLL_ERRORS, SUBMIT_ERRORS, error_responses
from serve_app.api.jobs.records import (
    CANCELED_EXAMPLE,
    CURSOR,
    JOB_EXAMPLE,
    JOBS_EXAMPLE,
    Job,
    Jobs,
    job_record,
)
from serve_app.api.jobs.schemas import WISHES, AnyWish, GenerationWish, UpscaleWish
from serve_app.api.openapi import GENERATION_HEADERS, POLL_HEADERS, UNREAD_HEADER, deletion, named, success
from serve_app.api.responses import (
    NOT_MODIFIED,
    POLL_PARAMETERS,
    accepted_headers,
    after_wait,
    answer_poll,
    encode,
    record_response,
    unknown_words_header,
    unread_header,
    wait_parameter,
)
from serve_app.api.routing import ClosedRoute
from serve_app.api.schemas import (
    DEFAULT_PAGE_SIZE,
    CatalogId,
    PageSize,
    Pixels,
    ResponseBody,
    image_id_path,
    job_id_path,
    page_after,
)
from serve_app.domain import jobs
from serve_app.domain.accounts import Caller
from serve_app.domain.catalog import BaseModel
from serve_app.domain.durations import Position
from serve_app.domain.errors import AmbiguousCredentials, Forbidden, InvalidParameter, JobUnfinished, NotFound
from serve_app.domain.families import abilities_of
from serve_app.domain.guidance import WHOLE, GuidancePart
from serve_app.domain.jobs import JOB_PREFIXES, JobKind, JobState
from serve_app.domain.requests import USUAL_GUIDANCE, USUAL_STEPS, GenerationRequest
from serve_app.jobs.history import JobFilter
from serve_app.jobs.submit import Call

router = APIRouter(route_class=ClosedRoute, tags=["Jobs"], strict_content_type=False)

LOOKED_AT = 10_000
"""One page looks at about this many entries of the index: those of jobs long gone may be many."""

JobId = Annotated[str, job_id_path("Also a `request_id` of interface A or a `run_id` of interface B.", *JOB_PREFIXES)]

ImageName = Annotated[str, image_id_path("An `image_id` of the job.")]


async def read_changed_job(request: Request, caller: CallerDep, job_id: JobId) -> str:
    """Return the id of a job that the key may change.

    A key that is kept to some LoRAs may change jobs of these, and those that it asked for itself. Raises `NotFound` and
    `Forbidden`.
    """
    valid_id = valid_job_id(job_id, *JOB_PREFIXES)
    if caller.adapters is not None:
        job = found(await jobs_of(request).reader.get(valid_id, account_id=caller.account_id), "job")
        loras = job.request.loras if isinstance(job.request, GenerationRequest) else ()
        is_of_key = bool(loras) and all(caller.may_use(lora.id) for lora in loras)
        if not is_of_key and job.key_id != caller.key_id:
            raise Forbidden(f"This API key may only change jobs of {', '.join(sorted(caller.adapters))}.")
    return valid_id


ChangedJob = Annotated[str, Depends(read_changed_job)]
_CREATION_HEADERS = {
    **GENERATION_HEADERS,
    "Preference-Applied": POLL_HEADERS["Preference-Applied"],
    **UNREAD_HEADER,
}


@router.post(
    "/v1/jobs",
    operation_id="createJob",
    summary="Create a job: images of a prompt, or a larger copy of an image",
    status_code=202,
    response_model=Job,
    responses={
        202: success("Accepted: the job as it is now.", JOB_EXAMPLE, headers=_CREATION_HEADERS),
        **error_responses(*SUBMIT_ERRORS, AmbiguousCredentials, Forbidden, NotFound),
    },
    openapi_extra={"parameters": [wait_parameter("job")]},
)
async def create_job(
    request: Request, caller: CallerDep, body: Annotated[AnyWish, Body(openapi_examples=named(WISHES))], call: CallDep
) -> Response:
    parts, headers = jobs_of(request), dict[str, str]()
    acceptance = await parts.submission.submit(caller, body.to_domain(), with_webhook(request, body, call))
    if isinstance(body, GenerationWish):
        headers = await unknown_words_header(request, acceptance, body.prompt)
    job_id = acceptance.job.id

    async def load() -> jobs.Job:
        return found(await parts.reader.get(job_id, account_id=caller.account_id), "job")

    job, applied = await after_wait(request, load)
    headers |= accepted_headers(request, f"/v1/jobs/{job_id}", replayed=acceptance.replayed) | dict(applied)
    headers |= unread_header(job)
    content = encode(job_record(job, image_signer(request)))
    return Response(content, status_code=202, headers=headers, media_type="application/json")


def with_webhook(request: Request, body: GenerationWish | UpscaleWish, call: Call) -> Call:
    """Return the call with the address that the body names, after a check of it. Raises `InvalidParameter`."""
    if body.webhook_url is None:
        return call
    jobs_of(request).webhooks.targets.check(body.webhook_url, "webhook_url")
    return replace(call, webhook=body.webhook_url, base_url=base_url(request))


@router.get(
    "/v1/jobs",
    operation_id="listJobs",
    summary="List jobs, newest first",
    response_model=Jobs,
    responses={
        200: success("A page of jobs.", JOBS_EXAMPLE),
        **error_responses(InvalidParameter, *COUNTED_ERRORS),
    },
)
async def list_jobs(
    request: Request,
    caller: CallerDep,
    after: Annotated[Position | None, page_after(CURSOR)],
    limit: PageSize = DEFAULT_PAGE_SIZE,
    status: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    kind: Annotated[JobKind | None, Query(description="Only jobs of this kind.")] = None,
    base_model: Annotated[str, Query(max_length=128, description="Only generations with this base model.")] = "",
    lora_id: Annotated[str, Query(max_length=128, description="Only generations with this LoRA.")] = "",
    created_after: Annotated[
        AwareDatetime | None, Query(description="Only jobs accepted at this time or later.")
    ] = None,
    created_before: Annotated[AwareDatetime | None, Query(description="Only jobs accepted before this time.")] = None,
    metadata: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=600)]],
        Query(max_length=16, description="Only jobs that keep this text, as `name=value`. Repeated, they keep each."),
    ] = [],  # noqa: B006 - FastAPI copies it
) -> Response:
    if any("=" not in text for text in metadata):
        raise InvalidParameter("metadata: must be name=value")
    only = JobFilter(
        state=status,
        kind=kind,
        lora_id=lora_id,
        base_model=base_model,
        metadata=frozenset(metadata),
        since=created_after,
        until=created_before,
    )
    history = jobs_of(request).history
    page = await history.page(caller.account_id, limit=limit, only=only, after=after, among=LOOKED_AT)
    url_of = image_signer(request)
    records = {"jobs": [job_record(job, url_of) for job in page.jobs]}
    return record_response(records if page.next is None else {**records, "next_cursor": page.next.cursor})


@router.get(
    "/v1/jobs/{job_id}",
    operation_id="getJob",
    summary="Read a job",
    response_model=Job,
    responses={
        200: success("The job.", JOB_EXAMPLE, headers=POLL_HEADERS | UNREAD_HEADER),
        304: NOT_MODIFIED | {"headers": POLL_HEADERS},
        **error_responses(*POLL_ERRORS),
    },
    openapi_extra=POLL_PARAMETERS,
)
async def get_job(request: Request, job_id: JobId) -> Response:
    async def load() -> jobs.Job:
        return found(await load_job(request, job_id, *JOB_PREFIXES), "job")

    return await answer_poll(request, load, job_record)


@router.post(
    "/v1/jobs/{job_id}/cancel",
    operation_id="cancelJob",
    summary="Cancel a job: immediately while queued, at its next step while running",
    response_model=Job,
    responses={
        200: success("The job; one that had already ended is unchanged.", CANCELED_EXAMPLE),
        **error_responses(*EITHER_KEY_ERRORS, NotFound),
    },
    description="Counts against the plan, and is done where the plan is used up too.",
)
async def cancel_job(
    request: Request, caller: Annotated[Caller, Depends(authenticate_beyond_plan)], job_id: ChangedJob
) -> Response:
    await jobs_of(request).queue.cancel(job_id, account_id=caller.account_id)
    job = found(await jobs_of(request).reader.get(job_id, account_id=caller.account_id), "job")
    return record_response(job_record(job, image_signer(request)))


@router.delete(
    "/v1/jobs/{job_id}",
    operation_id="deleteJob",
    summary="Delete a job that has ended, with its prompt and its images",
    **deletion(
        "Deleted: the job can no longer be read through any interface.",
        JobUnfinished,
        descriptions={409: "The job is queued or running: cancel it first."},
    ),
)
async def delete_job(request: Request, caller: CallerDep, job_id: ChangedJob) -> Response:
    by = acting_key(request, caller)
    await jobs_of(request).deletion.delete_job(job_id, account_id=caller.account_id, by=by)
    return Response(status_code=204)


@router.delete(
    "/v1/jobs/{job_id}/images/{image_id}",
    operation_id="deleteImage",
    summary="Delete one image of a job; deleting its last image deletes the job",
    **deletion("Deleted: the image's URLs no longer work."),
)
async def delete_image(request: Request, caller: CallerDep, job_id: ChangedJob, image_id: ImageName) -> Response:
    by = acting_key(request, caller)
    await jobs_of(request).deletion.delete_image(job_id, image_id, account_id=caller.account_id, by=by)
    return Response(status_code=204)


class BaseModelInfo(ResponseBody):
    """A base model on offer, and what may be asked of it."""

    id: CatalogId
    usual_side: Annotated[Pixels, Field(description="Images have this width and height where a job names none.")]
    longest_side: Pixels
    steps: Annotated[int, Field(description="What it was made for, or 30 where nobody says it.")]
    guidance_scale: Annotated[float, Field(description="What it was made for, or 7.5; 1 is no guidance.")]
    guidance_start: Annotated[float, Field(description="The fraction of an image's steps at which guidance begins.")]
    guidance_end: Annotated[float, Field(description="The fraction at which it ends.")]
    sampler: Annotated[str, Field(description="Empty: the base model's own.")]
    samplers: Annotated[list[str], Field(description="What may be asked for, alone or with a spacing as in `-karras`.")]
    prompt_weights: Annotated[bool, Field(description="Whether `prompt_weights` may be asked for.")]
    mask: Annotated[bool, Field(description="Whether `mask_image_id` and `strength` may be asked for.")]


class BaseModels(ResponseBody):
    """The base models, the default first."""

    base_models: list[BaseModelInfo]


BASE_MODELS = {
    "Base models": {
        "base_models": [
            {
                "id": "sdxl", "usual_side": 1024, "longest_side": 1536, "steps": 30, "guidance_scale": 7.5,
                "guidance_start": 0.0, "guidance_end": 1.0, "sampler": "", "samplers": ["euler", "dpm++2m"],
                "prompt_weights": True, "mask": True,
            }
        ]
    }
}  # fmt: skip


@router.get(
    "/v1/base-models",
    operation_id="listBaseModels",
    summary="List the base models, and what may be asked of each",
    response_model=BaseModels,
    responses={200: success("The base models.", BASE_MODELS), **error_responses(*COUNTED_ERRORS)},
)
async def list_base_models(request: Request, _caller: CallerDep) -> Response:
    models = await loras_of(request).applied_catalog.applied_base_models()
    return record_response({"base_models": [base_model_record(model) for model in models]})


def base_model_record(model: BaseModel) -> dict[str, Any]:
    """Return a `BaseModelInfo` as plain values."""
    abilities = abilities_of(model.pipeline)
    longest, part = model.max_side or abilities.longest_side, GuidancePart.said_by(model) or WHOLE
    return {
        "id": model.id,
        "usual_side": min(abilities.usual_side, longest),
        "longest_side": longest,
        "steps": model.steps or USUAL_STEPS,
        "guidance_scale": model.guidance or USUAL_GUIDANCE,
        "guidance_start": part.start,
        "guidance_end": part.end,
        "sampler": model.sampler,
        "samplers": list(abilities.samplers),
        "prompt_weights": abilities.prompt_weights,
        "mask": abilities.begins_late,
    }
