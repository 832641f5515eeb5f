"""Error pages for browsers outside the console; programs get the contract's envelope."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from serve_app.api.errors import answer_domain_error, answer_http_exception, answer_unexpected_error
from serve_app.api.site import PAGE_HEADERS, page_templates
from serve_app.domain.errors import NotFound, StoreUnavailable

Answer = Callable[[Request, Exception], Awaitable[Response]]

_TEMPLATES = page_templates(Path(__file__).parent / "templates")
_TITLES = {404: "Not found", 405: "Method not allowed", 500: "Internal error", 503: "Temporarily unavailable"}
_TEXTS = {
    404: "There is nothing at this address.",
    405: "This address cannot be used that way.",
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
        return _page(request, response.status_code, text, kept)

    return respond


def _page(request: Request, status: int, text: str, headers: dict[str, str]) -> HTMLResponse:
    html = _TEMPLATES.get_template("problem.html").render(
        site=request.scope.get("root_path", ""), title=_TITLES[status], text=text
    )
    return HTMLResponse(
        html, status, headers={**PAGE_HEADERS, "Vary": "Accept", "Cache-Control": "no-store", **headers}
    )
