"""The tools that an assistant calls: they draw, enlarge and list, by the bodies and records of the other interfaces."""

import json
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import mcp_types as types
from anyio import CancelScope
from fastapi import Request
from mcp.server.context import ServerRequestContext

from serve_app.api.attended import attend, usable_loras, with_ids
from serve_app.api.dependencies import authenticate, check_scope, image_signer, jobs_of
from serve_app.api.errors import message_of
from serve_app.api.jobs.records import job_record
from serve_app.api.jobs.routes import with_webhook
from serve_app.api.jobs.schemas import GenerationWish, UpscaleWish
from serve_app.api.request_context import RequestContext
from serve_app.api.responses import failure_of
from serve_app.api.routing import validate
from serve_app.api.schemas import RequestBody
from serve_app.domain.accounts import Caller, Scope
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationDraft, GenerationRequest
from serve_app.jobs.previews import thumbnail
from serve_app.jobs.submit import Call

Context = ServerRequestContext[Any, Request]


class NoArguments(RequestBody):
    """A tool that is asked for one thing only takes none."""


async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
    """Answer a call, which counts against the caller's plan; an assistant is told in words what went wrong."""
    request, tool = request_of(context), TOOLS.get(params.name)
    try:
        caller = await authenticate(request)
        if tool is None:
            return _refusal(f"There is no tool {params.name!r}; there are {', '.join(TOOLS)}.")
        given = {name: value for name, value in (params.arguments or {}).items() if value is not None}
        return await tool.run(context, caller, validate(tool.arguments, tool.kind | given))
    except AtelierError as error:
        return _refusal(message_of(error))


async def list_tools(context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[tool.shown(name) for name, tool in TOOLS.items()])


def request_of(context: Context) -> Request:
    assert context.request is not None, "every message comes by HTTP"
    return context.request


def lora_row(lora: Adapter) -> dict[str, Any]:
    """Return what an assistant needs to know of a LoRA."""
    named = {"id": lora.id, "name": lora.name, "description": lora.description, "base_model": lora.base_model}
    return named | {"trigger_words": list(lora.trigger_words)}


async def _list_loras(context: Context, caller: Caller, _: RequestBody) -> types.CallToolResult:
    listed = {"loras": [lora_row(lora) for lora in await usable_loras(request_of(context), caller)]}
    return types.CallToolResult(content=[_text(json.dumps(listed, ensure_ascii=False))], structured_content=listed)


async def _draw(context: Context, caller: Caller, wish: Any) -> types.CallToolResult:
    """Answer once the images are there; a caller that leaves before cancels the job."""
    check_scope(caller, Scope.GENERATE)
    request, draft = request_of(context), wish.to_domain()
    call = with_webhook(request, wish, Call(request_id=RequestContext.of(request).request_id))
    if isinstance(draft, GenerationDraft):
        draft = replace(draft, loras=await with_ids(request, caller, draft.loras))
    async with aclosing(attend(request, caller, draft, call, seconds=inf)) as states:
        job, told = None, -1
        with CancelScope(shield=True):  # or a job would be drawn whose id nobody has
            job = await anext(states)
        assert job is not None, "a shield swallows nothing"
        while not job.state.is_terminal:
            if job.progress > told:
                told = job.progress
                await context.session.report_progress(told, 100, job.state)
            job = await anext(states)
    if job.state is not JobState.COMPLETED:
        return _refusal(f"{failure_of(job).code}: {failure_of(job).message}")
    await context.session.report_progress(100, 100, job.state)
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


def _refusal(words: str) -> types.CallToolResult:
    return types.CallToolResult(content=[_text(words)], is_error=True)


def _text(words: str) -> types.TextContent:
    return types.TextContent(type="text", text=words)


class _Tool(NamedTuple):
    """What a tool takes, and how it answers."""

    arguments: type[RequestBody]
    kind: dict[str, str]
    """The kind of job, which its name says: an argument that nobody is asked for."""
    run: Callable[[Context, Caller, Any], Awaitable[types.CallToolResult]]
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
    "list_loras": _Tool(
        NoArguments, {}, _list_loras, "List the LoRAs that generate takes, with the words that a prompt should hold."
    ),
}
