"""Checks who may open a page or send a form, as dependencies of the console's path operations."""

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from serve_app.api.console.roles import may_open
from serve_app.api.console.session import SignedIn, read_session


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
