"""The house's HTTP side: which room is behind which path. No rule of any contract is written here."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from serve_app.api import answers, dispatch, docs, files, jobs, ops, variant_a, variant_b
from serve_app.api.console import console_app
from serve_app.api.edge import Edge
from serve_app.api.jobs import document as jobs_document
from serve_app.api.openapi import Facts
from serve_app.api.variant_a import document as a_document
from serve_app.api.variant_b import document as b_document
from serve_app.domain.requests import Variant
from serve_app.service.resources import Resources

_ROUTING = {
    404: ("not_found", "There is nothing at this address."),
    405: ("method_not_allowed", "This address does not take that method."),
}


def create_app(resources: Resources) -> ASGIApp:
    """The ASGI application over opened resources; it neither opens nor closes them.

    FastAPI without its own documents and body parsing: the rooms authenticate before a byte is read, and write their own.
    """
    a, b = variant_a.RoomA(resources), variant_b.RoomB(resources)
    settings = resources.settings
    house = FastAPI(
        routes=[
            dispatch.shared_route(a.generate, b.generate),
            *a.routes(),
            *b.routes(),
            *jobs.JobsRoom(resources).routes(),
            *files.routes(resources.images),
            *ops.routes(resources),
            *docs.routes(_documents(resources), public_url=settings.public_url),
            Route("/console", _to_console, methods=["GET"]),
            Mount("/console", app=console_app(resources)),
        ],
        redirect_slashes=False,
        openapi_url=None,
        exception_handlers={HTTPException: _routing_refusal, Exception: _leave_to_the_edge},
    )
    return Edge(house, settings.plan_table)


def _documents(resources: Resources) -> dict[str, docs.Document]:
    def told(make: Callable[[Facts], dict[str, Any]], *variants: Variant) -> docs.Document:
        return lambda server: make(_facts(resources, server, variants))

    return {
        "a": told(a_document.document, Variant.A),
        "b": told(b_document.document, Variant.B),
        "jobs": told(jobs_document.document),
    }


def _facts(resources: Resources, server: str, variants: tuple[Variant, ...]) -> Facts:
    """The examples use an adapter that every account may use, where the catalog has one."""
    settings = resources.settings
    open_to_all = (adapter.id for adapter in resources.catalog.all() if adapter.accounts is None)
    return Facts(
        server=server,
        adapter_id=next(open_to_all, "model_" + "a" * 26),
        plans=tuple(plan for plan in settings.plan_table.values() if plan.variant in variants),
        image_url_life=settings.image_url_life,
        retention=settings.retention,
    )


async def _to_console(request: Request) -> Response:
    return RedirectResponse(answers.local_path(request.scope, "/console/"), status_code=308)


async def _routing_refusal(request: Request, error: Exception) -> Response:
    """404 and 405 in the envelope of every other error; `Allow` is kept, in a settled order."""
    assert isinstance(error, HTTPException)
    code, message = _ROUTING.get(error.status_code, ("invalid_parameter", error.detail))
    headers = dict(error.headers or {})
    if "Allow" in headers:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    return answers.refusal(error.status_code, code, message, headers)


async def _leave_to_the_edge(_request: Request, error: Exception) -> Response:
    """The framework would answer a 500 in its own words."""
    raise error
