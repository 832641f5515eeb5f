"""Sessions of the console: the cookies, and who is signed in.

Names the browser of a User-Agent header, so that people recognize their own sessions in a list.

The cookie of a known device: its tries to sign in are counted apart from those of other browsers.
"""

import hmac
import secrets
import time
from dataclasses import dataclass, replace
from datetime import timedelta

from fastapi import Request
from starlette.responses import Response

from serve_app.accounts.sessions import ABSOLUTE_LIFE
from serve_app.accounts.sign_in import KnownDevice
from serve_app.api.dependencies import accounts_of, settings_of
from serve_app.domain.accounts import Account, Role, User
from serve_app.domain.audit import OWNER
from serve_app.domain.audit import user as user_actor
from serve_app.settings import Settings
from serve_app.web.site.forms import is_secure

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
    token = request.cookies.get(cookie_name(request, SESSION))
    opened = await accounts_of(request).sessions.get(token) if token else None
    account = await accounts_of(request).store.get(opened.account_id) if opened else None
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


_BROWSERS = (
    ("OPR/", "Opera"),
    ("Firefox/", "Firefox"),
    ("Chrome/", "Chrome"),
    ("Safari/", "Safari"),
)
"""Most name others beside themselves: the first that is found is meant."""
_SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("CrOS", "ChromeOS"),
    ("Linux", "Linux"),
)


def browser_name(user_agent: str) -> str:
    """Name browser and system, as `Firefox on Linux`; '' for an unknown one."""
    browser = next((name for sign, name in _BROWSERS if sign in user_agent), "")
    system = next((name for sign, name in _SYSTEMS if sign in user_agent), "")
    return " on ".join(part for part in (browser, system) if part)


COOKIE = "atelier_device"
LIFE = timedelta(days=90)


def read_device(request: Request) -> KnownDevice | None:
    """The device that the cookie names; None for a cookie that we did not sign, or that has expired."""
    text = request.cookies.get(cookie_name(request, COOKIE), "")
    content, _, proof = text.rpartition(".")
    expected = _proof(settings_of(request), content)
    if not hmac.compare_digest(expected.encode(), proof.encode(errors="replace")):
        return None
    account_id, device_id, ends = content.split(".")
    return KnownDevice(account_id, device_id) if int(ends) > time.time() else None


def set_device(request: Request, response: Response, account_id: str) -> None:
    """Make the browser a known device of the account for 90 days; a known one keeps its id."""
    known = read_device(request)
    device_id = known.device_id if known and known.account_id == account_id else secrets.token_urlsafe(16)
    value = signed(settings_of(request), KnownDevice(account_id, device_id), ends=time.time() + LIFE.total_seconds())
    set_cookie(request, response, COOKIE, value, LIFE)


def drop_device(request: Request, response: Response) -> None:
    drop_cookie(request, response, COOKIE)


def signed(settings: Settings, device: KnownDevice, *, ends: float) -> str:
    """The cookie's value."""
    content = f"{device.account_id}.{device.device_id}.{int(ends)}"
    return f"{content}.{_proof(settings, content)}"


def _proof(settings: Settings, content: str) -> str:
    key = hmac.digest(settings.pepper_bytes, b"known device", "sha256")
    return hmac.digest(key, content.encode(errors="replace"), "sha256").hex()
