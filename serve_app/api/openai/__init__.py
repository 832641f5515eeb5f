"""OpenAI's API of images, for tools that know it: with a bearer key, and its plan, scopes, LoRAs and base models."""

import json
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from serve_app.api import errors
from serve_app.api.credentials import BEARER
from serve_app.api.openai.routes import error_body, router
from serve_app.api.openapi import json_app
from serve_app.domain.errors import AtelierError

LONGEST_WAIT_S, _CURABLE = 60, (408, 429)
"""OpenAI's clients retry 408, 409, 429 and 5xx; earlier versions retry at once if told to wait longer than this."""

Answer = Callable[[Request, Exception], Awaitable[Response]]


def create_app() -> FastAPI:
    """Build the application, whose errors have the contract's statuses and codes in OpenAI's envelope."""
    app = json_app(routes=router.routes)
    app.state.credentials = BEARER
    app.add_exception_handler(AtelierError, _in_envelope(errors.answer_domain_error))
    app.add_exception_handler(HTTPException, _in_envelope(errors.answer_http_exception))
    app.add_exception_handler(Exception, _in_envelope(errors.answer_unexpected_error))
    return app


def _in_envelope(answer: Answer) -> Answer:
    async def answer_so(request: Request, error: Exception) -> Response:
        plain = await answer(request, error)
        headers = {name: value for name, value in plain.headers.items() if not name.startswith("content-")}
        wait_s = int(plain.headers.get("retry-after", 0))
        if wait_s > LONGEST_WAIT_S or (plain.status_code in range(400, 500) and plain.status_code not in _CURABLE):
            headers["X-Should-Retry"] = "false"
        body = error_body(plain.status_code, **json.loads(bytes(plain.body))["error"])
        return JSONResponse(body, status_code=plain.status_code, headers=headers)

    return answer_so
