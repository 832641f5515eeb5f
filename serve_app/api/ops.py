"""Path operations of health, readiness and metrics, for operators and their tools.

What tells one tenant of the others is the operator's: `/metrics` and what is below it, and what is wrong when `/readyz` says that something is.
"""

import hmac
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from serve_app.api.dependencies import resources_of
from serve_app.api.routing import ContractRoute
from serve_app.domain.errors import Unauthorized
from serve_app.service.metrics import CONTENT_TYPE, render_metrics
from serve_app.service.readiness import readiness
from serve_app.service.tenant_report import account_report, adapter_report

FOR_OPERATORS = "This endpoint is for the operator: send the operator's token as `Authorization: Bearer`."

MOST_DAYS, MOST_ROWS = 31, 500
Start = Annotated[int, Query(ge=0, le=1_000_000_000)]
Limit = Annotated[int, Query(ge=1, le=MOST_ROWS)]


async def require_operator(request: Request) -> None:
    """Refuse everybody but the operator."""
    if not _is_operator(request):
        raise Unauthorized(FOR_OPERATORS)


OPERATOR_ONLY = [Depends(require_operator)]

router = APIRouter(route_class=ContractRoute)


@router.get("/healthz")
async def alive() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def ready(request: Request) -> JSONResponse:
    """Answer 503 only where polls cannot be answered: a balancer would take them from their callers."""
    found = await readiness(resources_of(request))
    status = {"status": "ready" if found.is_ready else "not ready", "accepting": not found.reason}
    details = {**({"reason": found.reason} if found.reason else {}), **found.states}
    return JSONResponse(status | (details if _is_operator(request) else {}), 200 if found.answers_polls else 503)


@router.get("/metrics", dependencies=OPERATOR_ONLY)
async def metrics(request: Request) -> Response:
    return Response(await render_metrics(resources_of(request)), media_type=CONTENT_TYPE)


@router.get("/metrics/accounts", dependencies=OPERATOR_ONLY)
async def account_metrics(
    request: Request, start: Start = 0, limit: Limit = 100, days: Annotated[int, Query(ge=1, le=MOST_DAYS)] = 1
) -> Response:
    """Return queue and usage of each account, which as labels of Prometheus would be without bound."""
    return JSONResponse(await account_report(resources_of(request), start=start, limit=limit, days=days))


@router.get("/metrics/adapters", dependencies=OPERATOR_ONLY)
async def adapter_metrics(request: Request, start: Start = 0, limit: Limit = 100) -> Response:
    """Return waiting jobs, workers and images of each adapter."""
    return JSONResponse(await adapter_report(resources_of(request), start=start, limit=limit))


def _is_operator(request: Request) -> bool:
    """Return whether the caller has the operator's token.

    A call from this machine proves nothing: it has other users.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    token: bytes = request.app.state.operator_secret
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token)
