"""Builds the HTTP service: a FastAPI application per OpenAPI document, and one for the site."""

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from serve_app.api import files, jobs, loras, ops, variant_a, variant_b
from serve_app.api.applications import json_app
from serve_app.api.console import console_app
from serve_app.api.dispatch import Dispatcher
from serve_app.api.docs import STATIC, docs_router
from serve_app.api.docs.problems import answer_browsers_with_pages
from serve_app.api.middleware import RequestContextMiddleware
from serve_app.api.open_requests import OpenRequests
from serve_app.api.operators import operators_app
from serve_app.api.request_measures import RequestMeasures
from serve_app.api.site import SiteFiles
from serve_app.service.process import drop_trailers
from serve_app.service.resources import Resources

console_redirect = APIRouter()


def create_app(resources: Resources, *, requests_waiting: int = 1_000) -> ASGIApp:
    """Build the ASGI application over opened resources, which it neither opens nor closes.

    Beside the requests in progress (`requests_at_once` of the settings) so many wait. Whatever serves it in this process takes no trailer for a header.
    """
    drop_trailers()
    a, b, jobs_app = variant_a.create_app(resources), variant_b.create_app(resources), jobs.create_app(resources)
    loras_app = loras.create_app(resources)
    site = json_app(resources)
    answer_browsers_with_pages(site)
    site.state.operator_secret = resources.settings.operator_secret
    site.include_router(files.router)
    site.include_router(ops.router)
    site.include_router(docs_router({"a": a, "b": b, "jobs": jobs_app, "loras": loras_app}, resources))
    site.mount("/static", SiteFiles())
    site.mount("/docs/static", StaticFiles(directory=STATIC))
    site.include_router(console_redirect)
    site.mount("/console", console_app(resources))
    site.mount("/operators", operators_app(resources))
    dispatcher = Dispatcher(a=a, b=b, others=[jobs_app, loras_app], site=site)
    measures = RequestMeasures(resources.measures)
    bounded = OpenRequests(dispatcher, at_once=resources.settings.requests_at_once, waiting=requests_waiting)
    return RequestContextMiddleware(bounded, resources.settings.plan_table, measures, resources.auth)


@console_redirect.get("/console")
async def to_console(request: Request) -> RedirectResponse:
    return RedirectResponse(request.scope.get("root_path", "") + "/console/", status_code=308)


@console_redirect.get("/operators")
async def to_operators(request: Request) -> RedirectResponse:
    return RedirectResponse(request.scope.get("root_path", "") + "/operators/", status_code=308)
