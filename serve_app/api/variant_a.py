"""Variant A: `Authorization: Bearer`, generation, upscaling, and polling of both, from field to document."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Body, FastAPI, Request, Response
from pydantic import Field, RootModel

from serve_app.api.credentials import BEARER
from serve_app.api.dependencies import CallDep, CallerDep, found, jobs_of, load_job
from serve_app.api.errors import SUBMIT_ERRORS, Responses, error_responses
from serve_app.api.openapi import (
    ACCEPTED_HEADERS,
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
    estimated_completion,
    failure_of,
    json_response,
    unknown_words_header,
)
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import (
    CatalogId,
    Failure,
    GenerationBody,
    ImageId,
    JobId,
    Pixels,
    Prompt,
    RequestBody,
    ResponseBody,
    Seed,
    UnfinishedProgress,
    Url,
    UtcTime,
    job_id_path,
    utc_text,
)
from serve_app.domain.errors import AmbiguousCredentials, Forbidden, NotFound, Unauthorized
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import UpscaleDraft, Variant
from serve_app.jobs.acceptance import Acceptance
from serve_app.settings import Settings

Side = Literal[512, 768]


class GenerationRequest(GenerationBody):
    """Body of `POST /v1/generate` with a bearer key."""

    interface = Variant.A
    other_api_fields: ClassVar[dict[str, str]] = {
        "positive_prompt": "belongs to the X-API-Key interface; with a bearer key send `prompt`",
        "negative_prompt": "belongs to the X-API-Key interface; the bearer interface has no such field",
        "model_id": "belongs to the X-API-Key interface; with a bearer key send `lora_id`",
        "guidance": "belongs to the X-API-Key interface; with a bearer key send `guidance_scale`",
    }

    prompt: Annotated[Prompt, Field(description="What the image shows. White space around it does not count.")]
    lora_id: Annotated[CatalogId, Field(description="The LoRA model to use.")]
    lora_weight: Annotated[float, Field(ge=0.1, le=1.0, description="How strongly the LoRA acts.")] = 0.75
    width: Annotated[Side, Field(description="Pixels.")] = 512
    height: Annotated[Side, Field(description="Pixels.")] = 512
    num_images: Annotated[int, Field(ge=1, le=4, description="How many images; image i uses seed + i.")] = 1
    guidance_scale: Annotated[
        float,
        Field(ge=1, le=20, description="Classifier-free guidance scale: how closely the image follows the prompt."),
    ] = 7.5
    steps: Annotated[
        int, Field(ge=20, le=50, description="Denoising steps: more take longer and show finer detail.")
    ] = 30
    seed: Annotated[
        Seed, Field(description="The same seed gives the same images. Left out: the service draws one.")
    ] = None


_SHORTEST = {"prompt": "purple mountains under a black sky with a yellow moon", "lora_id": EXAMPLE_ADAPTER_ID}
GENERATION_EXAMPLES: dict[str, dict[str, Any]] = {
    "Shortest": _SHORTEST,
    "Everything": {
        **_SHORTEST,
        "lora_weight": 0.8,
        "width": 768,
        "height": 512,
        "num_images": 2,
        "guidance_scale": 6.5,
        "steps": 25,
        "seed": 7,
    },
}


class UpscaleRequest(RequestBody):
    """Body of `POST /v1/upscale`."""

    image_id: Annotated[CatalogId, Field(description="An image of your account, from a completed request.")]
    scale_factor: Annotated[
        Literal[2, 4],
        Field(description="How many times wider and higher the result is; it may hold at most 16 megapixels."),
    ] = 2

    def to_domain(self) -> UpscaleDraft:
        return UpscaleDraft(**self.model_dump(), interface=Variant.A)


class Acknowledgement(ResponseBody):
    """The request is durable and will end in `completed` or `failed`."""

    request_id: JobId
    status: Literal["processing"]
    estimated_completion_time: UtcTime


class Image(ResponseBody):
    """A generated image."""

    image_id: ImageId
    url: Annotated[Url, Field(description="The PNG; opens without the key.")]
    width: Pixels
    height: Pixels


class ProcessingRecord(ResponseBody):
    """A request that waits or runs."""

    request_id: JobId
    status: Literal["processing"]
    progress: UnfinishedProgress
    estimated_completion_time: UtcTime


class CompletedRecord(ResponseBody):
    """A request whose images are stored."""

    request_id: JobId
    status: Literal["completed"]
    images: Annotated[list[Image], Field(min_length=1, max_length=4)]
    completed_at: UtcTime


class FailedRecord(ResponseBody):
    """A request that ended without images."""

    request_id: JobId
    status: Literal["failed"]
    error: Failure


class StatusRecord(
    RootModel[Annotated[ProcessingRecord | CompletedRecord | FailedRecord, Field(discriminator="status")]]
):
    """A request's record; `status` says which fields it has."""


def status_record(job: Job, url_of: Callable[[str], str]) -> dict[str, Any]:
    """Return a `StatusRecord` as plain values.

    All of them are ours, and a model of them costs a poll a tenth of its time. Waiting is `processing`, and every end
    without images is `failed`. `url_of` signs an image URI.
    """
    if job.state is JobState.COMPLETED:
        assert job.finished_at is not None, job.id
        images = [
            {"image_id": image.image_id, "url": url_of(image.image_uri), "width": image.width, "height": image.height}
            for image in job.images
        ]
        completed_at = utc_text(job.finished_at)
        return {"request_id": job.id, "status": "completed", "images": images, "completed_at": completed_at}
    if job.state.is_terminal:
        return {"request_id": job.id, "status": "failed", "error": asdict(failure_of(job))}
    estimate = utc_text(estimated_completion(job))
    return {
        "request_id": job.id,
        "status": "processing",
        "progress": job.progress,
        "estimated_completion_time": estimate,
    }


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
        202: success("Accepted.", _accepted(_GENERATION_ID), headers=GENERATION_HEADERS, links=_POLL_LINK),
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
        202: success("Accepted.", _accepted(_UPSCALE_ID), headers=ACCEPTED_HEADERS, links=_POLL_LINK),
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
    body = Acknowledgement(
        request_id=acceptance.job.id,
        status="processing",
        estimated_completion_time=estimated_completion(acceptance.job),
    )
    return json_response(body, status=202, headers=headers | dict(more or {}))


def create_app(settings: Settings) -> FastAPI:
    tags = {
        "Generation": "Images from a prompt with a LoRA model.",
        "Upscaling": "Larger copies of generated images.",
    }
    description = f"""\
Generate images from a text prompt with a LoRA model, and enlarge them. Creating calls answer at once with a \
`request_id`;
poll it every 5 seconds until its status is `completed` or `failed`.

Send your key as `Authorization: Bearer <API_KEY>`. Plans, in requests: {plans_text(settings.plans_of(Variant.A))}. \
Polling does not count.
{common_text(settings)}"""
    title = "Atelier: Interface A"
    return api_app(BEARER, router, title=title, description=description, tags=tags, worded_defaults=False)
