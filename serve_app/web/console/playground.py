"""The routes of the playground, whose form submits an ordinary job, of Compare, where it submits several, of pictures.

Pictures that the form begins from are uploaded, shown small, and taken away again.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.dependencies import jobs_of, loras_of, valid_job_id
from serve_app.api.images import MAX_FILE_BYTES
from serve_app.api.multipart import read_multipart
from serve_app.api.request_context import RequestContext
from serve_app.domain.audit import Act
from serve_app.domain.errors import AtelierError, InvalidParameter, UnreadableRecord
from serve_app.domain.families import abilities_of
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Draft, GenerationDraft, GenerationRequest, UpscaleDraft, UpscaleRequest
from serve_app.jobs.previews import thumbnail
from serve_app.jobs.submit import Call
from serve_app.jobs.uploads import Hold
from serve_app.web.console.history import IMAGE_CACHE, ChosenJob
from serve_app.web.console.pages import (
    ConsoleSession,
    FormSession,
    PageSession,
    check_plan,
    owner_caller,
    render,
    uncounted_owner,
)
from serve_app.web.console.panels import MOST_PICTURES, Panel, arrange, panel_of, read_comparison
from serve_app.web.console.playground_form import (
    COMPARISON,
    DEFAULTS,
    chosen_loras,
    draw_seed,
    read_draft,
    sizes,
    values_of,
)
from serve_app.web.console.playground_page import (
    PURPOSE,
    cards_part,
    panel_values,
    playground_page,
    query_values,
    refusal,
    size_of_picture,
    usual_request,
)
from serve_app.web.site.forms import Form, check_form, redirect
from serve_app.web.site.job_text import drawn_with
from serve_app.web.site.sign_in import actor_of, record

router = APIRouter()

PICTURE_FIELDS = ("image_id", "mask_image_id")
LATEST = 8
"""The playground shows this many of the latest jobs."""
PRESELECTED = 4
"""Compare begins with this many LoRAs chosen."""


async def load_generation(job: ChosenJob) -> tuple[Job, GenerationRequest]:
    """Read a job and its request. Raises 404 where this version cannot read the request."""
    if not isinstance(job.request, GenerationRequest):
        raise HTTPException(404)
    return job, job.request


Generation = Annotated[tuple[Job, GenerationRequest], Depends(load_generation)]


@router.get("/playground")
async def open_playground(request: Request, session: PageSession) -> Response:
    """Show the form beside the latest pictures, as it was sent last unless the address says what it holds."""
    latest = (await jobs_of(request).history.page(session.who.id, limit=LATEST)).jobs
    asked = (each.request for each in latest if not each.key_id)
    last = next((each for each in asked if isinstance(each, GenerationRequest)), None)
    values = query_values(request.query_params)
    if last is not None and not values:
        values = {**values_of(last), **dict.fromkeys(("seed", *PICTURE_FIELDS), "")}
    return await playground_page(request, session, values, latest=latest)


@router.get("/compare/cards")
@router.get("/playground/cards")
async def open_cards(request: Request, session: PageSession) -> Response:
    """Render the cards alone, which the page fetches during a search."""
    return await cards_part(request, session, request.query_params, is_comparing=_page(request) == "compare")


@router.post("/compare/cards")
@router.post("/playground/cards")
async def find_loras(request: Request, session: FormSession, form: Form) -> Response:
    """Search without JavaScript: lead to the same page with the fields as they were filled in."""
    check_form(session, form, PURPOSE)
    return redirect(request, f"{_page(request)}?{urlencode(query_values(form))}")


def _page(request: Request) -> str:
    """Return which of the two pages a route is of: `playground` or `compare`."""
    return request.scope["route"].path.split("/")[1]


@router.post("/playground")
async def generate(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    try:
        job_id = await _submit(request, session, read_draft(form, chosen_loras(form)))
    except AtelierError as error:
        return await playground_page(request, session, form, **refusal(error))
    return redirect(request, f"playground/{job_id}")


@router.get("/playground/{job_id}")
async def open_job(request: Request, job: ChosenJob, session: PageSession) -> Response:
    return await _job_page(request, session, job)


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
        job_id = await _submit(request, session, draft)
    except AtelierError as error:
        return await _job_page(request, session, job, **refusal(error))
    return redirect(request, f"playground/{job_id}")


async def _submit(request: Request, session: FormSession, draft: Draft) -> str:
    """Return the id of the job of a draft, which counts as a request of the plan."""
    caller = await owner_caller(request, session)
    call = Call(request_id=RequestContext.of(request).request_id)
    return (await jobs_of(request).submission.submit(caller, draft, call)).job.id


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
        return await _job_page(request, session, job, **refusal(error))
    return redirect(request, "playground")


async def _job_page(request: Request, session: ConsoleSession, job: Job, **refused: Any) -> Response:
    """Show a job beside its own fields without the seed, or those of the job that it enlarges a picture of.

    The fields of the address go over them.
    """
    source, asked = None, job.request
    if isinstance(asked, UpscaleRequest):
        made = await jobs_of(request).reader.image(asked.image_id, account_id=session.who.id)
        source = made[0] if made else None
        asked = source.request if source else None
    fields = {**values_of(asked), "seed": ""} if isinstance(asked, GenerationRequest) else {}
    values = fields | query_values(request.query_params)
    return await playground_page(request, session, values, job=job, source=source, **refused)


@router.get("/compare")
async def open_compare(request: Request, session: PageSession) -> Response:
    panels = await _panels(request, session, _named_jobs(request))
    requests = [panel.job.request for panel in panels if isinstance(panel.job.request, GenerationRequest)]
    values = (values_of(requests[0]) if requests else {}) | query_values(request.query_params)
    weights = [*chosen_loras(values).values()]
    values |= {"lora_weight": weights[0]} if weights else {}
    if len({each.base_model for each in requests}) > 1:  # each was drawn on its own
        values["base_model"] = ""
    chosen = list(dict.fromkeys(lora.id for each in requests for lora in each.loras)) or [*chosen_loras(values)]
    preselected = 0 if chosen or "find" in values else PRESELECTED
    return await playground_page(request, session, values, comparing=chosen, panels=panels, preselected=preselected)


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
            job_ids.append(await _submit(request, session, draft))
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


FORM_LIFE = timedelta(hours=12)
"""A picture that no job was drawn from stays as long as a session can, with whatever form it is in."""
_FILE = "file"


@router.post("/pictures")
async def change_pictures(request: Request, session: FormSession) -> Response:
    """Keep a sent picture as the one to begin from, or, where there is one, as its mask; or take one away.

    Answers with the part of the form that shows them, or without JavaScript leads to the page with them.
    """
    form: Mapping[str, str] = {}
    try:
        form = await _receive(request, session)
    except AtelierError as error:
        return await _refused(request, session, error)
    ids = {name: form.get(name, "") for name in PICTURE_FIELDS}
    page = "compare" if form.get("page") == "compare" else "playground"
    if "hx-request" not in request.headers:
        return redirect(request, f"{page}?{urlencode({name: image_id for name, image_id in ids.items() if image_id})}")
    values = {**DEFAULTS, **ids}
    bases = await loras_of(request).applied_catalog.applied_base_models()
    takes_mask = any(abilities_of(each.pipeline).begins_late for each in bases)
    usual = await usual_request(request, session, "", {}, ids["image_id"]) if len(bases) == 1 else None
    usual_size = sizes(usual.width, usual.width, "", size_of_picture(usual))[""] if usual else ""
    return render(
        request, "pictures.html", session, values=values, page=page, takes_mask=takes_mask, usual_size=usual_size
    )


@router.get("/pictures/{image_id}")
async def open_picture(request: Request, session: PageSession, image_id: str) -> Response:
    """Serve a small copy of any picture of the account."""
    jobs = jobs_of(request)
    found = await jobs.uploads.stored(uncounted_owner(request, session), image_id)
    webp = await thumbnail(jobs.images, jobs.space.disk, found.image.image_uri)
    return Response(webp, media_type="image/webp", headers={"Cache-Control": IMAGE_CACHE})


async def _receive(request: Request, session: FormSession) -> Mapping[str, str]:
    """Return the fields of the form, with the id of the picture that it sent, which counts as a request."""
    async with loras_of(request).uploads.hold(session.who.id) as place:
        names = ("form_token", "page", "remove", *PICTURE_FIELDS)
        form, files = await read_multipart(request, place, texts=names, files={_FILE: MAX_FILE_BYTES})
        check_form(session, form, PURPOSE)
        if "remove" in form:
            removed = PICTURE_FIELDS if form["remove"] == "image_id" else PICTURE_FIELDS[1:]
            return form | dict.fromkeys(removed, "")
        if _FILE not in files:
            raise InvalidParameter("choose a PNG, JPEG or WebP file")
        caller = await owner_caller(request, session)
        added = await jobs_of(request).uploads.add(caller, files[_FILE], place=place, hold=Hold(FORM_LIFE))
    field = PICTURE_FIELDS[1 if form.get("image_id") else 0]
    return form | {field: added.upload.image.image_id}


async def _refused(request: Request, session: FormSession, error: AtelierError) -> Response:
    """Say why beside the form, which stays as it is, or on its page."""
    answer = refusal(error)
    if "hx-request" in request.headers:
        response = render(request, "refused.html", session, **answer)
        response.headers.update({"HX-Retarget": "#picture-problem", "HX-Reswap": "innerHTML"})
    else:
        response = await playground_page(request, session, {}, **answer)
    response.headers["Connection"] = "close"  # a part of the body may not have been read
    return response
