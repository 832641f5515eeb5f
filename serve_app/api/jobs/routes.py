"""Path operations of `/v1/jobs`: list, read, cancel and delete an account's jobs of both interfaces."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from serve_app.api.dependencies import (
    CallerDep,
    acting_key,
    authenticate_beyond_plan,
    found,
    image_signer,
    jobs_of,
    load_job,
    valid_job_id,
)
from serve_app.api.errors import COUNTED_ERRORS, EITHER_KEY_ERRORS, error_responses
from serve_app.api.jobs.records import (
    CANCELED_EXAMPLE,
    CURSOR,
    JOB_EXAMPLE,
    JOBS_EXAMPLE,
    Cursor,
    Job,
    Jobs,
    job_record,
)
from serve_app.api.openapi import POLL_HEADERS, deletion, success
from serve_app.api.polls import NOT_MODIFIED, POLL_PARAMETERS, answer_poll
from serve_app.api.responses import record_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import DEFAULT_PAGE_SIZE, NEXT_PAGE, PageSize, job_id_path, read_position
from serve_app.domain import jobs
from serve_app.domain.accounts import Caller
from serve_app.domain.durations import Position
from serve_app.domain.errors import Forbidden, InvalidParameter, JobUnfinished, NotFound
from serve_app.domain.jobs import JOB_PREFIXES
from serve_app.domain.requests import GenerationRequest

router = APIRouter(route_class=ContractRoute, tags=["Jobs"])

LOOKED_AT = 10_000
"""One page looks at about this many entries of the index: those of jobs long gone may be many."""

JobId = Annotated[str, job_id_path("Also a `request_id` of interface A or a `run_id` of interface B.", *JOB_PREFIXES)]

ImageName = Annotated[
    str,
    Path(
        description="An `image_id` of the job.",
        json_schema_extra={"type": "string", "pattern": "^img_[a-z2-7]{26}$"},
    ),
]


async def read_cursor(cursor: Annotated[Cursor, NEXT_PAGE] = None) -> Position | None:
    return read_position(cursor, CURSOR)


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
    after: Annotated[Position | None, Depends(read_cursor)],
    limit: PageSize = DEFAULT_PAGE_SIZE,
) -> Response:
    page = await jobs_of(request).history.page(caller.account_id, limit=limit, after=after, among=LOOKED_AT)
    url_of = image_signer(request)
    records = {"jobs": [job_record(job, url_of) for job in page.jobs]}
    return record_response(records if page.next is None else {**records, "next_cursor": page.next.cursor})


@router.get(
    "/v1/jobs/{job_id}",
    operation_id="getJob",
    summary="Read a job",
    response_model=Job,
    responses={
        200: success("The job.", JOB_EXAMPLE, headers=POLL_HEADERS),
        304: NOT_MODIFIED | {"headers": POLL_HEADERS},
        **error_responses(*EITHER_KEY_ERRORS, NotFound),
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
