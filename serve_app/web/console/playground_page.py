"""Renders the playground: the form as it was filled in, next to the job that it made."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import HTMLResponse

from serve_app.api.dependencies import accounts_of, jobs_of, loras_of
from serve_app.api.errors import ANSWERS
from serve_app.api.jobs.schemas import MAX_LORAS
from serve_app.domain.errors import AtelierError, StoreUnavailable
from serve_app.domain.families import abilities_of
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationDraft, GenerationRequest, LoraUse, Variant
from serve_app.jobs.previews import thumbnail_size
from serve_app.web.console.keys import usable_keys
from serve_app.web.console.lora_cards import choose_cards
from serve_app.web.console.pages import ConsoleSession, render, uncounted_owner
from serve_app.web.console.panels import AXES, Panel, arrange, panel_of
from serve_app.web.console.playground_form import (
    CHOICE,
    COMPARISON,
    DEFAULTS,
    EXAMPLES,
    FORMATS,
    SAMPLERS,
    SPACINGS,
    TUNED,
    WEIGHT,
    chosen_loras,
    for_people,
    sizes,
    values_of,
)
from serve_app.web.console.snippets import Snippet, as_asked, interface_of, snippets_of
from serve_app.web.site.forms import service_url
from serve_app.web.site.job_text import STATES, drawn_with, title

PURPOSE = "playground"
"""All forms of the page share the form tokens of this purpose."""
_LONGEST_QUERY_VALUE = 4000
MOST_KEYS = 20
"""The code next to a finished job may name one of this many keys, the newest."""
_LEFT_OPEN = (("size",), ("sampler", "spacing"), ("steps",), ("guidance_scale",), ("guidance_start", "guidance_end"))
"""What the LoRAs or the base model say of these is shown as automatic, so that it changes with them."""


async def playground_page(
    request: Request,
    session: ConsoleSession,
    given: Mapping[str, str],
    *,
    job: Job | None = None,
    source: Job | None = None,
    latest: Sequence[Job] = (),
    comparing: Sequence[str] | None = None,
    panels: Sequence[Panel] = (),
    preselected: int = 0,
    status: int = 200,
    notice: str = "",
) -> HTMLResponse:
    """Render the page; `given` are fields of the form, `comparing` the LoRAs chosen on Compare.

    `job` enlarges a picture of `source`. Of a form in which nobody has chosen yet, the first `preselected` LoRAs are.
    """
    adapters = await loras_of(request).catalog.adapters(session.who.id)
    loras = chosen_loras(given) if comparing is None else dict.fromkeys(comparing, "")
    bases = {base.id: base for base in await loras_of(request).applied_catalog.applied_base_models()}
    fields = {**DEFAULTS, **COMPARISON}
    values = {name: given.get(name, text) for name, text in fields.items()}
    first = loras if comparing is None else dict.fromkeys(comparing[:1], "")
    usual = await usual_request(request, session, values["base_model"], first, values["image_id"])
    if usual is not None:
        said = values_of(usual)
        for together in _LEFT_OPEN:
            if all(values[name] == said[name] for name in together):
                values |= dict.fromkeys(together, "")
    chosen = [each for each in adapters if each.id in loras]
    if {values["base_model"]} == ({each.base_model for each in chosen} or {next(iter(bases), "")}):
        values["base_model"] = ""
    base = bases.get(usual.base_model if usual else "") or next(iter(bases.values()), None)
    vocabulary = loras_of(request).vocabulary
    words = await vocabulary.words()
    known = [word for each in chosen for word in each.trigger_words]
    unknown = await vocabulary.unknown_words(values["prompt"], base.id, known) if base else []
    names = {adapter.id: adapter.name for adapter in adapters}
    if not notice and (gone := [lora_id for lora_id in loras if lora_id not in names]):
        notice = f"This account may not use {', '.join(gone)}: removed, no longer shared, or never there."
    panel = {} if job is None else await panel_values(request, session, job)
    abilities = [abilities_of(each.pipeline) for each in bases.values()]
    own = abilities_of(base.pipeline if base else "")
    longest = (base.max_side if base else 0) or own.longest_side
    return render(
        request,
        "playground.html",
        session,
        here="playground",
        comparing=comparing,
        preselected=preselected,
        source=source,
        latest=latest,
        states=STATES,
        title=title,
        thumbnail_size=thumbnail_size,
        panels=panels,
        grid=arrange(panels, names),
        names=names,
        drawn_with=drawn_with,
        axes=AXES,
        status=status,
        notice=notice,
        values=values,
        loras=loras,
        most_loras=MAX_LORAS,
        cards=await choose_cards(request, session.who.id, adapters, chosen=[*loras], find=given.get("find", "")),
        base_models=[*bases],
        sizes=sizes(min(own.usual_side, longest), longest, values["size"], size_of_picture(usual)),
        samplers=SAMPLERS,
        spacings=SPACINGS,
        formats=FORMATS,
        takes_weights=any(each.prompt_weights for each in abilities),
        takes_mask=any(each.begins_late for each in abilities),
        examples=EXAMPLES if words else (),
        words={name: " ".join(sorted(known)) for name, known in words.items()},
        unknown=unknown,
        window=await accounts_of(request).auth.window(session.who.id, Variant.A),
        is_tuned=any(values[name] != DEFAULTS[name] for name in TUNED),
        **{"panel": None, **panel},
    )


def size_of_picture(usual: GenerationRequest | None) -> str:
    """Name the size in which a picture is drawn again; '' for a request without one."""
    return f"{usual.width} × {usual.height}, as the picture" if usual and usual.image else ""


async def usual_request(
    request: Request, session: ConsoleSession, base_model: str, loras: Mapping[str, str], image_id: str
) -> GenerationRequest | None:
    """Return what these LoRAs, or else the base model, make of a request that says nothing more; None if they cannot.

    Without its picture, such as a deleted one, it is made of the others.
    """
    uses = tuple(map(LoraUse, loras))
    draft = GenerationDraft(prompt="", seed=0, loras=uses, base_model=base_model or None, image_id=image_id or None)
    try:
        usual, _ = await jobs_of(request).submission.resolution.resolve(uncounted_owner(request, session), draft)
    except StoreUnavailable:
        raise
    except AtelierError:
        return await usual_request(request, session, base_model, loras, "") if image_id else None
    return usual if isinstance(usual, GenerationRequest) else None


async def cards_part(
    request: Request, session: ConsoleSession, given: Mapping[str, str], *, is_comparing: bool
) -> HTMLResponse:
    """The part of the page that offers LoRAs."""
    adapters, loras = await loras_of(request).catalog.adapters(session.who.id), chosen_loras(given)
    cards = await choose_cards(request, session.who.id, adapters, chosen=[*loras], find=given.get("find", ""))
    comparing = [*loras] if is_comparing else None
    return render(request, "cards.html", session, cards=cards, comparing=comparing, loras=loras, preselected=0)


async def panel_values(request: Request, session: ConsoleSession, job: Job) -> dict[str, Any]:
    """Return the values for `panel.html`."""
    request_, keys = await as_asked(request, job.request), await usable_keys(accounts_of(request).api_keys, session)
    snippets, chosen, interface = list[Snippet](), None, None
    if isinstance(request_, GenerationRequest):
        interface = interface_of(request_, *Variant)
        keys = [key for key in keys if interface is None or interface in key.interfaces]
        wanted = request.query_params.get("key", "")
        chosen = next((key for key in keys if key.id == wanted), keys[0] if keys else None)
        snippets = snippets_of(request_, service_url(request), chosen)
    return {
        "panel": await panel_of(request, job),
        "snippets": snippets,
        "keys": keys[:MOST_KEYS],
        "chosen_key": chosen,
        "interface": interface,
        "can_upscale": isinstance(request_, GenerationRequest),
    }


def query_values(query: Mapping[str, str]) -> dict[str, str]:
    """Return the form's fields that the page's address holds, as examples and the page of a job give them."""
    names = (*DEFAULTS, *COMPARISON, "find", "lora_id")
    chosen = {f"{CHOICE}{lora_id}" for lora_id in chosen_loras(query)}
    kept = [name for name in query if name in names or name in chosen or name.replace(WEIGHT, CHOICE, 1) in chosen]
    return {name: query[name][:_LONGEST_QUERY_VALUE] for name in kept}


def refusal(error: AtelierError) -> dict[str, Any]:
    """Return the status and notice of a page that shows an error. Raises an outage again, which has its own page."""
    if isinstance(error, StoreUnavailable):
        raise error
    status = next(ANSWERS[kind].status for kind in type(error).__mro__ if kind in ANSWERS)
    return {"status": status, "notice": for_people(error.message)}
