"""Compare: one prompt over several LoRAs, across weights or seeds; each picture is a job of its own."""

from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlencode

from fastapi import APIRouter, HTTPException, Request, Response

from serve_app.api.console.comparison import MOST_PICTURES, arrange, read_comparison
from serve_app.api.console.guards import FormSession, PageSession
from serve_app.api.console.job_panel import Panel, panel_of
from serve_app.api.console.owner import call_of, uncounted_owner
from serve_app.api.console.playground_form import COMPARISON, values_of
from serve_app.api.console.playground_page import PURPOSE, cards_part, playground_page, query_values, status_of
from serve_app.api.console.rendering import render
from serve_app.api.console.session import SignedIn
from serve_app.api.dependencies import resources_of, valid_job_id
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import check_form
from serve_app.api.site.forms import Form
from serve_app.domain.errors import AtelierError, StoreUnavailable, UnreadableRecord
from serve_app.domain.requests import GenerationRequest
from serve_app.service import submit

CHOICE = "lora:"
"""Begins the name of the field of each LoRA that was chosen."""

router = APIRouter()


@router.get("/compare")
async def open_compare(request: Request, session: PageSession) -> Response:
    panels = await _panels(request, session)
    requests = [panel.job.request for panel in panels if isinstance(panel.job.request, GenerationRequest)]
    values = (values_of(requests[0]) if requests else {}) | query_values(request.query_params)
    chosen = list(dict.fromkeys(each.lora_id for each in requests)) or _chosen(request.query_params)
    return await playground_page(request, session, values, comparing=chosen, panels=panels)


@router.get("/compare/cards")
async def open_cards(request: Request, session: PageSession) -> Response:
    """Render the cards alone, which the page fetches during a search."""
    return await cards_part(request, session, request.query_params, _chosen(request.query_params))


@router.post("/compare/cards")
async def find_loras(request: Request, session: FormSession, form: Form) -> Response:
    """Search without JavaScript: lead to the same page with the fields as they were filled in."""
    check_form(session, form, PURPOSE)
    chosen = {f"{CHOICE}{lora_id}": "yes" for lora_id in _chosen(reversed(list(form)))}
    return redirect(request, f"compare?{urlencode({**query_values(form), **chosen})}")


@router.get("/compare/grid")
async def open_grid(request: Request, session: PageSession) -> Response:
    """Render the jobs alone, which the page fetches until the last one has ended."""
    panels = await _panels(request, session)
    if not panels:
        raise HTTPException(404)
    names = {lora.id: lora.name for lora in await resources_of(request).catalog.adapters(session.account.id)}
    return render(request, "grid.html", session, panels=panels, names=names, grid=arrange(panels, names))


@router.post("/compare")
async def compare(request: Request, session: FormSession, form: Form) -> Response:
    """Accept all jobs of a comparison, or none."""
    check_form(session, form, PURPOSE)
    chosen = _chosen(reversed(list(form)))
    try:
        asked = read_comparison(form, chosen)
        caller = uncounted_owner(request, session)
        jobs = await submit.generate_all(resources_of(request), caller, asked, call_of(request))
    except StoreUnavailable:
        raise
    except AtelierError as error:
        status, notice = status_of(error), error.message
        return await playground_page(request, session, form, comparing=chosen, status=status, notice=notice)
    across = {name: form.get(name, "") for name in COMPARISON} if form.get("across") else {}
    return redirect(request, f"compare?{urlencode({'jobs': ','.join(job.id for job in jobs), **across}, safe=',')}")


def _chosen(fields: Iterable[str]) -> list[str]:
    """Return the LoRAs that these fields choose, in the order of the page."""
    return [name.removeprefix(CHOICE) for name in fields if name.startswith(CHOICE)]


async def _panels(request: Request, session: SignedIn) -> list[Panel]:
    """Return the panels of the account's jobs that the address names."""
    resources, account_id = resources_of(request), session.account.id
    ids = [valid_job_id(text, "gen") for text in request.query_params.get("jobs", "").split(",")[:MOST_PICTURES]]
    panels: list[Panel] = []
    for job_id in filter(None, ids):
        with suppress(UnreadableRecord):  # the others can be compared
            job = await resources.jobs.get(job_id, account_id=account_id)
            panels += [await panel_of(resources, job)] if job is not None else []
    return panels
