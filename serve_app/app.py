"""Builds the HTTP service: a FastAPI application per OpenAPI document, and one for the site.

Passes each request to its application, by the path and, where two share it, the credential.
"""

from collections.abc import Iterable

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from fastapi.routing import iter_route_contexts
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api import jobs as jobs_api
from serve_app.api import loras as loras_api
from serve_app.api import mcp as mcp_api
from serve_app.api import openai as openai_api
from serve_app.api import ops, variant_a, variant_b
from serve_app.api.credentials import EITHER, SHARED_PATH, chosen_variant
from serve_app.api.errors import domain_error_response
from serve_app.api.middleware import OpenRequests, RequestContextMiddleware
from serve_app.api.openapi import COMMON_HEADERS, GENERATION_HEADERS, POLL_HEADERS, UNREAD_HEADER, json_app
from serve_app.api.parts import AccountParts, JobParts, LoraParts, OperationParts
from serve_app.api.request_context import RequestContext
from serve_app.domain.errors import AmbiguousCredentials, Unauthorized
from serve_app.domain.requests import Variant
from serve_app.http_server import drop_trailers
from serve_app.settings import Settings
from serve_app.web.console import console_app
from serve_app.web.docs.routes import STATIC, docs_router
from serve_app.web.guide import Guide
from serve_app.web.operators import operators_app
from serve_app.web.site import SiteFiles, takes_gzip
from serve_app.web.site.pages import Protection, answer_browsers_with_pages


class Dispatcher:
    """Passes each request to one application.

    `POST /v1/generate` goes to A or B by the credential header, never the body.
    """

    def __init__(self, *, a: FastAPI, b: FastAPI, others: Iterable[FastAPI], site: ASGIApp) -> None:
        self._by_variant = {Variant.A: a, Variant.B: b}
        self._by_resource = {resource: app for app in (*others, b, a) for resource in _resources(app)}
        self._variants = {id(app): variant for variant, app in self._by_variant.items()}
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._site(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        context = RequestContext.of(scope)
        if path == SHARED_PATH and scope["method"] == "POST":
            try:
                app = self._by_variant[chosen_variant(Headers(scope=scope))]
            except (Unauthorized, AmbiguousCredentials) as error:
                context.route = SHARED_PATH
                await domain_error_response(error, context, challenge=EITHER.challenge)(scope, receive, send)
                return
        else:
            app = self._by_resource.get(_resource(path), self._site)
        context.variant = self._variants.get(id(app))
        await app(scope, receive, send)


def _resource(path: str) -> str:
    """Return `generate` of `/v1/generate/gen_…`, `openai` of all below that, and `mcp`; empty outside the API."""
    if path.startswith(("/openai/", "/mcp")):
        return path.split("/", 2)[1]
    return path.split("/", 3)[2] if path.startswith("/v1/") else ""


def _resources(app: FastAPI) -> set[str]:
    return {_resource(route.path) for route in iter_route_contexts(app.routes) if route.path} - {""}


async def with_last_slash(request: Request) -> RedirectResponse:
    root = request.scope.get("root_path", "")
    return RedirectResponse(f"{root}{request.scope['path'].removeprefix(root)}/", status_code=308)


async def to_verify(request: Request) -> RedirectResponse:
    """Lead to the page that reads the marks of a picture, which needs a session of the console."""
    return RedirectResponse(f"{request.scope.get('root_path', '')}/console/verify", status_code=307)


def compressed(site: ASGIApp) -> ASGIApp:
    """Compress what is not an answer of /v1, for who takes it so: Starlette's middleware overlooks `gzip;q=0`."""
    packed = GZipMiddleware(site, minimum_size=1_000)

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        is_packed = scope["type"] == "http" and takes_gzip(scope)
        await (packed if is_packed else site)(scope, receive, send)

    return respond


def create_app(
    settings: Settings,
    *,
    accounts: AccountParts,
    loras: LoraParts,
    jobs: JobParts,
    operations: OperationParts,
    requests_waiting: int = 1_000,
) -> ASGIApp:
    """Build the ASGI application of the API and the pages over their parts.

    Besides the requests in progress (`requests_at_once` of the settings), `requests_waiting` more may wait. From then
    on no HTTP server of this process takes a request's trailer for a header.
    """
    drop_trailers()
    a, b = variant_a.create_app(settings), variant_b.create_app(settings)
    jobs_app, loras_app, site = jobs_api.create_app(), loras_api.create_app(), json_app()
    openai_app, mcp_app = openai_api.create_app(), mcp_api.create_app()
    console, operator_pages = console_app(), operators_app()
    for app in (a, b, jobs_app, loras_app, openai_app, mcp_app, site, console, operator_pages):
        app.state.settings, app.state.accounts, app.state.loras = settings, accounts, loras
        app.state.jobs, app.state.operations = jobs, operations
    answer_browsers_with_pages(site)
    site.state.operator_secret = settings.operator_secret
    site.include_router(ops.router)
    site.include_router(docs_router({"a": a, "b": b, "jobs": jobs_app, "loras": loras_app}))
    site.mount("/static", SiteFiles())
    site.mount("/docs/static", SiteFiles(STATIC))
    site.add_route("/guide", with_last_slash, methods=["GET"])
    site.mount("/guide", Guide())
    for path, pages in (("/console", console), ("/operators", operator_pages)):
        site.add_route(path, with_last_slash, methods=["GET"])
        site.mount(path, Protection(pages, public_url=settings.public_url))  # a 500 and a 413 need its headers too
    site.add_route("/verify", to_verify, methods=["GET"])
    dispatcher = Dispatcher(a=a, b=b, others=[jobs_app, loras_app, openai_app, mcp_app], site=compressed(site))
    bounded: ASGIApp = OpenRequests(dispatcher, at_once=settings.requests_at_once, waiting=requests_waiting)
    if settings.cors_origins:  # their pages send a key, and no cookie of ours; an overload is told to them too
        shown = [*COMMON_HEADERS, *GENERATION_HEADERS, *POLL_HEADERS, *UNREAD_HEADER]
        methods = ["GET", "POST", "PATCH", "DELETE"]
        bounded = CORSMiddleware(bounded, settings.cors_origins, methods, ["*"], expose_headers=shown)
    return RequestContextMiddleware(bounded, settings.plan_table, operations.measures, accounts.auth)
