"""The console's history: an account's jobs, the page of each with its images, canceling and deleting."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.dependencies import accounts_of, jobs_of, loras_of, valid_job_id
from serve_app.api.jobs.records import CURSOR
from serve_app.domain.accounts import ApiKey
from serve_app.domain.audit import Act
from serve_app.domain.durations import Position
from serve_app.domain.errors import JobUnfinished
from serve_app.domain.jobs import JOB_PREFIXES, Job, JobState, StoredImage
from serve_app.domain.requests import GenerationRequest
from serve_app.jobs.history import NO_KEY, JobFilter
from serve_app.jobs.previews import thumbnail, thumbnail_size
from serve_app.web.console.pages import ConsoleSession, FormSession, PageSession, render
from serve_app.web.console.playground_form import values_of as fields_of
from serve_app.web.console.snippets import as_asked, curl_command
from serve_app.web.site.forms import Form, check_form, redirect, service_url
from serve_app.web.site.job_text import STATES, drawn_with, failure_text, parameters, timeline, title
from serve_app.web.site.sign_in import actor_of, record

router = APIRouter()

PAGE_SIZE, LOOKED_AT = 24, 2_000
"""A page shows at most 24 jobs, and looks for them among 2,000: the next page looks further back."""
MOST_OFFERED = 50
"""The filters offer at most this many LoRAs and keys, the newest."""
IMAGE_CACHE = "private, max-age=3600, immutable"
"""An image's bytes never change, so browsers may keep it; an hour after a sign-out, none is left."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_FILTERS = ("state", "lora", "key", "from", "to")


@router.get("/history")
async def open_history(request: Request, session: PageSession) -> Response:
    account_id = session.who.id
    chosen = {name: request.query_params.get(name, "")[:100] for name in _FILTERS}
    after = Position.read(request.query_params.get("after", ""), CURSOR)
    adapters = await loras_of(request).catalog.adapters(account_id)
    loras = {adapter.id: adapter.name for adapter in adapters}
    wanted = _lora_id(chosen["lora"], loras)
    only = _read_filter(chosen, wanted)
    page = await jobs_of(request).history.page(account_id, limit=PAGE_SIZE, only=only, after=after, among=LOOKED_AT)
    given = {name: value for name, value in chosen.items() if value}
    return render(
        request,
        "history.html",
        session,
        here="history",
        jobs=page.jobs,
        older=urlencode({**given, "after": page.next.cursor}) if page.next else "",
        looked_at=LOOKED_AT if page.next and len(page.jobs) < PAGE_SIZE else 0,
        newest=urlencode(given) if after else None,
        chosen=chosen,
        is_filtered=bool(given),
        states=STATES,
        no_key=NO_KEY,
        loras=loras,
        lora=_shown_lora(wanted, loras),
        offered=[_shown_lora(adapter.id, loras) for adapter in reversed(adapters[-MOST_OFFERED:])],
        keys=_newest_keys(await accounts_of(request).api_keys.list(account_id), chosen["key"]),
        title=title,
        drawn_with=drawn_with,
        thumbnail_size=thumbnail_size,
    )


async def load_job(request: Request, job_id: str, session: PageSession) -> Job:
    """Read the account's job. Raises 404 for any other."""
    job = await jobs_of(request).reader.get(valid_job_id(job_id, *JOB_PREFIXES), account_id=session.who.id)
    if job is None:
        raise HTTPException(404)
    return job


async def load_image(job: "ChosenJob", image_id: str) -> StoredImage:
    image = next((image for image in job.images if image.image_id == image_id), None)
    if image is None:
        raise HTTPException(404)
    return image


ChosenJob = Annotated[Job, Depends(load_job)]
ChosenImage = Annotated[StoredImage, Depends(load_image)]


@router.get("/history/{job_id}")
async def open_job(request: Request, job: ChosenJob, session: PageSession) -> Response:
    return await _job_page(request, session, job)


@router.get("/history/{job_id}/{image_id}")
async def open_image(
    request: Request, job: ChosenJob, image: ChosenImage, download: Literal["yes"] | None = None
) -> Response:
    """Serve the image from this service's own address, which is all that the pages' policy allows."""
    content = await jobs_of(request).images.get(image.image_uri)
    kind = "attachment" if download else "inline"
    name = f"{job.id}-{image.index + 1}{image.format.suffix}"
    headers = {"Cache-Control": IMAGE_CACHE, "Content-Disposition": f'{kind}; filename="{name}"'}
    return Response(content, media_type=image.format.media_type, headers=headers)


@router.get("/history/{job_id}/{image_id}/thumbnail")
async def open_thumbnail(request: Request, image: ChosenImage) -> Response:
    webp = await thumbnail(jobs_of(request).images, jobs_of(request).space.disk, image.image_uri)
    return Response(webp, media_type="image/webp", headers={"Cache-Control": IMAGE_CACHE})


@router.post("/history/{job_id}/cancel")
async def cancel_job(request: Request, job_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, "cancel job")
    valid_id = valid_job_id(job_id, *JOB_PREFIXES)
    state = await jobs_of(request).queue.cancel(valid_id, account_id=session.who.id)
    if state is None:
        raise HTTPException(404)
    await record(request, session.who, Act.JOB_CANCELED, valid_id)
    return redirect(request, f"history/{valid_id}")


@router.post("/history/{job_id}/delete")
async def delete_job(request: Request, job_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, "delete job")
    account_id = session.who.id
    try:
        await jobs_of(request).deletion.delete_job(
            valid_job_id(job_id, *JOB_PREFIXES),
            account_id=account_id,
            by=actor_of(request, session.who),
        )
    except JobUnfinished as error:
        job = await load_job(request, job_id, session)
        return await _job_page(request, session, job, status=409, notice=error.message)
    return redirect(request, "history")


@router.post("/history/{job_id}/{image_id}/delete")
async def delete_image(request: Request, job_id: str, image_id: str, session: FormSession, form: Form) -> Response:
    """Delete one image of a job; with its last one the job goes."""
    check_form(session, form, "delete image")
    account_id, valid_id = session.who.id, valid_job_id(job_id, *JOB_PREFIXES)
    by = actor_of(request, session.who)
    try:
        await jobs_of(request).deletion.delete_image(valid_id, image_id, account_id=account_id, by=by)
    except JobUnfinished as error:
        job = await load_job(request, job_id, session)
        return await _job_page(request, session, job, status=409, notice=error.message)
    is_kept = await jobs_of(request).reader.get(valid_id, account_id=account_id) is not None
    return redirect(request, f"history/{valid_id}" if is_kept else "history")


async def _job_page(
    request: Request, session: ConsoleSession, job: Job, *, status: int = 200, notice: str = ""
) -> Response:
    uses = job.request.loras if isinstance(job.request, GenerationRequest) else ()
    loras = [await loras_of(request).catalog.adapter_of(use.id, session.who.id) for use in uses]
    names = {lora.adapter.id: lora.adapter.name for lora in loras if lora}
    keys = {key.id: key for key in await accounts_of(request).api_keys.list(session.who.id)}
    key = keys.get(job.key_id)
    return render(
        request,
        "job.html",
        session,
        here="history",
        status=status,
        notice=notice,
        job=job,
        title=title(job),
        state=STATES[job.state],
        failure=failure_text(job),
        parameters=parameters(job, names),
        timeline=timeline(job),
        key=(key.name or key.hint if key else "a key that was removed") if job.key_id else "",
        curl=curl_command(replace(job, request=await as_asked(request, job.request)), service_url(request), key),
        playground=urlencode(fields_of(job.request)) if isinstance(job.request, GenerationRequest) else "",
    )


def _lora_id(given: str, names: Mapping[str, str]) -> str:
    """Return the id of a LoRA given by id or name; the newest where several have the name."""
    named = [lora_id for lora_id, name in names.items() if name.casefold() == given.strip().casefold()]
    return given if given in names or not named else named[-1]


def _shown_lora(lora_id: str, names: Mapping[str, str]) -> str:
    """Return the LoRA's name, or its id where it is gone or shares its name with another."""
    name = names.get(lora_id, lora_id)
    return name if list(names.values()).count(name) == 1 else lora_id


def _newest_keys(keys: Sequence[ApiKey], chosen: str) -> list[ApiKey]:
    return [key for key in reversed(keys) if key.id == chosen or key in keys[-MOST_OFFERED:]]


def _read_filter(chosen: Mapping[str, str], lora_id: str) -> JobFilter:
    """Read the filter; an unreadable field filters nothing."""
    last = _read_date(chosen["to"])
    return JobFilter(
        state=JobState(chosen["state"]) if chosen["state"] in STATES else None,
        lora_id=lora_id,
        key_id=chosen["key"],
        since=_read_date(chosen["from"]),
        until=last + timedelta(days=1) if last and last.year < 9999 else None,
    )


def _read_date(text: str) -> datetime | None:
    """Read a date as the midnight (UTC) at its beginning."""
    if _DATE.fullmatch(text):
        with suppress(ValueError):
            return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
    return None
