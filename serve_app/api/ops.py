"""What operators and their tools ask: is the process alive, can it serve, how much work is waiting."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import Backlog, JobKind
from serve_app.service.resources import Resources

READY_TIMEOUT_S = 5
PROBE = "images/0/1970/01/01/probe/a0-0.png"
"""A well-formed name that no job has: asking for it proves that the storage answers."""

_GAUGES = (
    ("atelier_jobs_ready", "Jobs waiting for a worker.", "ready"),
    ("atelier_jobs_leased", "Jobs being worked on.", "leased"),
    ("atelier_jobs_delayed", "Jobs waiting for their next attempt.", "delayed"),
    ("atelier_backlog_seconds", "Work not yet done, in seconds of one replica.", "seconds"),
    ("atelier_oldest_job_age_seconds", "Age of the oldest waiting job.", "oldest_age_s"),
)


def routes(resources: Resources) -> list[Route]:
    async def alive(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        checks = {"redis": await _answers(_probe_jobs(resources)), "storage": await _answers(_probe_images(resources))}
        good = all(checks.values())
        body = {
            "status": "ready" if good else "not ready",
            **{name: "ok" if up else "down" for name, up in checks.items()},
        }
        return JSONResponse(body, status_code=200 if good else 503)

    async def metrics(request: Request) -> Response:
        backlogs = {kind: await resources.jobs.backlog(kind) for kind in JobKind}
        lines = [*_gauges(backlogs), *_counters(await resources.jobs.counts())]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    return [
        Route("/healthz", alive, methods=["GET"]),
        Route("/readyz", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


async def _probe_jobs(resources: Resources) -> None:
    await resources.jobs.backlog(JobKind.GENERATION)


async def _probe_images(resources: Resources) -> None:
    await resources.images.exists(resources.images.uri(PROBE))


async def _answers(probe: Coroutine[None, None, None]) -> bool:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await probe
    except (StoreUnavailable, TimeoutError):
        return False
    return True


def _gauges(backlogs: Mapping[JobKind, Backlog]) -> Iterable[str]:
    """What waits now, in Prometheus' text format."""
    for name, meaning, field in _GAUGES:
        yield f"# HELP {name} {meaning}"
        yield f"# TYPE {name} gauge"
        for kind, backlog in backlogs.items():
            yield f'{name}{{kind="{kind}"}} {getattr(backlog, field):g}'


def _counters(counts: Mapping[str, int]) -> Iterable[str]:
    yield "# HELP atelier_jobs_total Jobs since ever, by what became of them."
    yield "# TYPE atelier_jobs_total counter"
    for event, count in sorted(counts.items()):
        yield f'atelier_jobs_total{{event="{event}"}} {count}'
