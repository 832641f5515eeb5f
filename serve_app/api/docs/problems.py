"""What is not there, as a page for people; programs, and every address of the API, get the envelope of the contract."""

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from serve_app.api.errors import answer_domain_error, answer_http_exception
from serve_app.api.site import PAGE_HEADERS, page_templates
from serve_app.domain.errors import NotFound

_TEMPLATES = page_templates(Path(__file__).parent / "templates")


async def answer_missing_page(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and is_of_browser(request):
        return _page(request, "There is nothing at this address.")
    return await answer_http_exception(request, error)


async def answer_missing_image(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotFound)
    return _page(request, error.message) if is_of_browser(request) else await answer_domain_error(request, error)


def is_of_browser(request: Request) -> bool:
    """Whether a person opened the address: browsers ask for `text/html` by name."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    return "text/html" in request.headers.get("accept", "") and not path.startswith("/v1/")


def _page(request: Request, text: str) -> HTMLResponse:
    html = _TEMPLATES.get_template("problem.html").render(site=request.scope.get("root_path", ""), text=text)
    return HTMLResponse(html, 404, headers={**PAGE_HEADERS, "Vary": "Accept", "Cache-Control": "no-store"})
