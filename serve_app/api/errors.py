"""The one table from domain errors to HTTP answers, as exception handlers and as OpenAPI responses."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, Request
from pydantic import Field, WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from serve_app.api.request_context import RequestContext
from serve_app.api.schemas import ResponseBody
from serve_app.domain import errors

Responses = dict[int | str, dict[str, Any]]
"""A path operation takes its `responses=` in this form."""

_RETRY_S = {errors.Overloaded: 2, errors.StoreUnavailable: 5, errors.PollLimitExceeded: 1, errors.TooManyUploads: 5}
"""After an error of the first kind that fits, a caller is asked to wait for this many seconds."""
UNAVAILABLE = "The service is temporarily unavailable; nothing was accepted. Try again in a few seconds."
OVERLOADED = "The service is overloaded. Try again in a moment."
WAIT_ENDED = "This request can wait no longer. Repeat it: with an Idempotency-Key it goes on with the same job."
_OPENAI, _JOBS = " OpenAI's images API is below /openai/v1.", " Here it is POST /v1/jobs."
ELSEWHERE = {"/images/generations": _OPENAI, "/images/edits": _OPENAI, "/predictions": _JOBS, "/txt2img": _JOBS}
"""What an address is answered with that ends as another service's does."""
INTERNAL_ERROR = "internal_error"
INTERNAL_WORDS = "Internal error; include request id {} when you report it."


class ErrorAnswer(NamedTuple):
    """The status of a domain error, and a message of its kind for the documents."""

    status: int
    example: str


ANSWERS: Mapping[type[errors.AtelierError], ErrorAnswer] = {
    errors.InvalidParameter: ErrorAnswer(400, "guidance: must be between 1 and 20"),
    errors.InvalidJson: ErrorAnswer(400, "The body is not valid JSON: line 1, column 3."),
    errors.AmbiguousCredentials: ErrorAnswer(400, "Send either 'Authorization: Bearer' or 'X-API-Key', not both."),
    errors.Unauthorized: ErrorAnswer(401, "The API key is not valid."),
    errors.Forbidden: ErrorAnswer(403, "You have no permission to use this LoRA."),
    errors.NotFound: ErrorAnswer(404, "There is no such request."),
    errors.MethodNotAllowed: ErrorAnswer(405, "This address does not support that method."),
    errors.RequestTimeout: ErrorAnswer(408, "The body must arrive within 10 seconds, or at 32 KiB a second."),
    errors.IdempotencyConflict: ErrorAnswer(409, "This Idempotency-Key was used before with another body."),
    errors.JobUnfinished: ErrorAnswer(409, "The job has not ended; cancel it first."),
    errors.LoraQuotaExceeded: ErrorAnswer(409, "Your plan allows 10 LoRAs of your own; delete one first."),
    errors.ImageQuotaExceeded: ErrorAnswer(
        409, "Your account may store 5368709120 bytes of uploaded images; delete some that GET /v1/images lists first."
    ),
    errors.PayloadTooLarge: ErrorAnswer(413, "The body must be at most 65536 bytes."),
    errors.UnsupportedMediaType: ErrorAnswer(415, "Send the body as 'Content-Type: application/json'."),
    errors.RateLimitExceeded: ErrorAnswer(429, "Your plan allows 50 requests per hour; try again in 1800 seconds."),
    errors.PollLimitExceeded: ErrorAnswer(429, "At most 50 polls per second for each key; poll every 5 seconds."),
    errors.QueueFull: ErrorAnswer(429, "The queue is full; try again in 5 seconds."),
    errors.StoreUnavailable: ErrorAnswer(503, UNAVAILABLE),
    errors.Overloaded: ErrorAnswer(503, OVERLOADED),
    errors.WaitEnded: ErrorAnswer(503, WAIT_ENDED),
}
DESCRIPTIONS: Mapping[int, str] = {
    400: (
        "The body is not valid JSON, or a parameter breaks its rule. The message names the parameter and its valid "
        "range."
    ),
    401: "The API key is missing or not valid.",
    403: "You may not use this LoRA, or it does not exist; or the API key lacks the required scope.",
    404: "Not found in your account, or its retention period has ended.",
    408: "The body did not arrive in time.",
    409: "The `Idempotency-Key` was used before with another body.",
    413: "The body is over 64 KiB.",
    415: "The `Content-Type` is not JSON.",
    429: "Your plan's limit is reached (`rate_limit_exceeded`), or the queue is full (`queue_full`).",
    500: "Internal error.",
    503: (
        "The service is temporarily unavailable, or has too many open requests (`overloaded`). Nothing was "
        "accepted; try again."
    ),
}


_OF_JOBS = (errors.ImageQuotaExceeded,)
"""Errors that interfaces A and B never answer with: the jobs document adds their codes to those of all documents."""
_CODES = [*dict.fromkeys(kind.code for kind in ANSWERS if kind not in _OF_JOBS), INTERNAL_ERROR]


class Error(ResponseBody):
    code: Annotated[str, WithJsonSchema({"type": "string", "enum": _CODES})]
    message: Annotated[str, Field(min_length=1)]


class ErrorResponse(ResponseBody):
    """The body of every error."""

    error: Error


BODY_ERRORS = (
    errors.InvalidParameter,
    errors.InvalidJson,
    errors.RequestTimeout,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
)
"""Every path operation that takes a JSON body may answer with these errors."""
SUBMIT_ERRORS = (
    *BODY_ERRORS,
    errors.Unauthorized,
    errors.IdempotencyConflict,
    errors.RateLimitExceeded,
    errors.QueueFull,
)
"""Every path operation that creates a job may answer with these errors."""
EITHER_KEY_ERRORS = (errors.AmbiguousCredentials, errors.Unauthorized, errors.Forbidden)
"""Every path operation that takes either credential may answer with these errors."""
POLL_ERRORS = (*EITHER_KEY_ERRORS, errors.NotFound, errors.PollLimitExceeded)
"""Every such path operation that reads one job without counting against the plan may answer with these errors."""
COUNTED_ERRORS = (*EITHER_KEY_ERRORS, errors.RateLimitExceeded)
"""Every such path operation that counts against the plan may answer with these errors."""


SHOWN_NAME_LENGTH = 64


def shown_name(name: str) -> str:
    """Return the name of an unknown field as a message may repeat it; `body` for an odd one."""
    return name if name.isidentifier() and name.isascii() and len(name) <= SHOWN_NAME_LENGTH else "body"


def install(app: FastAPI, envelope: Callable[[Response], Response] = lambda plain: plain) -> None:
    """Make every exception an error response, in the contract's envelope or in one that is made of it.

    The challenge of a 401 is that of `app.state.credentials`, else `Bearer`.
    """

    def enveloped(answer: Callable[[Request, Exception], Awaitable[Response]]) -> Any:
        async def answer_so(request: Request, error: Exception) -> Response:
            return envelope(await answer(request, error))

        return answer_so

    app.add_exception_handler(errors.AtelierError, enveloped(answer_domain_error))
    app.add_exception_handler(HTTPException, enveloped(answer_http_exception))
    app.add_exception_handler(Exception, enveloped(answer_unexpected_error))


def other_body(plain: Response, body_of: Callable[[int, str, str], dict[str, Any]]) -> JSONResponse:
    """Return an error with the body that another API has for its status, code and message, and the same headers."""
    error = json.loads(bytes(plain.body))["error"]
    headers = {name: value for name, value in plain.headers.items() if not name.startswith("content-")}
    return JSONResponse(body_of(plain.status_code, error["code"], error["message"]), plain.status_code, headers)


def error_response(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Answer with an error, always as `{"error": {"code", "message"}}`."""
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status, headers=headers)


def domain_error_response(error: errors.AtelierError, context: RequestContext, *, challenge: str = "") -> Response:
    """Answer a domain error by the table; raise an error again that no caller may see."""
    status, message = told_of(error)
    context.error_code = error.code
    return error_response(status, error.code, message, _headers(error, context, challenge))


def told_of(error: errors.AtelierError) -> tuple[int, str]:
    """Return the status and the message for a caller: why a store is away is the operator's alone to know.

    Raises an error again that no caller may see.
    """
    answer = next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), None)
    if answer is None:
        raise error
    return answer.status, answer.example if isinstance(error, errors.StoreUnavailable) else error.message


def internal_error(request_id: str) -> Response:
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL_ERROR, INTERNAL_WORDS.format(request_id))


def error_responses(*kinds: type[errors.AtelierError], descriptions: Mapping[int, str] | None = None) -> Responses:
    """Return `responses=` of a path operation: its own errors, and those that every operation may meet.

    `descriptions` replace the usual ones of a status.
    """
    texts = {**DESCRIPTIONS, **(descriptions or {})}
    if errors.PollLimitExceeded in kinds:
        texts[429] = "The key polls too fast (`rate_limit_exceeded`); every 5 seconds is enough."
    rows = [
        (ANSWERS[kind].status, kind.code, ANSWERS[kind].example)
        for kind in (*kinds, errors.StoreUnavailable, errors.Overloaded)
    ]
    rows.append((500, INTERNAL_ERROR, INTERNAL_WORDS.format("req_5f0c")))
    return {
        status: _documented(texts[status], (row for row in rows if row[0] == status))
        for status in sorted({r[0] for r in rows})
    }


async def answer_domain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.AtelierError)
    credentials = getattr(request.app.state, "credentials", None)
    challenge = credentials.challenge if credentials else "Bearer"
    return domain_error_response(error, RequestContext.of(request), challenge=challenge)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer the router's 404 and 405, with `Allow` in a fixed order and HEAD wherever there is GET."""
    assert isinstance(error, HTTPException)
    hint = next((words for end, words in ELSEWHERE.items() if request.url.path.endswith(end)), "")
    if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
        return error_response(404, errors.NotFound.code, f"There is nothing at this address.{hint}")
    allowed = {method.strip() for method in (error.headers or {}).get("Allow", "").split(",")} | _methods_of(request)
    allow = ", ".join(sorted(allowed | {"HEAD"} if "GET" in allowed else allowed))
    message = f"{ANSWERS[errors.MethodNotAllowed].example}{hint}"
    return error_response(405, errors.MethodNotAllowed.code, message, {"Allow": allow})


def _methods_of(request: Request) -> set[str]:
    """Return the methods of all path operations of this path; the router names the first's alone."""
    matching = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in matching for method in getattr(route, "methods", None) or ()}


async def answer_unexpected_error(request: Request, _error: Exception) -> Response:
    """Answer an unexpected error; the framework raises it again, and the middleware logs it."""
    return internal_error(RequestContext.of(request).request_id)


def _headers(error: errors.AtelierError, context: RequestContext, challenge: str) -> dict[str, str]:
    if isinstance(error, errors.Unauthorized):
        return {"WWW-Authenticate": challenge}
    if isinstance(error, errors.RequestTimeout):  # the rest of the body is not waited for
        return {"Connection": "close"}
    retry_s = _retry_after_s(error, context)
    return {} if retry_s is None else {"Retry-After": str(retry_s)}


def _retry_after_s(error: errors.AtelierError, context: RequestContext) -> int | None:
    """Return the seconds after which trying again can succeed, rounded up."""
    if isinstance(error, errors.QueueFull | errors.TooManyTries):
        return error.retry_after_s
    for kind, seconds in _RETRY_S.items():
        if isinstance(error, kind):
            return seconds
    if isinstance(error, errors.RateLimitExceeded) and context.window is not None:
        return max(1, context.window.seconds_left)
    return None


def _documented(description: str, rows: Iterable[tuple[int, str, str]]) -> dict[str, Any]:
    examples = {code: {"value": {"error": {"code": code, "message": message}}} for _, code, message in rows}
    return {
        "model": ErrorResponse,
        "description": description,
        "content": {"application/json": {"examples": examples}},
    }
