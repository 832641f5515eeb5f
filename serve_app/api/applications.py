"""Builds FastAPI applications with the parts that all share.

These are the stores, the credentials, the error answers and the application's own document.
"""

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.telemetry import TelemetryConfig

from serve_app.api import errors, openapi
from serve_app.api.credentials import CredentialScheme
from serve_app.service.resources import Resources

VERSION = "1.0.0"
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI would look for OpenTelemetry providers at each request, and use those that Ray configures for itself."""


def new_app(resources: Resources, **options: Any) -> FastAPI:
    """Build an application over opened stores; it serves no document by itself."""
    app = FastAPI(openapi_url=None, telemetry=_NO_TELEMETRY, **options)
    app.state.resources = resources
    return app


def json_app(resources: Resources, **options: Any) -> FastAPI:
    """Build an application whose every error has the contract's envelope."""
    app = new_app(resources, redirect_slashes=False, **options)
    errors.install(app)
    return app


def api_app(
    resources: Resources,
    credentials: CredentialScheme,
    router: APIRouter,
    *,
    title: str,
    description: str,
    tags: dict[str, str],
) -> FastAPI:
    """Build the application of one OpenAPI document.

    `tags` are the groups of path operations, with a line about each. The application takes the router's routes
    themselves: `include_router` matches each request twice, which costs a poll 3 %.
    """
    documented = [{"name": name, "description": text} for name, text in tags.items()]
    app = json_app(
        resources,
        routes=router.routes,
        title=title,
        version=VERSION,
        description=description,
        openapi_tags=documented,
    )
    app.state.credentials = credentials
    openapi.install(app, credentials)
    return app
