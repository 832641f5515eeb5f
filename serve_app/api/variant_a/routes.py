"""Variant A's path operations: generation, upscaling, and polling of both."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from serve_app.api.dependencies import CallDep, CallerDep, found, jobs_of, load_job
from serve_app.api.errors import SUBMIT_ERRORS, Responses, error_responses
from serve_app.api.openapi import ACCEPTED_HEADERS, GENERATION_HEADERS, POLL_HEADERS, named, success
from serve_app.api.polls import NOT_MODIFIED, POLL_PARAMETERS, answer_poll, unknown_words_header
from serve_app.api.responses import accepted_headers, json_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import job_id_path
from serve_app.api.variant_a.schemas import (
    GENERATION_EXAMPLES,
    Acknowledgement,
    GenerationRequest,
    StatusRecord,
    UpscaleRequest,
    acknowledgement,
    status_record,
)
from serve_app.domain.errors import AmbiguousCredentials, Forbidden, NotFound, Unauthorized
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.jobs.acceptance import Acceptance

_GENERATION_ID = "gen_c4zq2e7wvbbxm5l3r6yhtajd2i"
_UPSCALE_ID = "up_7gk5m2xqhw4rbn3vtzcylsjd6e"
_IMAGE_ID = "img_nq6w3s5kfrzp2xvd7bmtch4ylu"
_ETA, _ENDED = "2026-11-21T12:00:09Z", "2026-11-21T12:00:08Z"

_IMAGE = {"image_id": _IMAGE_ID, "url": "https://images.example/mountains.png", "width": 768, "height": 512}
_RECORDS: dict[str, dict[str, Any]] = {
    "Processing": {"status": "processing", "progress": 43, "estimated_completion_time": _ETA},
    "Completed": {"status": "completed", "images": [_IMAGE], "completed_at": _ENDED},
    "Failed": {"status": "failed", "error": {"code": "timeout", "message": "The images could not be made in time."}},
}


def _accepted(request_id: str) -> dict[str, Any]:
    return {"Accepted": {"request_id": request_id, "status": "processing", "estimated_completion_time": _ETA}}


UPSCALE = named({"Twice": {"image_id": _IMAGE_ID, "scale_factor": 2}})
GENERATION_ACCEPTED = _accepted(_GENERATION_ID)
UPSCALE_ACCEPTED = _accepted(_UPSCALE_ID)
RECORDS = {name: {"request_id": _GENERATION_ID, **record} for name, record in _RECORDS.items()}


router = APIRouter(route_class=ContractRoute, strict_content_type=False)

RequestId = Annotated[str, job_id_path("The identifier that the creating call returned.", "gen", "up")]

_POLL_LINK = {"Poll": {"operationId": "getRequest", "parameters": {"request_id": "$response.body#/request_id"}}}
_UPSCALE_LINK = {
    "Upscale": {"operationId": "upscale", "requestBody": {"image_id": "$response.body#/images/0/image_id"}}
}
_POLL_RESPONSES: Responses = {
    200: success("The request's record.", RECORDS, headers=POLL_HEADERS, links=_UPSCALE_LINK),
    304: NOT_MODIFIED | {"headers": POLL_HEADERS},
    **error_responses(Unauthorized, Forbidden, NotFound),
}


@router.post(
    "/v1/generate",
    operation_id="generate",
    summary="Generate images",
    tags=["Generation"],
    status_code=202,
    response_model=Acknowledgement,
    responses={
        202: success("Accepted.", GENERATION_ACCEPTED, headers=GENERATION_HEADERS, links=_POLL_LINK),
        **error_responses(*SUBMIT_ERRORS, AmbiguousCredentials, Forbidden),
    },
)
async def generate(
    request: Request,
    caller: CallerDep,
    body: Annotated[GenerationRequest, Body(openapi_examples=named(GENERATION_EXAMPLES))],
    call: CallDep,
) -> Response:
    acceptance = await jobs_of(request).submission.submit(caller, body.to_domain(), call)
    return _acknowledge(request, acceptance, await unknown_words_header(request, acceptance, body.prompt))


@router.post(
    "/v1/upscale",
    operation_id="upscale",
    summary="Enlarge an image",
    tags=["Upscaling"],
    status_code=202,
    response_model=Acknowledgement,
    responses={
        202: success("Accepted.", UPSCALE_ACCEPTED, headers=ACCEPTED_HEADERS, links=_POLL_LINK),
        **error_responses(*SUBMIT_ERRORS, Forbidden, NotFound),
    },
)
async def upscale(
    request: Request,
    caller: CallerDep,
    body: Annotated[UpscaleRequest, Body(openapi_examples=UPSCALE)],
    call: CallDep,
) -> Response:
    acceptance = await jobs_of(request).submission.submit(caller, body.to_domain(), call)
    return _acknowledge(request, acceptance)


@router.get(
    "/v1/upscale/{request_id}",
    operation_id="getUpscale",
    summary="Poll a request: the same record under another path",
    tags=["Upscaling"],
    response_model=StatusRecord,
    responses=_POLL_RESPONSES,
    openapi_extra=POLL_PARAMETERS,
)
@router.get(
    "/v1/generate/{request_id}",
    operation_id="getRequest",
    summary="Poll a request",
    tags=["Generation"],
    response_model=StatusRecord,
    responses=_POLL_RESPONSES,
    openapi_extra=POLL_PARAMETERS,
)
async def poll(request: Request, request_id: RequestId) -> Response:
    async def load() -> Job:
        return found(await load_job(request, request_id, "gen", "up", of=Variant.A), "request")

    return await answer_poll(request, load, status_record)


def _acknowledge(request: Request, acceptance: Acceptance, more: Mapping[str, str] | None = None) -> Response:
    headers = accepted_headers(request, f"/v1/generate/{acceptance.job.id}", replayed=acceptance.replayed)
    return json_response(acknowledgement(acceptance.job), status=202, headers=headers | dict(more or {}))
