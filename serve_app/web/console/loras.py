"""The console's pages of LoRAs: the list, the page of each, upload, change, sharing and removal."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.accounts.accounts import AccountStore
from serve_app.accounts.sign_in import Limit
from serve_app.api.dependencies import accounts_of, caller_address, jobs_of, loras_of, operations_of, settings_of
from serve_app.api.loras.schemas import GrantRequest, LoraChange, LoraForm, split_words
from serve_app.api.loras.upload import read_upload
from serve_app.api.routing import validate
from serve_app.domain.catalog import Adapter
from serve_app.domain.durations import period_text
from serve_app.domain.errors import InvalidParameter, NotFound, TooManyUploads
from serve_app.domain.jobs import JobState
from serve_app.jobs.history import JobFilter
from serve_app.jobs.previews import thumbnail, thumbnail_size
from serve_app.jobs.samples import find_pictures
from serve_app.loras.account_loras import AccountActor
from serve_app.loras.catalog import SharedAdapter
from serve_app.web.console.history import IMAGE_CACHE
from serve_app.web.console.lora_cards import (
    FORM_ERRORS,
    LONGEST_SEARCH,
    MOST,
    FormError,
    drawn_on,
    form_error,
    found_parts,
    own_pictures,
    sample_pictures,
    suggested_words,
    training_parts,
)
from serve_app.web.console.pages import ConsoleSession, FormSession, PageSession, render, uncounted_owner
from serve_app.web.site import size_text
from serve_app.web.site.forms import Form, check_form, page_number, redirect

router = APIRouter()

GROUPS = ("Yours", "Shared with you", "Provided by this service")
RECENT = 100
"""A card's picture is looked for among this many of the newest jobs."""
SAMPLES, LOOKED_AT = 6, 3_000
"""A LoRA's page shows at most six pictures, and looks for them among the newest 3,000 jobs."""
MOST_COUNTED = 100
TRIES = Limit("console-loras", 60, timedelta(hours=1))
"""Uploads and shares of an account are limited: a file takes seconds to check, and names could be guessed."""
_CLOSE = {"Connection": "close"}
"""A body that was not read must not be taken for the next request."""
_VERDICTS = {
    "added": "The file matches its base model.",
    "same": "This account already has these weights, in this LoRA.",
    "changed": "The changes are saved.",
    "shared": "The LoRA is shared.",
    "unshared": "The LoRA is no longer shared.",
}


def signed_in_by(request: Request, session: FormSession) -> AccountActor:
    """Return who acts, as the use cases of LoRAs name them."""
    caller = uncounted_owner(request, session)
    return AccountActor(caller=caller, address=caller_address(request), name=session.who.actor)


ActorDep = Annotated[AccountActor, Depends(signed_in_by)]


@router.get("/loras")
async def open_loras(request: Request, session: PageSession) -> Response:
    account_id = session.who.id
    adapters = await loras_of(request).catalog.adapters(account_id)
    find = request.query_params.get("find", "").strip()[:LONGEST_SEARCH]
    fitting = [adapter for group in _by_owner(adapters, account_id) for adapter in group if adapter.holds(find)]
    page = min(page_number(request), max(1, ceil(len(fitting) / MOST)))
    shown = fitting[(page - 1) * MOST : page * MOST]
    newest = await jobs_of(request).history.page(account_id, limit=RECENT)
    terms = await loras_of(request).owned.quota(account_id)
    own = [each for each in adapters if each.owner == account_id]
    return render(
        request,
        "loras.html",
        session,
        here="loras",
        groups=dict(zip(GROUPS, _by_owner(shown, account_id), strict=True)),
        used=f"{len(own)} of {terms.max_loras} LoRAs, "
        f"{size_text(sum(each.size_bytes for each in own))} of {size_text(terms.max_bytes)}",
        pictures={**await sample_pictures(request, shown), **own_pictures(request, newest.jobs)},
        owners=await _owner_names(accounts_of(request).store, {each.owner for each in shown} - {"", account_id}),
        has_own=bool(own),
        find=find,
        found=len(fitting),
        is_searchable=bool(find) or len(adapters) > MOST,
        newer=_page_address(find, page - 1) if page > 1 else None,
        older=_page_address(find, page + 1) if len(fitting) > page * MOST else None,
    )


def _by_owner(adapters: Sequence[Adapter], account_id: str) -> tuple[list[Adapter], list[Adapter], list[Adapter]]:
    """Split LoRAs into the account's own (newest first), those shared with it, and the service's."""
    own = [each for each in reversed(adapters) if each.owner == account_id]
    shared = [each for each in adapters if each.owner not in ("", account_id)]
    return own, shared, [each for each in adapters if not each.owner]


def _page_address(find: str, page: int) -> str:
    fields = {"find": find, "page": page if page > 1 else ""}
    return urlencode({name: value for name, value in fields.items() if value})


async def _owner_names(accounts: AccountStore, account_ids: Iterable[str]) -> Mapping[str, str]:
    """Return the names of accounts that share their LoRAs."""
    found = [await accounts.get(account_id) for account_id in sorted(account_ids)]
    return {each.id: each.name for each in found if each is not None}


@router.get("/loras/new")
async def open_upload(request: Request, session: PageSession) -> Response:
    return await _upload_page(request, session)


@router.post("/loras/new")
async def upload(request: Request, session: FormSession, by: ActorDep) -> Response:
    """Receive a LoRA's file, check it and register it, which takes some seconds."""
    form = None
    await _check_tries(request, session)
    try:
        async with loras_of(request).uploads.hold(session.who.id) as place:
            sent = await read_upload(request, place, extra=("form_token",))
            form = sent.form
            check_form(session, sent.extra, "upload lora")
            registered = await loras_of(request).owned.add(
                by, sent.path, form.to_offer(), place=place, idempotency_key=None
            )
    except TooManyUploads as error:
        raise HTTPException(429, error.message, _CLOSE) from None
    except FORM_ERRORS as error:
        return await _upload_page(request, session, refused=form_error(error), form=form)
    return redirect(request, f"loras/{registered.adapter.id}?said={registered.status}")


@router.get("/loras/{lora_id}")
async def open_lora(request: Request, session: PageSession, lora_id: str) -> Response:
    found, said = await _find(request, session, lora_id), request.query_params.get("said", "")
    notice = _VERDICTS.get(said, "")
    if said == "added":
        warning = await operations_of(request).state.base_warning(found.adapter.base_model)
        notice += f" {warning or 'You can use the LoRA now.'}"
    return await _lora_page(request, session, found, notice=notice)


@router.get("/loras/{lora_id}/sample")
async def open_sample(request: Request, session: PageSession, lora_id: str) -> Response:
    """Serve the sample picture of a registered LoRA to accounts that may use it."""
    jobs, lora = jobs_of(request), await _find(request, session, lora_id)
    found = await find_pictures(loras_of(request).samples, jobs.reader, [lora.adapter])
    try:
        webp = await thumbnail(jobs.images, jobs.space.disk, found[lora_id].image_uri)
    except (KeyError, NotFound):
        raise HTTPException(404) from None
    return Response(webp, media_type="image/webp", headers={"Cache-Control": IMAGE_CACHE})


@router.post("/loras/{lora_id}/change")
async def change(request: Request, session: FormSession, by: ActorDep, lora_id: str, form: Form) -> Response:
    check_form(session, form, "change lora")
    words = split_words(form.get("trigger_words", ""))
    try:
        texts = {name: form.get(name, "") for name in ("name", "description")}
        wanted = validate(LoraChange, {**texts, "trigger_words": words})
        await loras_of(request).owned.change(by, lora_id, **wanted.model_dump())
    except InvalidParameter as error:
        return await _refused(request, session, lora_id, form_error(error))
    return redirect(request, f"loras/{lora_id}?said=changed")


@router.post("/loras/{lora_id}/share")
async def share(request: Request, session: FormSession, by: ActorDep, lora_id: str, form: Form) -> Response:
    check_form(session, form, "share lora")
    await _check_tries(request, session)
    await _find(request, session, lora_id)
    try:
        grant = validate(GrantRequest, {"account": form.get("account", "")})
        await loras_of(request).owned.share(by, lora_id, grant.account)
    except (NotFound, *FORM_ERRORS) as error:
        return await _refused(request, session, lora_id, form_error(error))
    return redirect(request, f"loras/{lora_id}?said=shared")


@router.post("/loras/{lora_id}/unshare")
async def unshare(request: Request, session: FormSession, by: ActorDep, lora_id: str, form: Form) -> Response:
    check_form(session, form, "unshare lora")
    await loras_of(request).owned.unshare(by, lora_id, form.get("account", ""))
    return redirect(request, f"loras/{lora_id}?said=unshared")


@router.post("/loras/{lora_id}/delete")
async def delete(request: Request, session: FormSession, by: ActorDep, lora_id: str, form: Form) -> Response:
    check_form(session, form, "delete lora")
    await loras_of(request).owned.remove(by, lora_id)
    return redirect(request, "loras")


async def _find(request: Request, session: ConsoleSession, lora_id: str) -> SharedAdapter:
    return await loras_of(request).owned.find(signed_in_by(request, session).caller, lora_id)


async def _check_tries(request: Request, session: ConsoleSession) -> None:
    if await accounts_of(request).throttle.hit(TRIES, session.who.id):
        raise HTTPException(
            429, f"At most {TRIES.tries} uploads and shares per {period_text(TRIES.per)}. Try again later.", _CLOSE
        )


async def _refused(request: Request, session: ConsoleSession, lora_id: str, refused: FormError) -> Response:
    return await _lora_page(request, session, await _find(request, session, lora_id), refused=refused)


async def _upload_page(
    request: Request, session: ConsoleSession, *, refused: FormError | None = None, form: LoraForm | None = None
) -> Response:
    response = render(
        request,
        "lora_upload.html",
        session,
        here="loras",
        status=refused.status if refused else 200,
        problem=refused.text if refused else "",
        form=form,
        base_models=[base.id for base in await loras_of(request).applied_catalog.base_models()],
        largest=size_text(int(settings_of(request).max_lora_size)),
    )
    if refused is not None:
        response.headers["Connection"] = "close"  # a part of the body may not have been read
    return response


async def _lora_page(
    request: Request,
    session: ConsoleSession,
    found: SharedAdapter,
    *,
    notice: str = "",
    refused: FormError | None = None,
) -> Response:
    account_id, adapter = session.who.id, found.adapter
    completed = JobFilter(lora_id=adapter.id, state=JobState.COMPLETED)
    done = await jobs_of(request).history.page(account_id, limit=SAMPLES, only=completed, among=LOOKED_AT)
    own = dict.fromkeys((JobState.QUEUED, JobState.RUNNING), 0)
    for state in own:
        only = JobFilter(lora_id=adapter.id, state=state)
        page = await jobs_of(request).history.page(account_id, limit=MOST_COUNTED, only=only, among=1_000)
        own[state] = len(page.jobs)
    others = 0
    if found.shared_with:
        others = (await jobs_of(request).stats.waiting_for([adapter.sha256]))[adapter.sha256] - own[JobState.QUEUED]
    keys, now = await accounts_of(request).api_keys.list(account_id), datetime.now(UTC)
    owners = await _owner_names(accounts_of(request).store, {adapter.owner} - {"", account_id})
    return render(
        request,
        "lora.html",
        session,
        here="loras",
        status=refused.status if refused else 200,
        notice=notice,
        problem=refused.text if refused else "",
        lora=adapter,
        is_own=adapter.owner == account_id,
        parts=found_parts(adapter, (await drawn_on(request)).get(adapter.base_model, ())),
        training=training_parts(adapter) if adapter.owner == account_id else [],
        suggested=suggested_words(adapter),
        shared_with=sorted(found.shared_with.items(), key=lambda each: each[1]),
        jobs=done.jobs,
        unfinished=sum(own.values()),
        unfinished_of_others=max(0, others),
        keys=[key for key in keys if key.adapters and adapter.id in key.adapters and key.state(now) == "active"],
        owner=owners.get(adapter.owner, ""),
        picture=(await sample_pictures(request, [adapter])).get(adapter.id, ""),
        thumbnail_size=thumbnail_size,
    )
