"""Serves the landing page, the OpenAPI documents with pages to read them, `robots.txt` and `llms.txt`."""

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
from markupsafe import Markup, escape

from serve_app.api.dependencies import base_url, loras_of
from serve_app.api.openapi import EXAMPLE_ADAPTER_ID
from serve_app.web.docs.reference import credentials_of, messages_of, operations_of
from serve_app.web.guide import is_built
from serve_app.web.site import PAGE_HEADERS, page_templates
from serve_app.web.site import STATIC as SITE_STATIC
from serve_app.web.site.forms import curl_line
from serve_app.web.site.pages import FIRST_SAMPLES, SAMPLE_PROMPT

ROBOTS = """User-agent: *
Disallow: /console/
Disallow: /operators/
Disallow: /files/
Disallow: /v1/
"""


def llms_text(base_url: str, titles: Mapping[str, str], *, has_guide: bool) -> str:
    """Return what a language model needs to write a client: https://llmstxt.org."""
    guide = f"- [Guide]({base_url}/guide/llms.txt): how to draw, integrate and operate, page by page\n"
    documents = "\n".join(
        f"- [{title}]({base_url}/openapi/{name}.json): OpenAPI document" for name, title in titles.items()
    )
    return f"""# Atelier

> A self-hosted service that generates images from prompts with LoRA models, as jobs that are polled.

Programs send an API key and get the id of a job; they poll it every 5 seconds until its status is completed or failed.
Two interfaces share `POST {base_url}/v1/generate`. The header that carries the key decides which one answers:
`Authorization: Bearer` is interface A (one to four images, upscaling),
`X-API-Key` is interface B (one image, negative prompt).
Every error is JSON: `{{"error": {{"code": "...", "message": "..."}}}}`.

## Documents

{documents}
- [Reference]({base_url}/docs): the operations of all of them, with a curl line for each
{guide if has_guide else ""}"""


_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
_CODE = re.compile(r"`([^`]+)`")
_HERE = Path(__file__).parent
STATIC = _HERE / "static"
_FAVICON_HEADERS = {"Cache-Control": "public, max-age=86400"}


def docs_router(documents: Mapping[str, FastAPI]) -> APIRouter:
    """Build the router of the landing page and of the documents.

    It has `/`, the files that browsers and programs look for next to it, `/docs`, and for each document `/docs/<name>`
    and `/openapi/<name>.json`.
    """
    router = APIRouter(include_in_schema=False)
    templates = page_templates(_HERE / "templates")
    templates.filters["shell"] = _with_variables
    templates.filters["prose"] = _prose
    templates.policies["json.dumps_kwargs"] = {"sort_keys": False}  # JSON keeps the order of the document

    async def document(request: Request, name: str) -> dict[str, Any]:
        """Return the document with this service's address, and an open adapter in its examples."""
        if name not in documents:
            raise HTTPException(404)
        usable = await loras_of(request).catalog.open_adapter_id()
        text = json.dumps(documents[name].openapi()).replace(EXAMPLE_ADAPTER_ID, usable or EXAMPLE_ADAPTER_ID)
        return {**json.loads(text), "servers": [{"url": base_url(request)}]}

    def page(request: Request, template: str, **values: Any) -> HTMLResponse:
        html = templates.get_template(template).render(
            site=request.scope.get("root_path", ""),
            base=base_url(request),
            titles={name: app.title.removeprefix("Atelier: ") for name, app in documents.items()},
            **values,
        )
        return HTMLResponse(html, headers=PAGE_HEADERS)

    @router.get("/")
    async def landing(request: Request) -> HTMLResponse:
        lora_id = await loras_of(request).catalog.open_adapter_id() or EXAMPLE_ADAPTER_ID
        header, fields = "Authorization: Bearer YOUR_API_KEY", {"prompt": SAMPLE_PROMPT, "lora_id": lora_id}
        curl = curl_line(base_url(request), header, fields)
        return page(request, "landing.html", samples=FIRST_SAMPLES, prompt=SAMPLE_PROMPT, curl=curl)

    @router.get("/favicon.ico")
    async def favicon() -> Response:
        return FileResponse(SITE_STATIC / "mark.svg", media_type="image/svg+xml", headers=_FAVICON_HEADERS)

    @router.get("/robots.txt")
    async def robots() -> Response:
        return PlainTextResponse(ROBOTS)

    @router.get("/llms.txt")
    async def for_language_models(request: Request) -> Response:
        titles = {name: app.title for name, app in documents.items()}
        return PlainTextResponse(llms_text(base_url(request), titles, has_guide=await asyncio.to_thread(is_built)))

    @router.get("/docs")
    async def chooser(request: Request) -> HTMLResponse:
        chosen = {name: await document(request, name) for name in documents}
        return page(request, "chooser.html", documents=chosen)

    @router.get("/docs/{name}")
    async def reference(request: Request, name: str) -> HTMLResponse:
        shown = await document(request, name)
        return page(
            request,
            "reference.html",
            name=name,
            document=shown,
            operations=operations_of(shown),
            messages=messages_of(shown),
            credentials=credentials_of(shown),
        )

    @router.get("/openapi/{name}.json")
    async def openapi(request: Request, name: str) -> Response:
        return Response(json.dumps(await document(request, name)), media_type="application/json")

    return router


def _with_variables(path: str) -> str:
    """Return a path with shell variables: `/v1/generate/$REQUEST_ID` of `/v1/generate/{request_id}`."""
    return _PATH_PARAMETER.sub(lambda name: f"${name[1].upper()}", path)


def _prose(text: str) -> Markup:
    """Split a text in paragraphs, with code between backticks."""
    paragraphs = [_CODE.sub(r"<code>\1</code>", str(escape(each))) for each in text.split("\n\n") if each]
    return Markup("".join(f"<p>{each}</p>" for each in paragraphs))
