"""The routes of the playground, whose form submits an ordinary job, and of Compare, where it submits several."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.dependencies import jobs_of, loras_of, valid_job_id
from serve_app.domain.audit import Act
from serve_app.domain.errors import AtelierError, UnreadableRecord
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Draft, GenerationDraft, GenerationRequest, UpscaleDraft
from serve_app.web.console.history import ChosenJob
from serve_app.web.console.pages import (
    ConsoleSession,
    FormSession,
    PageSession,
    call_of,
    check_plan,
    owner_caller,
    render,
)
from serve_app.web.console.panels import MOST_PICTURES, Panel, arrange, panel_of, read_comparison
from serve_app.web.console.playground_form import COMPARISON, chosen_loras, draw_seed, read_draft, values_of
from serve_app.web.console.playground_page import (
    PURPOSE,
    cards_part,
    panel_values,
    playground_page,
    query_values,
    refusal,
)
from serve_app.web.site.forms import Form, check_form, redirect
from serve_app.web.site.job_text import drawn_with
from serve_app.web.site.sign_in import actor_of, record

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
        draft = read_draft(form, chosen_loras(form))
        caller = await owner_caller(request, session)
        accepted = await jobs_of(request).submission.submit(caller, draft, call_of(request))
    except AtelierError as error:
        return await playground_page(request, session, form, **refusal(error))
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
    previews = await jobs_of(request).previews.get(job.id)
    if index not in previews:
        raise HTTPException(404)
    return Response(previews[index].png, media_type="image/png", headers={"Cache-Control": "private, max-age=60"})


@router.post("/playground/{job_id}/again")
async def again(request: Request, generation: Generation, session: FormSession, form: Form) -> Response:
    """Submit the same request with the next seed, or a random one."""
    check_form(session, form, PURPOSE)
    job, before = generation
    seed = before.seeds[-1] + 1 if form.get("seed") == "next" else draw_seed()
    return await _from_job(request, session, job, GenerationDraft.like(before, seed=seed))


@router.post("/playground/{job_id}/upscale/{image_id}")
async def upscale(request: Request, job: ChosenJob, image_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    draft = UpscaleDraft(image_id=image_id, scale_factor=4 if form.get("factor") == "4" else 2)
    return await _from_job(request, session, job, draft)


async def _from_job(request: Request, session: FormSession, job: Job, draft: Draft) -> Response:
    """Submit what was asked for on the page of a job; lead to the page of the new one."""
    try:
        caller = await owner_caller(request, session)
        accepted = await jobs_of(request).submission.submit(caller, draft, call_of(request))
    except AtelierError as error:
        return await _job_with_notice(request, session, job, error)
    return redirect(request, f"playground/{accepted.job.id}")


@router.post("/playground/{job_id}/cancel")
async def cancel(request: Request, job: ChosenJob, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    await jobs_of(request).queue.cancel(job.id, account_id=session.who.id)
    await record(request, session.who, Act.JOB_CANCELED, job.id)
    return redirect(request, f"playground/{job.id}")


@router.post("/playground/{job_id}/delete")
async def delete_job(request: Request, job: ChosenJob, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    try:
        await jobs_of(request).deletion.delete_job(job.id, account_id=session.who.id, by=actor_of(request, session.who))
    except AtelierError as error:
        return await _job_with_notice(request, session, job, error)
    return redirect(request, "playground")


async def _job_with_notice(request: Request, session: FormSession, job: Job, error: AtelierError) -> Response:
    values = _values(request, job)
    return await playground_page(request, session, values, job=job, **refusal(error))


def _values(request: Request, job: Job) -> dict[str, str]:
    """Return the job's fields without its seed, over which go the fields of the address."""
    made = {**values_of(job.request), "seed": ""} if isinstance(job.request, GenerationRequest) else {}
    return made | query_values(request.query_params)


@router.get("/compare")
async def open_compare(request: Request, session: PageSession) -> Response:
    panels = await _panels(request, session, _named_jobs(request))
    requests = [panel.job.request for panel in panels if isinstance(panel.job.request, GenerationRequest)]
    values = (values_of(requests[0]) if requests else {}) | query_values(request.query_params)
    weights = [*chosen_loras(values).values()]
    values |= {"lora_weight": weights[0]} if weights else {}
    chosen = list(dict.fromkeys(lora.id for each in requests for lora in each.loras)) or [*chosen_loras(values)]
    return await playground_page(request, session, values, comparing=chosen, panels=panels)


@router.get("/compare/cards")
async def open_compared_cards(request: Request, session: PageSession) -> Response:
    """Render the cards alone, which the page fetches during a search."""
    return await cards_part(request, session, request.query_params, [*chosen_loras(request.query_params)])


@router.post("/compare/cards")
async def find_compared_loras(request: Request, session: FormSession, form: Form) -> Response:
    """Search without JavaScript: lead to the same page with the fields as they were filled in."""
    check_form(session, form, PURPOSE)
    return redirect(request, f"compare?{urlencode(query_values(form))}")


@router.get("/compare/grid")
async def open_grid(request: Request, session: PageSession) -> Response:
    """Render the jobs alone, which the page fetches until the last one has ended."""
    panels = await _panels(request, session, _named_jobs(request))
    if not panels:
        raise HTTPException(404)
    names = {lora.id: lora.name for lora in await loras_of(request).catalog.adapters(session.who.id)}
    return render(
        request, "grid.html", session, panels=panels, names=names, grid=arrange(panels, names), drawn_with=drawn_with
    )


@router.post("/compare")
async def compare(request: Request, session: FormSession, form: Form) -> Response:
    """Create the jobs of a comparison; where one is refused, show those before it and say why."""
    check_form(session, form, PURPOSE)
    chosen, job_ids = [*chosen_loras(form)], list[str]()
    try:
        asked = read_comparison(form, chosen)
        await check_plan(request, session, len(asked))
        for draft in asked:
            caller = await owner_caller(request, session)
            job_ids.append((await jobs_of(request).submission.submit(caller, draft, call_of(request))).job.id)
    except AtelierError as error:
        panels = await _panels(request, session, job_ids)
        return await playground_page(request, session, form, comparing=chosen, panels=panels, **refusal(error))
    across = {name: form.get(name, "") for name in COMPARISON} if form.get("across") else {}
    return redirect(request, f"compare?{urlencode({'jobs': ','.join(job_ids), **across}, safe=',')}")


def _named_jobs(request: Request) -> list[str]:
    """Return the ids of jobs in the page's address."""
    names = request.query_params.get("jobs", "").split(",")[:MOST_PICTURES]
    return [name for name in names if valid_job_id(name, "gen", "job")]


async def _panels(request: Request, session: ConsoleSession, job_ids: Sequence[str]) -> list[Panel]:
    """Return the panels of these jobs, as far as they are the account's."""
    account_id = session.who.id
    panels: list[Panel] = []
    for job_id in job_ids:
        with suppress(UnreadableRecord):  # the other images can be compared all the same
            job = await jobs_of(request).reader.get(job_id, account_id=account_id)
            panels += [await panel_of(request, job)] if job is not None else []
    return panels
