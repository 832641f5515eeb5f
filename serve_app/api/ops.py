"""Health, readiness and metrics, for operators and their tools."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from serve_app.api.dependencies import resources_of
from serve_app.service.metrics import CONTENT_TYPE, render_metrics
from serve_app.service.readiness import readiness

router = APIRouter()


@router.get("/healthz")
async def alive() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def ready(request: Request) -> JSONResponse:
    is_ready, states = await readiness(resources_of(request))
    return JSONResponse({"status": "ready" if is_ready else "not ready", **states}, 200 if is_ready else 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    return Response(await render_metrics(resources_of(request).jobs), media_type=CONTENT_TYPE)
