"""Checks who may open an operators' page or send its form, as dependencies."""

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from serve_app.api.dependencies import caller_address, resources_of
from serve_app.api.operators.session import SignedIn, read_session
from serve_app.domain.audit import Act, operator
from serve_app.service.operate import Actor


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
    await resources_of(request).audit.record(operator(name), act, actor=actor, address=caller_address(request))


PageSession = Annotated[SignedIn, Depends(page_session)]
LiveSession = Annotated[SignedIn, Depends(live_session)]
FormSession = Annotated[SignedIn, Depends(form_session)]
