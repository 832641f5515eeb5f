"""Sessions of operators, and their cookies, which no customer's page ever gets."""

import secrets
from dataclasses import dataclass
from datetime import timedelta

from fastapi import Request
from starlette.responses import Response

from serve_app.accounts.operator_sessions import ABSOLUTE_LIFE
from serve_app.api.dependencies import operations_of
from serve_app.domain.accounts import Operator
from serve_app.web.site.forms import is_secure

SESSION, ANONYMOUS = "atelier_operator", "atelier_operator_form"
ANONYMOUS_LIFE = timedelta(hours=1)
"""How long an opened sign-in page can be sent."""


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A live session and its operator."""

    token: str
    operator: Operator


async def read_session(request: Request, *, extends: bool = True) -> SignedIn | None:
    """Return the session of the request's cookie; None when it has ended or its operator is gone."""
    token = request.cookies.get(_name(request, SESSION))
    name = await operations_of(request).sessions.get(token, extends=extends) if token else None
    operator = await operations_of(request).operators.get(name) if name else None
    return SignedIn(token, operator) if token and operator else None


def anonymous_token(request: Request) -> str:
    """Return the token of a browser that is not signed in: its cookie's, or a new one."""
    return request.cookies.get(_name(request, ANONYMOUS)) or secrets.token_urlsafe(32)


def set_session(request: Request, response: Response, token: str) -> None:
    _set(request, response, SESSION, token, ABSOLUTE_LIFE)
    _set(request, response, ANONYMOUS, "", timedelta())


def drop_session(request: Request, response: Response) -> None:
    _set(request, response, SESSION, "", timedelta())


def set_anonymous(request: Request, response: Response, token: str) -> None:
    _set(request, response, ANONYMOUS, token, ANONYMOUS_LIFE)


def _name(request: Request, name: str) -> str:
    """Return the cookie's name, with the prefix that browsers accept over https alone.

    It is not `__Host-`, which would send the cookie to every page.
    """
    return f"__Secure-{name}" if is_secure(request) else name


def _set(request: Request, response: Response, name: str, value: str, life: timedelta) -> None:
    response.set_cookie(
        _name(request, name),
        value,
        max_age=int(life.total_seconds()),
        path=request.scope.get("root_path", "").rstrip("/"),
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )
