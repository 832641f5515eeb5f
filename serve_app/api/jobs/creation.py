"""Path operations that make a job of anything that the base models on offer can do, and that list these."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field

from serve_app.api.dependencies import CallDep, CallerDep, found, image_signer, jobs_of, loras_of
from serve_app.api.errors import COUNTED_ERRORS, SUBMIT_ERRORS, error_responses
from serve_app.api.jobs.records import JOB_EXAMPLE, Job, job_record
from serve_app.api.jobs.schemas import WISHES, AnyWish, GenerationWish
from serve_app.api.openapi import GENERATION_HEADERS, named, success
from serve_app.api.polls import LONGEST_WAIT_S, after_wait, unknown_words_header
from serve_app.api.responses import accepted_headers, encode, record_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import CatalogId, Pixels, ResponseBody
from serve_app.domain import jobs
from serve_app.domain.errors import AmbiguousCredentials, Forbidden, NotFound
from serve_app.domain.families import abilities_of
from serve_app.domain.requests import USUAL_GUIDANCE, USUAL_STEPS

router = APIRouter(route_class=ContractRoute, tags=["Jobs"], strict_content_type=False)

_WAIT = {
    "parameters": [
        {
            "name": "Prefer",
            "in": "header",
            "description": (
                f"`wait=N` (RFC 7240): answer when the job has ended, or after N seconds (at most {LONGEST_WAIT_S}) "
                "with the job as it is then. `Preference-Applied` confirms it."
            ),
            "schema": {"type": "string"},
        }
    ]
}
_PREFERENCE = {
    "Preference-Applied": {
        "description": "`Prefer: wait=N` was applied, with the longest wait in seconds.",
        "required": False,
        "schema": {"type": "string", "pattern": "^wait=[0-9]+$"},
    }
}


@router.post(
    "/v1/jobs",
    operation_id="createJob",
    summary="Create a job: images of a prompt, or a larger copy of an image",
    status_code=202,
    response_model=Job,
    responses={
        202: success("Accepted: the job as it is now.", JOB_EXAMPLE, headers=GENERATION_HEADERS | _PREFERENCE),
        **error_responses(*SUBMIT_ERRORS, AmbiguousCredentials, Forbidden, NotFound),
    },
    openapi_extra=_WAIT,
)
async def create_job(
    request: Request, caller: CallerDep, body: Annotated[AnyWish, Body(openapi_examples=named(WISHES))], call: CallDep
) -> Response:
    parts, headers = jobs_of(request), dict[str, str]()
    if body.webhook_url is not None:
        parts.webhooks.targets.check(body.webhook_url, "webhook_url")
        call = replace(call, webhook=body.webhook_url)
    acceptance = await parts.submission.submit(caller, body.to_domain(), call)
    if isinstance(body, GenerationWish):
        headers = await unknown_words_header(request, acceptance, body.prompt)
    job_id = acceptance.job.id

    async def load() -> jobs.Job:
        return found(await parts.reader.get(job_id, account_id=caller.account_id), "job")

    job, applied = await after_wait(request, await load(), load)
    headers |= accepted_headers(request, f"/v1/jobs/{job_id}", replayed=acceptance.replayed) | dict(applied)
    content = encode(job_record(job, image_signer(request)))
    return Response(content, status_code=202, headers=headers, media_type="application/json")


class BaseModelInfo(ResponseBody):
    """A base model on offer, and what may be asked of it."""

    id: CatalogId
    usual_side: Annotated[Pixels, Field(description="Images have this width and height where a job names none.")]
    longest_side: Pixels
    steps: Annotated[int, Field(description="What it was made for, or 30 where nobody says it.")]
    guidance_scale: Annotated[float, Field(description="What it was made for, or 7.5; 1 is no guidance.")]
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
                "id": "sdxl", "usual_side": 1024, "longest_side": 1536, "steps": 30, "guidance_scale": 7.5, "sampler": "",
                "samplers": ["euler", "dpm++2m"], "prompt_weights": True, "mask": True,
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
    rows: list[dict[str, Any]] = []
    for model in await loras_of(request).applied_catalog.applied_base_models():
        abilities = abilities_of(model.pipeline)
        longest = model.max_side or abilities.longest_side
        rows.append(
            {
                "id": model.id,
                "usual_side": min(abilities.usual_side, longest),
                "longest_side": longest,
                "steps": model.steps or USUAL_STEPS,
                "guidance_scale": model.guidance or USUAL_GUIDANCE,
                "sampler": model.sampler,
                "samplers": list(abilities.samplers),
                "prompt_weights": abilities.prompt_weights,
                "mask": abilities.begins_late,
            }
        )
    return record_response({"base_models": rows})
