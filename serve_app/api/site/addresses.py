"""Addresses of pages: where their application is mounted, redirects within it, what their query says."""

from starlette.requests import Request
from starlette.responses import RedirectResponse

from serve_app.api.dependencies import resources_of

MOST_PAGES = 2_000


def redirect(request: Request, path: str) -> RedirectResponse:
    """Redirect to another page of the same application."""
    return RedirectResponse(f"{root_of(request)}/{path}", 303)


def page_number(request: Request) -> int:
    """The `page` of the address, from 1."""
    text = request.query_params.get("page", "")
    return min(max(1, int(text)), MOST_PAGES) if text.isascii() and text.isdecimal() and len(text) < 6 else 1


def root_of(request: Request) -> str:
    """The path at which the pages' application is mounted."""
    return request.scope.get("root_path", "").rstrip("/")


def site_of(request: Request) -> str:
    """The path of the service, in which that application is mounted."""
    return request.scope.get("app_root_path", "").rstrip("/")


def is_secure(request: Request) -> bool:
    """Whether the browser speaks https, also when a front proxy ends it and `public_url` says so."""
    return request.url.scheme == "https" or resources_of(request).settings.public_url.startswith("https://")
