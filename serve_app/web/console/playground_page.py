"""Renders the playground: the form as it was filled in, beside the job that it made."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import HTMLResponse

from serve_app.api.dependencies import accounts_of, loras_of
from serve_app.api.errors import ANSWERS
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AtelierError, StoreUnavailable
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.web.console.keys import usable_keys
from serve_app.web.console.lora_cards import LoraCards, choose_cards
from serve_app.web.console.pages import ConsoleSession, render
from serve_app.web.console.panels import AXES, Panel, arrange, panel_of
from serve_app.web.console.playground_form import COMPARISON, DEFAULTS, EXAMPLES, SIZES, TUNED
from serve_app.web.console.snippets import Snippet, interface_of, snippets_of
from serve_app.web.site.forms import form_token, service_url
from serve_app.web.site.job_text import drawn_with

PURPOSE = "playground"
"""All forms of the page share the form tokens of this purpose."""
_LONGEST_QUERY_VALUE = 4000
MOST_KEYS = 20
"""The code beside a finished job may name one of this many keys, the newest."""


async def playground_page(
    request: Request,
    session: ConsoleSession,
    given: Mapping[str, str],
    *,
    job: Job | None = None,
    comparing: Sequence[str] | None = None,
    panels: Sequence[Panel] = (),
    status: int = 200,
    notice: str = "",
) -> HTMLResponse:
    """Render the page; `given` are fields of the form, `comparing` the LoRAs chosen on Compare."""
    adapters = await loras_of(request).catalog.adapters(session.who.id)
    cards = await _cards(request, session, given, adapters, comparing)
    tuned = await _tuned(request, adapters)
    values = _complete(given, tuned, cards, is_comparing=comparing is not None)
    vocabulary = loras_of(request).vocabulary
    words = await vocabulary.words()
    chosen = next((each for each in adapters if each.id == values["lora_id"]), None)
    unknown = (
        await vocabulary.unknown_words(values["prompt"], chosen.base_model, chosen.trigger_words) if chosen else []
    )
    names = {adapter.id: adapter.name for adapter in adapters}
    panel = {} if job is None else await panel_values(request, session, job)
    return render(
        request,
        "playground.html",
        session,
        here="playground",
        comparing=comparing,
        panels=panels,
        grid=arrange(panels, names),
        names=names,
        drawn_with=drawn_with,
        axes=AXES,
        status=status,
        notice=notice,
        values=values,
        cards=cards,
        tuned=tuned,
        sizes=SIZES,
        examples=EXAMPLES if words else (),
        words={name: " ".join(sorted(known)) for name, known in words.items()},
        unknown=unknown,
        is_tuned=any(values[name] != DEFAULTS[name] for name in TUNED),
        **{"panel": None, "token": form_token(session.token, PURPOSE), **panel},
    )


async def cards_part(
    request: Request, session: ConsoleSession, given: Mapping[str, str], comparing: Sequence[str] | None = None
) -> HTMLResponse:
    """The part of the page that offers LoRAs."""
    adapters = await loras_of(request).catalog.adapters(session.who.id)
    cards = await _cards(request, session, given, adapters, comparing)
    words = await loras_of(request).vocabulary.words()
    tuned = await _tuned(request, adapters)
    values = _complete(given, tuned, cards, is_comparing=comparing is not None)
    return render(
        request, "cards.html", session, cards=cards, comparing=comparing, words=words, values=values, tuned=tuned
    )


async def _tuned(request: Request, adapters: Sequence[Adapter]) -> dict[str, dict[str, str]]:
    """Return the fields of the form with which it begins for each LoRA, by id: what the LoRA or its base model wants."""
    base_models = await loras_of(request).applied_catalog.applied_base_models()
    wanted = {adapter.id: adapter.recommended(base_models) for adapter in adapters}
    return {
        lora_id: {
            "steps": DEFAULTS["steps"] if steps is None else str(steps),
            "guidance_scale": DEFAULTS["guidance_scale"] if guidance is None else f"{guidance:g}",
        }
        for lora_id, (steps, guidance) in wanted.items()
    }


async def _cards(
    request: Request,
    session: ConsoleSession,
    given: Mapping[str, str],
    adapters: Sequence[Adapter],
    comparing: Sequence[str] | None,
) -> LoraCards:
    """The LoRAs that the form offers; those that are chosen come first of too many."""
    chosen = [given.get("lora_id", "")] if comparing is None else comparing
    return await choose_cards(request, session.who.id, adapters, chosen=chosen, find=given.get("find", ""))


async def panel_values(request: Request, session: ConsoleSession, job: Job) -> dict[str, Any]:
    """Return the values for `panel.html`."""
    request_, keys = job.request, await usable_keys(accounts_of(request).api_keys, session)
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
        "token": form_token(session.token, PURPOSE),
    }


def query_values(query: Mapping[str, str]) -> dict[str, str]:
    """Return the form's fields that the page's address holds, as examples and the page of a job give them."""
    return {name: query[name][:_LONGEST_QUERY_VALUE] for name in (*DEFAULTS, *COMPARISON, "find") if name in query}


def refusal(error: AtelierError) -> dict[str, Any]:
    """Return the status and notice of a page that shows an error. Raises an outage again, which has its own page."""
    if isinstance(error, StoreUnavailable):
        raise error
    status = next(ANSWERS[kind].status for kind in type(error).__mro__ if kind in ANSWERS)
    return {"status": status, "notice": error.message}


def _complete(
    given: Mapping[str, str], tuned: Mapping[str, Mapping[str, str]], cards: LoraCards, *, is_comparing: bool
) -> dict[str, str]:
    """Fill in what is not given; several LoRAs that are compared share the usual steps and guidance."""
    lora_id = given.get("lora_id", "")
    if lora_id not in tuned and cards.shown:
        lora_id = cards.shown[0].id
    usual = {**DEFAULTS, **COMPARISON, **({} if is_comparing else tuned.get(lora_id, {}))}
    values = {name: given.get(name, value) for name, value in usual.items()} | {"lora_id": lora_id}
    if values["size"] not in SIZES:
        values["size"] = DEFAULTS["size"]
    return values
