"""The operators' page of models: base models with the workers that hold them, and all LoRAs."""

from collections import Counter

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import resources_of
from serve_app.api.operators.guards import PageSession
from serve_app.api.operators.rendering import PAGE_SIZE, render
from serve_app.api.site.addresses import page_number
from serve_app.domain.jobs import JobKind
from serve_app.stores.operator_reader import USE_DAYS

router = APIRouter()


@router.get("/models")
async def open_models(request: Request, session: PageSession) -> Response:
    resources, page = resources_of(request), page_number(request)
    wanted = request.query_params.get("account", "").strip()[:100]
    owner = await resources.accounts.get(wanted) if wanted else None
    if wanted and owner is None:
        rows, total = [], 0
    else:
        owner_id = owner.id if owner else ""
        rows, total = await resources.operator_reader.loras((page - 1) * PAGE_SIZE, PAGE_SIZE, owner=owner_id)
    workers = await resources.measures.shown(JobKind.GENERATION)
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
        owners=await resources.operator_reader.account_names(row.adapter.owner for row in rows),
        base_models=await resources.applied_catalog.applied_base_models(),
        set_aside=await resources.applied_catalog.set_aside(),
        workers=len(workers),
        holding=Counter(name for worker in workers for name in worker.base_models),
        resident=Counter(name for worker in workers for name in worker.loras),
        failure=await resources.workers.failure(JobKind.GENERATION),
    )
