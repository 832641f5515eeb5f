"""The pages of an account's API keys: create, roll and revoke them."""

import re
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.console.guards import FormSession, PageSession
from serve_app.api.console.key_page import ALL_KEY_PAGES, EXPIRIES, KEY_NAME_LENGTH, ROLL_GRACE, KeyPage
from serve_app.api.console.pages import keys_of, keys_page
from serve_app.api.console.session import SignedIn
from serve_app.api.dependencies import caller_address, resources_of
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import EXPIRED_FORM, check_form, nonce_of
from serve_app.api.site.forms import Form
from serve_app.domain.accounts import Scope
from serve_app.domain.audit import Act
from serve_app.domain.errors import InvalidParameter, NotFound, TooManyKeys
from serve_app.stores.sessions import ABSOLUTE_LIFE
from serve_app.stores.throttle import Limit

NEW_KEYS = Limit("new-key-form", 1, ABSOLUTE_LIFE)
"""Of one opened form: a reload must not make a second key."""
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
    """The only response that ever holds the key. The form works once: a reload makes no second key."""
    scopes = frozenset(scope for scope in Scope if f"scope_{scope}" in form)
    expires_in = EXPIRIES.get(form.get("expires", ""))
    if await _is_used_up(request, session, form, "create key"):
        return await keys_page(request, session, page, status=409, notice=MADE_ALREADY)
    if not scopes or expires_in is None:
        return await keys_page(
            request, session, page, status=400, notice="Choose what the key may do, and for how long."
        )
    await resources_of(request).check_space()
    try:
        lora_id = await _lora(request, session, form.get("lora", "").strip())
        key, secret = await resources_of(request).api_keys.create(
            session.account.id,
            name=form.get("key_name", "")[:KEY_NAME_LENGTH],
            interfaces=page.interfaces,
            expires_in=expires_in.life,
            scopes=scopes,
            adapters=None if lora_id is None else frozenset({lora_id}),
            user_id=session.user.id,
            limit=_limit(form.get("limit", "")),
        )
    except InvalidParameter as error:
        return await keys_page(request, session, page, status=400, notice=error.message)
    except TooManyKeys as error:
        return await keys_page(request, session, page, status=409, notice=error.message)
    await _record(request, session, Act.KEY_CREATED, key.id)
    return await keys_page(request, session, page, made=key, secret=secret)


@router.post("/settings/{slug}/{key_id}/roll")
async def roll_key(request: Request, page: ChosenKeyPage, key_id: str, session: FormSession, form: Form) -> Response:
    """Make a successor with the same permissions; the old key works a day longer."""
    await _require_own(request, session, key_id)
    if await _is_used_up(request, session, form, "roll key"):
        return await keys_page(request, session, page, status=409, notice=MADE_ALREADY)
    try:
        key, secret = await resources_of(request).api_keys.roll(key_id, grace=ROLL_GRACE)
    except NotFound:
        raise HTTPException(404) from None
    except TooManyKeys as error:
        return await keys_page(request, session, page, status=409, notice=error.message)
    await _record(request, session, Act.KEY_ROLLED, key_id)
    return await keys_page(request, session, page, made=key, secret=secret)


@router.post("/settings/{slug}/{key_id}/revoke")
async def revoke_key(request: Request, page: ChosenKeyPage, key_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, "revoke key")
    await _require_own(request, session, key_id)
    await resources_of(request).api_keys.revoke(key_id)
    await _record(request, session, Act.KEY_REVOKED, key_id)
    return redirect(request, f"settings/{page.slug}")


def _limit(given: str) -> int | None:
    """Read the limit; None for an empty field, and 0, which every plan refuses, for other texts."""
    return None if not given.strip() else int(given) if re.fullmatch(r"[0-9]{1,9}", given.strip()) else 0


async def _lora(request: Request, session: SignedIn, given: str) -> str | None:
    """Find the LoRA named by id or name; None for an empty field. Raises `InvalidParameter`."""
    if not given:
        return None
    usable = await resources_of(request).catalog.adapters(session.account.id)
    found = [each.id for each in usable if given == each.id or given.casefold() == each.name.casefold()]
    if len(found) != 1:
        what = f"{len(found)} LoRAs have this name; use the id" if found else "there is no such LoRA available to you"
        raise InvalidParameter(f"Only with this LoRA: {what}.")
    return found[0]


async def _is_used_up(request: Request, session: SignedIn, form: Mapping[str, str], purpose: str) -> bool:
    """Whether the form was sent before. Raises 403 for one that was not given to this session."""
    nonce = nonce_of(session.token, purpose, form.get("form_token", ""))
    if nonce is None:
        raise HTTPException(403, EXPIRED_FORM)
    return bool(await resources_of(request).throttle.hit(NEW_KEYS, nonce))


async def _require_own(request: Request, session: SignedIn, key_id: str) -> None:
    if key_id not in {key.id for key in await keys_of(resources_of(request), session)}:
        raise HTTPException(404)


async def _record(request: Request, session: SignedIn, act: Act, key_id: str) -> None:
    audit, address = resources_of(request).audit, caller_address(request)
    await audit.record(session.account.id, act, actor=session.actor, subject=key_id, address=address)
