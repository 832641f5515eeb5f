"""What the console's pages do, in the words of the visitor."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from serve_app.api.console.key_page import KEY_NAME_LENGTH, KEY_PAGES, KeyPage, curl_line
from serve_app.api.console.session import (
    SESSION,
    SignedIn,
    drop_cookie,
    form_token,
    is_form_token,
    nonce_of,
    set_session,
    set_visitor,
    signed_in,
    single_use_token,
    visitor_token,
)
from serve_app.domain.accounts import Account, ApiKey
from serve_app.service.resources import Resources
from serve_app.stores.sessions import ABSOLUTE_LIFE
from serve_app.stores.throttle import Allowance

NAME_LENGTH, PASSWORD_LENGTH = 100, 128
FAST_GUESSES = Allowance("sign-in-minute", 5, timedelta(minutes=1))
"""By one address for one account name."""
SLOW_GUESSES = Allowance("sign-in-hour", 50, timedelta(hours=1))
"""By everyone for one account name. Both end by themselves: nobody can lock an account for good."""
NEW_KEYS = Allowance("new-key-form", 1, ABSOLUTE_LIFE)
"""Of one opened form: a reload must not make a second key."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The console's pages over one set of stores."""

    resources: Resources
    templates: Environment

    async def home(self, request: Request) -> Response:
        return self._go(request, "settings")

    async def sign_in_form(self, request: Request) -> Response:
        if await signed_in(self.resources, request) is not None:
            return self._go(request, "settings")
        return self._sign_in_page(request)

    async def sign_in(self, request: Request) -> Response:
        form = await _fields(request)
        name, password = form.get("name", "").strip(), form.get("password", "")
        if not is_form_token(visitor_token(request), "sign in", form.get("form_token", "")):
            return self._sign_in_page(
                request, status=403, problem="That page had expired. Please try again.", name=name
            )
        wait_s = await self._guess_wait_s(request, name)
        if wait_s:
            problem = f"Too many attempts for this account. Try again in {_spoken(wait_s)}."
            return self._sign_in_page(request, status=429, problem=problem, name=name, retry_after_s=ceil(wait_s))
        account = await self._account_of(name, password)
        if account is None:
            problem = "That account and password do not belong together."
            return self._sign_in_page(request, status=403, problem=problem, name=name)
        await self._forget_guesses(request, name)
        response = self._go(request, "settings")
        set_session(request, response, await self.resources.sessions.create(account.id))
        return response

    async def sign_out(self, request: Request) -> Response:
        session, form = await self._session_and_form(request, "sign out")
        if "everywhere" in form:
            await self.resources.sessions.revoke_all(session.account.id)
        await self.resources.sessions.revoke(session.token)
        response = self._go(request, "sign-in")
        drop_cookie(request, response, SESSION)
        return response

    async def settings(self, request: Request) -> Response:
        session = await signed_in(self.resources, request)
        if session is None:
            return self._go(request, "sign-in")
        account_id = session.account.id
        standing = [(page, await self.resources.accounts.window(account_id, page.variant)) for page in KEY_PAGES]
        adapters = await self.resources.catalog.adapters(account_id)
        return self._page(request, "settings.html", session, here="settings", standing=standing, adapters=adapters)

    async def keys(self, request: Request, page: KeyPage) -> Response:
        session = await signed_in(self.resources, request)
        if session is None:
            return self._go(request, "sign-in")
        return await self._keys_page(request, session, page)

    async def create_key(self, request: Request, page: KeyPage) -> Response:
        """The only answer that ever holds the key. The form works once: a reload is told so and makes no second key."""
        session = await self._session(request)
        form = await _fields(request)
        nonce = nonce_of(session.token, "create key", form.get("form_token", ""))
        if nonce is None:
            raise HTTPException(403, "That page had expired. Go back, reload it, and try again.")
        if await self.resources.throttle.take(NEW_KEYS, nonce):
            notice = "This form had already made its key, so no second one was made."
            return await self._keys_page(request, session, page, status=409, notice=notice)
        key, secret = await self.resources.accounts.create_key(
            session.account.id, name=form.get("key_name", "")[:KEY_NAME_LENGTH], interfaces=frozenset({page.variant})
        )
        return await self._keys_page(request, session, page, made=key, secret=secret)

    async def revoke_key(self, request: Request, page: KeyPage) -> Response:
        session, _ = await self._session_and_form(request, "revoke key")
        keys = await self.resources.accounts.keys(session.account.id)
        if request.path_params["key_id"] not in {key.id for key in keys}:
            raise HTTPException(404)
        await self.resources.accounts.revoke_key(request.path_params["key_id"])
        return self._go(request, f"settings/{page.slug}")

    async def _account_of(self, name: str, password: str) -> Account | None:
        """The account of a right password. What is too long for one costs the same and is never right."""
        is_possible = len(name) <= NAME_LENGTH and len(password) <= PASSWORD_LENGTH
        return await self.resources.accounts.check_password(name if is_possible else "", password[:PASSWORD_LENGTH])

    async def _guess_wait_s(self, request: Request, name: str) -> float:
        """Counts a guess, before it is looked at, so that many at once are counted too."""
        throttle = self.resources.throttle
        return await throttle.take(FAST_GUESSES, name, _address(request)) or await throttle.take(SLOW_GUESSES, name)

    async def _forget_guesses(self, request: Request, name: str) -> None:
        await self.resources.throttle.forget(FAST_GUESSES, name, _address(request))
        await self.resources.throttle.forget(SLOW_GUESSES, name)

    async def _session(self, request: Request) -> SignedIn:
        session = await signed_in(self.resources, request)
        if session is None:
            raise HTTPException(403, "You have been signed out. Sign in and try again.")
        return session

    async def _session_and_form(self, request: Request, purpose: str) -> tuple[SignedIn, Mapping[str, str]]:
        """Raises 403 when nobody is signed in or the form was not given to this session."""
        session, form = await self._session(request), await _fields(request)
        if not is_form_token(session.token, purpose, form.get("form_token", "")):
            raise HTTPException(403, "That page had expired. Go back, reload it, and try again.")
        return session, form

    def _sign_in_page(
        self,
        request: Request,
        *,
        status: int = 200,
        problem: str = "",
        name: str = "",
        retry_after_s: int | None = None,
    ) -> Response:
        visitor = visitor_token(request)
        response = self._page(
            request,
            "sign_in.html",
            None,
            status=status,
            problem=problem,
            name=name[:NAME_LENGTH],
            form_token=form_token(visitor, "sign in"),
        )
        if retry_after_s is not None:
            response.headers["Retry-After"] = str(retry_after_s)
        set_visitor(request, response, visitor)
        return response

    async def _keys_page(
        self, request: Request, session: SignedIn, page: KeyPage, *, status: int = 200, notice: str = "",
        made: ApiKey | None = None, secret: str = "",
    ) -> Response:  # fmt: skip
        keys = [key for key in await self.resources.accounts.keys(session.account.id) if page.variant in key.interfaces]
        now = datetime.now(UTC)
        keys.sort(key=lambda key: (key.state(now) == "active", key.created_at), reverse=True)
        adapters = await self.resources.catalog.adapters(session.account.id)
        return self._page(
            request,
            "keys.html",
            session,
            status=status,
            here=page.slug,
            page=page,
            keys=keys,
            now=now,
            docs=f"{request.scope.get('app_root_path', '')}/docs/{page.variant}",
            notice=notice,
            made=made,
            secret=secret,
            curl=curl_line(page, self._base_url(request), secret, adapters[0].id if adapters else "YOUR_LORA"),
            create_token=single_use_token(session.token, "create key"),
            revoke_token=form_token(session.token, "revoke key"),
            key_name_length=KEY_NAME_LENGTH,
        )

    def problem(self, request: Request, status: int, title: str, text: str) -> Response:
        """A page that says what went wrong, and where to go on."""
        return self._page(request, "problem.html", None, status=status, title=title, text=text)

    def _page(
        self, request: Request, template: str, session: SignedIn | None, *, status: int = 200, **words: Any
    ) -> HTMLResponse:
        html = self.templates.get_template(template).render(
            root=_root(request),
            account=session.account if session else None,
            sign_out_token=form_token(session.token, "sign out") if session else "",
            key_pages=KEY_PAGES,
            **{"here": "", **words},
        )
        return HTMLResponse(html, status)

    def _base_url(self, request: Request) -> str:
        return self.resources.settings.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"

    def _go(self, request: Request, place: str) -> RedirectResponse:
        return RedirectResponse(f"{_root(request)}/{place}", 303)


def load_templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
    )
    templates.trim_blocks = templates.lstrip_blocks = True
    return templates


async def _fields(request: Request) -> Mapping[str, str]:
    """The form's text fields, the first of each name."""
    async with request.form(max_files=0, max_fields=10) as form:
        return {name: value for name, value in form.items() if isinstance(value, str)}


def _root(request: Request) -> str:
    return request.scope.get("root_path", "").rstrip("/")


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def _spoken(seconds: float) -> str:
    minutes = ceil(seconds / 60)
    return "a minute" if minutes == 1 else f"{minutes} minutes"
