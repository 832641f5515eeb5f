"""The bodies that `POST /v1/jobs` takes, by the kind of job, and how a job's record shows what it was asked for."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.openapi import EXAMPLE_ADAPTER_ID
from serve_app.api.schemas import (
    MAX_LORAS,
    NO_NUL,
    NOT_NULL,
    CatalogId,
    Count,
    ImageId,
    LoraWish,
    OptionalPrompt,
    Pixels,
    Prompt,
    RequestBody,
    ResponseBody,
    Seed,
    Steps,
)
from serve_app.domain.requests import (
    GenerationDraft,
    GenerationRequest,
    ImageFormat,
    LoraUse,
    Priority,
    Request,
    UpscaleDraft,
)
from serve_app.domain.samplers import Sampler, spacings_of
from serve_app.jobs.resolution import SHORTEST_SIDE, SIDE_STEP
from serve_app.webhooks.targets import LONGEST_URL

LONGEST_SIDE = 2048
_SAMPLERS = "|".join(f"{each}(?:-(?:{'|'.join(spacings_of(each))}))?" for each in Sampler).replace("+", r"\+")
_SAMPLER_PATTERN = f"^(?:{_SAMPLERS})$"

OptionalId = Annotated[CatalogId | SkipJsonSchema[None], NOT_NULL]
Side = Annotated[
    Annotated[int, Field(ge=SHORTEST_SIDE, le=LONGEST_SIDE, multiple_of=SIDE_STEP)] | SkipJsonSchema[None],
    NOT_NULL,
    Field(
        description="Pixels; the base model says how many it takes, and how many are usual. With an image to begin "
        "from, what is left out follows its proportions."
    ),
]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="Texts of yours that the job keeps, such as an order's number."),
]


_SAID = """\
n num_outputs num_samples batch_size n_iter: is called `num_images` here
size image_size aspect_ratio resolution megapixels: send `width` and `height`, in pixels
num_inference_steps num_steps inference_steps: is called `steps` here
cfg cfg_scale guidance: is called `guidance_scale` here
scheduler sampler_name: is called `sampler` here
prompt_strength denoising_strength image_strength: is called `strength` here
positive_prompt text: is called `prompt` here
format image_format: is called `output_format` here
webhook fal_webhook callback_url: is called `webhook_url` here
lora lora_id lora_ids lora_url lora_urls lora_path model_id: send `loras`, as in [{"id": "model_…", "weight": 0.8}]
lora_weight lora_weights lora_scale lora_strength extra_lora replicate_weights: send `loras`, each with a `weight`
model model_name version checkpoint: send `base_model`, or LoRAs as `loras`
image image_url image_urls init_image init_images input_image: send it to `POST /v1/images`, and its id as `image_id`
mask mask_image mask_url: send it to `POST /v1/images`, and its id as `mask_image_id`
input inputs arguments parameters params: send its fields in the body itself
scale upscale upscale_factor: is called `weight` of a LoRA here, and `scale_factor` of an upscale
loras[].path loras[].url loras[].file loras[].model: send the file to `POST /v1/loras` once, and its id as `id`
loras[].lora_id loras[].model_id loras[].name loras[].lora: is called `id` here
loras[].scale loras[].strength loras[].lora_weight loras[].lora_scale: is called `weight` here
webhook_events_filter webhook_events: leave it out; a webhook of `POST /v1/webhooks` has `events`
enable_safety_checker disable_safety_checker safety_checker safety_tolerance: leave it out; the operator moderates
sync_mode sync wait stream: leave it out; with the header `Prefer: wait=30` the answer comes when the job has ended
acceleration go_fast output_quality quality expand_prompt clip_skip refine: leave it out; there is no such choice here
"""
OTHER_NAMES = {
    name: said for line in _SAID.splitlines() for names, _, said in [line.partition(": ")] for name in names.split()
}
"""What is told to callers who send a name of fal, Replicate, OpenAI, A1111 or diffusers: `loras[].` is of each LoRA."""


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
        Field(description="This HTTPS address is told by POST when the job ends, as are the account's webhooks."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the fields of the draft that it becomes; the order of `metadata` asks for nothing."""
        told = self.model_dump(exclude={"kind", "webhook_url"})
        return told | {"metadata": dict(sorted(self.metadata.items()))}


class GenerationWish(_AnyWish):
    """Images of a prompt. What is left out is as the LoRAs, or else their base model, say."""

    other_api_fields: ClassVar[dict[str, str]] = OTHER_NAMES
    kind: Literal["generation"] = "generation"
    prompt: Annotated[Prompt, Field(description="What the images show. White space around it does not count.")]
    negative_prompt: Annotated[OptionalPrompt, Field(description="What they should not show.")] = ""
    loras: Annotated[
        list[LoraWish],
        Field(max_length=MAX_LORAS, description="LoRAs that act together on one base model; their order is no matter."),
    ] = Field(default_factory=list[LoraWish])
    base_model: Annotated[
        OptionalId,
        Field(
            description="One of the `base_models` of each of the LoRAs, by default their own; without a LoRA, the first of "
            "`GET /v1/base-models`."
        ),
    ] = None
    sampler: Annotated[
        Annotated[str, Field(min_length=1, max_length=40, json_schema_extra={"pattern": _SAMPLER_PATTERN})]
        | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="Such as `euler` or `dpm++2m-karras`."),
    ] = None
    steps: Annotated[Steps | SkipJsonSchema[None], NOT_NULL, Field(description="Denoising steps.")] = None
    guidance_scale: Annotated[
        Annotated[float, Field(ge=1, le=20)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="How closely the images follow the prompt; 1 is no guidance."),
    ] = None
    guidance_start: Annotated[
        Annotated[float, Field(ge=0, le=1)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(
            description="The fraction of an image's own steps at which guidance begins: a step without it takes half the "
            "time. With `guidance_end` alone it is 0."
        ),
    ] = None
    guidance_end: Annotated[
        Annotated[float, Field(ge=0, le=1)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="The fraction at which it ends, above `guidance_start`. With that alone it is 1."),
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
    embed_settings: Annotated[
        bool,
        Field(
            description="Write prompt, seed and other settings into each file, where A1111 and InvokeAI (of a PNG) read "
            "them, and whoever has the image's address."
        ),
    ] = False
    image_id: Annotated[
        OptionalId,
        Field(description="An image of your account to begin from; a width and height asked for take its middle."),
    ] = None
    strength: Annotated[
        Annotated[float, Field(ge=0.01, le=1)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="How much of that image is redrawn, by default 0.8: it takes that part of the steps."),
    ] = None
    mask_image_id: Annotated[
        OptionalId,
        Field(description="An image of your account: white where `image_id` is redrawn, black where it is kept."),
    ] = None

    def to_domain(self) -> GenerationDraft:
        given = self.given()
        given["loras"] = tuple(LoraUse(**lora) for lora in given["loras"])
        return GenerationDraft(**given)


class UpscaleWish(_AnyWish):
    """A larger copy of an image."""

    kind: Literal["upscale"]
    image_id: Annotated[CatalogId, Field(description="An image of your account.")]
    scale_factor: Annotated[
        Literal[2, 4],
        Field(description="How many times wider and higher the result is; it may hold at most 16 megapixels."),
    ] = 2

    def to_domain(self) -> UpscaleDraft:
        return UpscaleDraft(**self.given())


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


SeedText = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9]+$"})]
OptionalText = Annotated[str | SkipJsonSchema[None], Field(description="Absent where the request names none.")]
OptionalFraction = Annotated[
    float | SkipJsonSchema[None], Field(description="Absent where the request says nothing of it.")
]
OptionalImage = Annotated[ImageId | SkipJsonSchema[None], Field(description="Absent where it begins from none.")]


class LoraFields(ResponseBody):
    """A LoRA, and how strongly it acts."""

    id: str
    weight: float


class GenerationFields(ResponseBody):
    """What a generation was asked for, defaults filled in."""

    prompt: str
    negative_prompt: str
    loras: list[LoraFields]
    base_model: OptionalText = None
    width: Pixels
    height: Pixels
    guidance_scale: float
    guidance_start: OptionalFraction = None
    guidance_end: OptionalFraction = None
    steps: Count
    sampler: OptionalText = None
    num_images: Count
    seeds: Annotated[list[SeedText], Field(description="That of each image, as decimal strings.")]
    prompt_weights: bool
    embed_settings: bool
    image_id: OptionalImage = None
    strength: Annotated[float | SkipJsonSchema[None], Field(description="Present with `image_id`.")] = None
    mask_image_id: OptionalImage = None
    output_format: ImageFormat
    priority: Priority
    start_within: Count | SkipJsonSchema[None] = None
    metadata: dict[str, str]


class UpscaleFields(ResponseBody):
    """What an upscale was asked for."""

    image_id: ImageId
    scale_factor: Count
    output_format: ImageFormat
    priority: Priority
    start_within: Count | SkipJsonSchema[None] = None
    metadata: dict[str, str]


def request_record(request: Request) -> dict[str, Any]:
    """Return `GenerationFields` or `UpscaleFields` as plain values, in their order."""
    fields = GenerationFields if isinstance(request, GenerationRequest) else UpscaleFields
    values: dict[str, Any] = {name: getattr(request, name, None) for name in fields.model_fields}
    if isinstance(request, GenerationRequest):
        values["loras"] = [{"id": lora.id, "weight": lora.weight} for lora in request.loras]
        values["seeds"] = [str(seed) for seed in request.seeds]
        values["image_id"] = request.image and request.image.image_id
        values["mask_image_id"] = request.mask and request.mask.image_id
        values["strength"] = request.strength if request.image else None
    return {name: value for name, value in values.items() if value is not None and not (name in _UNNAMED and not value)}


_UNNAMED = ("base_model", "sampler")
