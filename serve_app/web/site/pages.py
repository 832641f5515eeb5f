"""What all pages share: how they are rendered, their error pages and their security headers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from jinja2 import Template
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.errors import answer_domain_error, answer_http_exception, answer_unexpected_error
from serve_app.domain.errors import NotFound, StoreUnavailable, UnreadableRecord
from serve_app.web.site import PAGE_HEADERS, page_templates

Answer = Callable[[Request, Exception], Awaitable[Response]]

_TEMPLATES = page_templates(Path(__file__).parent / "templates")
_TITLES = {404: "Not found", 405: "Method not allowed", 500: "Internal error", 503: "Temporarily unavailable"}
_TEXTS: Mapping[int, str] = {
    404: "There is nothing at this address.",
    405: "This address does not support that method.",
    500: "The error has been logged. Going back and trying again may help.",
    503: "The service is temporarily unavailable. Try again in a few seconds.",
}


def answer_browsers_with_pages(site: FastAPI) -> None:
    """Answer what a person may meet outside the console with pages: 404, 405, 500 and 503."""
    site.add_exception_handler(HTTPException, _page_or(answer_http_exception))
    site.add_exception_handler(NotFound, _page_or(answer_domain_error))
    site.add_exception_handler(StoreUnavailable, _page_or(answer_domain_error))
    site.add_exception_handler(Exception, _page_or(answer_unexpected_error))


def is_of_browser(request: Request) -> bool:
    """Return whether a person opened the address: browsers ask for `text/html` by name."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    return "text/html" in request.headers.get("accept", "") and not path.startswith("/v1/")


def _page_or(answer: Answer) -> Answer:
    """Answer a browser with a page of the same status and headers that programs get."""

    async def respond(request: Request, error: Exception) -> Response:
        response = await answer(request, error)
        if not is_of_browser(request):
            return response
        text = error.message if isinstance(error, NotFound) else _TEXTS[response.status_code]
        kept = {name: response.headers[name] for name in ("allow", "retry-after") if name in response.headers}
        html = _TEMPLATES.get_template("problem.html").render(
            site=request.scope.get("root_path", ""), title=_TITLES[response.status_code], text=text, here=""
        )
        headers = {**PAGE_HEADERS, "Vary": "Accept", "Cache-Control": "no-store", **kept}
        return HTMLResponse(html, response.status_code, headers)

    return respond


YIELDS_AFTER_S = 0.001
"""Rendering yields to the event loop after this long, so that polls do not wait."""


class PageResponse(HTMLResponse):
    """Renders a template while it is sent, in pieces, so that the event loop can serve others between.

    An error is raised before a byte is sent.
    """

    def __init__(self, template: Template, values: Mapping[str, Any], status: int = 200) -> None:
        super().__init__(status_code=status)
        self._template, self._values = template, values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = (await self._render()).encode()
        self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)

    async def _render(self) -> str:
        parts: list[str] = []
        yields_at = time.perf_counter() + YIELDS_AFTER_S
        for part in self._template.generate(self._values):
            parts.append(part)
            if time.perf_counter() >= yields_at:
                await asyncio.sleep(0)
                yields_at = time.perf_counter() + YIELDS_AFTER_S
        return "".join(parts)


Render = Callable[..., Response]
"""Renders a template of some pages: `render(request, template, session, status=…, **values)`."""


def answer_with_pages(app: FastAPI, render: Render, read: Callable[[Request], Awaitable[Any]]) -> None:
    """Answer client errors, outages and unexpected errors with pages.

    `read` returns the session of a request: who is signed in keeps the navigation, unless the service itself fails.
    """

    async def page(request: Request, status: int, title: str, text: str) -> Response:
        session = None
        if status < 500:
            with suppress(StoreUnavailable):
                session = await read(request)
        return render(request, "problem.html", session, status=status, title=title, text=text)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        text = _TEXTS.get(status, error.detail) if error.detail == status.phrase else error.detail
        response = await page(request, status, status.phrase.capitalize(), text)
        response.headers.update(error.headers or {})
        return response

    async def explain(request: Request, error: Exception) -> Response:
        if isinstance(error, UnreadableRecord):
            text = "Another version of this service wrote the record, or it is damaged. Nothing else is affected."
            return await page(request, 500, "This record cannot be read", text)
        status = 404 if isinstance(error, NotFound) else 503 if isinstance(error, StoreUnavailable) else 500
        response = await page(request, status, _TITLES[status], _TEXTS[status])
        if status == 503:
            response.headers["Retry-After"] = "5"
        return response

    app.add_exception_handler(HTTPException, refuse)
    for kind in (NotFound, StoreUnavailable, UnreadableRecord, Exception):
        app.add_exception_handler(kind, explain)


HSTS = "max-age=31536000"


class Protection:
    """Refuses a POST that another site made the browser send, and sets the headers of every answer.

    `public_url` is the address behind a front proxy: an accepted origin, and https when it says so.
    """

    def __init__(self, app: ASGIApp, *, public_url: str) -> None:
        self._app = app
        self._public = urlsplit(public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._set_headers(MutableHeaders(scope=message), is_https=scope["scheme"] == "https")
            await send(message)

        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD") and not self._is_own_form(headers):
            response = PlainTextResponse("This form was not sent from the console's own pages.\n", 403)
            await response(scope, receive, send_protected)
            return
        await self._app(scope, receive, send_protected)

    def _is_own_form(self, headers: Headers) -> bool:
        """Whether the form is of our own pages: by `Sec-Fetch-Site`, or by `Origin` over plain http."""
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        origin = urlsplit(headers.get("origin", "")).netloc
        return bool(origin) and origin in (headers.get("host"), self._public.netloc)

    def _set_headers(self, headers: MutableHeaders, *, is_https: bool) -> None:
        for name, value in PAGE_HEADERS.items():
            headers[name] = value
        headers.setdefault("Cache-Control", "no-store")  # answers with images say how long they are kept
        if is_https or self._public.scheme == "https":
            headers["Strict-Transport-Security"] = HSTS


SAMPLES = ("neon", "stripes", "shadow", "mosaic", "confetti", "sepia", "blueprint", "outline")
FIRST_SAMPLES = ("stripes", "confetti", "neon", "shadow", "mosaic", "blueprint")
"""The landing page shows these: Outline breaks its lines and Sepia blurs in some of twelve seeds (28 November 2026)."""
SAMPLE_PROMPT = "a yellow flower with a red middle on a blue background"
_BASE_MODEL = "pocket"


def sample_of(name: str, base_model: str) -> str:
    """The sample of a LoRA by its name and base model; empty for one that is not bundled."""
    return name.lower() if base_model == _BASE_MODEL and name.lower() in SAMPLES else ""
