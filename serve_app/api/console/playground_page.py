"""Rendering of the playground: the form as it was filled in, beside the job that it made."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse

from serve_app.api.console.job_panel import Panel, panel_of
from serve_app.api.console.playground_form import DEFAULTS, EXAMPLES, SIZES
from serve_app.api.console.rendering import render
from serve_app.api.console.session import SignedIn, form_token
from serve_app.api.console.snippets import snippets_of
from serve_app.api.console.vocabulary import known_words, unknown_words
from serve_app.api.dependencies import resources_of
from serve_app.api.errors import ANSWERS
from serve_app.api.responses import base_url
from serve_app.api.site.samples import sample_of
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest, Variant

PURPOSE = "playground"
"""Of the form tokens: one for all forms of the page."""
_LONGEST_QUERY_VALUE = 4000


async def playground_page(
    request: Request,
    session: SignedIn,
    given: Mapping[str, str],
    *,
    job: Job | None = None,
    comparing: Sequence[str] | None = None,
    panels: Sequence[Panel] = (),
    status: int = 200,
    notice: str = "",
) -> HTMLResponse:
    """`given` are fields of the form; what it lacks has its usual value. `comparing`: the LoRAs chosen to be compared."""
    adapters = await resources_of(request).catalog.adapters(session.account.id)
    values = _complete(given, adapters)
    words = await known_words(await resources_of(request).catalog.base_models())
    chosen = next((adapter for adapter in adapters if adapter.id == values["lora_id"]), None)
    known = words.get(chosen.base_model if chosen else "")
    panel = {} if job is None else await panel_values(request, session, job)
    return render(
        request,
        "playground.html",
        session,
        here="playground",
        comparing=comparing,
        panels=panels,
        names={adapter.id: adapter.name for adapter in adapters},
        status=status,
        notice=notice,
        values=values,
        adapters=adapters,
        sample_of=lambda adapter: sample_of(adapter.name, adapter.base_model),
        sizes=SIZES,
        examples=EXAMPLES if words else (),
        words={name: " ".join(sorted(known)) for name, known in words.items()},
        unknown=unknown_words(values["prompt"], known) if known else [],
        is_tuned=any(values[name] != DEFAULTS[name] for name in ("steps", "guidance_scale", "negative_prompt", "seed")),
        **{"panel": None, "token": form_token(session.token, PURPOSE), **panel},
    )


async def panel_values(request: Request, session: SignedIn, job: Job) -> dict[str, Any]:
    """What `panel.html` takes."""
    resources = resources_of(request)
    address = base_url(request, resources.settings.public_url).removesuffix("/console")
    is_made_here = isinstance(job.request, GenerationRequest) and job.variant is Variant.A
    return {
        "panel": await panel_of(resources, job),
        "snippets": snippets_of(job.request, address) if isinstance(job.request, GenerationRequest) else [],
        "can_upscale": is_made_here,
        "token": form_token(session.token, PURPOSE),
    }


def query_values(query: Mapping[str, str]) -> dict[str, str]:
    """Fields of the form in the page's address, as examples and the page of a job give them."""
    values = {name: query[name][:_LONGEST_QUERY_VALUE] for name in DEFAULTS if name in query}
    if "width" in query and "height" in query:
        values["size"] = f"{query['width']}x{query['height']}"
    return values


def status_of(error: AtelierError) -> int:
    return next(ANSWERS[kind].status for kind in type(error).__mro__ if kind in ANSWERS)


def _complete(given: Mapping[str, str], adapters: list[Adapter]) -> dict[str, str]:
    values = {name: given.get(name, usual) for name, usual in DEFAULTS.items()}
    if values["size"] not in SIZES:
        values["size"] = DEFAULTS["size"]
    if values["lora_id"] not in {adapter.id for adapter in adapters} and adapters:
        values["lora_id"] = adapters[0].id
    return values
