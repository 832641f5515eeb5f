"""The operators' pages that show the service as it is now: overview, models and checks.

The overview refreshes itself; without JavaScript it is reloaded by hand. The checks are those of `atelier doctor` that
this process can run.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import accounts_of, jobs_of, loras_of, operations_of, settings_of
from serve_app.domain import metrics
from serve_app.domain.jobs import DEFAULT_GROUP, WORKER_LIFE, Backlog, JobKind, group_of_pool
from serve_app.domain.metrics import Metric
from serve_app.operations.checks import Check, Level
from serve_app.operations.reports import USE_DAYS
from serve_app.operations.store_checks import check_service
from serve_app.store.measures import ShownWorker
from serve_app.store.redis_copy import COPY_DUE
from serve_app.web.operators.pages import PAGE_SIZE, FormSession, LiveSession, OperatorSession, PageSession, render
from serve_app.web.site.forms import Form, check_form, page_number

MOST_ROWS = 10

router = APIRouter()


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as the page shows it."""

    pool: str
    worker: ShownWorker

    def gauge(self, metric: Metric) -> int | None:
        value = self.worker.gauges.get(metric.name)
        return None if value is None else int(value)


@router.get("/")
async def open_overview(request: Request, session: PageSession) -> Response:
    return render(request, "overview.html", session, here="overview", **await _facts(request))


@router.get("/live")
async def open_live(request: Request, session: LiveSession) -> Response:
    """Render the part of the page that refreshes itself."""
    return render(request, "overview_live.html", session, **await _facts(request))


async def _facts(request: Request) -> dict[str, Any]:
    settings, jobs, operations = settings_of(request), jobs_of(request), operations_of(request)
    reader = operations.reader
    found = await operations.state.readiness()
    pools = await jobs.stats.pools()
    backlogs: dict[str, Backlog] = {pool: await jobs.stats.backlog(pool) for pool in pools}
    by_plan = await jobs.stats.waiting([":".join(plan) for plan in settings.plan_table])
    queues = [queue for pool in pools for queue in await reader.queues(pool, MOST_ROWS)]
    running = [job for pool in pools for job in await reader.running(pool, MOST_ROWS)]
    workers = [WorkerRow(pool, worker) for pool in pools for worker in await operations.measures.shown(pool)]
    return {
        "backlogs": backlogs,
        "plans": [(pool, *plan.split(":", 1), each) for (pool, plan), each in by_plan.items() if each.jobs],
        "queues": sorted(queues, key=lambda queue: -queue.oldest_age_s)[:MOST_ROWS],
        "running": running[:MOST_ROWS],
        "dead": await jobs.stats.dead(),
        "workers": workers,
        "unanswered": {
            pool
            for pool, backlog in backlogs.items()
            if backlog.oldest_age_s > WORKER_LIFE.total_seconds() and not any(row.pool == pool for row in workers)
        },
        "starting": {pool: words for pool in pools if (words := await operations.workers.starting(pool)) is not None},
        "upscaler_failure": await operations.workers.failure(JobKind.UPSCALE),  # the states tell those of generators
        "states": found.states,
        "memory": await jobs.space.memory.read(),
        "copy_age": await jobs.stats.copy_age(),
        "copy_due": COPY_DUE,
        "disks": await jobs.space.disk.disks(),
        "names": await reader.account_names([*(q.account_id for q in queues), *(job.account_id for job in running)]),
        "loras": await reader.lora_names(lora for row in workers for lora in row.worker.loras),
        "metrics": metrics,
    }


_WORST_FIRST = (Level.FAIL, Level.WARN, Level.OK)


@router.get("/checks")
async def open_checks(request: Request, session: PageSession) -> Response:
    return _checks_page(request, session, None)


@router.post("/checks")
async def run_checks(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, "run checks")
    found = await check_service(settings_of(request))
    if check_machines := operations_of(request).check_machines:
        found += await check_machines()
    return _checks_page(request, session, found)


def _checks_page(request: Request, session: OperatorSession, found: list[Check] | None) -> Response:
    return render(
        request,
        "checks.html",
        session,
        here="checks",
        checks=None if found is None else sorted(found, key=lambda check: _WORST_FIRST.index(check.level)),
        bad=[check for check in found or [] if check.level is not Level.OK],
    )


@router.get("/models")
async def open_models(request: Request, session: PageSession) -> Response:
    operations, loras, page = operations_of(request), loras_of(request), page_number(request)
    wanted = request.query_params.get("account", "").strip()[:100]
    owner = await accounts_of(request).store.get(wanted) if wanted else None
    if wanted and owner is None:
        rows, total = [], 0
    else:
        owner_id = owner.id if owner else ""
        rows, total = await operations.reader.loras((page - 1) * PAGE_SIZE, PAGE_SIZE, owner=owner_id)
    pools = [pool for pool in await jobs_of(request).stats.pools() if pool != JobKind.UPSCALE]
    workers = {pool: await operations.measures.shown(pool) for pool in pools}
    failures = {group_of_pool(pool): await operations.workers.failure(pool) for pool in pools}
    return render(
        request,
        "models.html",
        session,
        here="models",
        rows=rows,
        total=total,
        page=page,
        page_size=PAGE_SIZE,
        days=USE_DAYS,
        wanted=owner.name if owner else wanted,
        owner=owner,
        owners=await operations.reader.account_names(row.adapter.owner for row in rows),
        base_models=await loras.applied_catalog.applied_base_models(),
        set_aside=await loras.applied_catalog.set_aside(),
        workers={pool: len(each) for pool, each in workers.items()},
        holding=Counter(
            (pool, name) for pool, each in workers.items() for worker in each for name in worker.base_models
        ),
        resident=Counter(name for each in workers.values() for worker in each for name in worker.loras),
        failures={group: failure for group, failure in failures.items() if failure},
        default_group=DEFAULT_GROUP,
    )
