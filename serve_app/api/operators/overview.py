"""The operators' first page: queues, workers and stores as they are now.

It refreshes itself, and reloads without JavaScript.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import resources_of
from serve_app.api.operators.guards import LiveSession, PageSession
from serve_app.api.operators.rendering import render
from serve_app.domain import metrics
from serve_app.domain.jobs import Backlog, JobKind
from serve_app.domain.metrics import Metric
from serve_app.service.readiness import readiness
from serve_app.service.resources import Resources
from serve_app.stores.measures import ShownWorker
from serve_app.stores.queue_stats import QueueLength

MOST_ROWS = 10

router = APIRouter()


@dataclass(frozen=True, slots=True)
class PlanQueue:
    """Jobs of one kind that wait under one plan."""

    kind: JobKind
    interface: str
    plan: str
    waiting: QueueLength


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as the page shows it."""

    kind: JobKind
    worker: ShownWorker

    def gauge(self, metric: Metric) -> int | None:
        value = self.worker.gauges.get(metric.name)
        return None if value is None else int(value)


@router.get("/")
async def open_overview(request: Request, session: PageSession) -> Response:
    return render(request, "overview.html", session, here="overview", **await _facts(resources_of(request)))


@router.get("/live")
async def open_live(request: Request, session: LiveSession) -> Response:
    """Render the part of the page that refreshes itself."""
    return render(request, "overview_live.html", session, **await _facts(resources_of(request)))


async def _facts(resources: Resources) -> dict[str, Any]:
    reader = resources.operator_reader
    backlogs: dict[JobKind, Backlog] = {kind: await resources.queue_stats.backlog(kind) for kind in JobKind}
    by_plan = await resources.queue_stats.waiting([":".join(plan) for plan in resources.settings.plan_table])
    queues = [queue for kind in JobKind for queue in await reader.queues(kind, MOST_ROWS)]
    running = [job for kind in JobKind for job in await reader.running(kind, MOST_ROWS)]
    workers = [WorkerRow(kind, worker) for kind in JobKind for worker in await resources.measures.shown(kind)]
    return {
        "backlogs": backlogs,
        "plans": [_plan_queue(kind, plan, waiting) for (kind, plan), waiting in by_plan.items() if waiting.jobs],
        "queues": sorted(queues, key=lambda queue: -queue.oldest_age_s)[:MOST_ROWS],
        "running": running[:MOST_ROWS],
        "dead": await resources.queue_stats.dead(),
        "workers": workers,
        "states": (await readiness(resources)).states,
        "memory": await resources.memory.read(),
        "disks": await resources.disk.disks(),
        "names": await reader.account_names([*(q.account_id for q in queues), *(job.account_id for job in running)]),
        "loras": await reader.lora_names(lora for row in workers for lora in row.worker.loras),
        "metrics": metrics,
    }


def _plan_queue(kind: JobKind, plan: str, waiting: QueueLength) -> PlanQueue:
    interface, _, name = plan.partition(":")
    return PlanQueue(kind, interface, name, waiting)
