"""OpenAI's API of images, for tools that know it: with a bearer key, and its plan, scopes, LoRAs and base models."""

from fastapi import FastAPI
from starlette.responses import Response

from serve_app.api import errors
from serve_app.api.credentials import BEARER
from serve_app.api.openai.routes import error_body, router
from serve_app.api.openapi import json_app

LONGEST_WAIT_S, _CURABLE = 60, (408, 429)
"""OpenAI's clients retry 408, 409, 429 and 5xx; earlier versions retry at once if told to wait longer than this."""


def create_app() -> FastAPI:
    """Build the application, whose errors have the contract's statuses and codes in OpenAI's envelope."""
    app = json_app(routes=router.routes)
    app.state.credentials = BEARER
    errors.install(app, _in_envelope)
    return app


def _in_envelope(plain: Response) -> Response:
    told, wait_s = errors.other_body(plain, error_body), int(plain.headers.get("retry-after", 0))
    if wait_s > LONGEST_WAIT_S or (told.status_code in range(400, 500) and told.status_code not in _CURABLE):
        told.headers["X-Should-Retry"] = "false"
    return told
