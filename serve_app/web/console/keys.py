"""Serves the pages on which an account's API keys are created, rolled and revoked.

An owner sees all keys of the account, every other user only their own.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from starlette.responses import HTMLResponse

from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.sessions import CUSTOMERS
from serve_app.accounts.sign_in import Limit
from serve_app.api.dependencies import accounts_of, jobs_of, loras_of, settings_of
from serve_app.domain.accounts import ApiKey, Role, Scope
from serve_app.domain.audit import Act
from serve_app.domain.durations import period_text
from serve_app.domain.errors import InvalidParameter, TooManyKeys
from serve_app.domain.requests import Variant
from serve_app.loras.catalog import CatalogReader
from serve_app.web.console.navigation import ALL_KEY_PAGES, EXPIRIES, KEY_NAME_LENGTH, ROLL_GRACE, SCOPES, KeyPage
from serve_app.web.console.pages import ConsoleSession, FormSession, PageSession, render
from serve_app.web.console.playground_form import EXAMPLES
from serve_app.web.site.forms import (
    EXPIRED_FORM,
    Form,
    check_form,
    curl_line,
    nonce_of,
    redirect,
    service_url,
    single_use_token,
    site_of,
)
from serve_app.web.site.sign_in import browser_name, record

MOST_ENDED = 20
"""The list shows at most this many keys that have ended, the newest."""


async def keys_page(
    request: Request, session: ConsoleSession, page: KeyPage, *, status: int = 200, notice: str = "",
    made: ApiKey | None = None, secret: str = "",
) -> HTMLResponse:  # fmt: skip
    now = datetime.now(UTC)
    keys = [key for key in await keys_of(accounts_of(request).api_keys, session) if key.interfaces >= page.interfaces]
    keys.sort(key=lambda key: (key.state(now) == "active", key.created_at), reverse=True)
    ended = [key for key in keys if key.state(now) != "active"]
    keys = [*keys[: len(keys) - len(ended)], *ended[:MOST_ENDED]]
    adapters = await loras_of(request).catalog.adapters(session.who.id, limit=1)
    example = min(made.adapters) if made and made.adapters else adapters[0].id if adapters else "YOUR_LORA"
    account = session.who.account
    plan_name = account.plan_a if page.variant is Variant.A else account.plan_b
    plan = settings_of(request).plan_named(page.variant, plan_name)
    prompt, lora = ("prompt", "lora_id") if page.variant is Variant.A else ("positive_prompt", "model_id")
    return render(
        request,
        "keys.html",
        session,
        status=status,
        here=page.slug,
        page=page,
        keys=keys,
        left_out=len(ended[MOST_ENDED:]),
        suggested=suggested_name(request, now),
        lora_names=await _only_loras(loras_of(request).catalog, account.id, keys),
        now=now,
        docs=f"{site_of(request)}/docs/{page.variant}",
        notice=notice,
        made=made,
        secret=secret,
        curl=curl_line(service_url(request), f"{page.header} {secret}", {prompt: EXAMPLES[0], lora: example}),
        create_token=single_use_token(session.token, "create key"),
        roll_token=single_use_token(session.token, "roll key"),
        scopes=SCOPES,
        expiries=EXPIRIES,
        key_name_length=KEY_NAME_LENGTH,
        most=plan.limit,
        period=period_text(plan.window),
    )


async def _only_loras(catalog: CatalogReader, account_id: str, keys: Sequence[ApiKey]) -> Mapping[str, str]:
    """Name the LoRAs that keys of only one LoRA may use, where the account may still use them."""
    ids = {lora_id for key in keys if key.adapters and len(key.adapters) == 1 for lora_id in key.adapters}
    found = [await catalog.adapter_of(lora_id, account_id) for lora_id in sorted(ids)]
    return {each.adapter.id: each.adapter.name for each in found if each is not None}


async def keys_of(api_keys: ApiKeyStore, session: ConsoleSession) -> Sequence[ApiKey]:
    """Return the keys that the user may change: an owner all of the account's, others their own."""
    keys, user = await api_keys.list(session.who.id), session.who.user
    return [key for key in keys if user.role is Role.OWNER or key.user_id == user.id]


async def usable_keys(api_keys: ApiKeyStore, session: ConsoleSession) -> list[ApiKey]:
    """Return the user's keys that work now, the newest first."""
    now = datetime.now(UTC)
    return [key for key in reversed(await keys_of(api_keys, session)) if key.state(now) == "active"]


def suggested_name(request: Request, now: datetime) -> str:
    """Suggest a name for a new key by where and when it is made: `Firefox on Linux, 24 Nov`."""
    browser = browser_name(request.headers.get("user-agent", ""))
    return f"{browser or 'Key'}, {now:%-d %b}"[:KEY_NAME_LENGTH]


NEW_KEYS = Limit("new-key-form", 1, CUSTOMERS.life)
"""One opened form makes one key: a reload must not make a second."""
MADE_ALREADY = (
    "This form has already created its key, so no second one was created. "
    "If you did not copy it, revoke it below and create another."
)

router = APIRouter()


async def key_page(slug: str) -> KeyPage:
    page = next((page for page in ALL_KEY_PAGES if page.slug == slug), None)
    if page is None:
        raise HTTPException(404)
    return page


ChosenKeyPage = Annotated[KeyPage, Depends(key_page)]


@router.get("/settings/{slug}")
async def open_keys(request: Request, page: ChosenKeyPage, session: PageSession) -> Response:
    return await keys_page(request, session, page)


@router.post("/settings/{slug}")
async def create_key(request: Request, page: ChosenKeyPage, session: FormSession, form: Form) -> Response:
    """Answer with the new key, which no other response ever holds. A reload makes no second key."""
    scopes = frozenset(scope for scope in Scope if f"scope_{scope}" in form)
    expires_in = EXPIRIES.get(form.get("expires", ""))
    if await _is_used_up(request, session, form, "create key"):
        return await keys_page(request, session, page, status=409, notice=MADE_ALREADY)
    if not scopes or expires_in is None:
        return await keys_page(
            request, session, page, status=400, notice="Choose what the key may do, and for how long."
        )
    await jobs_of(request).space.check()
    try:
        lora_id = await _lora(request, session, form.get("lora", "").strip())
        key, secret = await accounts_of(request).api_keys.create(
            session.who.id,
            name=form.get("key_name", "")[:KEY_NAME_LENGTH],
            interfaces=page.interfaces,
            expires_in=expires_in.life,
            scopes=scopes,
            adapters=None if lora_id is None else frozenset({lora_id}),
            user_id=session.who.user_id,
            limit=_limit(form.get("limit", "")),
        )
    except InvalidParameter as error:
        return await keys_page(request, session, page, status=400, notice=error.message)
    except TooManyKeys as error:
        return await keys_page(request, session, page, status=409, notice=error.message)
    await record(request, session.who, Act.KEY_CREATED, key.id)
    return await keys_page(request, session, page, made=key, secret=secret)


@router.post("/settings/{slug}/{key_id}/roll")
async def roll_key(request: Request, page: ChosenKeyPage, key_id: str, session: FormSession, form: Form) -> Response:
    """Make a successor with the same permissions; the old key works a day longer."""
    await _require_own(request, session, key_id)
    if await _is_used_up(request, session, form, "roll key"):
        return await keys_page(request, session, page, status=409, notice=MADE_ALREADY)
    try:
        key, secret = await accounts_of(request).api_keys.roll(key_id, grace=ROLL_GRACE)
    except TooManyKeys as error:
        return await keys_page(request, session, page, status=409, notice=error.message)
    await record(request, session.who, Act.KEY_ROLLED, key_id)
    return await keys_page(request, session, page, made=key, secret=secret)


@router.post("/settings/{slug}/{key_id}/revoke")
async def revoke_key(request: Request, page: ChosenKeyPage, key_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, "revoke key")
    await _require_own(request, session, key_id)
    await accounts_of(request).api_keys.revoke(key_id)
    await record(request, session.who, Act.KEY_REVOKED, key_id)
    return redirect(request, f"settings/{page.slug}")


def _limit(given: str) -> int | None:
    """Read the limit; None for an empty field, and 0, which every plan refuses, for other texts."""
    return None if not given.strip() else int(given) if re.fullmatch(r"[0-9]{1,9}", given.strip()) else 0


async def _lora(request: Request, session: ConsoleSession, given: str) -> str | None:
    """Find the LoRA named by id or name; None for an empty field. Raises `InvalidParameter`."""
    if not given:
        return None
    usable = await loras_of(request).catalog.adapters(session.who.id)
    found = [each.id for each in usable if given == each.id or given.casefold() == each.name.casefold()]
    if len(found) != 1:
        what = f"{len(found)} LoRAs have this name; use the id" if found else "there is no such LoRA available to you"
        raise InvalidParameter(f"Only with this LoRA: {what}.")
    return found[0]


async def _is_used_up(request: Request, session: ConsoleSession, form: Mapping[str, str], purpose: str) -> bool:
    """Return whether the form was sent before. Raises 403 for one that was not given to this session."""
    nonce = nonce_of(session.token, purpose, form.get("form_token", ""))
    if nonce is None:
        raise HTTPException(403, EXPIRED_FORM)
    return await accounts_of(request).throttle.hit(NEW_KEYS, nonce)


async def _require_own(request: Request, session: ConsoleSession, key_id: str) -> None:
    if key_id not in {key.id for key in await keys_of(accounts_of(request).api_keys, session)}:
        raise HTTPException(404)
