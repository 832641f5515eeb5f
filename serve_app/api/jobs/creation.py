"""Path operations that make a job of anything that the base models on offer can do, and that list these."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.dependencies import CallDep, CallerDep, found, image_signer, jobs_of, loras_of
from serve_app.api.errors import COUNTED_ERRORS, SUBMIT_ERRORS, error_responses
from serve_app.api.jobs.schemas import JOB_EXAMPLE, MAX_LORAS, Job, job_record
from serve_app.api.openapi import EXAMPLE_ADAPTER_ID, GENERATION_HEADERS, named, success
from serve_app.api.polls import LONGEST_WAIT_S, after_wait, unknown_words_header
from serve_app.api.responses import accepted_headers, encode, record_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import (
    NO_NUL,
    NOT_NULL,
    CatalogId,
    OptionalPrompt,
    Pixels,
    Prompt,
    RequestBody,
    ResponseBody,
    Seed,
)
from serve_app.domain import jobs
from serve_app.domain.errors import AmbiguousCredentials, Forbidden, NotFound
from serve_app.domain.families import abilities_of
from serve_app.domain.requests import ImageFormat, LoraUse, Priority
from serve_app.domain.samplers import Sampler, spacings_of
from serve_app.jobs.wishes import SHORTEST_SIDE, SIDE_STEP, USUAL_GUIDANCE, USUAL_STEPS, Wish
from serve_app.webhooks.targets import LONGEST_URL

router = APIRouter(route_class=ContractRoute, tags=["Jobs"], strict_content_type=False)

LONGEST_SIDE = 2048
_SAMPLERS = "|".join(f"{each}(?:-(?:{'|'.join(spacings_of(each))}))?" for each in Sampler).replace("+", r"\+")
_SAMPLER_PATTERN = f"^(?:{_SAMPLERS})$"

Side = Annotated[
    Annotated[int, Field(ge=SHORTEST_SIDE, le=LONGEST_SIDE, multiple_of=SIDE_STEP)] | SkipJsonSchema[None],
    NOT_NULL,
    Field(
        description="Pixels; the base model says how many it takes, and how many are usual. Of an image to begin from "
        "what is left out follows its proportions."
    ),
]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="Texts of yours that the job keeps, such as an order's number."),
]


class LoraWish(RequestBody):
    """A LoRA, and how strongly it acts."""

    id: Annotated[CatalogId, Field(description="A LoRA that your account may use.")]
    weight: Annotated[float, Field(ge=-2, le=2, description="How strongly it acts; below 0 it acts the other way.")] = (
        0.75
    )


class _AnyWish(RequestBody):
    output_format: Annotated[
        ImageFormat, Field(strict=False, description="The images' file format, by default `png`.")
    ] = ImageFormat.PNG
    priority: Annotated[
        Priority,
        Field(strict=False, description="`low` waits behind all other jobs of your account; by default `normal`."),
    ] = Priority.NORMAL
    start_within: Annotated[
        Annotated[int, Field(ge=1, le=604_800)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="Seconds; a job that has not been started by then ends as `expired`."),
    ] = None
    metadata: Metadata = Field(default_factory=dict[str, str])
    webhook_url: Annotated[
        Annotated[str, Field(min_length=1, max_length=LONGEST_URL), NO_NUL] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="This HTTPS address is told by POST when the job ends, beside the account's webhooks."),
    ] = None

    def of_the_job(self) -> dict[str, Any]:
        """Return what a request of either kind says of its job; the order of `metadata` asks for nothing."""
        told = self.model_dump(include={"output_format", "priority", "start_within"})
        return told | {"metadata": dict(sorted(self.metadata.items()))}


class GenerationWish(_AnyWish):
    """Images of a prompt. What is left out is as the LoRAs, or else their base model, say."""

    other_api_fields: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("n", "num_outputs"), "is called `num_images` here"),
        **dict.fromkeys(("size", "image_size", "aspect_ratio", "resolution"), "send `width` and `height`, in pixels"),
        **dict.fromkeys(("num_inference_steps", "num_steps"), "is called `steps` here"),
        **dict.fromkeys(("cfg", "cfg_scale", "guidance"), "is called `guidance_scale` here"),
        **dict.fromkeys(("scheduler", "sampler_name"), "is called `sampler` here"),
        **dict.fromkeys(("lora", "lora_id", "model_id"), 'send `loras`, as in [{"id": "model_…", "weight": 0.8}]'),
        "model": "send `base_model`, or LoRAs as `loras`",
        "positive_prompt": "is called `prompt` here",
        **dict.fromkeys(("image", "image_url"), "send the picture to `POST /v1/images`, and its id as `image_id`"),
        **dict.fromkeys(("mask", "mask_url"), "send the picture to `POST /v1/images`, and its id as `mask_image_id`"),
    }
    kind: Literal["generation"] = "generation"
    prompt: Annotated[Prompt, Field(description="What the images show. White space around it does not count.")]
    negative_prompt: Annotated[OptionalPrompt, Field(description="What they should not show.")] = ""
    loras: Annotated[
        list[LoraWish],
        Field(max_length=MAX_LORAS, description="LoRAs of one base model that act together; their order is no matter."),
    ] = Field(default_factory=list[LoraWish])
    base_model: Annotated[
        CatalogId | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="That of the LoRAs; without one, by default the first of `GET /v1/base-models`."),
    ] = None
    sampler: Annotated[
        Annotated[str, Field(min_length=1, max_length=40, json_schema_extra={"pattern": _SAMPLER_PATTERN})]
        | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="Such as `euler` or `dpm++2m-karras`."),
    ] = None
    steps: Annotated[
        Annotated[int, Field(ge=1, le=150)] | SkipJsonSchema[None], NOT_NULL, Field(description="Denoising steps.")
    ] = None
    guidance_scale: Annotated[
        Annotated[float, Field(ge=1, le=20)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="How closely the images follow the prompt; 1 is no guidance."),
    ] = None
    width: Side = None
    height: Side = None
    num_images: Annotated[int, Field(ge=1, le=8, description="How many images; image i uses seed + i.")] = 1
    seed: Annotated[
        Seed, Field(description="The same seed gives the same images. Left out: the service draws one.")
    ] = None
    prompt_weights: Annotated[
        bool, Field(description="Read `(red:1.5)` and `[green]` in both prompts as weights of their words.")
    ] = False
    image_id: Annotated[
        CatalogId | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="An image of your account to begin from; a width and height asked for take its middle."),
    ] = None
    strength: Annotated[
        Annotated[float, Field(ge=0.01, le=1)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="How much of that image is drawn anew, by default 0.8: it takes that part of the steps."),
    ] = None
    mask_image_id: Annotated[
        CatalogId | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="An image of your account: white where `image_id` is drawn anew, black where it is kept."),
    ] = None

    def to_domain(self) -> Wish:
        fields = self.model_dump(exclude={"kind", "loras", *_AnyWish.model_fields})
        loras = tuple(LoraUse(lora.id, lora.weight) for lora in self.loras)
        return Wish(loras=loras, **fields, **self.of_the_job())


class UpscaleWish(_AnyWish):
    """A larger copy of an image."""

    kind: Literal["upscale"]
    image_id: Annotated[CatalogId, Field(description="An image of your account.")]
    scale_factor: Annotated[
        Literal[2, 4],
        Field(description="How many times wider and higher the result is; it may hold at most 16 megapixels."),
    ] = 2


def _kind_of(body: Any) -> Any:
    return body.get("kind", "generation") if isinstance(body, dict) else body.kind  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


AnyWish = Annotated[
    Annotated[GenerationWish, Tag("generation")] | Annotated[UpscaleWish, Tag("upscale")], Discriminator(_kind_of)
]

_SHORTEST: dict[str, Any] = {"prompt": "purple mountains under a black sky with a yellow moon"}
WISHES: dict[str, dict[str, Any]] = {
    "Shortest": _SHORTEST,
    "With a LoRA": {
        **_SHORTEST,
        "loras": [{"id": EXAMPLE_ADAPTER_ID, "weight": 0.8}],
        "sampler": "dpm++2m-karras",
        "steps": 24,
        "guidance_scale": 5,
        "width": 768,
        "num_images": 4,
        "seed": 7,
        "metadata": {"order": "4711"},
    },
    "Upscale": {"kind": "upscale", "image_id": "img_nq6w3s5kfrzp2xvd7bmtch4ylu", "scale_factor": 2},
}
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
    if isinstance(body, UpscaleWish):
        acceptance = await parts.submission.upscale(
            caller, body.image_id, body.scale_factor, call, of_any_job=True, **body.of_the_job()
        )
    else:
        acceptance = await parts.submission.create(caller, body.to_domain(), call)
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
