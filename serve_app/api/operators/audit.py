"""The operators' page of the audit log: newest first, filtered by account and act."""

from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import resources_of
from serve_app.api.operators.guards import PageSession
from serve_app.api.operators.rendering import PAGE_SIZE, render
from serve_app.domain.audit import Act, operator
from serve_app.service.audit_names import log_names
from serve_app.service.resources import Resources

router = APIRouter()


@router.get("/audit")
async def open_audit(request: Request, session: PageSession) -> Response:
    resources, asked = resources_of(request), request.query_params
    wanted, act = asked.get("account", "").strip()[:100], asked.get("act", "")
    act = act if act in set(Act) else ""
    page = await resources.audit_reader.page(
        log=await _log(resources, wanted) if wanted else "",
        act=act,
        before=asked.get("before", ""),
        limit=PAGE_SIZE,
    )
    given = {name: value for name, value in (("account", wanted), ("act", act)) if value}
    return render(
        request,
        "audit.html",
        session,
        here="audit",
        rows=page.rows,
        names=await log_names(resources, {row.log for row in page.rows}),
        acts=list(Act),
        wanted=wanted,
        act=act,
        is_filtered=bool(given),
        is_first="before" not in asked,
        newest=urlencode(given),
        older=urlencode({**given, "before": page.next}) if page.next else "",
    )


async def _log(resources: Resources, wanted: str) -> str:
    """Name the log of an account's name or id, even of a deleted one, or of `operator:<name>`."""
    account = None if wanted.startswith(operator("")) else await resources.accounts.get(wanted)
    return resources.audit.pseudonym(account.id if account else wanted)
