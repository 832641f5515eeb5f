"""Signs customers and operators in and out of their pages, by a password or by a link that works once.

A `Realm` says what differs between the two: their cookies, who has the password, which page comes next.
"""

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Generic, Literal
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from starlette.routing import BaseRoute

from serve_app.accounts.sessions import Holder, SessionRealm, digest_of
from serve_app.accounts.sign_in import LENGTH, LONGEST_NAME, LinkPurpose, SignInLink
from serve_app.api.dependencies import accounts_of, caller_address
from serve_app.api.openapi import new_app
from serve_app.api.parts import AccountParts, OperationParts
from serve_app.domain.accounts import Operator, SignIn
from serve_app.domain.audit import Act, Actor
from serve_app.domain.durations import wait_text
from serve_app.domain.errors import InvalidParameter, NotFound, TooManyTries
from serve_app.web.site.forms import (
    Form,
    SignedIn,
    W,
    check_form,
    form_token,
    is_form_token,
    is_secure,
    redirect,
    root_of,
    site_of,
)
from serve_app.web.site.pages import Render, answer_with_pages

FORM_LIFE = timedelta(hours=1)
"""A sign-in form is accepted this long after it was opened."""
_WANTED = re.compile(r"[a-z][\w/-]{0,200}(\?[!-~]{0,2000})?", re.ASCII)
"""A sign-in leads on to a page of this form, below the path of its realm's pages."""
LINK_GONE = "This link has been used or is too old. Sign in with the password, or ask for another link."
EXPIRED = "The page has expired. Please try again."


class SignInRequired(Exception):
    """A page was opened without a session; the browser is sent to the sign-in page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Realm(Generic[W]):
    """What differs between customers and operators who sign in."""

    sessions: SessionRealm
    cookie: str
    """The name of the session's cookie, with which that of a form before the sign-in begins."""
    same_site: Literal["lax", "strict"]
    is_whole_site: bool
    """Browsers send the cookies to every page of the service, not only to the realm's own."""
    parts: Callable[[Request], AccountParts | OperationParts]
    find: Callable[[Request, Holder], Awaitable[W | None]]
    """This returns whose a session or link is; None for who is gone or disabled."""
    check: Callable[[Request, str, str], Awaitable[W | None]]
    """This returns who has a name and a password, as `SignIns.check` does."""
    set_password: Callable[[Request, W, str], Awaitable[str]]
    page_of: Callable[[W, str], str]
    """This returns the page to open after signing in, given the one that was wanted."""
    greet: Callable[[Request, Response, W], None]
    """This is called when a session was opened."""
    render: Render
    after_link: str = ""
    """A link leads to this page."""

    async def read(self, request: Request, *, extends: bool = True) -> SignedIn[W] | None:
        """Return the session of the request's cookie, and extend it; None when it has ended or its holder is gone."""
        token = request.cookies.get(self.cookie_name(request, self.cookie))
        holder = await self.parts(request).sessions.get(token, extends=extends) if token else None
        who = await self.find(request, holder) if holder else None
        return SignedIn(token, who) if token and who else None

    async def page_session(self, request: Request) -> SignedIn[W]:
        """Return the session of a browser that opens a page. Raises `SignInRequired`."""
        session = await self.read(request)
        if session is None:
            raise SignInRequired
        return session

    async def form_session(self, request: Request) -> SignedIn[W]:
        """Return the session of a browser that sends a form. Raises 403."""
        session = await self.read(request)
        if session is None:
            raise HTTPException(403, "You have been signed out. Sign in and try again.")
        return session

    async def open_session(
        self, request: Request, who: W, page: str, *, credential_version: str | None = None
    ) -> Response:
        """Sign the browser in with the credential version that was shown, and send it to a page."""
        await record(request, who, Act.SIGNED_IN)
        response = redirect(request, self.page_of(who, page))
        token = await self.parts(request).sessions.create(
            who.id,
            user_id=who.user_id,
            credential_version=who.credential_version if credential_version is None else credential_version,
            browser=browser_name(request.headers.get("user-agent", "")),
            address=caller_address(request),
        )
        self.set_cookie(request, response, self.cookie, token, self.sessions.life)
        self.set_cookie(request, response, f"{self.cookie}_form", "", timedelta())
        self.greet(request, response, who)
        return response

    async def change_password(self, request: Request, who: W, password: str) -> str:
        """Set a password and return the new credential version. Raises `NotFound` when `who` was removed meanwhile."""
        credential_version = await self.set_password(request, who, password)
        await record(request, who, Act.PASSWORD_SET)
        return credential_version

    def form_page(self, request: Request, template: str, status: int, **values: Any) -> Response:
        """Render a page with a form for a browser that is not signed in."""
        browser = self.browser_token(request)
        response = self.render(
            request, template, None, status=status, length=LENGTH, token_of=partial(form_token, browser), **values
        )
        self.set_cookie(request, response, f"{self.cookie}_form", browser, FORM_LIFE)
        return response

    def browser_token(self, request: Request) -> str:
        """Return the token of a browser that is not signed in: its cookie's, or a new one."""
        name = self.cookie_name(request, f"{self.cookie}_form")
        return request.cookies.get(name) or secrets.token_urlsafe(32)

    def cookie_name(self, request: Request, name: str) -> str:
        """Return a cookie's name, with the prefix that browsers accept over https alone.

        `__Host-` binds a cookie to this host, and sends it to every page.
        """
        return f"{'__Host-' if self.is_whole_site else '__Secure-'}{name}" if is_secure(request) else name

    def set_cookie(self, request: Request, response: Response, name: str, value: str, life: timedelta) -> None:
        """Set a cookie that neither scripts nor other sites' forms can use; one without life is removed."""
        response.set_cookie(
            self.cookie_name(request, name),
            value,
            max_age=int(life.total_seconds()),
            path="/" if self.is_whole_site else root_of(request),
            secure=is_secure(request),
            httponly=True,
            samesite=self.same_site,
        )


def pages_app(realm: Realm[W], routers: Sequence[APIRouter]) -> FastAPI:
    """Build the application of a realm's pages. `Protection` goes around it, against forms of other sites."""
    routes: list[BaseRoute] = [route for router in (sign_in_router(realm), *routers) for route in router.routes]
    app = new_app(routes=routes)
    app.add_exception_handler(SignInRequired, _to_sign_in)
    answer_with_pages(app, realm.render, partial(realm.read, extends=False))
    return app


async def _to_sign_in(request: Request, _error: Exception) -> Response:
    """Send the browser to the sign-in page, also from a part of a page, and then on to the page that was wanted."""
    is_part = "hx-request" in request.headers
    url = urlsplit(request.headers.get("hx-current-url", "") if is_part else str(request.url))
    after = _page(url._replace(scheme="", netloc="", fragment="").geturl().removeprefix(f"{root_of(request)}/"))
    sign_in = redirect(request, f"sign-in?{urlencode({'next': after})}" if after else "sign-in")
    if is_part:
        return Response(status_code=204, headers={"HX-Redirect": sign_in.headers["location"]})
    return sign_in


def sign_in_router(realm: Realm[W]) -> APIRouter:
    """Build the routes by which people of a realm sign in and out."""
    router = APIRouter()

    @router.get("/sign-in")
    async def open_sign_in(request: Request) -> Response:
        session = await realm.read(request)
        wanted = request.query_params.get("next", "")
        return (
            sign_in_page(request, after=wanted)
            if session is None
            else redirect(request, realm.page_of(session.who, ""))
        )

    @router.post("/sign-in")
    async def sign_in(request: Request, form: Form) -> Response:
        name, after = form.get("name", "").strip(), form.get("next", "")
        if not is_form_token(realm.browser_token(request), "sign in", form.get("form_token", "")):
            return sign_in_page(request, status=403, problem=EXPIRED, name=name, after=after)
        try:
            who = await realm.check(request, name, form.get("password", ""))
        except TooManyTries as error:
            wait = wait_text(timedelta(seconds=error.retry_after_s))
            problem = f"Too many attempts. Try again in {wait}."
            return retry_later(sign_in_page(request, status=429, problem=problem, name=name, after=after), error)
        if who is None:
            return sign_in_page(request, status=403, problem="Wrong name or password.", name=name, after=after)
        return await realm.open_session(request, who, _page(after))

    def sign_in_page(request: Request, *, status: int = 200, problem: str = "", name: str = "", after: str) -> Response:
        return realm.form_page(
            request,
            "sign_in.html",
            status,
            problem=problem,
            name=name[:LONGEST_NAME],
            name_length=LONGEST_NAME,
            after=_page(after),
        )

    @router.post("/sign-out")
    async def sign_out(
        request: Request, session: Annotated[SignedIn[W], Depends(realm.form_session)], form: Form
    ) -> Response:
        check_form(session, form, "sign out")
        who, sessions = session.who, realm.parts(request).sessions
        if "everywhere" in form:
            await sessions.revoke_all(who.id, user_id=who.user_id)
        await sessions.end(who.id, digest_of(session.token))
        await record(request, who, Act.SIGNED_OUT_EVERYWHERE if "everywhere" in form else Act.SIGNED_OUT)
        response = redirect(request, "sign-in")
        realm.set_cookie(request, response, realm.cookie, "", timedelta())
        return response

    async def live_link(request: Request, token: str) -> tuple[SignInLink, W]:
        """Read the link of the address, and whom it signs in. Raises 404 when it no longer works."""
        link = await realm.parts(request).links.get(token)
        who = await realm.find(request, link.holder) if link else None
        if link is None or who is None:
            raise HTTPException(404, LINK_GONE)
        return link, who

    @router.get("/links/{token}")
    async def open_link(
        request: Request, token: str, found: Annotated[tuple[SignInLink, W], Depends(live_link)]
    ) -> Response:
        """Show a button, so that a program that opens links in advance does not use this one up."""
        return link_page(request, token, *found)

    @router.post("/links/{token}")
    async def use_link(
        request: Request, token: str, found: Annotated[tuple[SignInLink, W], Depends(live_link)], form: Form
    ) -> Response:
        link, who = found
        if not is_form_token(realm.browser_token(request), "link", form.get("form_token", "")):
            return link_page(request, token, link, who, status=403, problem=EXPIRED)
        try:
            password = new_password(form) if link.purpose is LinkPurpose.NEW_PASSWORD else None
        except InvalidParameter as error:
            return link_page(request, token, link, who, status=400, problem=error.message)
        if await realm.parts(request).links.use(token) is None:
            raise HTTPException(404, LINK_GONE)
        credential_version = link.holder.credential_version
        if password is not None:
            try:
                credential_version = await realm.change_password(request, who, password)
            except NotFound:
                raise HTTPException(404, LINK_GONE) from None
        return await realm.open_session(request, who, realm.after_link, credential_version=credential_version)

    def link_page(
        request: Request, token: str, link: SignInLink, who: W, *, status: int = 200, problem: str = ""
    ) -> Response:
        needs_password = link.purpose is LinkPurpose.NEW_PASSWORD
        values = {"problem": problem, "who": who, "needs_password": needs_password, "token": token}
        return realm.form_page(request, "link.html", status, **values)

    return router


def _page(wanted: str) -> str:
    """Return the wanted page if a sign-in may lead on to it, else '', the realm's first page."""
    return wanted if _WANTED.fullmatch(wanted) else ""


def new_password(form: Form) -> str:
    """Return the new password. Raises `InvalidParameter` if its two entries differ or its length is wrong."""
    password = form.get("new_password", "")
    if password != form.get("new_password_again", ""):
        raise InvalidParameter("The two new passwords differ.")
    if len(password) not in LENGTH:
        raise InvalidParameter(f"A password has {LENGTH.start} to {LENGTH.stop - 1} characters.")
    return password


def retry_later(response: Response, error: TooManyTries) -> Response:
    """Say in the answer's header when the next try is looked at."""
    response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def page_values(request: Request, session: SignedIn[SignIn] | SignedIn[Operator] | None) -> dict[str, Any]:
    """Return the values that the layout of all pages takes."""
    return {
        "root": root_of(request),
        "site": site_of(request),
        "token_of": partial(form_token, session.token if session else ""),
    }


def actor_of(request: Request, who: SignIn | Operator) -> Actor:
    """Return who acts on a page as the audit log names them, and from where."""
    return Actor(who.actor, caller_address(request))


async def record(request: Request, who: SignIn | Operator, act: Act, subject: str = "") -> None:
    """Record an act in the audit log of who acts."""
    await accounts_of(request).audit.record(who.log, act, actor_of(request, who), subject)


_BROWSERS = (("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
"""Most browsers name others besides themselves: the first that is found is meant."""
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
    """Name browser and system, as `Firefox on Linux`, so that people recognize their own sessions; '' if unknown."""
    browser = next((name for sign, name in _BROWSERS if sign in user_agent), "")
    system = next((name for sign, name in _SYSTEMS if sign in user_agent), "")
    return " on ".join(part for part in (browser, system) if part)
