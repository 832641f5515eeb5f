"""The playground: a form that submits an ordinary job for the account, and the job as it is drawn."""

from dataclasses import replace
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.console.guards import FormSession, PageSession
from serve_app.api.console.history import ChosenJob
from serve_app.api.console.owner import call_of, owner_caller
from serve_app.api.console.playground_form import draw_seed, read_playground_form, values_of
from serve_app.api.console.playground_page import (
    PURPOSE,
    cards_part,
    panel_values,
    playground_page,
    query_values,
    status_of,
)
from serve_app.api.console.rendering import render
from serve_app.api.dependencies import caller_address, resources_of
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import check_form
from serve_app.api.site.forms import Form
from serve_app.domain.audit import Act
from serve_app.domain.errors import AtelierError, NotFound, StoreUnavailable
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest, image_seeds
from serve_app.service import delete, submit

router = APIRouter()


async def load_generation(job: ChosenJob) -> tuple[Job, GenerationRequest]:
    """Read a job and its request. Raises 404 where this version cannot read the request."""
    if not isinstance(job.request, GenerationRequest):
        raise HTTPException(404)
    return job, job.request


Generation = Annotated[tuple[Job, GenerationRequest], Depends(load_generation)]


@router.get("/playground")
async def open_playground(request: Request, session: PageSession) -> Response:
    return await playground_page(request, session, query_values(request.query_params))


@router.get("/playground/cards")
async def open_cards(request: Request, session: PageSession) -> Response:
    """Render the cards alone, which the page fetches during a search."""
    return await cards_part(request, session, request.query_params)


@router.post("/playground/cards")
async def find_loras(request: Request, session: FormSession, form: Form) -> Response:
    """Search without JavaScript: lead to the same page with the fields as they were filled in."""
    check_form(session, form, PURPOSE)
    return redirect(request, f"playground?{urlencode(query_values(form))}")


@router.post("/playground")
async def generate(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    try:
        wanted = read_playground_form(form).to_domain()
        caller = await owner_caller(request, session)
        accepted = await submit.generate(resources_of(request), caller, wanted, call_of(request))
    except StoreUnavailable:
        raise
    except AtelierError as error:
        return await playground_page(request, session, form, status=status_of(error), notice=error.message)
    return redirect(request, f"playground/{accepted.job.id}")


@router.get("/playground/{job_id}")
async def open_job(request: Request, job: ChosenJob, session: PageSession) -> Response:
    return await playground_page(request, session, _values(request, job), job=job)


@router.get("/playground/{job_id}/panel")
async def open_panel(request: Request, job: ChosenJob, session: PageSession) -> Response:
    """Render the job alone, which the page fetches until the job has ended."""
    return render(request, "panel.html", session, **await panel_values(request, session, job))


@router.get("/playground/{job_id}/previews/{index}")
async def open_preview(request: Request, job: ChosenJob, index: int) -> Response:
    previews = await resources_of(request).previews.get(job.id)
    if index not in previews:
        raise HTTPException(404)
    return Response(previews[index].png, media_type="image/png", headers={"Cache-Control": "private, max-age=60"})


@router.post("/playground/{job_id}/again")
async def again(request: Request, generation: Generation, session: FormSession, form: Form) -> Response:
    """Submit the same request with the next seed, or a random one."""
    check_form(session, form, PURPOSE)
    job, before = generation
    seed = before.seeds[-1] + 1 if form.get("seed") == "next" else draw_seed()
    wanted = replace(before, seeds=image_seeds(seed, before.num_images))
    try:
        caller = await owner_caller(request, session)
        accepted = await submit.generate(resources_of(request), caller, wanted, call_of(request))
    except StoreUnavailable:
        raise
    except AtelierError as error:
        return await _job_with_notice(request, session, job, error)
    return redirect(request, f"playground/{accepted.job.id}")


@router.post("/playground/{job_id}/upscale/{image_id}")
async def upscale(request: Request, job: ChosenJob, image_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    factor = 4 if form.get("factor") == "4" else 2
    try:
        caller = await owner_caller(request, session)
        accepted = await submit.upscale(resources_of(request), caller, image_id, factor, call_of(request))
    except StoreUnavailable:
        raise
    except AtelierError as error:
        return await _job_with_notice(request, session, job, error)
    return redirect(request, f"playground/{accepted.job.id}")


@router.post("/playground/{job_id}/cancel")
async def cancel(request: Request, job: ChosenJob, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    resources, account_id = resources_of(request), session.account.id
    await resources.queue.cancel(job.id, account_id=account_id)
    address = caller_address(request)
    await resources.audit.record(account_id, Act.JOB_CANCELED, actor=session.actor, subject=job.id, address=address)
    return redirect(request, f"playground/{job.id}")


@router.post("/playground/{job_id}/delete")
async def delete_job(request: Request, job: ChosenJob, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    resources, account_id, address = resources_of(request), session.account.id, caller_address(request)
    try:
        await delete.delete_job(resources, job.id, account_id=account_id, actor=session.actor, address=address)
    except NotFound:
        raise HTTPException(404) from None
    except StoreUnavailable:
        raise
    except AtelierError as error:
        return await _job_with_notice(request, session, job, error)
    return redirect(request, "playground")


async def _job_with_notice(request: Request, session: FormSession, job: Job, error: AtelierError) -> Response:
    values = _values(request, job)
    return await playground_page(request, session, values, job=job, status=status_of(error), notice=error.message)


def _values(request: Request, job: Job) -> dict[str, str]:
    """Return the job's fields without its seed, over which go the fields of the address."""
    made = {**values_of(job.request), "seed": ""} if isinstance(job.request, GenerationRequest) else {}
    return made | query_values(request.query_params)
