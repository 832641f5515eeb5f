"""The operators' page of failed jobs: counts by code, and jobs to queue again or drop."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import resources_of, valid_job_id
from serve_app.api.operators.guards import FormSession, PageSession, by
from serve_app.api.operators.rendering import PAGE_SIZE, render
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import check_form, form_token
from serve_app.api.site.forms import Form
from serve_app.domain.errors import FailureCode
from serve_app.service import operate
from serve_app.stores.dead_letters import LOOKED_AT_ONCE
from serve_app.stores.job_history import Position

WINDOWS: Mapping[str, tuple[str, timedelta | None]] = {
    "": ("As long as kept", None),
    "hour": ("The last hour", timedelta(hours=1)),
    "day": ("The last 24 hours", timedelta(days=1)),
    "week": ("The last 7 days", timedelta(days=7)),
}
_CURSOR = re.compile(r"([0-9]{1,14})-((?:gen|up)_[a-z2-7]{26})")
_REQUEUE, _DROP = "requeue jobs", "drop jobs"
_FILTERS = ("code", "window", "account")

router = APIRouter()


@router.get("/failures")
async def open_failures(request: Request, session: PageSession) -> Response:
    resources, chosen = resources_of(request), _chosen(request)
    account = await resources.accounts.get(chosen["account"]) if chosen["account"] else None
    _, length = WINDOWS.get(chosen["window"], WINDOWS[""])
    after = _read_cursor(request.query_params.get("after", ""))
    page = await resources.dead_letters.page(
        account=account.id if account else chosen["account"],
        code=chosen["code"],
        since=None if length is None else datetime.now(UTC) - length,
        after=after,
        limit=PAGE_SIZE,
    )
    return render(
        request,
        "failures.html",
        session,
        here="failures",
        page=page,
        counted=sum(page.counts.values()),
        is_cut=sum(page.counts.values()) >= LOOKED_AT_ONCE,
        most=LOOKED_AT_ONCE,
        chosen=chosen,
        given=urlencode({name: value for name, value in chosen.items() if value}),
        is_first=after is None,
        older=urlencode({**chosen, "after": f"{page.next.accepted_ms}-{page.next.job_id}"}) if page.next else "",
        windows={name: words for name, (words, _) in WINDOWS.items()},
        codes=sorted({*FailureCode, *page.counts} - {FailureCode.CANCELED, FailureCode.EXPIRED}),
        names=await resources.operator_reader.account_names(job.account_id for job in page.jobs),
        requeued=_number(request, "requeued"),
        dropped=_number(request, "dropped"),
        requeue_token=form_token(session.token, _REQUEUE),
        drop_token=form_token(session.token, _DROP),
    )


@router.post("/failures/requeue")
async def requeue(request: Request, session: FormSession, form: Form) -> Response:
    """Queue the jobs of the form again, with all their attempts."""
    check_form(session, form, _REQUEUE)
    resources, who = resources_of(request), by(request, session)
    done = [await operate.requeue_job(resources, job_id, who) for job_id in _job_ids(form)]
    return _back(request, "requeued", sum(done))


@router.post("/failures/drop")
async def drop(request: Request, session: FormSession, form: Form) -> Response:
    """Take the jobs of the form off the list."""
    check_form(session, form, _DROP)
    resources, who = resources_of(request), by(request, session)
    done = [await operate.drop_job(resources, job_id, who) for job_id in _job_ids(form)]
    return _back(request, "dropped", sum(done))


def _back(request: Request, what: str, number: int) -> Response:
    given = {name: value for name, value in _chosen(request).items() if value}
    return redirect(request, f"failures?{urlencode({**given, what: number})}")


def _chosen(request: Request) -> Mapping[str, str]:
    return {name: request.query_params.get(name, "").strip()[:100] for name in _FILTERS}


def _job_ids(form: Mapping[str, str]) -> list[str]:
    """Read the form's job ids, at most a page of them."""
    ids = (valid_job_id(text, "gen", "up") for text in form.get("jobs", "").split()[:PAGE_SIZE])
    return [job_id for job_id in dict.fromkeys(ids) if job_id]


def _read_cursor(text: str) -> Position | None:
    parts = _CURSOR.fullmatch(text)
    return Position(int(parts[1]), parts[2]) if parts else None


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,3}", text, re.ASCII) else None
