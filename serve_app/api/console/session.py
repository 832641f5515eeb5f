"""Sessions of the console: the cookies, and who is signed in."""

import secrets
from dataclasses import dataclass, replace
from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.dependencies import resources_of
from serve_app.api.site.addresses import is_secure
from serve_app.domain.accounts import Account, Role, User
from serve_app.domain.audit import OWNER
from serve_app.domain.audit import user as user_actor
from serve_app.stores.sessions import ABSOLUTE_LIFE

SESSION, ANONYMOUS = "atelier_session", "atelier_anonymous"
ANONYMOUS_LIFE = timedelta(hours=1)
"""How long an opened sign-in page can be sent."""


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A live session, its account, and which of its users."""

    token: str
    account: Account
    user: User

    @property
    def actor(self) -> str:
        """The user's name in the audit log."""
        return user_actor(self.user.id) if self.user.id else OWNER


async def read_session(request: Request) -> SignedIn | None:
    """The session of the request's cookie; None when it has ended or its account is disabled."""
    resources = resources_of(request)
    token = request.cookies.get(cookie_name(request, SESSION))
    opened = await resources.sessions.get(token) if token else None
    account = await resources.accounts.get(opened.account_id) if opened else None
    if token is None or opened is None or account is None or account.disabled:
        return None
    user = User.first(account)
    if opened.user_id:
        user = replace(user, id=opened.user_id, name=opened.name, role=Role(opened.role))
    return SignedIn(token, account, user)


def anonymous_token(request: Request) -> str:
    """Return the token of a browser that is not signed in: its cookie's, or a new one."""
    return request.cookies.get(cookie_name(request, ANONYMOUS)) or secrets.token_urlsafe(32)


def set_session(request: Request, response: Response, token: str) -> None:
    set_cookie(request, response, SESSION, token, ABSOLUTE_LIFE)
    drop_cookie(request, response, ANONYMOUS)


def set_anonymous(request: Request, response: Response, token: str) -> None:
    set_cookie(request, response, ANONYMOUS, token, ANONYMOUS_LIFE)


def drop_cookie(request: Request, response: Response, name: str) -> None:
    secure = is_secure(request)
    response.delete_cookie(cookie_name(request, name), path="/", secure=secure, httponly=True, samesite="lax")


def cookie_name(request: Request, name: str) -> str:
    """`__Host-` binds the cookie to this host and to https; a browser refuses the prefix without https."""
    return f"__Host-{name}" if is_secure(request) else name


def set_cookie(request: Request, response: Response, name: str, value: str, life: timedelta) -> None:
    """Set a cookie that neither scripts nor other sites' forms can use."""
    response.set_cookie(
        cookie_name(request, name),
        value,
        max_age=int(life.total_seconds()),
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="lax",
    )
