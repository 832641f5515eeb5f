"""Path operations of OpenAI's API: images of a prompt, for which the request waits, and the models to draw them with."""

import asyncio
import math
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import JSONResponse, Response, StreamingResponse

from serve_app.api.attended import attend, meant_by, usable_loras
from serve_app.api.body import parse_json
from serve_app.api.dependencies import CallDep, CallerDep, image_signer, jobs_of, loras_of, settings_of
from serve_app.api.errors import told_of
from serve_app.api.images import MAX_FILE_BYTES
from serve_app.api.multipart import read_multipart
from serve_app.api.responses import encode, failure_of, record_response
from serve_app.api.routing import ContractRoute, validate
from serve_app.api.schemas import MAX_LORAS, CatalogId, LoraWish, OptionalPrompt, Prompt, RequestBody, Steps
from serve_app.domain.accounts import Caller
from serve_app.domain.errors import (
    AtelierError,
    FailureCode,
    InvalidJson,
    InvalidParameter,
    NotFound,
    UnsupportedMediaType,
)
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationDraft, GenerationRequest, ImageFormat, LoraUse
from serve_app.jobs.resolution import SHORTEST_SIDE, SIDE_STEP
from serve_app.jobs.submit import Call
from serve_app.jobs.uploads import Hold

router = APIRouter(route_class=ContractRoute, strict_content_type=False)

LONGEST_WAIT_S = 590
"""A request waits no longer for its answer, lest HAProxy ends it after 600 (`deployments/proxy/backend.cfg`)."""
_HUNG_UP = 499
_STATUSES = {FailureCode.CANCELED: 409, FailureCode.LORA_UNAVAILABLE: 403, FailureCode.EXPIRED: 503}
"""How a job that ended without images is answered, if not by 500."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_SIZE, _NUMBER = re.compile(r"([0-9]{1,4})x([0-9]{1,4})"), re.compile(r"-?[0-9]{1,4000}")

_PICTURES, _FIDELITY = ("image", "image[]", "mask"), "input_fidelity"
_NUMBERS = ("n", "partial_images", "output_compression", "seed", "steps")
TOKEN_PIXELS, TOKEN_BYTES = 16 * 16, 4
"""What `usage` counts as a token: a square of pixels, as transformers see it, and bytes of a text."""

Ignored = Annotated[str, Field(max_length=512)] | None


class ImagesRequest(RequestBody):
    """What OpenAI's clients ask for. As there, null is the same as a field that is left out."""

    prompt: Prompt
    model: CatalogId | None = None
    n: Annotated[int, Field(ge=1, le=10)] | None = None
    size: Annotated[str, Field(min_length=1, max_length=16)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    background: Literal["opaque", "auto", "transparent"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    seed: Annotated[int, WithJsonSchema({"type": "integer"})] | None = None
    negative_prompt: OptionalPrompt | None = None
    loras: Annotated[list[LoraWish], Field(max_length=MAX_LORAS)] | None = None
    steps: Steps | None = None
    quality: Ignored = None
    style: Ignored = None
    moderation: Ignored = None
    user: Ignored = None
    safety_identifier: Ignored = None


@router.post("/openai/v1/images/generations")
async def generate(
    request: Request, caller: CallerDep, body: Annotated[ImagesRequest, Body()], call: CallDep
) -> Response:
    return await _answer(request, caller, body, await _draft(request, caller, body), call)


@router.post("/openai/v1/images/edits")
async def edit(request: Request, caller: CallerDep, call: CallDep) -> Response:
    async with jobs_of(request).uploads.hold() as hold:
        body, ids = await _read_form(request, caller, hold)
        draft = replace(await _draft(request, caller, body), image_id=ids["image"], mask_image_id=ids.get("mask"))
        return await _answer(request, caller, body, draft, call)


async def _answer(
    request: Request, caller: Caller, body: ImagesRequest, draft: GenerationDraft, call: Call
) -> Response:
    """Answer once the job of a draft has ended, or by a stream."""
    name = "image_generation" if draft.image_id is None else "image_edit"
    seconds = math.inf if body.stream else LONGEST_WAIT_S
    states = attend(request, caller, draft, call, seconds=seconds)
    try:
        job = await anext(states)
    except InvalidParameter as error:  # width and height are one field here
        message = error.message.replace("image_id:", "image:", 1)
        raise InvalidParameter(re.sub(r"^(?=(width|height):)", "size: ", message)) from None
    if body.stream:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        events = _events(request, states, job, body, name)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    hang_up = asyncio.create_task(_hang_up(request))
    try:
        async with aclosing(states):
            while not job.state.is_terminal:
                if hang_up.done():
                    return Response(status_code=_HUNG_UP)
                job = await anext(states)
    finally:
        hang_up.cancel()
    if job.state is not JobState.COMPLETED:
        return JSONResponse(*_failure(job), {"X-Should-Retry": "false"})
    gives_addresses = not (body.model or "").startswith("gpt-image")  # as at OpenAI; some clients may fetch none
    images = await _images(request, job, body.response_format or (None if gives_addresses else "b64_json"))
    answer = {"created": int(job.created_at.timestamp()), "data": images, "usage": _usage(job, len(images))}
    answer |= _drawn(job, body)
    return Response(await asyncio.to_thread(encode, answer), media_type="application/json")


@router.get("/openai/v1/models")
async def list_models(request: Request, caller: CallerDep) -> Response:
    return record_response({"object": "list", "data": await _models(request, caller)})


@router.get("/openai/v1/models/{model:path}")
async def get_model(request: Request, caller: CallerDep, model: str) -> Response:
    base_model, lora_id = await _model_of(request, caller, model)
    rows = await _models(request, caller)
    return record_response(next(row for row in rows if row["id"] in (base_model, lora_id)))


async def _models(request: Request, caller: Caller) -> list[dict[str, Any]]:
    """Return the base models, and the LoRAs with their names."""
    rows = [_model(base.id) for base in await loras_of(request).applied_catalog.applied_base_models()]
    for lora in await usable_loras(request, caller):
        owner = caller.account_id if lora.owner == caller.account_id else ""
        rows.append(_model(lora.id, int(lora.created_at.timestamp()), owner) | {"name": lora.name})
    return rows


def _model(model_id: str, created: int = 0, owner: str = "") -> dict[str, Any]:
    return {"id": model_id, "object": "model", "created": created, "owned_by": owner or "atelier"}


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """Return OpenAI's envelope of an error; `param` is the parameter that a message begins with."""
    parameter = re.match(r"([a-z_]+)(?:\[[0-9]*\])?(?:\.[a-z_]+)?: ", message)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": parameter and parameter[1], "code": code}}


async def _hang_up(request: Request) -> None:
    """Return when the caller has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_form(request: Request, caller: Caller, hold: Hold) -> tuple[ImagesRequest, dict[str, str]]:
    """Read the fields, and store the pictures; return also their ids. Raises what `read_multipart` and `Uploads.add` raise."""
    ids: dict[str, str] = {}
    async with loras_of(request).uploads.hold(caller.account_id) as place:
        names, most = [*ImagesRequest.model_fields, _FIDELITY], dict.fromkeys(_PICTURES, MAX_FILE_BYTES)
        texts, files = await read_multipart(request, place, texts=names, files=most, may_be_empty=False)
        numbers = {name: int(text) for name, text in texts.items() if name in _NUMBERS and _NUMBER.fullmatch(text)}
        flags = {"stream": texts["stream"] == "true"} if texts.get("stream") in ("true", "false") else {}
        listed = dict[str, Any]()
        with suppress(InvalidJson):  # the field is refused as it came then, by its name
            listed = {"loras": parse_json(texts["loras"].encode())} if "loras" in texts else {}
        texts.pop(_FIDELITY, None)
        body = validate(ImagesRequest, texts | numbers | flags | listed)
        for name in (each for each in _PICTURES if each in files):
            if name.removesuffix("[]") in ids:
                raise InvalidParameter("image: must be sent once, either as image or as image[]")
            ids[name.removesuffix("[]")] = await _store(request, caller, files[name], hold)
    if "image" not in ids:
        raise InvalidParameter("image: is required, one picture")
    return body, ids


async def _store(request: Request, caller: Caller, file: Path, hold: Hold) -> str:
    is_mask = file.name == "mask"
    try:
        async with AsyncExitStack() as place:
            added = await jobs_of(request).uploads.add(caller, file, place=place, hold=hold, is_mask=is_mask)
    except (InvalidParameter, UnsupportedMediaType) as error:
        name = "mask" if is_mask else "image"
        raise type(error)(error.message.replace("file:", f"{name}:", 1)) from None
    return added.upload.image.image_id


async def _draft(request: Request, caller: Caller, body: ImagesRequest) -> GenerationDraft:
    """Return what the body asks for. Raises `InvalidParameter`, and `NotFound` for a model."""
    base_model, lora_id = await _model_of(request, caller, body.model)
    width, height = _size(body.size)
    if body.background == "transparent":
        raise InvalidParameter("background: transparent is not drawn here; ask for opaque or auto")
    if body.output_compression not in (None, 100) and body.output_format in (None, "png"):
        raise InvalidParameter("output_compression: is for the output_format jpeg or webp; a png loses nothing")
    uses = tuple(LoraUse(each.id, each.weight) for each in body.loras or ())
    return GenerationDraft(
        prompt=body.prompt,
        negative_prompt=body.negative_prompt or "",
        seed=body.seed,
        num_images=body.n or 1,
        loras=((LoraUse(lora_id),) if lora_id else ()) + uses,
        steps=body.steps,
        quality=body.output_compression,
        base_model=base_model,
        width=width,
        height=height,
        output_format=ImageFormat(body.output_format or "png"),
    )


async def _model_of(request: Request, caller: Caller, model: str | None) -> tuple[str | None, str | None]:
    """Return the base model, or else the LoRA, that an id or a LoRA's name means; neither is the default."""
    if model is None:
        return None, None
    model = settings_of(request).openai_models.get(model, model)
    if any(base.id == model for base in await loras_of(request).applied_catalog.applied_base_models()):
        return model, None
    if lora_id := meant_by(model, await usable_loras(request, caller), "model"):
        return None, lora_id
    raise NotFound("model: must be the id of a base model, or the id or name of a LoRA that you may use")


def _size(size: str | None) -> tuple[int | None, int | None]:
    """Return width and height; the base model says how many it takes at most, and how many are usual."""
    if size in (None, "auto"):
        return None, None
    sides = [int(side) for each in [_SIZE.fullmatch(size)] if each for side in each.groups()]
    if not sides or any(side < SHORTEST_SIDE or side % SIDE_STEP for side in sides):
        least = f"multiples of {SIDE_STEP} from {SHORTEST_SIDE}"
        raise InvalidParameter(f"size: must be auto, or width and height as in 1024x512, {least}")
    return sides[0], sides[1]


async def _events(
    request: Request, states: AsyncGenerator[Job], job: Job, body: ImagesRequest, name: str
) -> AsyncGenerator[bytes]:
    """Yield previews of the first image, spread over its steps, and then each image, as server-sent events.

    `name` is what their types begin with.
    """
    parts, partials, sent = jobs_of(request), body.partial_images or 0, 0
    created = {"created_at": int(job.created_at.timestamp()), "quality": "auto", "background": "opaque"}
    try:
        async with aclosing(states):
            while not job.state.is_terminal:
                preview = None
                if sent < partials:
                    await parts.previews.watch(job.id)
                    if job.progress * (partials + 1) >= 100 * (sent + 1):
                        preview = (await parts.previews.get(job.id)).get(0)
                if preview is None:
                    yield b": waiting\n\n"  # proxies end connections on which nothing passes
                else:
                    shown = {"b64_json": b64encode(preview.png).decode(), "output_format": "png", "size": "auto"}
                    yield _event(f"{name}.partial_image", created | shown | {"partial_image_index": sent})
                    sent += 1
                job = await anext(states)
        if job.state is not JobState.COMPLETED:
            yield _event("error", _failure(job)[0])
            return
        for image in await _images(request, job, "b64_json"):
            yield _event(f"{name}.completed", created | _drawn(job, body) | image | {"usage": _usage(job, 1)})
    except AtelierError as error:
        status, message = told_of(error)
        yield _event("error", error_body(status, error.code, message))


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode({"type": name, **data}))


async def _images(request: Request, job: Job, form: str | None) -> list[dict[str, str]]:
    """Return each image in the form that is asked for, and in both where that is left out: clients differ."""
    parts, url_of, rows = jobs_of(request), image_signer(request), list[dict[str, str]]()
    for image in job.images:
        row: dict[str, str] = {}
        if form != "url":
            row["b64_json"] = b64encode(await parts.images.get(image.image_uri)).decode()
        if form != "b64_json":
            row["url"] = url_of(image.image_uri)
        rows.append(row)
    return rows


def _usage(job: Job, images: int) -> dict[str, Any]:
    """Return what some of a job's images took, in tokens as `TOKEN_PIXELS` says, and in what the account is told."""
    request = job.request
    assert isinstance(request, GenerationRequest)
    text = math.ceil(len(f"{request.prompt}{request.negative_prompt}".encode()) / TOKEN_BYTES) * images
    drawn = math.ceil(request.width * request.height / TOKEN_PIXELS) * images
    seen = drawn if request.image else 0
    tokens = {"input_tokens": text + seen, "output_tokens": drawn, "total_tokens": text + seen + drawn}
    work = round(request.work * images / request.num_images, 6)
    return tokens | {"input_tokens_details": {"text_tokens": text, "image_tokens": seen}, "megapixel_steps": work}


def _drawn(job: Job, body: ImagesRequest) -> dict[str, str]:
    size = f"{job.images[0].width}x{job.images[0].height}" if job.images else "auto"
    return {"size": size, "output_format": body.output_format or "png", "background": "opaque"}


def _failure(job: Job) -> tuple[dict[str, Any], int]:
    failure = failure_of(job)
    status = _STATUSES.get(failure.code, 500)
    return error_body(status, failure.code, failure.message), status
