"""The operators' pages of single jobs, and of failed jobs, which can be queued again or dropped."""

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.dependencies import accounts_of, jobs_of, operations_of, valid_job_id
from serve_app.api.jobs.records import CURSOR
from serve_app.domain.audit import Actor
from serve_app.domain.durations import Position
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import JOB_PREFIXES, Job, JobState
from serve_app.domain.requests import GenerationRequest
from serve_app.jobs.history import FAILED_AT_ONCE as LOOKED_AT_ONCE
from serve_app.web.operators.pages import PAGE_SIZE, FormSession, PageSession, render
from serve_app.web.site.forms import Form, check_form, redirect
from serve_app.web.site.job_text import STATES, failure_text, parameters, timeline, title
from serve_app.web.site.sign_in import actor_of

_SHOW_PROMPT = (JobState.RUNNING, JobState.FAILED)
"""An operator may have to see what was asked for in these states; prompts of other jobs are their customers' alone."""

router = APIRouter()


async def load_job(request: Request, job_id: str) -> Job:
    job = await jobs_of(request).reader.find(valid_job_id(job_id, *JOB_PREFIXES))
    if job is None:
        raise HTTPException(404)
    return job


ChosenJob = Annotated[Job, Depends(load_job)]


@router.get("/jobs/{job_id}")
async def open_job(request: Request, session: PageSession, job: ChosenJob) -> Response:
    reader, asked = operations_of(request).reader, job.request
    loras = await reader.lora_names([asked.lora_id]) if isinstance(asked, GenerationRequest) else {}
    return render(
        request,
        "job.html",
        session,
        job=job,
        account=(await reader.account_names([job.account_id])).get(job.account_id, "a deleted account"),
        state=STATES[job.state],
        failure=failure_text(job),
        prompt=title(job) if job.state in _SHOW_PROMPT else "",
        parameters=parameters(job, loras),
        timeline=timeline(job),
    )


@router.post("/jobs/{job_id}/cancel")
async def cancel(request: Request, session: FormSession, job: ChosenJob, form: Form) -> Response:
    check_form(session, form, "cancel any job")
    await operations_of(request).acts.cancel_job(job.id, actor_of(request, session.who))
    return redirect(request, f"jobs/{job.id}")


WINDOWS: Mapping[str, tuple[str, timedelta | None]] = {
    "": ("Any time", None),
    "hour": ("The last hour", timedelta(hours=1)),
    "day": ("The last 24 hours", timedelta(days=1)),
    "week": ("The last 7 days", timedelta(days=7)),
}
_FILTERS = ("code", "window", "account")


@router.get("/failures")
async def open_failures(request: Request, session: PageSession) -> Response:
    chosen = _chosen(request)
    account = await accounts_of(request).store.get(chosen["account"]) if chosen["account"] else None
    _, length = WINDOWS.get(chosen["window"], WINDOWS[""])
    after = Position.read(request.query_params.get("after", ""), CURSOR)
    page = await jobs_of(request).dead_letters.page(
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
        older=urlencode({**chosen, "after": page.next.cursor}) if page.next else "",
        windows={name: words for name, (words, _) in WINDOWS.items()},
        codes=sorted({*FailureCode, *page.counts} - {FailureCode.CANCELED, FailureCode.EXPIRED}),
        names=await operations_of(request).reader.account_names(job.account_id for job in page.jobs),
        requeued=_number(request, "requeued"),
        dropped=_number(request, "dropped"),
    )


@router.post("/failures/requeue")
async def requeue(request: Request, session: FormSession, form: Form) -> Response:
    """Queue the jobs of the form again, with all their attempts."""
    check_form(session, form, "requeue jobs")
    return await _done(request, session, form, operations_of(request).acts.requeue_job, "requeued")


@router.post("/failures/drop")
async def drop(request: Request, session: FormSession, form: Form) -> Response:
    """Take the jobs of the form off the list."""
    check_form(session, form, "drop jobs")
    return await _done(request, session, form, operations_of(request).acts.drop_job, "dropped")


async def _done(
    request: Request, session: FormSession, form: Form, act: Callable[[str, Actor], Awaitable[bool]], what: str
) -> Response:
    """Do something with each job of the form, at most a page of them, and say on the list with how many."""
    ids = (valid_job_id(text, *JOB_PREFIXES) for text in form.get("jobs", "").split()[:PAGE_SIZE])
    done = [await act(job_id, actor_of(request, session.who)) for job_id in dict.fromkeys(ids) if job_id]
    given = {name: value for name, value in _chosen(request).items() if value}
    return redirect(request, f"failures?{urlencode({**given, what: sum(done)})}")


def _chosen(request: Request) -> Mapping[str, str]:
    return {name: request.query_params.get(name, "").strip()[:100] for name in _FILTERS}


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,3}", text, re.ASCII) else None
