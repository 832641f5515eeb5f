"""The operators' page of the queue, which lists every account that waits in the order of their turns."""

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import resources_of
from serve_app.api.operators.guards import PageSession
from serve_app.api.operators.rendering import PAGE_SIZE, render
from serve_app.api.site.addresses import page_number
from serve_app.domain.jobs import JobKind

router = APIRouter()


@router.get("/queue")
async def open_queue(request: Request, session: PageSession) -> Response:
    reader, page = resources_of(request).operator_reader, page_number(request)
    kind = _kind(request.query_params.get("kind", ""))
    rows, total = await reader.queue_page(kind, (page - 1) * PAGE_SIZE, PAGE_SIZE)
    return render(
        request,
        "queue.html",
        session,
        here="overview",
        kind=kind,
        rows=rows,
        total=total,
        page=page,
        page_size=PAGE_SIZE,
        names=await reader.account_names(row.account_id for row in rows),
    )


def _kind(text: str) -> JobKind:
    return JobKind(text) if text in set(JobKind) else JobKind.GENERATION
