"""Admits operators to their pages, and renders these.

Dependencies of the path operations check who may open an operators' page or send its form.

`render` puts a page into the layout that all pages share; `size` formats bytes for it.
"""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from starlette.responses import HTMLResponse

from serve_app.api.dependencies import accounts_of, caller_address
from serve_app.domain.audit import Act, Actor, operator
from serve_app.domain.durations import rounded_duration
from serve_app.web.operators.session import SignedIn, read_session
from serve_app.web.site import page_templates
from serve_app.web.site.forms import form_token, root_of, site_of
from serve_app.web.site.pages import PageResponse


def size(number: float) -> str:
    """Write bytes in decimal units: `850 kB`, `1.2 GB`."""
    for length, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= length:
            return f"{number / length:.1f} {unit}" if number < 10 * length else f"{number / length:.0f} {unit}"
    return f"{number:.0f} B"


class SignInRequired(Exception):
    """A page was opened without a session; the browser is sent to the sign-in page."""


async def page_session(request: Request) -> SignedIn:
    """Return the session of a browser that opens a page. Raises `SignInRequired`."""
    session = await read_session(request)
    if session is None:
        raise SignInRequired
    return session


async def live_session(request: Request) -> SignedIn:
    """Return the session of a page that refreshes itself, without extending it."""
    session = await read_session(request, extends=False)
    if session is None:
        raise SignInRequired
    return session


async def form_session(request: Request) -> SignedIn:
    """Return the session of a browser that sends a form."""
    session = await read_session(request)
    if session is None:
        raise HTTPException(403, "You have been signed out. Sign in and try again.")
    return session


def by(request: Request, session: SignedIn) -> Actor:
    """Return the session's operator as the audit log names them."""
    return Actor(operator(session.operator.name), caller_address(request))


async def record(request: Request, name: str, act: Act, *, actor: str) -> None:
    """Record an act upon an operator in the audit log."""
    await accounts_of(request).audit.record(operator(name), act, actor=actor, address=caller_address(request))


PageSession = Annotated[SignedIn, Depends(page_session)]
LiveSession = Annotated[SignedIn, Depends(live_session)]
FormSession = Annotated[SignedIn, Depends(form_session)]


_TEMPLATES = page_templates(Path(__file__).parent / "templates")

PAGE_SIZE = 50


def render(
    request: Request, template: str, session: SignedIn | None, *, here: str = "", status: int = 200, **values: Any
) -> HTMLResponse:
    """Render a page for operators. `here` names the link in the header that leads to it."""
    shared = {
        "root": root_of(request),
        "site": site_of(request),
        "operator": session.operator if session else None,
        "sign_out_token": form_token(session.token, "sign out") if session else "",
        "here": here,
        "duration": _duration,
        "size": size,
    }
    return PageResponse(_TEMPLATES.get_template(template), shared | values, status)


def problem_page(request: Request, status: int, title: str, text: str) -> HTMLResponse:
    """Render a page that says what went wrong, and where to go on."""
    return render(request, "problem.html", None, status=status, title=title, text=text)


def _duration(seconds: float) -> str:
    return rounded_duration(timedelta(seconds=seconds))
