"""Variant B: `X-API-Key`, generation runs, and the models an account may use, from field to document."""

from collections.abc import Callable
from dataclasses import asdict
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Body, FastAPI, Request, Response
from pydantic import Field, RootModel

from serve_app.api.credentials import API_KEY
from serve_app.api.dependencies import CallDep, CallerDep, found, jobs_of, load_job, loras_of
from serve_app.api.errors import SUBMIT_ERRORS, error_responses
from serve_app.api.openapi import (
    EXAMPLE_ADAPTER_ID,
    GENERATION_HEADERS,
    POLL_HEADERS,
    api_app,
    common_text,
    named,
    plans_text,
    success,
)
from serve_app.api.responses import (
    NOT_MODIFIED,
    POLL_PARAMETERS,
    accepted_headers,
    answer_poll,
    failure_of,
    json_response,
    time_left,
    unknown_words_header,
)
from serve_app.api.routing import ContractRoute
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
    job_id_path,
)
from serve_app.domain.errors import AmbiguousCredentials, Forbidden, NotFound, RateLimitExceeded, Unauthorized
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import Variant
from serve_app.settings import Settings

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
    seconds = max(1, ceil(time_left(acceptance.job).total_seconds()))
    # It is called queued whatever has happened since: a retry is answered as the first request was.
    queued = Acknowledgement(run_id=acceptance.job.id, status="queued", estimated_time=seconds)
    return json_response(queued, headers=headers)


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
        200: success("The models.", {"Models": {"models": [_MODEL]}}),
        **error_responses(Unauthorized, Forbidden, RateLimitExceeded),
    },
)
async def list_models(request: Request, caller: CallerDep) -> Response:
    usable = await loras_of(request).catalog.adapters(caller.account_id)
    adapters = [adapter for adapter in usable if caller.may_use(adapter.id)]
    return json_response(Models.model_validate({"models": adapters}))


def create_app(settings: Settings) -> FastAPI:
    tags = {
        "Generation": "An image from a prompt with one of your account's models.",
        "Models": "The models your account may use.",
    }
    description = f"""\
Generate an image from a prompt with one of your account's models. Creating a run answers at once with a `run_id`; \
ask for the
run until its status is `completed` or `failed`.

Send your key as `X-API-Key: <API_KEY>`. Plans, in requests: {plans_text(settings.plans_of(Variant.B))}. Asking for a \
run does not count.
{common_text(settings)}"""
    title = "Atelier: Interface B"
    return api_app(API_KEY, router, title=title, description=description, tags=tags, worded_defaults=False)
