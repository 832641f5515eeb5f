"""The cookie of a known device: its tries to sign in are counted apart from those of other browsers."""

import hmac
import secrets
import time
from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.console.session import cookie_name, drop_cookie, set_cookie
from serve_app.api.dependencies import resources_of
from serve_app.settings import Settings
from serve_app.stores.sign_ins import KnownDevice

COOKIE = "atelier_device"
LIFE = timedelta(days=90)


def read_device(request: Request) -> KnownDevice | None:
    """The device that the cookie names; None for a cookie that we did not sign, or that has expired."""
    text = request.cookies.get(cookie_name(request, COOKIE), "")
    content, _, proof = text.rpartition(".")
    expected = _proof(resources_of(request).settings, content)
    if not hmac.compare_digest(expected.encode(), proof.encode(errors="replace")):
        return None
    account_id, device_id, ends = content.split(".")
    return KnownDevice(account_id, device_id) if int(ends) > time.time() else None


def set_device(request: Request, response: Response, account_id: str) -> None:
    """Make the browser a known device of the account for 90 days; a known one keeps its id."""
    known = read_device(request)
    device_id = known.device_id if known and known.account_id == account_id else secrets.token_urlsafe(16)
    value = signed(
        resources_of(request).settings, KnownDevice(account_id, device_id), ends=time.time() + LIFE.total_seconds()
    )
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
