"""Builds FastAPI applications, each with its OpenAPI 3.1 document, which is adjusted for generated clients."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.telemetry import TelemetryConfig

from serve_app.api import errors
from serve_app.api.credentials import CredentialScheme
from serve_app.domain.accounts import Plan
from serve_app.domain.durations import duration_text, period_text
from serve_app.domain.errors import AtelierError, NotFound
from serve_app.settings import Settings

Schema = dict[str, Any]

EXAMPLE_ADAPTER_ID = "model_" + "a" * 26
"""Examples name this adapter; a served document names one that every account may use instead."""
_WHOLE_NUMBER_BOUNDS = ("minimum", "maximum", "multipleOf")


def _header(description: str, schema: Schema, *, required: bool = True) -> Schema:
    return {"description": description, "required": required, "schema": schema}


_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "integer", "minimum": 1}
COMMON_HEADERS: dict[str, Schema] = {
    "X-RateLimit-Limit": _header("Requests the plan allows in a window.", _COUNT),
    "X-RateLimit-Remaining": _header("Requests left in the window.", _COUNT),
    "X-RateLimit-Reset": _header("When the window ends, in Unix seconds.", _COUNT),
    "RateLimit-Policy": _header(
        "The window's name, quota and length (IETF draft).",
        {"type": "string", "pattern": '^"[^"]+";q=[0-9]+;w=[0-9]+$'},
    ),
    "RateLimit": _header(
        "Requests and seconds left in the window (IETF draft).",
        {"type": "string", "pattern": '^"[^"]+";r=[0-9]+;t=[0-9]+$'},
    ),
    "X-Request-Id": _header(
        "Quote it when you report a problem.", {"type": "string", "pattern": r"^[A-Za-z0-9._\-]{8,128}$"}
    ),
    "Cache-Control": _header(
        "Responses are for the caller alone.", {"type": "string", "enum": ["no-store", "private, no-cache"]}
    ),
}
"""Every response has these headers."""
HEADERS_BY_STATUS: dict[str, dict[str, Schema]] = {
    "401": {"WWW-Authenticate": _header("How to authenticate.", {"type": "string"})},
    "429": {"Retry-After": _header("Seconds to wait before retrying.", _SECONDS)},
    "503": {"Retry-After": _header("Seconds to wait before retrying.", _SECONDS)},
}
ACCEPTED_HEADERS: dict[str, Schema] = {
    "Location": _header("Where to poll for the result.", {"type": "string", "format": "uri-reference"}),
    "Retry-After": _header("Seconds to wait before the first poll.", _SECONDS),
    "Idempotency-Replayed": _header(
        "The response repeats that of an earlier request with the same key.",
        {"type": "string", "const": "true"},
        required=False,
    ),
}
CREATED_HEADERS = {name: ACCEPTED_HEADERS[name] for name in ("Location", "Idempotency-Replayed")}
GENERATION_HEADERS: dict[str, Schema] = ACCEPTED_HEADERS | {
    "X-Unknown-Words": _header(
        "Words of the prompt that the base model has never read, so that the image may not show them: with commas "
        "between, percent-encoded, the first 20.",
        {"type": "string", "pattern": r"^[A-Za-z0-9%_.~\-]+(, [A-Za-z0-9%_.~\-]+)*$"},
        required=False,
    ),
}
UNREAD_HEADER: dict[str, Schema] = {
    "X-Unread-Characters": _header(
        "How many characters at the end of its texts the base model did not read, because they are beyond its tokens.",
        {"type": "string", "pattern": r"^(prompt|negative_prompt)=\d+(, negative_prompt=\d+)?$"},
        required=False,
    ),
}
POLL_HEADERS: dict[str, Schema] = {
    "Retry-After": _header(
        "Seconds to wait before polling again; absent once the record has ended.", _SECONDS, required=False
    ),
    "ETag": _header("Identifies this state of the record: send it as `If-None-Match`.", {"type": "string"}),
    "Preference-Applied": _header(
        "`Prefer: wait=N` was applied, with the longest wait in seconds.",
        {"type": "string", "pattern": "^wait=[0-9]+$"},
        required=False,
    ),
}


def success(description: str, examples: dict[str, Any], **extra: Any) -> Schema:
    """Return `responses=` of a success; `extra` is `headers` and `links`."""
    return {"description": description, "content": {"application/json": {"examples": named(examples)}}, **extra}


def named(examples: dict[str, Any]) -> dict[str, Any]:
    """Return examples by name, as the documents and `openapi_examples=` take them."""
    return {name: {"summary": name, "value": value} for name, value in examples.items()}


def deletion(
    description: str, *kinds: type[AtelierError], descriptions: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return the arguments of a path operation that deletes: 204 without a body, its own errors, and the usual ones."""
    refused = errors.error_responses(*kinds, *errors.COUNTED_ERRORS, NotFound, descriptions=descriptions)
    return {"status_code": 204, "response_class": Response, "responses": {204: {"description": description}, **refused}}


def _adjusted(document: Schema, credentials: CredentialScheme) -> Schema:
    components = document["components"]
    components["securitySchemes"] = dict(credentials.security_schemes)
    components["headers"] = COMMON_HEADERS
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    for operation in operations(document):
        operation["security"] = [{name: []} for name in credentials.security_schemes]
        operation["responses"].pop("422", None)
        for status, response in operation["responses"].items():
            common = {name: {"$ref": f"#/components/headers/{name}"} for name in COMMON_HEADERS}
            response["headers"] = common | HEADERS_BY_STATUS.get(status, {}) | response.get("headers", {})
    for schema in _schemas(document):
        _tidy(schema)
    _add_codes(document)
    return document


def _word_defaults(document: Schema) -> None:
    """Move defaults of fields into their descriptions: openapi-typescript takes a field that has one for required."""
    for schema in document["components"]["schemas"].values():
        for field in schema.get("properties", {}).values():
            said, default = field.get("description", ""), field.pop("default", None)
            if default not in (None, "") and "by default" not in said:
                shown = json.dumps(default).strip('"')
                field["description"] = f"{said} By default `{shown}`.".strip()


def _add_codes(document: Schema) -> None:
    """Add the codes of errors that only this document's path operations answer with to those of all documents."""
    listed: list[str] = document["components"]["schemas"]["Error"]["properties"]["code"]["enum"]
    for operation in operations(document):
        for status, response in operation["responses"].items():
            if status >= "400":
                examples: Schema = response["content"]["application/json"]["examples"]
                listed += [code for code in examples if code not in listed]


def operations(document: Schema) -> Iterator[Schema]:
    for methods in document["paths"].values():
        yield from methods.values()


def _schemas(node: Any) -> Iterator[Schema]:
    """Yield every object of the document that looks like a schema."""
    if isinstance(node, dict):
        if "type" in node or "$ref" in node or "oneOf" in node or "anyOf" in node:
            yield node
        for name, child in node.items():
            if name not in ("examples", "default"):
                yield from _schemas(child)
    elif isinstance(node, list):
        for child in node:
            yield from _schemas(child)


def _tidy(schema: Schema) -> None:
    """Remove titles that repeat names, and write whole bounds as integers, which FastAPI writes as floats."""
    if isinstance(schema.get("title"), str):
        del schema["title"]
    for name in _WHOLE_NUMBER_BOUNDS:
        bound = schema.get(name)
        if isinstance(bound, float) and bound.is_integer():
            schema[name] = int(bound)


def plans_text(plans: Iterable[Plan]) -> str:
    return ", ".join(f"{plan.name.capitalize()} {plan.limit} per {period_text(plan.window)}" for plan in plans)


def common_text(settings: Settings) -> str:
    """Return what the documents of interfaces A and B both end with."""
    return f"""\
Image addresses work without the key for {duration_text(settings.image_url_life)} and are signed anew at every poll; \
images and records are kept for {duration_text(settings.retention)}.

Every error has the body `{{"error": {{"code", "message"}}}}`, errors of routing (404, and 405 with `Allow`) \
included."""


VERSION = "1.0.0"
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI would look for OpenTelemetry providers at each request, and use those that Ray configures for itself."""


def new_app(**options: Any) -> FastAPI:
    """Build an application that serves no document by itself."""
    return FastAPI(openapi_url=None, telemetry=_NO_TELEMETRY, **options)


def json_app(**options: Any) -> FastAPI:
    """Build an application whose every error has the contract's envelope."""
    app = new_app(redirect_slashes=False, **options)
    errors.install(app)
    return app


def api_app(
    credentials: CredentialScheme,
    router: APIRouter,
    *,
    title: str,
    description: str,
    tags: dict[str, str],
    webhooks: Mapping[str, Schema] | None = None,
    schemas: Mapping[str, Schema] | None = None,
    worded_defaults: bool = True,
) -> FastAPI:
    """Build the application of one OpenAPI document.

    `tags` are the groups of path operations, with a line about each; `webhooks` are what it sends by itself, `schemas`
    those of no body. With `worded_defaults`, defaults of fields are told in words alone. The application takes the
    router's routes themselves: `include_router` matches each request twice, which costs a poll 3 %.
    """
    app = json_app(routes=router.routes, title=title)
    app.state.credentials = credentials
    documented = [{"name": name, "description": text} for name, text in tags.items()]

    @cache
    def openapi() -> Schema:
        document = get_openapi(
            title=title, version=VERSION, description=description, tags=documented, routes=app.routes
        )
        if webhooks:
            document["webhooks"] = dict(webhooks)
        document["components"]["schemas"] |= schemas or {}
        if worded_defaults:
            _word_defaults(document)
        return _adjusted(document, credentials)

    app.openapi = openapi
    return app
