"""Path operations of health, readiness and metrics, for operators and their tools, and of image files.

Whatever would tell one tenant of the others is for the operator alone: `/metrics`, and the reason why `/readyz` says
that the service is not ready. Image files are for everybody who has their signed address.
"""

import hmac
import re

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from serve_app.api.dependencies import jobs_of, operations_of, settings_of
from serve_app.domain.errors import NotFound, Unauthorized
from serve_app.domain.requests import ImageFormat
from serve_app.operations.metrics_page import CONTENT_TYPE, render_metrics

FOR_OPERATORS = "This endpoint is for the operator: send the operator's token as `Authorization: Bearer`."

router = APIRouter()


@router.get("/healthz")
async def alive() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def ready(request: Request) -> JSONResponse:
    """Answer 503 only where polls cannot be answered: a balancer would take them from their callers."""
    found = await operations_of(request).state.readiness()
    status = {"status": "ready" if found.is_ready else "not ready", "accepting": not found.reason}
    details = {**({"reason": found.reason} if found.reason else {}), **found.states}
    return JSONResponse(status | (details if _is_operator(request) else {}), 200 if found.answers_polls else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    if not _is_operator(request):
        raise Unauthorized(FOR_OPERATORS)
    jobs, plans = jobs_of(request), settings_of(request).plan_table
    page = await render_metrics(
        operations_of(request).measures, jobs.stats, jobs.images, jobs.space, plans, event_streams=jobs.waits.streams
    )
    return Response(page, media_type=CONTENT_TYPE)


def _is_operator(request: Request) -> bool:
    """Return whether the caller has the operator's token.

    That a call comes from this machine proves nothing, because the machine has other users.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    token: bytes = request.app.state.operator_secret
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token)


_UNIX_TIME = re.compile(r"[0-9]{1,12}")
_HEADERS = {
    "Cache-Control": "private, max-age=86400, immutable",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Content-Disposition": "inline",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Referrer-Policy": "no-referrer",
}
"""An image's name is never used twice, so its bytes never change; a page of any origin may show it."""

FILES = "/files/"


@router.get(FILES + "{name:path}", response_class=Response)
async def open_file(request: Request, name: str, exp: str = "", kid: str = "", sig: str = "") -> Response:
    images = jobs_of(request).images
    try:
        if not _UNIX_TIME.fullmatch(exp) or not images.verify(name, exp, kid, sig):
            raise NotFound("There is no such image.")
        if not await jobs_of(request).access.is_open(name.split("/")[-2]):
            raise NotFound("There is no such image.")
        content = await images.get(images.uri(name))
    except NotFound:
        raise NotFound("There is no such image, or its address is no longer valid.") from None
    return Response(content, media_type=ImageFormat.of_name(name).media_type, headers=_HEADERS)
