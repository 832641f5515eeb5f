"""The tools that an assistant calls, by the bodies and records of `/v1/jobs`, and the base models and LoRAs it reads."""

import json
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from math import inf
from typing import Annotated, Any, NamedTuple

import mcp_types as types
from anyio import CancelScope
from fastapi import Request
from pydantic import Field

from serve_app.api.attended import attend, usable_loras
from serve_app.api.dependencies import check_scope, image_signer, jobs_of, loras_of
from serve_app.api.jobs.records import job_record
from serve_app.api.jobs.routes import base_model_record, with_webhook
from serve_app.api.jobs.schemas import GenerationWish, UpscaleWish
from serve_app.api.request_context import RequestContext
from serve_app.api.responses import failure_of
from serve_app.api.routing import validate
from serve_app.api.schemas import RequestBody
from serve_app.domain.accounts import Caller, Scope
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import InvalidParameter, NotFound
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationRequest
from serve_app.jobs.previews import thumbnail
from serve_app.jobs.submit import Call

BASE_MODEL, LORA, JSON = "atelier://base-models/", "atelier://loras/", "application/json"
PAGE = 200
"""How many LoRAs one answer names."""


class Asked(NamedTuple):
    """A message: its HTTP request, its caller, and how its caller is told of progress."""

    request: Request
    caller: Caller
    report: Callable[[float, float, str], Awaitable[None]]


class LoraSearch(RequestBody):
    """Which LoRAs to list."""

    q: Annotated[str, Field(max_length=100, description="Words of name, description, trigger words or id.")] = ""


async def call_tool(asked: Asked, params: types.CallToolRequestParams) -> types.CallToolResult:
    """Answer a call. As in other interfaces for assistants, null is the same as an argument that is left out."""
    if (tool := TOOLS.get(params.name)) is None:
        raise InvalidParameter(f"There is no tool {params.name!r}; there are {', '.join(TOOLS)}.")
    given = {name: value for name, value in (params.arguments or {}).items() if value is not None}
    return await tool.run(asked, validate(tool.arguments, tool.kind | given))


async def list_tools(_: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[tool.shown(name) for name, tool in TOOLS.items()])


async def list_resources(asked: Asked, params: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
    """Return the base models, and a page of LoRAs."""
    cursor = (params and params.cursor) or "0"
    if not (cursor.isdecimal() and cursor.isascii() and len(cursor) < 10):
        raise InvalidParameter("cursor: must be the nextCursor of a previous page")
    start, loras = int(cursor), await usable_loras(asked.request, asked.caller)
    models = await loras_of(asked.request).applied_catalog.applied_base_models() if start == 0 else []
    rows = [(BASE_MODEL + each.id, each.id, "A base model, and what may be asked of it.") for each in models]
    rows += [(LORA + lora.id, lora.name, lora.description) for lora in loras[start : start + PAGE]]
    resources = [types.Resource(uri=uri, name=name, description=words, mime_type=JSON) for uri, name, words in rows]
    following = str(start + PAGE) if loras[start + PAGE :] else None
    return types.ListResourcesResult(resources=resources, next_cursor=following)


async def read_resource(asked: Asked, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    uri, models = str(params.uri), await loras_of(asked.request).applied_catalog.applied_base_models()
    found = [base_model_record(each) for each in models if uri == BASE_MODEL + each.id]
    found += [_lora_row(lora) for lora in await usable_loras(asked.request, asked.caller) if uri == LORA + lora.id]
    if not found:
        raise NotFound("There is no such base model, or LoRA that you may use.")
    text = json.dumps(found[0], ensure_ascii=False)
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=params.uri, text=text, mime_type=JSON)])


def refusal(words: str) -> types.CallToolResult:
    return types.CallToolResult(content=[_text(words)], is_error=True)


async def _list_loras(asked: Asked, search: LoraSearch) -> types.CallToolResult:
    found = [lora for lora in await usable_loras(asked.request, asked.caller) if lora.holds(search.q)]
    listed = {"loras": [_lora_row(lora) for lora in found[:PAGE]], "left_out": len(found[PAGE:])}
    return types.CallToolResult(content=[_text(json.dumps(listed, ensure_ascii=False))], structured_content=listed)


def _lora_row(lora: Adapter) -> dict[str, Any]:
    named = {"id": lora.id, "name": lora.name, "description": lora.description, "base_model": lora.base_model}
    return named | {"trigger_words": list(lora.trigger_words)}


async def _draw(asked: Asked, wish: GenerationWish | UpscaleWish) -> types.CallToolResult:
    """Answer once the images are there; a caller that leaves before cancels the job."""
    check_scope(asked.caller, Scope.GENERATE)
    request, job, told = asked.request, None, -1
    call = with_webhook(request, wish, Call(request_id=RequestContext.of(request).request_id))
    async with aclosing(attend(request, asked.caller, wish.to_domain(), call, seconds=inf)) as states:
        with CancelScope(shield=True):  # or a job would be drawn whose id nobody has
            job = await anext(states)
        assert job is not None, "a shield swallows nothing"
        while not job.state.is_terminal:
            if job.progress > told:
                told = job.progress
                await asked.report(told, 100, job.state)
            job = await anext(states)
    if job.state is not JobState.COMPLETED:
        return refusal(f"{failure_of(job).code}: {failure_of(job).message}")
    await asked.report(100, 100, job.state)
    return await _shown(request, job)


async def _shown(request: Request, job: Job) -> types.CallToolResult:
    """Return each image as a link, with a small picture of it and a line that names it."""
    parts, url_of, content = jobs_of(request), image_signer(request), list[Any]()
    seeds = job.request.seeds if isinstance(job.request, GenerationRequest) else ()
    for image in job.images:
        webp = await thumbnail(parts.images, parts.space.disk, image.image_uri)
        size, url = f"{image.width} × {image.height} pixels", url_of(image.image_uri)
        words = f"{size}, seed {seeds[image.index]}" if seeds else size
        form = job.request.output_format.media_type if job.request else None
        content += [
            types.ImageContent(type="image", data=b64encode(webp).decode(), mime_type="image/webp"),
            types.ResourceLink(name=image.image_id, uri=url, mime_type=form, size=image.size_bytes, description=words),
            _text(f"{image.image_id}, {words}: {url}"),
        ]
    return types.CallToolResult(content=content, structured_content=job_record(job, url_of))


def _text(words: str) -> types.TextContent:
    return types.TextContent(type="text", text=words)


class _Tool(NamedTuple):
    """What a tool takes, and how it answers."""

    arguments: type[RequestBody]
    kind: dict[str, str]
    """The kind of job, which its name says: an argument that nobody is asked for."""
    run: Callable[[Asked, Any], Awaitable[types.CallToolResult]]
    description: str

    def shown(self, name: str) -> types.Tool:
        schema = self.arguments.model_json_schema()
        for each in self.kind:
            schema["properties"].pop(each)
        schema["required"] = [each for each in schema.get("required", ()) if each not in self.kind]
        reads = types.ToolAnnotations(read_only_hint=self.run is _list_loras)
        return types.Tool(name=name, description=self.description, input_schema=schema, annotations=reads)


TOOLS = {
    "generate": _Tool(
        GenerationWish,
        {"kind": "generation"},
        _draw,
        "Draw images of a prompt, with any of the LoRAs that list_loras names, by id or name. Each image comes with an "
        "id, which upscale and image_id take, a small preview, and an address that opens in a browser.",
    ),
    "upscale": _Tool(UpscaleWish, {"kind": "upscale"}, _draw, "Enlarge an image by its id."),
    "list_loras": _Tool(LoraSearch, {}, _list_loras, "List LoRAs, with the words that a prompt should hold for each."),
}
