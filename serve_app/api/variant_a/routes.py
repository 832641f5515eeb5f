"""Variant A's path operations: generation, upscaling, and polling of both."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Body, Path, Request, Response

from serve_app.api.dependencies import CallDep, CallerDep, found, load_job, resources_of
from serve_app.api.errors import SUBMIT_ERRORS, Responses, error_responses
from serve_app.api.openapi import ACCEPTED_HEADERS, GENERATION_HEADERS, POLL_HEADERS, success
from serve_app.api.polls import NOT_MODIFIED, POLL_PARAMETERS, answer_poll
from serve_app.api.prompt_warnings import unknown_words_header
from serve_app.api.responses import accepted_headers, json_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import job_id_schema
from serve_app.api.variant_a import examples
from serve_app.api.variant_a.schemas import (
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
from serve_app.service import submit
from serve_app.stores.acceptance import Acceptance

router = APIRouter(route_class=ContractRoute, strict_content_type=False)

RequestId = Annotated[
    str,
    Path(description="The identifier that the creating call returned.", json_schema_extra=job_id_schema("gen", "up")),
]
"""Documented, not validated: the key comes first, and what cannot be an id is not found."""

_POLL_LINK = {"Poll": {"operationId": "getRequest", "parameters": {"request_id": "$response.body#/request_id"}}}
_UPSCALE_LINK = {
    "Upscale": {"operationId": "upscale", "requestBody": {"image_id": "$response.body#/images/0/image_id"}}
}
_POLL_RESPONSES: Responses = {
    200: success("The request's record.", examples.RECORDS, headers=POLL_HEADERS, links=_UPSCALE_LINK),
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
        202: success("Accepted.", examples.GENERATION_ACCEPTED, headers=GENERATION_HEADERS, links=_POLL_LINK),
        **error_responses(*SUBMIT_ERRORS, AmbiguousCredentials, Forbidden),
    },
)
async def generate(
    request: Request,
    caller: CallerDep,
    body: Annotated[GenerationRequest, Body(openapi_examples=examples.GENERATION)],
    call: CallDep,
) -> Response:
    acceptance = await submit.generate(resources_of(request), caller, body.to_domain(), call)
    return _acknowledge(request, acceptance, await unknown_words_header(request, acceptance, body.prompt))


@router.post(
    "/v1/upscale",
    operation_id="upscale",
    summary="Enlarge an image",
    tags=["Upscaling"],
    status_code=202,
    response_model=Acknowledgement,
    responses={
        202: success("Accepted.", examples.UPSCALE_ACCEPTED, headers=ACCEPTED_HEADERS, links=_POLL_LINK),
        **error_responses(*SUBMIT_ERRORS, Forbidden, NotFound),
    },
)
async def upscale(
    request: Request,
    caller: CallerDep,
    body: Annotated[UpscaleRequest, Body(openapi_examples=examples.UPSCALE)],
    call: CallDep,
) -> Response:
    acceptance = await submit.upscale(resources_of(request), caller, body.image_id, body.scale_factor, call)
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
