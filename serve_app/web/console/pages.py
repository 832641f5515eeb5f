"""Who signs in to the console, who may open its pages, and how these are rendered.

A known device is a browser in which somebody has signed in. Its tries to sign in are counted apart from others'.
"""

import hmac
import secrets
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from starlette.responses import HTMLResponse, Response

from serve_app.accounts import sessions
from serve_app.accounts.sessions import Holder
from serve_app.accounts.sign_in import KnownDevice
from serve_app.api.dependencies import accounts_of, caller_address, settings_of
from serve_app.domain.accounts import Caller, SignIn, User
from serve_app.domain.audit import ANYONE, Actor
from serve_app.domain.durations import wait_text
from serve_app.domain.errors import RateLimitExceeded
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.web.console.navigation import ALL_KEY_PAGES, home_of, may_open
from serve_app.web.site import page_templates
from serve_app.web.site.forms import SignedIn
from serve_app.web.site.pages import PageResponse
from serve_app.web.site.sign_in import Realm, page_values

ConsoleSession = SignedIn[SignIn]

_TEMPLATES = page_templates(Path(__file__).parent / "templates")


def render(
    request: Request, template: str, session: ConsoleSession | None, *, here: str = "", status: int = 200, **values: Any
) -> HTMLResponse:
    """Render a page of the console. `here` names the link in the header that leads to it."""
    who = session.who if session else None
    shared = {
        **page_values(request, session),
        "for_operators": False,
        "account": who.account if who else None,
        "user": who.user if who else None,
        "may_open": partial(may_open, who.user.role) if who else None,
        "key_pages": ALL_KEY_PAGES,
        "in_settings": here in {*(page.slug for page in ALL_KEY_PAGES), "password", "users"},
        "here": here,
    }
    return PageResponse(_TEMPLATES.get_template(template), shared | values, status)


async def _find(request: Request, holder: Holder) -> SignIn | None:
    accounts = accounts_of(request)
    account = await accounts.store.get(holder.id)
    if account is None or account.disabled:
        return None
    user = await accounts.users.get(account.id, holder.user_id) if holder.user_id else User.first(account)
    return user and SignIn(account=account, user=user, credential_version=holder.credential_version)


async def _check(request: Request, name: str, password: str) -> SignIn | None:
    accounts, by = accounts_of(request), Actor(ANYONE, caller_address(request))
    look = partial(accounts.store.check_password, name, password)
    return await accounts.sign_ins.check(look, name, by, device=read_device(request))


async def _set_password(request: Request, who: SignIn, password: str) -> str:
    return await accounts_of(request).store.set_password(who.id, password, user_id=who.user_id)


def _page_of(who: SignIn, wanted: str) -> str:
    page = wanted or "settings"
    return page if may_open(who.user.role, f"/{page.partition('?')[0]}") else home_of(who.user.role)


CUSTOMERS = Realm(
    sessions=sessions.CUSTOMERS,
    cookie="atelier_session",
    same_site="lax",
    is_whole_site=True,
    parts=accounts_of,
    find=_find,
    check=_check,
    set_password=_set_password,
    page_of=_page_of,
    greet=lambda request, response, who: set_device(request, response, who),
    render=render,
    after_link="playground",
)


async def page_session(request: Request) -> ConsoleSession:
    return _admit(request, await CUSTOMERS.page_session(request))


async def form_session(request: Request) -> ConsoleSession:
    return _admit(request, await CUSTOMERS.form_session(request))


def _admit(request: Request, session: ConsoleSession) -> ConsoleSession:
    """Return the session. Raises 403 for what the user's role may not open."""
    role = session.who.user.role
    if not may_open(role, request.scope["route"].path):
        raise HTTPException(403, f"Your role ({role}) has no access to this page.")
    return session


PageSession = Annotated[ConsoleSession, Depends(page_session)]
FormSession = Annotated[ConsoleSession, Depends(form_session)]


def uncounted_owner(request: Request, session: ConsoleSession) -> Caller:
    """Return the owner as a caller, without counting a request."""
    account, settings = session.who.account, settings_of(request)
    plan = settings.plan_named(Variant.A, account.plan_a)
    return Caller(account_id=account.id, account_name=account.name, key_id="", variant=Variant.A, plan=plan)


async def owner_caller(request: Request, session: ConsoleSession) -> Caller:
    """Count one request of interface A. Raises `RateLimitExceeded`, and 403 for a disabled account."""
    counted = await accounts_of(request).auth.count_owner(session.who.id, Variant.A)
    if counted.caller is None:
        raise HTTPException(403, "You have been signed out. Sign in and try again.")
    if counted.limited:
        window = counted.window
        raise RateLimitExceeded(
            f"Your plan's {window.plan.limit} requests are used; "
            f"try again in {wait_text(timedelta(seconds=window.seconds_left))}."
        )
    return counted.caller


async def check_plan(request: Request, session: ConsoleSession, wanted: int) -> None:
    """Raise `RateLimitExceeded` where the owner's plan leaves fewer requests of interface A."""
    left = (await accounts_of(request).auth.window(session.who.id, Variant.A)).remaining
    if left < wanted:
        raise RateLimitExceeded(f"your plan has {left} requests left, and this needs {wanted}")


COOKIE = "atelier_device"
LIFE = timedelta(days=90)


def read_device(request: Request) -> KnownDevice | None:
    """Return the device that the cookie names; None for a cookie that is not signed by this service, or has expired."""
    text = request.cookies.get(CUSTOMERS.cookie_name(request, COOKIE), "")
    content, _, proof = text.rpartition(".")
    expected = _proof(settings_of(request), content)
    if not hmac.compare_digest(expected.encode(), proof.encode(errors="replace")):
        return None
    account_id, device_id, ends = content.split(".")
    return KnownDevice(account_id, device_id) if int(ends) > time.time() else None


def set_device(request: Request, response: Response, who: SignIn) -> None:
    """Make the browser a known device of the user for 90 days; a known one keeps its id."""
    known, holder = read_device(request), f"{who.id}:{who.user_id}" if who.user_id else who.id
    device_id = known.device_id if known and known.account_id == holder else secrets.token_urlsafe(16)
    value = signed(settings_of(request), KnownDevice(holder, device_id), ends=time.time() + LIFE.total_seconds())
    CUSTOMERS.set_cookie(request, response, COOKIE, value, LIFE)


def signed(settings: Settings, device: KnownDevice, *, ends: float) -> str:
    """Return the value of the device's cookie."""
    content = f"{device.account_id}.{device.device_id}.{int(ends)}"
    return f"{content}.{_proof(settings, content)}"


def _proof(settings: Settings, content: str) -> str:
    key = hmac.digest(settings.pepper_bytes, b"known device", "sha256")
    return hmac.digest(key, content.encode(errors="replace"), "sha256").hex()
