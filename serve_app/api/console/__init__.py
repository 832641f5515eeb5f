"""The console: sign in, and make the keys of both interfaces. Server-rendered; works without JavaScript.

app.mount("/console", console_app(resources))
"""

from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from serve_app.api.console.key_page import KEY_PAGES
from serve_app.api.console.pages import Pages, load_templates
from serve_app.api.console.protection import Protection
from serve_app.domain.errors import StoreUnavailable
from serve_app.service.resources import Resources

FORM_BYTES = 16 * 1024
"""No form of ours is larger than a few hundred bytes."""
STATIC = Path(__file__).parent / "static"


def console_app(resources: Resources) -> ASGIApp:
    """The pages over these stores. Every answer carries the security headers; a POST must come from the console itself."""
    pages = Pages(resources, load_templates())
    app = Starlette(
        routes=_routes(pages),
        exception_handlers=_problems(pages),
        max_body_size=FORM_BYTES,
    )
    app.state.resources = resources
    return Protection(app, public_url=resources.settings.public_url)  # outermost: a 500 and a 413 need its headers too


def _routes(pages: Pages) -> list[Route | Mount]:
    routes: list[Route | Mount] = [
        Route("/", pages.home),
        Route("/sign-in", pages.sign_in_form, methods=["GET"]),
        Route("/sign-in", pages.sign_in, methods=["POST"]),
        Route("/sign-out", pages.sign_out, methods=["POST"]),
        Route("/settings", pages.settings),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    for page in KEY_PAGES:
        path = f"/settings/{page.slug}"
        routes += [
            Route(path, partial(pages.keys, page=page), methods=["GET"]),
            Route(path, partial(pages.create_key, page=page), methods=["POST"]),
            Route(path + "/{key_id}/revoke", partial(pages.revoke_key, page=page), methods=["POST"]),
        ]
    return routes


def _problems(pages: Pages) -> dict[Any, Any]:
    async def refused(request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        text = {404: "There is no such page here.", 403: error.detail}.get(status, f"{status.phrase}.")
        response = pages.problem(request, status, {404: "Not found", 403: "Not done"}.get(status, "Not done"), text)
        response.headers.update(error.headers or {})
        return response

    async def unavailable(request: Request, error: StoreUnavailable) -> Response:
        response = pages.problem(
            request, 503, "Back in a moment", "The service's memory cannot be reached. Try again soon."
        )
        response.headers["Retry-After"] = "5"
        return response

    async def broken(request: Request, error: Exception) -> Response:
        return pages.problem(
            request, 500, "Something broke", "It has been logged. Going back and trying again may help."
        )

    return {HTTPException: refused, StoreUnavailable: unavailable, Exception: broken}
