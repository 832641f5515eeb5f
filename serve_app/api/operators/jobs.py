"""The operators' page of one job of any account."""

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.dependencies import resources_of, valid_job_id
from serve_app.api.operators.guards import FormSession, PageSession, by
from serve_app.api.operators.rendering import render
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import check_form, form_token
from serve_app.api.site.forms import Form
from serve_app.api.site.job_text import STATES, failure_text, parameters, timeline, title
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationRequest
from serve_app.service import operate

_CANCEL = "cancel any job"
_SHOW_PROMPT = (JobState.RUNNING, JobState.FAILED)
"""An operator may have to see what was asked for in these states; prompts of other jobs are their customers' alone."""

router = APIRouter()


async def load_job(request: Request, job_id: str) -> Job:
    job = await resources_of(request).jobs.find(valid_job_id(job_id, "gen", "up"))
    if job is None:
        raise HTTPException(404)
    return job


ChosenJob = Annotated[Job, Depends(load_job)]


@router.get("/jobs/{job_id}")
async def open_job(request: Request, session: PageSession, job: ChosenJob) -> Response:
    reader, asked = resources_of(request).operator_reader, job.request
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
        requeue_token=form_token(session.token, "requeue jobs"),
        drop_token=form_token(session.token, "drop jobs"),
        cancel_token=form_token(session.token, _CANCEL),
    )


@router.post("/jobs/{job_id}/cancel")
async def cancel(request: Request, session: FormSession, job: ChosenJob, form: Form) -> Response:
    check_form(session, form, _CANCEL)
    await operate.cancel_job(resources_of(request), job.id, by(request, session))
    return redirect(request, f"jobs/{job.id}")
