"""Where the documents and their pages are."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from serve_app.api.answers import base_address
from serve_app.api.docs.page import code_spans, operations

Document = Callable[[str], dict[str, Any]]
"""From the address callers use to the OpenAPI document."""

_HERE = Path(__file__).parent
_STYLE = (_HERE / "style.css").read_bytes()
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


def routes(documents: Mapping[str, Document], *, public_url: str) -> list[Route]:
    """`/openapi/<name>.json` and `/docs/<name>` for each document, and `/` to find them."""
    pages = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined)
    pages.filters["code_spans"] = code_spans

    def open_document(name: str) -> Route:
        async def answer(request: Request) -> Response:
            return JSONResponse(documents[name](base_address(request, public_url)))

        return Route(f"/openapi/{name}.json", answer, methods=["GET"])

    def open_page(name: str) -> Route:
        async def answer(request: Request) -> Response:
            base = base_address(request, public_url)
            document = documents[name](base)
            html = pages.get_template("page.html").render(
                name=name,
                base=base,
                root=request.scope.get("root_path", ""),
                document=document,
                operations=operations(document, base),
            )
            return HTMLResponse(html, headers=_PAGE_HEADERS)

        return Route(f"/docs/{name}", answer, methods=["GET"])

    async def landing(request: Request) -> Response:
        base = base_address(request, public_url)
        html = pages.get_template("landing.html").render(base=base, root=request.scope.get("root_path", ""))
        return HTMLResponse(html, headers=_PAGE_HEADERS)

    async def style(request: Request) -> Response:
        return Response(_STYLE, media_type="text/css", headers={"Cache-Control": "public, max-age=3600"})

    return [
        Route("/", landing, methods=["GET"]),
        Route("/docs/style.css", style, methods=["GET"]),
        *(open_document(name) for name in documents),
        *(open_page(name) for name in documents),
    ]
