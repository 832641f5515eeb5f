"""Variant B's path operations: generation, its runs, and the models an account may use."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from serve_app.api.dependencies import CallDep, CallerDep, found, jobs_of, load_job, loras_of
from serve_app.api.errors import SUBMIT_ERRORS, error_responses
from serve_app.api.openapi import EXAMPLE_ADAPTER_ID, GENERATION_HEADERS, POLL_HEADERS, named, success
from serve_app.api.polls import NOT_MODIFIED, POLL_PARAMETERS, answer_poll, unknown_words_header
from serve_app.api.responses import accepted_headers, json_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import job_id_path
from serve_app.api.variant_b.schemas import (
    GENERATION_EXAMPLES,
    Acknowledgement,
    GenerationRequest,
    Models,
    Run,
    acknowledgement,
    run_record,
)
from serve_app.domain.errors import AmbiguousCredentials, Forbidden, NotFound, RateLimitExceeded, Unauthorized
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant

_RUN_ID = "gen_c4zq2e7wvbbxm5l3r6yhtajd2i"

_RECORDS: dict[str, dict[str, Any]] = {
    "Queued": {"status": "queued", "progress": 0},
    "Processing": {"status": "processing", "progress": 43},
    "Completed": {"status": "completed", "progress": 100, "image_url": "https://images.example/mountains.png"},
    "Failed": {
        "status": "failed",
        "progress": 43,
        "error": {"code": "timeout", "message": "The images could not be made in time."},
    },
}
_MODEL = {
    "id": EXAMPLE_ADAPTER_ID,
    "name": "Neon",
    "description": "Glowing coloured tubes on a dark wall.",
    "created_at": "2026-11-21T00:00:00Z",
}

ACCEPTED = {"Accepted": {"run_id": _RUN_ID, "status": "queued", "estimated_time": 9}}
RECORDS = {name: {"run_id": _RUN_ID, **record} for name, record in _RECORDS.items()}
MODELS = {"Models": {"models": [_MODEL]}}


router = APIRouter(route_class=ContractRoute, strict_content_type=False)

RunId = Annotated[str, job_id_path("The identifier that creating the run returned.", "gen")]

_RUN_LINK = {"Run": {"operationId": "getRun", "parameters": {"run_id": "$response.body#/run_id"}}}


@router.post(
    "/v1/generate",
    operation_id="generate",
    summary="Generate an image",
    tags=["Generation"],
    response_model=Acknowledgement,
    responses={
        200: success("Accepted.", ACCEPTED, headers=GENERATION_HEADERS, links=_RUN_LINK),
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
    headers = accepted_headers(request, f"/v1/generations/{acceptance.job.id}", replayed=acceptance.replayed)
    headers |= await unknown_words_header(request, acceptance, body.prompt)
    return json_response(acknowledgement(acceptance.job), headers=headers)


@router.get(
    "/v1/generations/{run_id}",
    operation_id="getRun",
    summary="Retrieve a run",
    tags=["Generation"],
    response_model=Run,
    responses={
        200: success("The run's record.", RECORDS, headers=POLL_HEADERS),
        304: NOT_MODIFIED | {"headers": POLL_HEADERS},
        **error_responses(Unauthorized, Forbidden, NotFound),
    },
    openapi_extra=POLL_PARAMETERS,
)
async def get_run(request: Request, run_id: RunId) -> Response:
    async def load() -> Job:
        return found(await load_job(request, run_id, "gen", of=Variant.B), "run")

    return await answer_poll(request, load, run_record)


@router.get(
    "/v1/models",
    operation_id="listModels",
    summary="List the models your account may use",
    tags=["Models"],
    response_model=Models,
    responses={
        200: success("The models.", MODELS),
        **error_responses(Unauthorized, Forbidden, RateLimitExceeded),
    },
)
async def list_models(request: Request, caller: CallerDep) -> Response:
    usable = await loras_of(request).catalog.adapters(caller.account_id)
    adapters = [adapter for adapter in usable if caller.may_use(adapter.id)]
    return json_response(Models.model_validate({"models": adapters}))
