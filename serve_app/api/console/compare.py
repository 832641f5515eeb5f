"""Compare: one prompt and one seed over several LoRAs, each a job of its own; workers draw them in one batch."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from fastapi import APIRouter, HTTPException, Request, Response

from serve_app.api.console.guards import Form, FormSession, PageSession, check_form
from serve_app.api.console.job_panel import Panel, panel_of
from serve_app.api.console.owner import owner_caller
from serve_app.api.console.playground_form import draw_seed, read_playground_form, values_of
from serve_app.api.console.playground_page import PURPOSE, playground_page, query_values, status_of
from serve_app.api.console.rendering import redirect, render
from serve_app.api.console.session import SignedIn
from serve_app.api.dependencies import resources_of, valid_job_id
from serve_app.domain.errors import (
    AtelierError,
    InvalidParameter,
    RateLimitExceeded,
    StoreUnavailable,
    UnreadableRecord,
)
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service import submit

MOST = 8
"""LoRAs in one comparison."""
CHOICE = "lora:"
"""Begins the name of the field of each LoRA that was chosen."""

router = APIRouter()


@router.get("/compare")
async def open_compare(request: Request, session: PageSession) -> Response:
    panels = await _panels(request, session)
    requests = [panel.job.request for panel in panels if isinstance(panel.job.request, GenerationRequest)]
    values = values_of(requests[0]) if requests else query_values(request.query_params)
    chosen = [each.lora_id for each in requests]
    return await playground_page(request, session, values, comparing=chosen, panels=panels)


@router.get("/compare/grid")
async def open_grid(request: Request, session: PageSession) -> Response:
    """The part of the page that shows the jobs, as the page fetches it while one is under way."""
    panels = await _panels(request, session)
    if not panels:
        raise HTTPException(404)
    names = {lora.id: lora.name for lora in await resources_of(request).catalog.adapters(session.account.id)}
    return render(request, "grid.html", session, panels=panels, names=names)


@router.post("/compare")
async def compare(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, PURPOSE)
    chosen = [name.removeprefix(CHOICE) for name in reversed(list(form)) if name.startswith(CHOICE)]
    try:
        accepted = await _submit(request, session, form, chosen)
    except StoreUnavailable:
        raise
    except AtelierError as error:
        status, notice = status_of(error), error.message
        return await playground_page(request, session, form, comparing=chosen, status=status, notice=notice)
    return redirect(request, f"compare?jobs={','.join(accepted)}")


async def _submit(request: Request, session: SignedIn, form: Mapping[str, str], chosen: Sequence[str]) -> list[str]:
    """The ids of the new jobs: all, or those before one that was refused. Raises what the first is refused with."""
    if not 2 <= len(chosen) <= MOST:
        raise InvalidParameter(f"choose two to {MOST} LoRAs to compare")
    seed = form.get("seed", "").strip() or str(draw_seed())
    fields = {**form, "num_images": "1", "seed": seed}
    wanted = [read_playground_form({**fields, "lora_id": lora_id}).to_domain() for lora_id in chosen]
    resources = resources_of(request)
    left = (await resources.auth.window(session.account.id, Variant.A)).remaining
    if left < len(wanted):
        raise RateLimitExceeded(f"your plan leaves {left} requests now, and this takes {len(wanted)}")
    accepted: list[str] = []
    for each in wanted:
        try:
            job = (await submit.generate(resources, await owner_caller(request, session), each)).job
        except AtelierError:
            if not accepted:
                raise
            break
        accepted.append(job.id)
    return accepted


async def _panels(request: Request, session: SignedIn) -> list[Panel]:
    """Of the account's jobs that the address names."""
    resources, account_id = resources_of(request), session.account.id
    ids = [valid_job_id(text, "gen") for text in request.query_params.get("jobs", "").split(",")[:MOST]]
    panels: list[Panel] = []
    for job_id in filter(None, ids):
        with suppress(UnreadableRecord):  # the others can be compared
            job = await resources.jobs.get(job_id, account_id=account_id)
            panels += [await panel_of(resources, job)] if job is not None else []
    return panels
