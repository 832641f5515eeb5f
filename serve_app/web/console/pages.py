"""Checks who may open a page or send a form, as dependencies of the console's path operations.

The account's owner as a caller: a request of the console counts in the plan as one with a key.

Rendering of a console page in the shared layout.
"""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from starlette.responses import HTMLResponse

from serve_app.api.dependencies import accounts_of, settings_of
from serve_app.api.request_context import RequestContext
from serve_app.domain.accounts import Caller
from serve_app.domain.durations import wait_text
from serve_app.domain.errors import RateLimitExceeded
from serve_app.domain.requests import Variant
from serve_app.jobs.submit import Call
from serve_app.web.console.navigation import ALL_KEY_PAGES, may_open
from serve_app.web.console.session import SignedIn, read_session
from serve_app.web.site import page_templates
from serve_app.web.site.forms import form_token, root_of, site_of
from serve_app.web.site.pages import PageResponse


class SignInRequired(Exception):
    """A page was opened without a session; the browser is sent to the sign-in page."""


async def page_session(request: Request) -> SignedIn:
    """The session of a browser that opens a page. Raises `SignInRequired`."""
    session = await read_session(request)
    if session is None:
        raise SignInRequired
    return _admit(request, session)


async def form_session(request: Request) -> SignedIn:
    """The session of a browser that sends a form."""
    session = await read_session(request)
    if session is None:
        raise HTTPException(403, "You have been signed out. Sign in and try again.")
    return _admit(request, session)


def _admit(request: Request, session: SignedIn) -> SignedIn:
    """Raises 403 for what the user's role may not open."""
    if not may_open(session.user.role, request.scope["route"].path):
        raise HTTPException(403, f"Your role ({session.user.role}) has no access to this page.")
    return session


PageSession = Annotated[SignedIn, Depends(page_session)]
FormSession = Annotated[SignedIn, Depends(form_session)]


def uncounted_owner(request: Request, session: SignedIn) -> Caller:
    """Return the owner as a caller, without counting a request."""
    account, settings = session.account, settings_of(request)
    plan = settings.plan_named(Variant.A, account.plan_a)
    return Caller(account_id=account.id, account_name=account.name, key_id="", variant=Variant.A, plan=plan)


async def owner_caller(request: Request, session: SignedIn) -> Caller:
    """Count one request of interface A. Raises `RateLimitExceeded`, and 403 for a disabled account."""
    counted = await accounts_of(request).auth.count_owner(session.account.id, Variant.A)
    if counted.caller is None:
        raise HTTPException(403, "You have been signed out. Sign in and try again.")
    if counted.limited:
        window = counted.window
        raise RateLimitExceeded(
            f"Your plan's {window.plan.limit} requests are used; "
            f"try again in {wait_text(timedelta(seconds=window.seconds_left))}."
        )
    return counted.caller


def call_of(request: Request) -> Call:
    return Call(request_id=RequestContext.of(request).request_id)


_TEMPLATES = page_templates(Path(__file__).parent / "templates")


def render(
    request: Request, template: str, session: SignedIn | None, *, here: str = "", status: int = 200, **values: Any
) -> HTMLResponse:
    """A page of the console. `here` names the link in the header that leads to it."""
    shared = {
        "root": root_of(request),
        "site": site_of(request),
        "account": session.account if session else None,
        "user": session.user if session else None,
        "may_open": partial(may_open, session.user.role) if session else None,
        "sign_out_token": form_token(session.token, "sign out") if session else "",
        "key_pages": ALL_KEY_PAGES,
        "in_settings": here in {*(page.slug for page in ALL_KEY_PAGES), "password", "users"},
        "here": here,
    }
    return PageResponse(_TEMPLATES.get_template(template), shared | values, status)


def problem_page(request: Request, status: int, title: str, text: str) -> HTMLResponse:
    """A page that says what went wrong, and where to go on."""
    return render(request, "problem.html", None, status=status, title=title, text=text)
