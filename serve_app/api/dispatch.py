"""Passes each request to its application, by the path and, where two share it, the credential."""

from collections.abc import Iterable

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.context import RequestContext
from serve_app.api.credentials import EITHER, SHARED_PATH, chosen_variant
from serve_app.api.errors import domain_error_response
from serve_app.domain.errors import AmbiguousCredentials, Unauthorized
from serve_app.domain.requests import Variant


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
    """Return `generate` of `/v1/generate/gen_…`; empty outside the API."""
    return path.split("/", 3)[2] if path.startswith("/v1/") else ""


def _resources(app: FastAPI) -> set[str]:
    """Return the first path segments that an application declares below `/v1`."""
    return {_resource(route.path) for route in iter_route_contexts(app.routes) if route.path} - {""}
