"""Health, readiness and metrics, for operators and their tools."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from serve_app.api.dependencies import resources_of
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.service.metrics import CONTENT_TYPE, render_metrics

READY_TIMEOUT_S = 5
PROBE = "images/0/1970/01/01/probe/a0-0.png"
"""A well-formed name that no job has: asking for it proves that the storage answers."""

router = APIRouter()


@router.get("/healthz")
async def alive() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def ready(request: Request) -> JSONResponse:
    resources = resources_of(request)
    checks = {
        "redis": await _answers(resources.jobs.backlog(JobKind.GENERATION)),
        "storage": await _answers(resources.images.exists(resources.images.uri(PROBE))),
    }
    is_ready = all(checks.values())
    states = {name: "ok" if is_up else "down" for name, is_up in checks.items()}
    return JSONResponse({"status": "ready" if is_ready else "not ready", **states}, 200 if is_ready else 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    return Response(await render_metrics(resources_of(request).jobs), media_type=CONTENT_TYPE)


async def _answers(probe: Coroutine[Any, Any, object]) -> bool:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await probe
    except (StoreUnavailable, TimeoutError):
        return False
    return True
